"""Data-parallel training on the public functions: to be read, and to be used.

Problem: k ranks hold the same model, and each rank computes gradients on data of its own. A
training step on all of the data needs the average of the gradients on every rank. Three ways:

`average_gradients`
    An all-reduce for each parameter, after backward. A loop of three lines; it pays the latency
    of a message for each parameter, and the network rests during backward.
`BucketedDataParallel`
    Gradients are collected in *buckets*. The all-reduce of a bucket starts as soon as its last
    gradient has arrived, while backward goes on with the layers before it.
`all_reduce_hook`
    Buckets by torch's own ``DistributedDataParallel``, which calls ringcoll in place of its
    native all-reduce.

::

    model = BucketedDataParallel(model)          # rank 0's parameters go to all ranks
    for inputs, targets in batches:              # of this rank
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()  # buckets leave as they fill
        model.finish()                           # .grad is now the average
        optimizer.step()

Every rank gets the same averages to the last bit, so the models stay the same.

Ranks with batches of different sizes pass ``weight``, the number w of their samples: then the average of the gradients
g is ``sum(w g) / sum(w)``, to ``(k + 2) u sum(w |g|) / sum(w)`` in a dtype of unit roundoff u on k ranks. The sum of
the weights costs an all-reduce of one number a step.

A parameter that a rank does not use has no gradient there. The rank takes part with zeros, and
gets the average as all others do: the ranks' operations must match. (torch leaves ``.grad`` at
``None`` if no rank has used the parameter.)

With a wire dtype of 16 bits half as many bytes are sent. The largest float16 is 65504, which a
sum over ranks passes before it is divided. So for float16 each rank divides its gradients by the
number of ranks before they are sent. Small gradients may become denormal: scale the loss up, or
choose bfloat16, which has the range of float32.

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel
Training", VLDB 2020 (buckets, their order, unused parameters).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import takewhile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ringcoll.collectives import as_group
from ringcoll.collectives import functions as api
from ringcoll.errors import BackwardError
from ringcoll.group import Work
from ringcoll.reduction import Reproducible, premul_sum
from ringcoll.schedule import Schedule
from ringcoll.training.checks import check_dense, require
from ringcoll.training.data.buckets import (
    BUCKET_BYTES,
    GradientBucket,
    StepReport,
    assign_buckets,
    covered,
)
from ringcoll.training.flat import begin_alike, trained


def average_op(wire_dtype: torch.dtype | None, world_size: int) -> object:
    """Operator for an average; it divides before the sends if float16 could overflow."""
    return premul_sum(1 / world_size) if wire_dtype is torch.float16 else dist.ReduceOp.AVG


class Weighing:
    """The share of this rank in the sum of all weights; a weighted average is the sum of gradients times shares."""

    def __init__(self, weight: float | Tensor, group: Any) -> None:
        self._group, self._weight = as_group(group), float(weight)
        sent = self._weight if 0 <= self._weight < math.inf else math.nan  # so that all ranks raise
        self._total = torch.tensor([sent], dtype=torch.float64, device="cpu")
        self._work = api.all_reduce(self._total, group=group, async_op=True)

    @property
    def share(self) -> float:
        """The weight of this rank over the sum of all."""
        assert self._work is not None
        self._work.wait()
        total = float(self._total)
        require(0 < total < math.inf, "weight", "the ranks cannot be weighed", "finite numbers, at least 0, not all 0",
                f"{self._weight} here, {total} in sum", self._group.rank())  # fmt: skip
        return self._weight / total

    def weigh(self, grad: Tensor) -> object:
        """Multiply a gradient by the share, in place, and return the operator; without samples, it becomes 0."""
        share = self.share
        grad.mul_(share) if self._weight else grad.zero_()  # it may be NaN
        return dist.ReduceOp.SUM


def average_gradients(
    module_or_params: nn.Module | Iterable[Tensor],
    group: Any = None,
    *,
    algorithm: str | Schedule = "auto",
    wire_dtype: torch.dtype | None = None,
    reproducible: Reproducible = False,
    weight: float | Tensor | None = None,
) -> None:
    """Replace each ``.grad`` by its average over all ranks; call it between backward and step.

    A gradient that is not dense raises `ArgumentError`, and nothing is sent.

    Parameters
    ----------
    module_or_params
        A module, or parameters in the same order on all ranks. Parameters that need no
        gradient are left out; a parameter whose ``.grad`` is ``None`` takes part with zeros.
    algorithm, wire_dtype, reproducible
        As for `ringcoll.all_reduce`.
    weight
        Number of samples that the gradients of this rank are a mean over, as a number or a tensor of one element;
        ``None`` on all ranks if all count alike. All ranks raise `ArgumentError` if all weights are 0, or a weight is
        negative or not finite.
    """
    named: Iterable[tuple[object, Tensor]] = (
        module_or_params.named_parameters()
        if isinstance(module_or_params, nn.Module)
        else enumerate(module_or_params)
    )
    params = [(str(name), param) for name, param in named if param.requires_grad]
    for name, param in params:
        if param.grad is not None:
            check_dense(param.grad, name)
    weighing = None if weight is None else Weighing(weight, group)
    op = average_op(wire_dtype, as_group(group).size())
    for _, param in params:
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        if weighing is not None:
            op = weighing.weigh(param.grad)
        api.all_reduce(param.grad, op, group, algorithm=algorithm, wire_dtype=wire_dtype,
                       reproducible=reproducible)  # fmt: skip


_FIRST_BUCKET_BYTES = 1 << 20  # as in torch: a small first bucket starts the network early


class _AveragedBucket(GradientBucket):
    """A bucket that is all-reduced, and knows how long that takes."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        super().__init__(named)
        self.work: Work | None = None
        self.begin_s, self.ends_s = 0.0, list[float]()

    def launch(self, all_reduce: Callable[[Tensor], Work | None]) -> None:
        """Start the all-reduce."""
        assert self.grad is not None
        self.begin_s = time.perf_counter()
        self.work = all_reduce(self.grad)
        assert self.work is not None
        ends_s = self.ends_s = []  # a new list: the callback of the step before may be late
        self.work.get_future().add_done_callback(lambda _: ends_s.append(time.perf_counter()))

    def wait(self) -> tuple[float, float]:
        """Wait for the all-reduce, and return when it began and ended."""
        assert self.work is not None
        self.work.wait()
        self.work = None
        self.expect_gradients()
        # The callback has a thread of its own, and may be later than this thread.
        return self.begin_s, (self.ends_s or [time.perf_counter()])[0]


