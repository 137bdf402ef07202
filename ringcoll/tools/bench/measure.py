"""Measure contenders side by side, on every rank.

Contenders take turns, as `ringcoll.tools.bench.rounds` says. Results are checked apart from that.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist

from ringcoll.errors import ArgumentError, ScheduleError
from ringcoll.runtime.launch import report as to_parent
from ringcoll.runtime.machine import cpu
from ringcoll.runtime.reduction import OPERATORS
from ringcoll.runtime.user_files import UserModule
from ringcoll.schedules import contract
from ringcoll.tools.bench.contenders import (
    DTYPES,
    Buffers,
    Caller,
    Workload,
    caller,
    close_groups,
    limit_caller,
    shape,
)
from ringcoll.tools.bench.exact_inputs import Oracle, count_wrong, spoil
from ringcoll.tools.bench.names import LIMITS, NATIVE, OVER, SHARED
from ringcoll.tools.bench.rounds import Meeting, alternate
from ringcoll.tools.bench.units import Summary, algbw, busbw, summarize

_SCOUTING = 0.2  # of the time of a size, to find the best of many
_SCOUTING_ROUNDS = 3


def default_backend(kind: str) -> str:
    """The backend of a default group on whose tensors, ``"cpu"`` or ``"cuda"``, is measured."""
    return "cpu:gloo,cuda:nccl" if kind == "cuda" and dist.is_nccl_available() else "gloo"


def device_of(kind: str, rank: int) -> torch.device:
    """The device of a rank; ranks share GPUs where there are fewer."""
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", rank % torch.cuda.device_count())


def device(kind: str = "cpu") -> dict[str, Any]:
    """Describe where a rank of the default group runs, and its tensors are; called on it."""
    used = device_of(kind, dist.get_rank())
    return {
        "rank": dist.get_rank(),
        "group": 0,
        "pid": os.getpid(),
        "hostname": socket.gethostname().partition(".")[0],
        "device": used.index or 0,
        "device_kind": kind,
        "device_info": cpu() if kind == "cpu" else torch.cuda.get_device_name(used),
        "threads": torch.get_num_threads(),
    }


Others = Mapping[str, Callable[[Workload, Buffers], Caller]]


@dataclass(frozen=True)
class BenchRequest:
    """The question that a measurement answers.

    Parameters
    ----------
    collective, contenders, nbytes
        Names of the collective and of algorithms, ``"auto"``, ``"native"`` or `LIMITS`; sizes.
    dtypes, ops, roots
        By the names of nccl-tests. Pairs that no library defines are left out.
    modes, timed_modes
        Whether in place: ``False``, ``True``, or both; and those of them that are also timed.
    scouts
        More algorithms. They run a few times in advance, and for each size the fastest
        joins the contenders; its time is measured anew, so that luck does not count.
    warmup, least, most, seconds
        Rounds before timing, and limits on the number of rounds; time for all sizes together within
        these. Without ``seconds``, ``most`` is the number of operations of each contender.
    over_ranks, check
        One of `OVER_RANKS`; whether results are checked.
    blocking
        How the operations of a turn follow each other. 2: each is waited for. 0: all are
        started, then waited for. 1: a turn has one operation only.
    writes
        Whether every rank writes its input anew before each operation, so that no other rank has
        it in its caches. A turn has one operation then.
    segment_bytes, modules
        As for `ringcoll.all_reduce`; modules of the user, which register further algorithms.
    device
        Where the tensors are: ``"cpu"`` or ``"cuda"``. There a turn ends when the GPU is done.
    """

    collective: str
    contenders: tuple[str, ...]
    nbytes: tuple[int, ...]
    dtypes: tuple[str, ...] = ("float",)
    ops: tuple[str, ...] = ("sum",)
    roots: tuple[int, ...] = (0,)
    modes: tuple[bool, ...] = (False, True)
    timed_modes: tuple[bool, ...] = (False, True)
    scouts: tuple[str, ...] = ()
    warmup: int = 1
    least: int = 5
    most: int = 20
    seconds: float | None = None
    over_ranks: str = "max"
    check: bool = True
    blocking: int = 2
    writes: bool = False
    segment_bytes: int | None = None
    modules: tuple[UserModule, ...] = ()
    device: str = "cpu"

    @property
    def workloads(self) -> list[Workload]:
        """The lines of the table, in the order of nccl-tests: sizes vary fastest."""
        rules = contract(self.collective)
        if rules.at_least_once:  # a barrier moves nothing
            return [Workload(self.collective, 0, "uint8", "none")]
        ops = self.ops if rules.reduces else ("none",)
        roots = self.roots if rules.rooted else (-1,)
        return [
            Workload(self.collective, nbytes, dtype, op, root)
            for dtype, op, root, nbytes in product(self.dtypes, ops, roots, self.nbytes)
            if _defined(dtype, op)
        ]


def _defined(dtype: str, op: str) -> bool:
    """Whether an operator makes sense for a dtype."""
    kind = DTYPES[dtype]
    if op in ("none", "sum", "prod"):
        return True
    if op == "avg":
        return kind is not torch.bool
    if op in ("min", "max"):
        return not kind.is_complex
    return (kind.is_floating_point or kind.is_complex) == (op == "mulsum")


@dataclass(frozen=True)
class Timing:
    """Times of one operation, and the number of wrong elements of its result on all ranks.

    Each sample is the mean of ``turn`` operations; there is no sample if the operation was
    only checked. ``wrong`` is ``None`` if the result was not checked.
    """

    samples_s: tuple[float, ...]
    turn: int
    wrong: int | None

    @cached_property
    def summary(self) -> Summary:
        """Statistics of the samples."""
        return summarize(self.samples_s)


@dataclass(frozen=True)
class Result:
    """The measurement of one contender on one workload.

    Parameters
    ----------
    workload, contender, world_size
        The operation, the name of the contender in the request, and the number of ranks.
    count, nbytes
        Elements of the vector or of one block, and size of the whole, as shown.
    out_of_place, in_place
        Times; ``None`` if they were not requested, or the mode is not possible.
    refused
        The reason why the contender could not run, in the words of the library.
    scouted
        Whether the contender was the fastest of the scouts.
    """

    workload: Workload
    contender: str
    world_size: int
    count: int
    nbytes: int
    out_of_place: Timing | None = None
    in_place: Timing | None = None
    refused: str | None = None
    scouted: bool = False

    @property
    def timed(self) -> Timing | None:
        """The times in place, which is how torch's own works; else those out of place."""
        timings = (self.in_place, self.out_of_place)
        return next((each for each in timings if each and each.samples_s), None)

    @property
    def summary(self) -> Summary:
        """Statistics of the times; the operation was timed."""
        assert self.timed is not None
        return self.timed.summary

    @property
    def wrong(self) -> int | None:
        """Wrong elements in both modes together; ``None`` if nothing was checked."""
        timings = (self.out_of_place, self.in_place)
        wrong = [each.wrong for each in timings if each and each.wrong is not None]
        return sum(wrong) if wrong else None

    def algbw(self, seconds: float) -> float:
        """Algorithm bandwidth in GB/s."""
        return algbw(self.nbytes, seconds)

    def busbw(self, seconds: float) -> float:
        """Bus bandwidth in GB/s."""
        return busbw(self.workload.collective, self.world_size, self.nbytes, seconds)


