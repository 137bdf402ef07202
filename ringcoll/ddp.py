"""Data-parallel training on the public functions: to be read, and to be used.

Problem: k ranks hold the same model, and each computes gradients on data of its own. One
step on all of the data needs the average of the gradients on every rank. Three ways:

`average_gradients`
    After backward, one all-reduce for each parameter. A loop of three lines; it pays the
    latency of a message per parameter, and the network rests during backward.
`BucketedDataParallel`
    Gradients are collected in *buckets*, and the all-reduce of a bucket starts as soon
    as its last gradient is there, while backward goes on with the layers before it.
`all_reduce_hook`
    The same work by torch's own ``DistributedDataParallel``, which then only calls
    ringcoll in place of its native all-reduce.

::

    model = BucketedDataParallel(model)          # rank 0's parameters go to all ranks
    for inputs, targets in batches:              # of this rank
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()  # buckets leave as they fill
        model.finish()                           # .grad is now the average
        optimizer.step()

Every rank gets the same averages to the last bit, so the models stay the same.

A parameter without a gradient on some rank, because the rank did not use it, counts as
zero there, and gets the average as on all others: the ranks' operations must match. (torch
leaves ``.grad`` at ``None`` if no rank has used the parameter.)

With a wire dtype of 16 bits half as many bytes are sent. float16 ends at 65504, which a
sum over ranks passes before the division that makes it an average; so for it each rank's
part is divided by the number of ranks before it is sent. That may make small gradients
denormal: scale the loss up, or choose bfloat16, which has the range of float32.

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel
Training", VLDB 2020 (buckets, their order, unused parameters).
"""

# Annotations stay objects in this file: torch looks at those of a hook.

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ringcoll import api
from ringcoll.errors import ArgumentError, BackwardError
from ringcoll.reduction import premul_sum
from ringcoll.schedule import Schedule
from ringcoll.work import Work

__all__ = [
    "BucketedDataParallel",
    "HookOptions",
    "StepReport",
    "all_reduce_hook",
    "assign_buckets",
    "average_gradients",
]

_BUCKET_BYTES = 25 << 20
_FIRST_BUCKET_BYTES = 1 << 20  # both are torch's: a small one first starts the network early


def _world_size(group: Any) -> int:
    return dist.get_world_size() if group is None else int(group.size())


def _average(wire_dtype: torch.dtype | None, world_size: int) -> object:
    """The operator that makes an average: divides before sending if float16 could overflow."""
    return premul_sum(1 / world_size) if wire_dtype is torch.float16 else dist.ReduceOp.AVG


def _dense(grad: Tensor, name: str) -> Tensor:
    if grad.layout is not torch.strided:
        raise ArgumentError(
            f"the gradient of parameter {name} is not dense",
            argument="module",
            expected=torch.strided,
            got=grad.layout,
        )
    return grad


# --- one all-reduce for each parameter ------------------------------------------------


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
        A module, or parameters in an order that is the same on all ranks. Those that
        need no gradient are left out; one that has none takes part with zeros.
    group
        The ranks that train together; ``None`` for the default group.
    algorithm, wire_dtype
        As for `ringcoll.all_reduce`.

    Raises
    ------
    ArgumentError
        A gradient is not dense; nothing was sent.
    RingcollError
        An all-reduce failed.
    """
    named: list[tuple[str, Tensor]]
    if isinstance(module_or_params, nn.Module):
        named = list(module_or_params.named_parameters())
    else:
        named = [(str(index), param) for index, param in enumerate(module_or_params)]
    params = [(name, param) for name, param in named if param.requires_grad]
    for name, param in params:
        if param.grad is not None:
            _dense(param.grad, name)
    op = _average(wire_dtype, _world_size(group))
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
        With how many bytes a bucket is complete, and the first one. As in torch, the
        parameter that reaches it is still in: a bias does not part from its weight.

    Returns
    -------
    tuple of tuple of int
        Indices of parameters. Those of a bucket have one dtype and device.

    Examples
    --------
    >>> import torch
    >>> from ringcoll.ddp import assign_buckets
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
    """What one step of `BucketedDataParallel` did on this rank.

    Parameters
    ----------
    nbytes
        Bytes of gradients that were all-reduced, in the wire dtype if one was given.
    communication_s
        Time, in seconds, in which at least one all-reduce was under way.
    waited_s
        Time, in seconds, that `BucketedDataParallel.finish` took: what was not hidden.
    """

    nbytes: int
    communication_s: float
    waited_s: float

    @property
    def overlap(self) -> float:
        """Part of the communication that was hidden behind backward, 0 to 1.

        It means nothing over NCCL: an all-reduce there counts as over when it is enqueued.
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
    """Gradients that travel together, one after the other in a flat tensor."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self.params = params
        self.flat = torch.zeros(
            sum(param.numel() for param in params), dtype=params[0].dtype, device=params[0].device
        )
        pieces = torch.split(self.flat, [param.numel() for param in params])
        self.views = [piece.view_as(param) for piece, param in zip(pieces, params, strict=True)]
        self.arrived, self.missing = [False] * len(params), len(params)
        self.work: Work | None = None
        self.begin_s, self.ends_s = 0.0, list[float]()

    def take(self, slot: int) -> None:
        """Put a gradient in its place, which from then on is the parameter's ``.grad``."""
        param, view = self.params[slot], self.views[slot]
        if param.grad is None:
            view.zero_()
        elif param.grad.data_ptr() != view.data_ptr():
            view.copy_(param.grad)
        param.grad = view
        self.arrived[slot] = True
        self.missing -= 1

    def launch(self, all_reduce: Callable[[Tensor], Work | None]) -> None:
        """Start the all-reduce."""
        self.begin_s = time.perf_counter()
        self.work = all_reduce(self.flat)
        assert self.work is not None
        ends_s = self.ends_s = []  # of its own: a callback may be late
        self.work.get_future().add_done_callback(lambda _: ends_s.append(time.perf_counter()))

    def wait(self) -> tuple[float, float]:
        """Wait for the all-reduce; when it began and ended."""
        assert self.work is not None
        self.work.wait()
        self.work = None
        self.arrived, self.missing = [False] * len(self.params), len(self.params)
        # The callback has a thread of its own, and may come after us.
        return self.begin_s, (self.ends_s or [time.perf_counter()])[0]


