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

# Annotations stay objects in this file: torch looks at those of a hook.

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ringcoll.collectives import functions as api
from ringcoll.collectives.groups import as_group
from ringcoll.errors import ArgumentError, BackwardError
from ringcoll.reduction import premul_sum
from ringcoll.runtime.work import Work
from ringcoll.schedule.ir import Schedule
from ringcoll.training.checks import check_dense, check_same_kinds
from ringcoll.training.flat import begin_alike

__all__ = [
    "BucketedDataParallel",
    "HookOptions",
    "StepReport",
    "all_reduce_hook",
    "assign_buckets",
    "average_gradients",
]

_BUCKET_BYTES = 25 << 20
_FIRST_BUCKET_BYTES = 1 << 20  # both as in torch: a small first bucket starts the network early


def _average(wire_dtype: torch.dtype | None, world_size: int) -> object:
    """Operator for an average; it divides before the sends if float16 could overflow."""
    return premul_sum(1 / world_size) if wire_dtype is torch.float16 else dist.ReduceOp.AVG


# --- an all-reduce for each parameter -------------------------------------------------


def average_gradients(
    module_or_params: nn.Module | Iterable[Tensor],
    group: Any = None,
    *,
    algorithm: str | Schedule = "auto",
    wire_dtype: torch.dtype | None = None,
) -> None:
    """Replace each ``.grad`` by its average over all ranks; call it between backward and step.

    Parameters
    ----------
    module_or_params
        A module, or parameters in the same order on all ranks. Parameters that need no
        gradient are left out; a parameter whose ``.grad`` is ``None`` takes part with zeros.
    group
        Group of the ranks that train together; ``None`` for the default group.
    algorithm, wire_dtype
        As for `ringcoll.all_reduce`.

    Raises
    ------
    ArgumentError
        A gradient is not dense; nothing was sent.
    RingcollError
        An all-reduce failed.
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
    op = _average(wire_dtype, as_group(group).size())
    for _, param in params:
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        api.all_reduce(param.grad, op, group, algorithm=algorithm, wire_dtype=wire_dtype)


# --- buckets, overlapped with backward ------------------------------------------------


def assign_buckets(
    params: Sequence[Tensor], bucket_bytes: int, first_bucket_bytes: int
) -> tuple[tuple[int, ...], ...]:
    """Distribute parameters over buckets, the last parameter first, as backward finds them.

    Parameters
    ----------
    params
        Parameters in the order of registration, any shapes.
    bucket_bytes, first_bucket_bytes
        Bytes with which a bucket is complete, and the first bucket. As in torch, the parameter
        that reaches the number is still in the bucket: a bias does not part from its weight.

    Returns
    -------
    tuple of tuple of int
        Indices of parameters, bucket by bucket. All parameters of a bucket have the same dtype
        and device.

    Examples
    --------
    >>> import torch
    >>> from ringcoll.training.data_parallel import assign_buckets
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


@dataclass(frozen=True, slots=True)
class StepReport:
    """Report of a training step of `BucketedDataParallel` on this rank.

    Parameters
    ----------
    nbytes
        Bytes of gradients that were all-reduced, in the wire dtype if there is a wire dtype.
    communication_s
        Time, in seconds, in which at least one all-reduce was under way.
    waited_s
        Time, in seconds, that `BucketedDataParallel.finish` took: it was not hidden.
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


def _covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals.

    >>> _covered([(0.0, 2.0), (5.0, 6.0), (1.0, 3.0)])
    4.0
    """
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