@dataclass
class _TimedContender:
    """One contender on one workload, on this rank; all dictionaries by whether it is in place."""

    contender: str
    scouted: bool = False
    refused: str | None = None
    run: dict[bool, Callable[[int], object]] = field(default_factory=dict)
    timings: dict[bool, Timing] = field(default_factory=dict)


class _Bench:
    """The measurement of one workload, on one rank."""

    def __init__(
        self,
        meeting: Meeting,
        request: BenchRequest,
        workload: Workload,
        others: Others | None = None,
    ) -> None:
        self.meeting, self.request, self.workload = meeting, request, workload
        self.others = others or {}
        self.rank, self.world_size = meeting.rank, meeting.world_size
        self.shape = shape(workload, self.world_size)
        self.device = device_of(request.device, self.rank)
        possible = contract(workload.collective).in_place
        self.modes = [mode for mode in request.modes if possible or not mode]
        self._buffers: dict[tuple[bool, bool], Buffers] = {}
        self.oracle = Oracle(
            workload.collective,
            OPERATORS.get(workload.op, "bor"),
            DTYPES[workload.dtype],
            self.world_size,
            max(0, workload.root),
        )

    def run(self, seconds: float | None) -> list[Result]:
        """Check and time all contenders."""
        start = time.perf_counter()
        entries = [self._entry(name) for name in self.request.contenders]
        if (best := self._best_scout(seconds)) is not None:
            entries.append(best)
        left = None if seconds is None else max(0.0, seconds - (time.perf_counter() - start))
        self._time(entries, left)
        return [
            Result(
                workload=self.workload,
                contender=entry.contender,
                world_size=self.world_size,
                count=self.shape.count,
                nbytes=self.shape.nbytes,
                out_of_place=entry.timings.get(False),
                in_place=entry.timings.get(True),
                refused=entry.refused,
                scouted=entry.scouted,
            )
            for entry in entries
        ]

    def _buffers_of(self, contender: str, mode: bool) -> Buffers:
        """The tensors that a contender works on, in place or not."""
        key = mode, contender.partition(OVER)[0] == SHARED
        if key not in self._buffers:
            self._buffers[key] = Buffers.make(
                self.workload,
                self.world_size,
                self.rank,
                in_place=mode,
                device=self.device,
                shared=key[1],
            )
        return self._buffers[key]

    def _time(self, entries: list[_TimedContender], seconds: float | None) -> None:
        """Let all contenders take turns, in the modes that are to be timed."""
        request = self.request
        modes = [mode for mode in self.modes if mode in request.timed_modes]
        jobs = [(entry, mode) for entry in entries for mode in modes if mode in entry.run]
        inputs = [self._buffers_of(entry.contender, mode).inp for entry, mode in jobs]
        if not jobs:
            return
        samples = alternate(
            self.meeting,
            [entry.run[mode] for entry, mode in jobs],
            warmup=request.warmup,
            least=request.least,
            most=request.most,
            seconds=seconds,
            over_ranks=request.over_ranks,
            turn=1 if request.blocking == 1 or request.writes else None,
            before=(lambda index: inputs[index].fill_(1)) if request.writes else None,
        )
        for (entry, mode), times_s, turn in zip(jobs, samples.times_s, samples.turns, strict=True):
            entry.timings[mode] = replace(entry.timings[mode], samples_s=times_s, turn=turn)

    def _entry(self, contender: str, *, scout: bool = False) -> _TimedContender:
        """Run a contender once in each mode, and check the results."""
        entry = _TimedContender(contender)
        if contender in LIMITS:  # it has no result to be checked, and is timed in one mode
            mode = self.modes[-1]
            try:
                limit = limit_caller(contender, self.workload, self.world_size, self.device)
            except ArgumentError as error:
                return _TimedContender(contender, refused=str(error))
            entry.run[mode] = partial(_settled, limit, self.device)
            entry.timings[mode] = Timing((), 1, None)
            return entry
        for mode in self.modes:
            buffers = self._buffers_of(contender, mode)
            if contender in self.others:
                call = self.others[contender](self.workload, buffers)
            else:
                call = caller(
                    contender,
                    self.workload,
                    buffers,
                    self.rank,
                    self.world_size,
                    self.request.segment_bytes,
                )
            check = self.request.check and not scout and self.oracle.exact
            refused, wrong = self._run_once(contender, mode, call, check=check)
            if refused is not None:
                return _TimedContender(contender, refused=refused)
            entry.run[mode] = partial(_several, call, self.request.blocking == 0, self.device)
            entry.timings[mode] = Timing((), 1, wrong if check else None)
        return entry

    def _run_once(
        self, contender: str, mode: bool, call: Callable[[bool], Any], *, check: bool
    ) -> tuple[str | None, int]:
        """Run once: why it is refused, before anything is sent; wrong elements on all ranks."""
        # torch raises plain RuntimeErrors; what ringcoll raises beyond these is a failure.
        refusals: tuple[type[Exception], ...] = (ArgumentError, ScheduleError)
        if contender == NATIVE:
            refusals = (RuntimeError, ValueError, TypeError, NotImplementedError)
        buffers, expected = self._buffers_of(contender, mode), None
        if check:
            expected = self.oracle.output(self.rank, self.shape.count)
            if expected is not None:
                spoil(buffers.out, expected)
            buffers.inp.copy_(self.oracle.input(self.rank, self.shape.send_numel))
        refused = None
        try:
            call(False)
        except refusals as error:
            first_line = str(error).partition("\n")[0]
            refused = "".join(filter(str.isprintable, first_line)) or type(error).__name__
        wrong = 0
        if refused is None and expected is not None:
            wrong = count_wrong(buffers.out, expected)
        wrong, refusing = self.meeting.totals(wrong, refused is not None)
        if refusing:
            refused = next(filter(None, self.meeting.gather(refused)))
        return refused, wrong

    def _best_scout(self, seconds: float | None) -> _TimedContender | None:
        """Find the fastest of the scouts, and check it."""
        scouts = [self._entry(name, scout=True) for name in self.request.scouts]
        scouts = [entry for entry in scouts if entry.refused is None]
        if not scouts:
            return None
        mode = self.request.timed_modes[-1] in self.modes and self.request.timed_modes[-1]
        samples = alternate(
            self.meeting,
            [entry.run[mode] for entry in scouts],
            warmup=1,
            least=_SCOUTING_ROUNDS,
            most=10 * _SCOUTING_ROUNDS,
            seconds=0.0 if seconds is None else _SCOUTING * seconds,
        )
        medians = [summarize(times_s).p50_s for times_s in samples.times_s]
        best = self._entry(scouts[medians.index(min(medians))].contender)
        best.scouted = True
        return best