class BucketedDataParallel(nn.Module):
    """A module whose gradients are averaged over ranks while backward computes them.

    ============  ==================================================================
    construction  the ranks compare the parameters; rank 0's go to all
    backward      gradient by gradient, from the last layer to the first, into
                  buckets; a full bucket is sent at once
    `finish`      sends what never became full, waits; ``.grad`` is the average
    ============  ==================================================================

    Operations of a group have to be issued in one order on all ranks, but ranks may find
    gradients in different orders. So buckets leave in the order of their numbers: one
    that is full early waits for those before it.

    After `finish`, each ``.grad`` is a view of its bucket, so nothing is copied back;
    both forms of ``zero_grad`` are fine.

    Parameters
    ----------
    module
        The module, available as ``.module``; it has the same parameters on all ranks, of
        any shapes and dtypes. Its parameters and buffers become rank 0's.
    group
        The ranks that train together; ``None`` for the default group.
    bucket_bytes
        With how many bytes a bucket is complete; the first one to be sent with 1 MiB at most.
    algorithm, wire_dtype
        As for `ringcoll.all_reduce`.

    Raises
    ------
    ArgumentError
        No parameter needs a gradient, or a rank has other parameters than rank 0.

    Examples
    --------
    >>> import torch, ringcoll
    >>> from ringcoll.ddp import BucketedDataParallel
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
        _check_same(module, group)
        named = [(name, param) for name, param in module.named_parameters() if param.requires_grad]
        if not named:
            raise ArgumentError("no parameter needs a gradient", argument="module")
        for tensor in (*module.parameters(), *module.buffers()):
            api.broadcast(tensor.detach(), group=group, group_src=0)
        self.module, self.group = module, group
        self._op = _average(wire_dtype, _world_size(group))
        self._options: dict[str, Any] = {"algorithm": algorithm, "wire_dtype": wire_dtype}
        params = [param for _, param in named]
        buckets = assign_buckets(params, bucket_bytes, min(bucket_bytes, _FIRST_BUCKET_BYTES))
        self._buckets = [_Bucket([params[index] for index in indices]) for indices in buckets]
        for bucket, indices in zip(self._buckets, buckets, strict=True):
            for slot, index in enumerate(indices):
                self._watch(named[index][0], bucket, slot)
        self._nbytes = sum(
            bucket.flat.numel() * (wire_dtype or bucket.flat.dtype).itemsize
            for bucket in self._buckets
        )
        self._launched = 0  # buckets of this step that were sent
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
            if any(bucket.missing < len(bucket.params) for bucket in self._buckets):
                raise BackwardError("call finish() after each backward, or use no_sync()")
            self._expecting = True
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, forward and backward only add to this rank's own ``.grad``.

        For the accumulation of gradients over several batches: all but the last of
        them go in here, on all ranks alike.
        """
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    def finish(self) -> None:
        """Wait until every ``.grad`` is the average over ranks; does nothing without a forward.

        Raises
        ------
        RingcollError
            An all-reduce failed.
        """
        if not self._expecting:
            return
        begin_s = time.perf_counter()
        for bucket in self._buckets[self._launched :]:
            for slot, arrived in enumerate(bucket.arrived):
                if not arrived:
                    bucket.take(slot)
        self._launch_full()
        spans = [bucket.wait() for bucket in self._buckets]
        self._launched, self._expecting = 0, False
        self.last_step = StepReport(self._nbytes, _covered(spans), time.perf_counter() - begin_s)

    def finish_before(self, optimizer: torch.optim.Optimizer) -> RemovableHandle:
        """Let each ``step`` of an optimizer begin with `finish`; returns what undoes it."""
        return optimizer.register_step_pre_hook(lambda *_: self.finish())

    def _watch(self, name: str, bucket: _Bucket, slot: int) -> None:
        """Have a parameter's gradient taken when backward has computed it."""

        def arrived(param: Tensor) -> None:
            if not (self._syncing and self._expecting):
                return
            assert param.grad is not None
            _dense(param.grad, name)
            if bucket.arrived[slot]:
                raise BackwardError(
                    f"a second gradient of {name} arrived; "
                    "call finish() after each backward, or use no_sync()"
                )
            bucket.take(slot)
            self._launch_full()

        param: Any = bucket.params[slot]  # torch has no types for this method
        param.register_post_accumulate_grad_hook(arrived)

    def _launch_full(self) -> None:
        """Send full buckets, up to the first that is not."""
        for bucket in self._buckets[self._launched :]:
            if bucket.missing:
                break
            bucket.launch(self._all_reduce)
            self._launched += 1

    def _all_reduce(self, flat: Tensor) -> Work | None:
        return api.all_reduce(flat, self._op, self.group, True, **self._options)


