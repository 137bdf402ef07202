"""Gradients in buckets: flat tensors that leave while backward goes on.

Operations of a group have to be issued in the same order on all ranks, but gradients may arrive in
another order on each rank. So buckets leave in the order of their numbers: a bucket that is full
early waits for the buckets before it.

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel
Training", VLDB 2020 (buckets, their order, unused parameters).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ringcoll.errors import BackwardError
from ringcoll.runtime.transport import lasting_zeros
from ringcoll.training.data.averages import Weighing
from ringcoll.training.model_on_ranks import views_of

BUCKET_BYTES = 25 << 20
"""Bytes of parameters of a bucket, as in torch's DistributedDataParallel."""


def assign_buckets(
    params: Sequence[Tensor], bucket_bytes: int, first_bucket_bytes: int
) -> tuple[tuple[int, ...], ...]:
    """Distribute parameters over buckets, the last parameter first, as backward finds them.

    The result has indices of parameters, bucket by bucket. All parameters of a bucket have the same
    dtype and device.

    Parameters
    ----------
    params
        Parameters in the order of registration, any shapes.
    bucket_bytes, first_bucket_bytes
        Bytes with which a bucket is complete, and the first bucket. As in torch, the parameter
        that reaches the number is still in the bucket: a bias does not part from its weight.

    Examples
    --------
    >>> import torch
    >>> params = [torch.zeros(n) for n in (100, 10, 10, 10)]  # of 400, 40, 40, 40 bytes
    >>> assign_buckets(params, bucket_bytes=60, first_bucket_bytes=40)
    ((3,), (2, 1), (0,))
    """
    buckets: list[list[int]] = []
    kind, room = None, 0
    for index in reversed(range(len(params))):
        param = params[index]
        if room <= 0 or kind != (param.dtype, param.device):
            room = bucket_bytes if buckets else first_bucket_bytes
            kind = (param.dtype, param.device)
            buckets.append([])
        buckets[-1].append(index)
        room -= param.nbytes
    return tuple(map(tuple, buckets))


class GradientBucket:
    """Gradients of some parameters, end to end in a flat tensor; ``missing`` have not arrived."""

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        self.names = [name for name, _ in named]
        self.params: list[Any] = [param for _, param in named]  # torch has no types for their hooks
        self.numel = sum(param.numel() for param in self.params)
        self.grad: Tensor | None = None  # from the first gradient on
        self.grad_views: list[Tensor] = []
        self.expect_gradients()

    def expect_gradients(self) -> None:
        """Wait for a gradient of every parameter."""
        self.missing = set(range(len(self.params)))

    def new_grad(self) -> Tensor:
        """Memory for all gradients."""
        return lasting_zeros(self.numel, self.params[0].dtype, self.params[0].device)

    def take(self, index: int) -> None:
        """Put a gradient, or zeros, in its place, which is the parameter's ``.grad`` then."""
        if self.grad is None:
            self.grad = self.new_grad()
            self.grad_views = views_of(self.grad, self.params)
        param, view = self.params[index], self.grad_views[index]
        if param.grad is None:
            view.zero_()
        elif param.grad.data_ptr() != view.data_ptr():
            view.copy_(param.grad)
        param.grad = view
        self.missing.discard(index)

    def accept(self, index: int, end: str) -> None:
        """Take a gradient that backward has computed; ``end`` is the call that ends a step."""
        if index not in self.missing:
            raise BackwardError(
                f"a second gradient of {self.names[index]} arrived; "
                f"call {end} after each backward, or use no_sync()"
            )
        self.take(index)


class BucketsInOrder:
    """Buckets that leave in the order of their numbers: operations of ranks have to match."""

    group: Any
    weight: float | Tensor | None
    _op: object = dist.ReduceOp.AVG  # without weights

    def _watch(self, buckets: Sequence[Any], arrived: Callable[[int, int, Tensor], None]) -> None:
        """Let backward call a function with the places of each gradient that it has computed.

        The hooks keep all objects that the function refers to: Python does not find cycles of
        references through torch's hooks.
        """
        self._buckets = buckets
        self._begin_step()
        for number, bucket in enumerate(buckets):
            for index, param in enumerate(bucket.params):
                param.register_post_accumulate_grad_hook(partial(arrived, number, index))

    def _launch(self, bucket: Any, op: object) -> None:
        raise NotImplementedError

    def _begin_step(self) -> None:
        """No bucket is on its way."""
        self._launched = 0
        self._weighing: Weighing | None = None

    def _has_gradients(self) -> bool:
        return any(len(bucket.missing) < len(bucket.params) for bucket in self._buckets)

    def _launch_full(self) -> None:
        """Send full buckets, up to the first bucket that is not full."""
        if self._weighing is None and self.weight is not None:
            self._weighing = Weighing(self.weight, self.group)
        waiting = self._buckets[self._launched :]
        for bucket in takewhile(lambda bucket: not bucket.missing, waiting):
            op = self._op
            if self._weighing is not None:  # weights that are refused may be mended
                weighing, self._weighing = self._weighing, None
                op = weighing.weigh(bucket.grad)
                self._weighing = weighing
            self._launch(bucket, op)
            self._launched += 1

    def _launch_all(self) -> None:
        """Send all buckets, with zeros for the gradients that have not arrived."""
        for bucket in self._buckets[self._launched :]:
            for index in tuple(bucket.missing):
                bucket.take(index)
        self._launch_full()