class BucketedDataParallel(nn.Module):
    """A module whose gradients are averaged over ranks while backward computes them.

    ============  ====================================================================
    construction  the ranks compare the parameters; rank 0's go to all
    backward      gradient by gradient, from the last layer to the first, into
                  buckets; a full bucket is sent at once
    `finish`      sends the buckets that are not full, waits; ``.grad`` is the average
    ============  ====================================================================

    Operations of a group have to be issued in the same order on all ranks, but gradients may
    arrive in another order on each rank. So buckets leave in the order of their numbers: a
    bucket that is full early waits for the buckets before it.

    After `finish`, each ``.grad`` is a view of its bucket, so nothing is copied back;
    both forms of ``zero_grad`` are fine.

    Parameters
    ----------
    module
        Module, available as ``.module``; it has the same parameters on all ranks, of any shapes and
        dtypes; otherwise `ArgumentError` is raised. Parameters and buffers become rank 0's.
    bucket_bytes
        Bytes with which a bucket is complete; the first bucket is complete with 1 MiB at most.
    algorithm, wire_dtype, reproducible
        As for `ringcoll.all_reduce`.
    weight
        As for `average_gradients`. It is read anew when the first gradient of a step arrives: set ``.weight``, or
        write into the tensor, before backward. A rank without samples calls the module, too.

    Examples
    --------
    >>> import torch, ringcoll
    >>> def rank_main(group):
    ...     model = BucketedDataParallel(torch.nn.Linear(2, 1, bias=False), group)
    ...     model(torch.full((1, 2), float(group.rank()))).sum().backward()
    ...     model.finish()
    ...     return model.module.weight.grad.tolist()
    >>> ringcoll.run_threads(rank_main, 3)  # the average of 0, 1 and 2
    [[[1.0, 1.0]], [[1.0, 1.0]], [[1.0, 1.0]]]
    """

    def __init__(
        self,
        module: nn.Module,
        group: Any = None,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        algorithm: str | Schedule = "auto",
        wire_dtype: torch.dtype | None = None,
        reproducible: Reproducible = False,
        weight: float | Tensor | None = None,
    ) -> None:
        super().__init__()
        require(bucket_bytes > 0, "bucket_bytes", "must be positive", "> 0", bucket_bytes)
        begin_alike(module, group)
        named = list(trained(module).items())
        self.module, self.group, self.weight = module, group, weight
        self._op = average_op(wire_dtype, as_group(group).size())
        self._weighing: Weighing | None = None  # of this step
        self._options: dict[str, Any] = {
            "algorithm": algorithm, "wire_dtype": wire_dtype, "reproducible": reproducible,
        }  # fmt: skip
        params = [param for _, param in named]
        first_bucket_bytes = min(bucket_bytes, _FIRST_BUCKET_BYTES)
        self._buckets = [
            _AveragedBucket(named[index] for index in indices)
            for indices in assign_buckets(params, bucket_bytes, first_bucket_bytes)
        ]
        for bucket in self._buckets:
            bucket.watch(partial(self._arrived, bucket))
        self._nbytes = sum(param.numel() * (wire_dtype or param.dtype).itemsize for param in params)
        self._launched = 0  # number of buckets of this step that were sent
        self._expecting = False  # between forward and finish
        self._syncing = True
        self.last_step: StepReport | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module; `BackwardError` is raised if gradients wait for `finish`."""
        if self._syncing and torch.is_grad_enabled():
            if any(len(bucket.missing) < len(bucket.params) for bucket in self._buckets):
                raise BackwardError("call finish() after each backward, or use no_sync()")
            self._expecting = True
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Make forward and backward only add to this rank's own ``.grad``.

        To accumulate gradients, all batches but the last are in such a block, on all ranks alike.
        """
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    def finish(self) -> None:
        """Wait until every ``.grad`` is the average over ranks; do nothing without a forward."""
        if not self._expecting:
            return
        begin_s = time.perf_counter()
        for bucket in self._buckets[self._launched :]:
            bucket.take_missing()
        self._launch_full()
        spans = [bucket.wait() for bucket in self._buckets]
        self._launched, self._expecting, self._weighing = 0, False, None
        self.last_step = StepReport(self._nbytes, covered(spans), time.perf_counter() - begin_s)

    def finish_before(self, optimizer: torch.optim.Optimizer) -> RemovableHandle:
        """Let each ``step`` of an optimizer begin with `finish`, until the handle is removed."""
        return optimizer.register_step_pre_hook(lambda *_: self.finish())

    def _arrived(self, bucket: _AveragedBucket, index: int, param: Tensor) -> None:
        """Let a bucket take a parameter's gradient, which backward has computed."""
        if self._syncing and self._expecting:
            assert param.grad is not None
            check_dense(param.grad, bucket.names[index])
            bucket.accept(index, "finish()")
            self._launch_full()

    def _launch_full(self) -> None:
        """Send full buckets, up to the first bucket that is not full."""
        if self._weighing is None and self.weight is not None:
            self._weighing = Weighing(self.weight, self.group)
        waiting = self._buckets[self._launched :]
        for bucket in takewhile(lambda bucket: not bucket.missing, waiting):
            bucket.launch(self._all_reduce)
            self._launched += 1

    def _all_reduce(self, flat: Tensor) -> Work | None:
        op = self._weighing.weigh(flat) if self._weighing else self._op
        return api.all_reduce(flat, op, self.group, True, **self._options)