def _check_same(module: nn.Module, group: Any) -> None:
    """Raise, on all ranks, if some rank has other parameters than rank 0."""
    mine = [
        (name, f"{kind} {tuple(item.shape)} {item.dtype} requires_grad={item.requires_grad}")
        for kind, items in (
            ("parameter", module.named_parameters()),
            ("buffer", module.named_buffers()),
        )
        for name, item in items
    ]
    text = torch.frombuffer(bytearray(json.dumps(mine), "utf-8"), dtype=torch.uint8)
    world_size = _world_size(group)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size)]
    api.all_gather(lengths, torch.tensor([text.numel()]), group)
    texts = [torch.empty(int(length), dtype=torch.uint8) for length in lengths]
    api.all_gather(texts, text, group)
    first, *others = (json.loads(bytes(item.tolist())) for item in texts)
    for rank, theirs in enumerate(others, start=1):
        for index in range(max(len(first), len(theirs))):
            expected, got = (
                ": ".join(listed[index]) if index < len(listed) else "nothing"
                for listed in (first, theirs)
            )
            if expected != got:
                raise ArgumentError(
                    f"rank {rank} has another module than rank 0",
                    argument="module",
                    expected=expected,
                    got=got,
                )


# --- torch's own DistributedDataParallel ----------------------------------------------


@dataclass(frozen=True, slots=True)
class HookOptions:
    """How `all_reduce_hook` works: its ``state``.

    Parameters
    ----------
    group
        The ranks that train together, as given to ``DistributedDataParallel``; ``None``
        for the default group.
    algorithm, segment_bytes, wire_dtype
        As for `ringcoll.all_reduce`.
    """

    group: Any = None
    algorithm: str | Schedule = "ring"
    segment_bytes: int | None = None
    wire_dtype: torch.dtype | None = None


def all_reduce_hook(state: HookOptions, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket of ``DistributedDataParallel`` with ringcoll instead of natively.

    ::

        model = DistributedDataParallel(module)
        options = ringcoll.ddp.HookOptions(algorithm="tree", wire_dtype=torch.bfloat16)
        model.register_comm_hook(options, ringcoll.ddp.all_reduce_hook)

    An operation that fails makes ``backward`` raise a ``RuntimeError`` that holds the text
    of its error.

    Parameters
    ----------
    state
        The options.
    bucket
        What ``DistributedDataParallel`` passes: a flat tensor of gradients.

    Returns
    -------
    Future
        Of the same tensor, averaged.
    """
    work = api.all_reduce(
        bucket.buffer(),
        _average(state.wire_dtype, _world_size(state.group)),
        state.group,
        True,
        algorithm=state.algorithm,
        segment_bytes=state.segment_bytes,
        wire_dtype=state.wire_dtype,
    )
    assert work is not None
    # The callback's own failure is one that C++ understands; a Python future's exception,
    # passed on as it is, would be taken for the tensor.
    return work.get_future().then(_only_result)


def _only_result(future: torch.futures.Future[list[Tensor]]) -> Tensor:
    (tensor,) = future.value()
    return tensor