def _several(call: Callable[[bool], Any], async_op: bool, device: torch.device, times: int) -> None:
    """Run an operation several times; asynchronously, all are started first."""
    works = [call(async_op) for _ in range(times)]
    for work in works if async_op else ():
        work.wait()
    _settle(device)


def _settled(function: Callable[[int], object], device: torch.device, times: int) -> None:
    function(times)
    _settle(device)


def _settle(device: torch.device) -> None:
    """Wait for what was enqueued on a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(
    request: BenchRequest,
    report: Callable[[list[Result]], object] | None = None,
    others: Others | None = None,
) -> list[Result]:
    """Measure; called by all ranks of the default group alike.

    ``report`` is called on rank 0 with the results of each workload as soon as they are there.
    ``others`` makes the calls of contenders of other libraries, by their names in the request.
    The results of each contender on each workload are returned, on every rank the same.
    """
    for module in request.modules:
        module.load()
    meeting = Meeting()
    if request.device == "cuda":
        torch.cuda.set_device(device_of("cuda", meeting.rank))
    start, measured, workloads = time.perf_counter(), list[Result](), request.workloads
    for index, workload in enumerate(workloads):
        seconds = None
        if request.seconds is not None:
            left = request.seconds - (time.perf_counter() - start)
            seconds = max(0.0, left) / (len(workloads) - index)
        results = _Bench(meeting, request, workload, others).run(seconds)
        measured += results
        if report is not None and meeting.rank == 0:
            report(results)
    close_groups()
    meeting.close()
    return measured


def on_rank(request: BenchRequest) -> list[Result]:
    """`measure`, for `ringcoll.runtime.launch.processes.Ranks`: reports go to the parent."""
    return measure(request, to_parent)
