"""Buckets: gradients that travel together, and how long that takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from ringcoll.errors import BackwardError
from ringcoll.training.flat import views_of
from ringcoll.transport import lasting_zeros

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
    """Gradients of some parameters, end to end in a flat tensor.

    ``missing`` has the indices of the gradients that have not arrived. The flat tensor ``grad``
    exists from the first gradient on.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        self.names, self.params = [], list[Any]()  # torch has no types for hooks of parameters
        for name, param in named:
            self.names.append(name)
            self.params.append(param)
        self.numel = sum(param.numel() for param in self.params)
        self.grad: Tensor | None = None
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

    def take_missing(self) -> None:
        """Take zeros for the gradients that have not arrived."""
        for index in tuple(self.missing):
            self.take(index)

    def accept(self, index: int, end: str) -> None:
        """Take a gradient that backward has computed; ``end`` is the call that ends a step."""
        if index not in self.missing:
            raise BackwardError(
                f"a second gradient of {self.names[index]} arrived; "
                f"call {end} after each backward, or use no_sync()"
            )
        self.take(index)

    def watch(self, arrived: Callable[[int, Tensor], None]) -> None:
        """Let backward call a function with the index of each gradient that it has computed."""
        for index, param in enumerate(self.params):
            param.register_post_accumulate_grad_hook(partial(arrived, index))


@dataclass(frozen=True, slots=True)
class StepReport:
    """Report of a training step of `BucketedDataParallel` on this rank.

    Bytes of gradients that were all-reduced, in the wire dtype if there is one; seconds in which at
    least one all-reduce was under way; and seconds that `BucketedDataParallel.finish` took.
    """

    nbytes: int
    communication_s: float
    waited_s: float

    @property
    def overlap(self) -> float:
        """Share of the communication that was hidden behind backward, 0 to 1.

        The number means nothing over NCCL, where an all-reduce counts as over when it is enqueued.
        """
        if self.communication_s <= 0:
            return 0.0
        return min(1.0, max(0.0, 1 - self.waited_s / self.communication_s))


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals.

    >>> covered([(0.0, 2.0), (5.0, 6.0), (1.0, 3.0)])
    4.0
    """
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
