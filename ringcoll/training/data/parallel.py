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

Ranks with batches of different sizes pass ``weight``, the number w of their samples: then the
average of the gradients g is ``sum(w g) / sum(w)``, to ``(k + 2) u sum(w |g|) / sum(w)`` in a dtype
of unit roundoff u on k ranks. The sum of the weights costs an all-reduce of one number a step.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ringcoll.errors import BackwardError
from ringcoll.runtime.collectives import as_group
from ringcoll.runtime.collectives import functions as api
from ringcoll.runtime.group import Work
from ringcoll.runtime.reduction import Reproducible, premul_sum
from ringcoll.runtime.transport import lasting_zeros
from ringcoll.schedules import Schedule
from ringcoll.training.model_on_ranks import begin_alike, check_dense, require, trained, views_of

BUCKET_BYTES = 25 << 20
"""Bytes of parameters of a bucket, as in torch's DistributedDataParallel."""

_FIRST_BUCKET_BYTES = 1 << 20  # as in torch: a small first bucket starts the network early


def average_op(wire_dtype: torch.dtype | None, world_size: int) -> object:
    """Operator for an average; it divides before the sends if float16 could overflow."""
    return premul_sum(1 / world_size) if wire_dtype is torch.float16 else dist.ReduceOp.AVG


class Weighing:
    """The share of this rank in the sum of all weights, by which its gradients are multiplied."""

    def __init__(self, weight: float | Tensor, group: Any) -> None:
        self._group, self._weight = as_group(group), float(weight)
        sent = self._weight if 0 <= self._weight < math.inf else math.nan  # so that all ranks raise
        self._total = torch.tensor([sent], dtype=torch.float64, device="cpu")
        self._work = api.all_reduce(self._total, group=group, async_op=True)

    def weigh(self, grad: Tensor) -> object:
        """Multiply a gradient by the share, in place, and return the operator."""
        assert self._work is not None
        self._work.wait()
        total = float(self._total)
        require(0 < total < math.inf, "weight", "the ranks cannot be weighed",
                "finite numbers, at least 0, not all 0",
                f"{self._weight} here, {total} in sum", self._group.rank())  # fmt: skip
        # Without samples, the gradient may be NaN.
        grad.mul_(self._weight / total) if self._weight else grad.zero_()
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
        Number of samples that the gradients of this rank are a mean over, as a number or a tensor
        of one element; ``None`` on all ranks if all count alike. All ranks raise `ArgumentError` if
        all weights are 0, or a weight is negative or not finite.
    """
    named: Iterable[tuple[object, Tensor]] = (
        module_or_params.named_parameters()
        if isinstance(module_or_params, nn.Module)
        else enumerate(module_or_params)
    )
    params = [(name, param) for name, param in named if param.requires_grad]
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


# --- buckets -----------------------------------------------------------------------


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

        What the function holds lasts: Python does not look into torch's hooks for what nobody else
        holds.
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


# --- buckets that are all-reduced during backward -----------------------------------------


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

    Operations of a group have to be issued in the same order on all ranks, but gradients may
    arrive in another order on each rank. So buckets leave in the order of their numbers: a
    bucket that is full early waits for the buckets before it. After `finish`, each ``.grad`` is a
    view of its bucket, so nothing is copied back; both forms of ``zero_grad`` are fine.

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