class _Bucket:
    """Gradients that travel together, end to end in a flat tensor."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self.params = params
        self.flat = torch.zeros(
            sum(param.numel() for param in params), dtype=params[0].dtype, device=params[0].device
        )
        pieces = torch.split(self.flat, [param.numel() for param in params])
        self.views = [piece.view_as(param) for piece, param in zip(pieces, params, strict=True)]
        self.missing = set(range(len(params)))  # indices of gradients that have not arrived
        self.work: Work | None = None
        self.begin_s, self.ends_s = 0.0, list[float]()

    def take(self, index: int) -> None:
        """Put a gradient in its place, which from then on is the parameter's ``.grad``."""
        param, view = self.params[index], self.views[index]
        if param.grad is None:
            view.zero_()
        elif param.grad.data_ptr() != view.data_ptr():
            view.copy_(param.grad)
        param.grad = view
        self.missing.remove(index)

    def launch(self, all_reduce: Callable[[Tensor], Work | None]) -> None:
        """Start the all-reduce."""
        self.begin_s = time.perf_counter()
        self.work = all_reduce(self.flat)
        assert self.work is not None
        ends_s = self.ends_s = []  # a new list: the callback of the step before may be late
        self.work.get_future().add_done_callback(lambda _: ends_s.append(time.perf_counter()))

    def wait(self) -> tuple[float, float]:
        """Wait for the all-reduce, and return when it began and ended."""
        assert self.work is not None
        self.work.wait()
        self.work = None
        self.missing = set(range(len(self.params)))
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
        Module, available as ``.module``; it has the same parameters on all ranks, of any
        shapes and dtypes. Its parameters and buffers become rank 0's.
    group
        Group of the ranks that train together; ``None`` for the default group.
    bucket_bytes
        Bytes with which a bucket is complete; the first bucket is complete with 1 MiB at most.
    algorithm, wire_dtype
        As for `ringcoll.all_reduce`.

    Raises
    ------
    ArgumentError
        No parameter needs a gradient, or a rank has other parameters than rank 0.

    Examples
    --------
    >>> import torch, ringcoll
    >>> from ringcoll.training.data_parallel import BucketedDataParallel
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
        bucket_bytes: int = _BUCKET_BYTES,
        algorithm: str | Schedule = "auto",
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if bucket_bytes < 1:
            raise ArgumentError(
                "must be positive", argument="bucket_bytes", expected="> 0", got=bucket_bytes
            )
        check_same_kinds(module, group)
        named = [(name, param) for name, param in module.named_parameters() if param.requires_grad]
        if not named:
            raise ArgumentError("no parameter needs a gradient", argument="module")
        begin_alike(module, group)
        self.module, self.group = module, group
        self._op = _average(wire_dtype, as_group(group).size())
        self._options: dict[str, Any] = {"algorithm": algorithm, "wire_dtype": wire_dtype}
        params = [param for _, param in named]
        buckets = assign_buckets(params, bucket_bytes, min(bucket_bytes, _FIRST_BUCKET_BYTES))
        self._buckets = [_Bucket([params[index] for index in indices]) for indices in buckets]
        for bucket, indices in zip(self._buckets, buckets, strict=True):
            for place, index in enumerate(indices):
                self._watch(named[index][0], bucket, place)
        self._nbytes = sum(
            bucket.flat.numel() * (wire_dtype or bucket.flat.dtype).itemsize
            for bucket in self._buckets
        )
        self._launched = 0  # number of buckets of this step that were sent
        self._expecting = False  # between forward and finish
        self._syncing = True
        self.last_step: StepReport | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module.

        Raises
        ------
        BackwardError
            Gradients of an earlier backward wait for `finish`.
        """
        if self._syncing and torch.is_grad_enabled():
            if any(len(bucket.missing) < len(bucket.params) for bucket in self._buckets):
                raise BackwardError("call finish() after each backward, or use no_sync()")
            self._expecting = True
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Make forward and backward only add to this rank's own ``.grad``.

        For the accumulation of gradients over several batches: all batches but the last are
        in such a block, on all ranks alike.
        """
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    def finish(self) -> None:
        """Wait until every ``.grad`` is the average over ranks; do nothing without a forward.

        Raises
        ------
        RingcollError
            An all-reduce failed.
        """
        if not self._expecting:
            return
        begin_s = time.perf_counter()
        for bucket in self._buckets[self._launched :]:
            for index in tuple(bucket.missing):
                bucket.take(index)
        self._launch_full()
        spans = [bucket.wait() for bucket in self._buckets]
        self._launched, self._expecting = 0, False
        self.last_step = StepReport(self._nbytes, _covered(spans), time.perf_counter() - begin_s)

    def finish_before(self, optimizer: torch.optim.Optimizer) -> RemovableHandle:
        """Let each ``step`` of an optimizer begin with `finish`, until the handle is removed."""
        return optimizer.register_step_pre_hook(lambda *_: self.finish())

    def _watch(self, name: str, bucket: _Bucket, index: int) -> None:
        """Let a bucket take a parameter's gradient when backward has computed it."""

        def arrived(param: Tensor) -> None:
            if not (self._syncing and self._expecting):
                return
            assert param.grad is not None
            check_dense(param.grad, name)
            if index not in bucket.missing:
                raise BackwardError(
                    f"a second gradient of {name} arrived; "
                    "call finish() after each backward, or use no_sync()"
                )
            bucket.take(index)
            self._launch_full()

        param: Any = bucket.params[index]  # torch has no types for this method
        param.register_post_accumulate_grad_hook(arrived)

    def _launch_full(self) -> None:
        """Send full buckets, up to the first bucket that is not full."""
        for bucket in self._buckets[self._launched :]:
            if bucket.missing:
                break
            bucket.launch(self._all_reduce)
            self._launched += 1

    def _all_reduce(self, flat: Tensor) -> Work | None:
        return api.all_reduce(flat, self._op, self.group, True, **self._options)


# --- torch's own DistributedDataParallel ----------------------------------------------


@dataclass(frozen=True, slots=True)
class HookOptions:
    """Options of `all_reduce_hook`: its ``state``.

    Parameters
    ----------
    group
        Group of the ranks that train together, the same as of ``DistributedDataParallel``;
        ``None`` for the default group.
    algorithm, segment_bytes, wire_dtype
        As for `ringcoll.all_reduce`.
    """

    group: Any = None
    algorithm: str | Schedule = "auto"
    segment_bytes: int | None = None
    wire_dtype: torch.dtype | None = None


def all_reduce_hook(state: HookOptions, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket of ``DistributedDataParallel`` with ringcoll instead of natively.

    ::

        model = DistributedDataParallel(module)
        options = ringcoll.training.data_parallel.HookOptions(algorithm="tree", wire_dtype=torch.bfloat16)
        model.register_comm_hook(options, ringcoll.training.data_parallel.all_reduce_hook)

    If an operation fails, ``backward`` raises a ``RuntimeError`` with the text of the
    operation's error.

    Parameters
    ----------
    state
        The options.
    bucket
        Bucket that ``DistributedDataParallel`` passes: a flat tensor of gradients.

    Returns
    -------
    Future
        A future of the same tensor, averaged.
    """
    work = api.all_reduce(
        bucket.buffer(),
        _average(state.wire_dtype, as_group(state.group).size()),
        state.group,
        True,
        algorithm=state.algorithm,
        segment_bytes=state.segment_bytes,
        wire_dtype=state.wire_dtype,
    )
    assert work is not None
    # C++ understands an exception that the callback raises. C++ would take a Python future's
    # exception, passed on as it is, for the tensor.
    return work.get_future().then(_only_result)


def _only_result(future: torch.futures.Future[list[Tensor]]) -> Tensor:
    (tensor,) = future.value()
    return tensor
