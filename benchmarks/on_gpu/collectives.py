"""Collectives among processes: several on one GPU, over UCX and gloo; and over NCCL.

The ranks are real processes, and every result is checked to the last bit. `ringcoll.tools.bench.measure`
takes the times; each turn ends when the GPU has done everything. The columns are the columns of
nccl-tests. Ranks on one GPU are measured without MPS and, where it can be started, with MPS: the
column ``MPS`` says which.

The copy limit
--------------
Ranks that share a GPU share its memory. Whatever the transport, this memory has to be read and
written for every message (once each: CUDA IPC copies from the sender's memory to the
receiver's), for every local copy, and for every reduction (each source is read, each result
written). The sum of these bytes over all instructions of the plans of all ranks, divided by the bytes
that a copy on this GPU reads and writes in a second, is the copy limit. For a ring all-reduce of n bytes on k ranks it is k - 1 times 2 * 2n for the messages
and 3n for the additions, that is, 7 (k - 1) n bytes. A named
algorithm is compared with its own limit, ``auto`` and ``native`` with the lowest limit of the named
algorithms.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import ringcoll
from benchmarks.on_gpu import mps
from benchmarks.on_gpu.bandwidth import copy_bandwidth
from benchmarks.on_gpu.rows import NOT_RUN, Row, Settings, missing
from ringcoll.errors import RingcollError
from ringcoll.runtime import TRANSPORT_VARIABLES, Ranks, communicator
from ringcoll.runtime.operation import Combine, Layout, Move, Plan, Post, compile_plan
from ringcoll.schedules.algorithms import find, schedule_of
from ringcoll.tools.bench import (
    AUTO,
    DTYPES,
    NATIVE,
    BenchRequest,
    Result,
    Workload,
    as_size,
    default_backend,
    device_of,
    on_rank,
    shape,
)

__all__ = ["NCCL", "SHARED", "moved_nbytes", "nccl", "shared", "shared_with_mps"]

SHARED = "Collectives among ranks on one GPU"
NCCL = "Collectives over NCCL"

_Emit = Callable[[Row], object]
_Algorithms = Mapping[str, tuple[str, ...]]
_ALGORITHMS: _Algorithms = {
    "all_reduce": ("ring", "direct", AUTO),
    "reduce_scatter": ("ring", "direct", AUTO),
    "all_gather": ("ring", "recursive_doubling", AUTO),
}
_SIZES: tuple[int, ...] = (1 << 20, 1 << 24, 1 << 28)
_TINY: tuple[int, ...] = (1 << 12,)
_RUN_S = 30.0  # of a collective, so that a collective that hangs leaves time for the others


def moved_nbytes(collective: str, algorithm: str, world_size: int, nbytes: int) -> int:
    """Bytes that all ranks together read and write, for float32, in place, in one segment.

    Examples
    --------
    >>> moved_nbytes("all_reduce", "ring", 4, 4000) == 7 * 3 * 4000
    True
    """
    workload = Workload(collective, nbytes)
    schedule = schedule_of(collective, algorithm, world_size)
    count = shape(workload, world_size).count
    blocks = 1 if collective == "all_reduce" else world_size
    layout = Layout(tuple((block, count) for block in range(blocks)), in_place=True)
    itemsize = DTYPES[workload.dtype].itemsize
    plans = (compile_plan(schedule, rank, layout) for rank in range(world_size))
    return itemsize * sum(map(_moved_numel, plans))


def _moved_numel(plan: Plan) -> int:
    total = 0
    for instruction in plan.instructions:
        match instruction:
            case Post(receives=receives):  # a message counts where it arrives
                total += 2 * sum(numel for _, _, numel in receives)
            case Move(into=into):
                total += 2 * plan.regions[into].numel
            case Combine(into=into, sources=sources):
                total += sum(plan.regions[index].numel for index in (into, *sources))
            case _:
                pass
    return total


@dataclass(frozen=True, slots=True)
class _Pool:
    """Ranks to be measured on.

    Parameters
    ----------
    table
        Where the rows go.
    world_size
        Number of ranks.
    transport
        How tensors are to travel.
    backend
        Of torch's own collectives.
    requests
        What to measure.
    limit_s
        Time limit of each request.
    copy_speed
        Bytes a second, if ranks share a GPU.
    variables
        More of the environment.
    uses_mps
        Says whether the ranks use MPS, while they run; ``None`` if that is no question.
    """

    table: str
    world_size: int
    transport: str
    backend: str
    requests: tuple[BenchRequest, ...]
    limit_s: float
    copy_speed: float | None = None
    variables: tuple[tuple[str, str], ...] = ()
    uses_mps: Callable[[], bool] | None = None

    def measure(self, emit: _Emit) -> None:
        """Start the ranks and measure; a failure is a row."""
        kind = self.requests[0].device
        variables = {TRANSPORT_VARIABLES[kind]: self.transport, **dict(self.variables)}
        what = f"{self.world_size} ranks over {self.transport}"
        try:
            with (
                _environment(variables),
                Ranks(self.world_size, backend=self.backend, timeout_s=self.limit_s) as ranks,
            ):
                if any(set(request.contenders) != {NATIVE} for request in self.requests):
                    carriers = set(ranks.run(_carrier, kind))
                    if carriers != {self.transport}:
                        emit(missing(self.table, what, f"tensors travelled over {carriers}"))
                        return
                for request in self.requests:
                    ranks.run(on_rank, request, on_report=lambda results: self._emit(results, emit))
        except (RingcollError, RuntimeError, OSError) as error:
            emit(missing(self.table, what, error))

    def _emit(self, results: Iterable[Result], emit: _Emit) -> None:
        for result in results:
            emit(self._row(result))

    def _row(self, result: Result) -> Row:
        workload = result.workload
        cells: dict[str, Any] = {
            "collective": workload.collective,
            "ranks": result.world_size,
            "over": "torch's own" if result.contender == NATIVE else self.transport,
            **({} if self.uses_mps is None else {"MPS": "yes" if self.uses_mps() else "no"}),
            "size": as_size(result.nbytes),
            "nbytes": result.nbytes,
            "algorithm": result.contender,
            "count": result.count,
            "type": workload.dtype,
            "redop": workload.op,
            "root": workload.root,
        }
        if result.refused is not None or result.timed is None:
            return Row(self.table, cells | {NOT_RUN: result.refused or "it was not timed"})
        modes = {"out-of-place": result.out_of_place, "in-place": result.in_place}
        for mode, timing in modes.items():
            if timing is not None and timing.samples_s:
                time_s = timing.summary.p50_s
                cells |= {
                    f"{mode} time (us)": time_s * 1e6,
                    f"{mode} spread": timing.summary.spread,
                    f"{mode} algbw (GB/s)": result.algbw(time_s),
                    f"{mode} busbw (GB/s)": result.busbw(time_s),
                    f"{mode} #wrong": timing.wrong,
                }
        if self.copy_speed is not None and result.world_size > 1:
            limit_s, time_s = _least_moved(result) / self.copy_speed, result.timed.summary.p50_s
            cells |= {"copy limit (us)": limit_s * 1e6, "limit / time": limit_s / time_s}
        return Row(self.table, cells)


def _least_moved(result: Result) -> int:
    """Bytes of the plans of the algorithm, or of the cheapest algorithm if the choice is unknown."""
    collective = result.workload.collective
    names = [result.contender]
    if result.contender in (AUTO, NATIVE):
        names = [name for name in _ALGORITHMS[collective] if name != AUTO]
    return min(moved_nbytes(collective, name, result.world_size, result.nbytes) for name in names)


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Set variables for ranks that are started in the block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _carrier(kind: str) -> str:
    """Name the transport of tensors on a device of that type; connects the ranks."""
    device = device_of(kind, dist.get_rank())
    if kind == "cuda":
        torch.cuda.set_device(device)
    tensor = torch.ones(1, device=device)
    ringcoll.all_reduce(tensor)
    if float(tensor) != dist.get_world_size():
        raise RuntimeError(f"the sum of {dist.get_world_size()} ones is {float(tensor)}")
    return communicator(None, device).transport.name


def _requests(
    settings: Settings,
    algorithms: _Algorithms,
    sizes: tuple[int, ...],
    seconds: float,
    least: int = 5,
    modes: tuple[bool, ...] = (True,),
) -> tuple[BenchRequest, ...]:
    return tuple(
        BenchRequest(
            collective,
            contenders,
            sizes,
            modes=modes,
            least=least,
            most=1000,
            seconds=seconds / len(algorithms),
            device=settings.device,
        )
        for collective, contenders in algorithms.items()
    )


# (ranks, transport), the ones of the goals first.
_LAYOUTS = ((4, "ucx"), (4, "gloo"), (2, "ucx"), (8, "ucx"), (2, "gloo"), (8, "gloo"))
_MPS_LAYOUTS = ((4, "ucx"), (2, "ucx"), (8, "ucx"), (4, "gloo"))


def shared(settings: Settings, emit: _Emit) -> None:
    """Measure with several ranks on one GPU, whose contexts take turns: without MPS."""
    with mps.without_mps() as variables:
        _share(settings, emit, _LAYOUTS, variables, lambda: False)


def shared_with_mps(settings: Settings, emit: _Emit) -> None:
    """Measure with several ranks on one GPU whose work runs at once: with MPS."""
    with ExitStack() as stack:
        try:
            variables = {} if settings.rehearsal else stack.enter_context(mps.with_mps())
        except mps.MpsError as error:
            emit(missing(SHARED, "everything with MPS", error))
            return
        uses_mps = partial(mps.is_used, variables)
        _share(settings, emit, _MPS_LAYOUTS, variables, uses_mps)


def _share(
    settings: Settings,
    emit: _Emit,
    layouts: tuple[tuple[int, str], ...],
    variables: Mapping[str, str],
    uses_mps: Callable[[], bool],
) -> None:
    if settings.rehearsal:
        sizes, layouts, seconds = _TINY, ((2, "ucx"), (2, "gloo")), 0.2
    else:
        sizes, seconds = _SIZES, 2.0 if settings.quick else 4.0
    speed = copy_bandwidth(sizes[-1], settings.place)
    plain = dict.fromkeys(_ALGORITHMS, (AUTO,))
    staged: _Algorithms = {**plain, "all_reduce": (AUTO, NATIVE)}
    # All ranks use one GPU, even if the machine has several.
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    environment = (("CUDA_VISIBLE_DEVICES", gpu), *variables.items())
    for world_size, transport in layouts:
        algorithms, least = (_ALGORITHMS, 5) if transport == "ucx" else (staged, 2)
        fitting = {
            name: tuple(each for each in some if not _restricted(name, each, world_size))
            for name, some in algorithms.items()
        }
        requests = _requests(settings, fitting, sizes, seconds, least)
        # Native collectives are gloo's: NCCL may refuse ranks that share a GPU.
        _Pool(
            SHARED, world_size, transport, "gloo", requests, _RUN_S, speed, environment, uses_mps
        ).measure(emit)


def _restricted(collective: str, name: str, world_size: int) -> bool:
    if name in (AUTO, NATIVE):
        return False
    return bool(find(collective, name).restriction(world_size))


def nccl(settings: Settings, emit: _Emit) -> None:
    """Measure over NCCL: on one rank, on several that share a GPU, on several GPUs."""
    transport = "gloo" if settings.rehearsal else "nccl"
    sizes = _TINY if settings.rehearsal else _SIZES
    seconds = 0.2 if settings.rehearsal else 5.0

    def run(world_size: int, algorithms: _Algorithms, *variables: tuple[str, str]) -> None:
        requests = _requests(settings, algorithms, sizes, seconds, modes=(False, True))
        backend, limit_s = default_backend(settings.device), _RUN_S + 2 * seconds
        pool = _Pool(NCCL, world_size, transport, backend, requests, limit_s, None, variables)
        pool.measure(emit)

    if not (settings.rehearsal or dist.is_nccl_available()):
        emit(missing(NCCL, "everything", "this torch has no NCCL"))
        return
    run(1, dict.fromkeys(_ALGORITHMS, (AUTO, NATIVE)))
    gpus = 1 if settings.rehearsal else torch.cuda.device_count()
    if gpus > 1:
        seconds = 10.0
        both = {
            "all_reduce": ("ring", "tree", AUTO, NATIVE),
            "reduce_scatter": ("ring", AUTO, NATIVE),
            "all_gather": ("ring", AUTO, NATIVE),
        }
        # To 128 MiB; then, of what the processor takes longest to check, 1 GiB.
        for powers in (range(1, 10), range(10, 11)):
            sizes = tuple(8**power for power in powers)
            run(gpus, both)
        return
    emit(missing(NCCL, "several GPUs: ring, tree, auto and native", f"there is {gpus} GPU"))
    for world_size in (2,) if settings.rehearsal else (2, 4):
        for name in (NATIVE, AUTO):  # a refusal of NCCL is a row for each
            alone = dict.fromkeys(_ALGORITHMS, (name,))
            run(world_size, alone, ("NCCL_MULTI_RANK_GPU_ENABLE", "1"))
