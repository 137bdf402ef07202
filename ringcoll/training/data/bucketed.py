"""Buckets that are all-reduced while backward goes on.

::

    model = BucketedDataParallel(model)          # rank 0's parameters go to all ranks
    for inputs, targets in batches:              # of this rank
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()  # buckets leave as they fill
        model.finish()                           # .grad is now the average
        optimizer.step()
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ringcoll.errors import BackwardError
from ringcoll.runtime.collectives import as_group
from ringcoll.runtime.collectives import functions as api
from ringcoll.runtime.group import Work
from ringcoll.runtime.reduction import Reproducible
from ringcoll.schedules import Schedule
from ringcoll.training.arguments import require
from ringcoll.training.data.averages import average_op
from ringcoll.training.data.buckets import (
    BUCKET_BYTES,
    BucketsInOrder,
    GradientBucket,
    assign_buckets,
)
from ringcoll.training.model_on_ranks import begin_alike, check_dense, trained

_FIRST_BUCKET_BYTES = 1 << 20  # as in torch: a small first bucket starts the network early


class _AveragedBucket(GradientBucket):
    """A bucket that is all-reduced, and knows how long that takes."""

    work: Work | None = None
    begin_s = 0.0

    def launch(self, op: object, group: Any, options: dict[str, Any]) -> None:
        """Start the all-reduce."""
        assert self.grad is not None
        self.begin_s = time.perf_counter()
        self.work = api.all_reduce(self.grad, op, group, True, **options)
        assert self.work is not None
        ends_s = self.ends_s = list[float]()  # a new one: the callback of before may be late
        self.work.get_future().add_done_callback(lambda _: ends_s.append(time.perf_counter()))

    def wait(self) -> tuple[float, float]:
        """Wait for the all-reduce, and return when it began and ended."""
        assert self.work is not None
        self.work.wait()
        self.work = None
        self.expect_gradients()
        # The callback has a thread of its own, and may be later than this thread.
        return self.begin_s, (self.ends_s or [time.perf_counter()])[0]


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


class BucketedDataParallel(BucketsInOrder, nn.Module):
    """A module whose gradients are averaged over ranks while backward computes them.

    ============  ====================================================================
    construction  the ranks compare the parameters; rank 0's go to all
    backward      gradient by gradient, from the last layer to the first, into
                  buckets; a full bucket is sent at once
    `finish`      sends the buckets that are not full, waits; ``.grad`` is the average
    ============  ====================================================================

    Buckets leave in the order of their numbers. After `finish`, each ``.grad`` is a view of its
    bucket, so nothing is copied back; both forms of ``zero_grad`` are fine.

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
        As for `average_gradients`. It is read anew when the first gradient of a step arrives: set
        ``.weight``, or write into the tensor, before backward. A rank without samples calls the
        module, too.

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
        self._options: dict[str, Any] = {
            "algorithm": algorithm, "wire_dtype": wire_dtype, "reproducible": reproducible,
        }  # fmt: skip
        params = [param for _, param in named]
        first_bucket_bytes = min(bucket_bytes, _FIRST_BUCKET_BYTES)
        self._watch(
            [
                _AveragedBucket([named[index] for index in indices])
                for indices in assign_buckets(params, bucket_bytes, first_bucket_bytes)
            ],
            lambda number, *place: self._arrived(self._buckets[number], *place),
        )
        self._nbytes = sum(param.numel() * (wire_dtype or param.dtype).itemsize for param in params)
        self._expecting = False  # between forward and finish
        self._syncing = True
        self.last_step: StepReport | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module; `BackwardError` is raised if gradients wait for `finish`."""
        if self._syncing and torch.is_grad_enabled():
            if self._has_gradients():
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
        self._launch_all()
        spans = [bucket.wait() for bucket in self._buckets]
        self._begin_step()
        self._expecting = False
        self.last_step = StepReport(self._nbytes, covered(spans), time.perf_counter() - begin_s)

    def finish_before(self, optimizer: torch.optim.Optimizer) -> RemovableHandle:
        """Let each ``step`` of an optimizer begin with `finish`, until the handle is removed."""
        return optimizer.register_step_pre_hook(lambda *_: self.finish())

    def _arrived(self, bucket: _AveragedBucket, index: int, param: Tensor) -> None:
        if self._syncing and self._expecting:
            assert param.grad is not None
            check_dense(param.grad, bucket.names[index])
            bucket.accept(index, "finish()")
            self._launch_full()

    def _launch(self, bucket: _AveragedBucket, op: object) -> None:
        bucket.launch(op, self.group, self._options)
