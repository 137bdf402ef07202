"""What is measured: one call of a collective, by ringcoll or by torch.distributed.

Sizes are those of nccl-tests: ``nbytes`` is asked for; for the collectives on blocks
(all-gather, reduce-scatter, gather, scatter, all-to-all) it is divided by the number of
ranks, rounded down, and ``count`` is then the number of elements of one block. The size
that is shown is that of the larger side: k blocks.

Out of place means that the inputs survive. torch.distributed has no separate output
for all-reduce, reduce and broadcast: there, a copy of the input counts into the time.
In place means nccl-tests' places: the same tensor, or this rank's block of the larger one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import ringcoll
from ringcoll.bench.exact import FACTOR
from ringcoll.collectives.groups import communicator
from ringcoll.errors import ArgumentError
from ringcoll.reduction import OPERATORS, premul_sum
from ringcoll.schedule.contracts import contract

__all__ = [
    "AUTO",
    "DTYPES",
    "NATIVE",
    "OVER",
    "PERSISTENT",
    "SHARED",
    "Buffers",
    "Shape",
    "Workload",
    "caller",
    "close_groups",
    "shape",
]

NATIVE = "native"
"""Name of torch.distributed's own collective among the contenders."""
AUTO = "auto"
"""Name of whatever algorithm the library chooses by itself."""
PERSISTENT = "persistent"
"""Name of the same, as an operation that is prepared once: see `ringcoll.collectives.calls.Collective.plan`."""
SHARED = "shared_tensors"
"""Name of `PERSISTENT` on tensors in shared memory: see `ringcoll.empty_shared`."""
OVER = "@"
"""Between the name of a contender and that of another transport than the run's: ``"ring@gloo"``."""

DTYPES = {
    "int8": torch.int8,
    "uint8": torch.uint8,
    "int32": torch.int32,
    "uint32": torch.uint32,
    "int64": torch.int64,
    "uint64": torch.uint64,
    "half": torch.float16,
    "float": torch.float32,
    "double": torch.float64,
    "bfloat16": torch.bfloat16,
    "f8e4m3": torch.float8_e4m3fn,
    "f8e5m2": torch.float8_e5m2,
    # torch's own, beyond those of nccl-tests
    "int16": torch.int16,
    "uint16": torch.uint16,
    "bool": torch.bool,
    "complex64": torch.complex64,
    "complex128": torch.complex128,
}
"""Dtypes by the names of nccl-tests."""

_CPU = torch.device("cpu")
_VECTOR = ("all_reduce", "reduce", "broadcast")


@dataclass(frozen=True)
class Workload:
    """One line of a table: what is called, on how much.

    Parameters
    ----------
    collective
        Its name.
    nbytes
        Size that is asked for.
    dtype, op
        By the names of nccl-tests: see `DTYPES` and `ringcoll.reduction.OPERATORS`. ``op`` is ``"none"`` where
        nothing is reduced.
    root
        -1 where there is none.
    """

    collective: str
    nbytes: int
    dtype: str = "float"
    op: str = "sum"
    root: int = -1


@dataclass(frozen=True)
class Shape:
    """How large the tensors of a workload are.

    Parameters
    ----------
    count
        Elements of the vector, or of one block.
    nbytes
        Size of the vector, or of all blocks of a rank.
    send_numel, recv_numel
        Elements of the input and of the output.
    """

    count: int
    nbytes: int
    send_numel: int
    recv_numel: int


def shape(workload: Workload, world_size: int) -> Shape:
    """Work out the sizes of a workload.

    >>> shape(Workload("all_gather", 100), 4)
    Shape(count=6, nbytes=96, send_numel=6, recv_numel=24)
    """
    itemsize = DTYPES[workload.dtype].itemsize
    numel = workload.nbytes // itemsize
    match workload.collective:
        case "barrier":
            return Shape(0, 0, 0, 0)
        case name if name in _VECTOR:
            return Shape(numel, numel * itemsize, numel, numel)
        case name:
            count = numel // world_size
            whole = count * world_size
            sends_one = name in ("all_gather", "gather")
            receives_one = name in ("reduce_scatter", "scatter")
            return Shape(
                count,
                whole * itemsize,
                count if sends_one else whole,
                count if receives_one else whole,
            )


@dataclass(frozen=True)
class Buffers:
    """The flat tensors of one call; in place, both share memory."""

    inp: Tensor
    out: Tensor
    in_place: bool

    @classmethod
    def make(
        cls,
        workload: Workload,
        world_size: int,
        rank: int,
        *,
        in_place: bool,
        device: torch.device = _CPU,
        shared: bool = False,
    ) -> Buffers:
        """Allocate them, and touch every page, so that none is a shared page of zeros."""
        ones = _shared_ones if shared else _ones
        sizes, dtype = shape(workload, world_size), DTYPES[workload.dtype]
        send, recv, count = sizes.send_numel, sizes.recv_numel, sizes.count
        if not in_place:
            return cls(ones(send, dtype, device), ones(recv, dtype, device), in_place)
        whole = ones(max(send, recv), dtype, device)
        rooted = contract(workload.collective).rooted
        block = rank if not rooted or rank == workload.root else 0
        part = whole[block * count : (block + 1) * count]
        inp, out = part if send < recv else whole, part if recv < send else whole
        return cls(inp, out, in_place)


def _ones(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.ones(numel, dtype=torch.float32, device=device).to(dtype)


def _shared_ones(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        raise ArgumentError("is on the CPU", argument="shared_tensors", expected="cpu", got=device)
    return ringcoll.empty_shared(numel, dtype=dtype).fill_(1)


Caller = Callable[[bool], Any]  # (async_op) -> a work, or None


def caller(
    contender: str,
    workload: Workload,
    buffers: Buffers,
    rank: int,
    world_size: int,
    segment_bytes: int | None = None,
) -> Caller:
    """Make the function that runs a workload once.

    Parameters
    ----------
    contender
        Name of an algorithm, `AUTO`, `PERSISTENT` or `SHARED`, perhaps `OVER` a transport; or
        `NATIVE`.
    workload, buffers
        What to run, on which tensors.
    rank, world_size
        This rank of the default group, and its size.
    segment_bytes
        For ringcoll's pipelined algorithms: see `ringcoll.collectives.functions`.
    """
    arguments = _Arguments(workload, buffers, rank, world_size)
    if contender == NATIVE:
        return getattr(_Native(arguments), workload.collective)  # type: ignore[no-any-return]
    name, _, transport = contender.partition(OVER)
    group = _group_over(transport) if transport else None
    if name in (PERSISTENT, SHARED):
        own = _Ringcoll(arguments, AUTO, segment_bytes, group, _Plans())
        copies = workload.collective == "broadcast" and arguments.is_root and not buffers.in_place
        prepare: Callable[[bool], Callable[[], object]] = getattr(own, workload.collective)
        return _Persistent(prepare, arguments.ready if copies else None)
    own = _Ringcoll(arguments, name, segment_bytes, group)
    return getattr(own, workload.collective)  # type: ignore[no-any-return]


_groups: dict[str, dist.ProcessGroup] = {}  # by their transport


def _group_over(transport: str) -> dist.ProcessGroup:
    """The group of all ranks over a transport, which all ranks make alike, until `close_groups`."""
    group = _groups.get(transport)
    if group is None:
        group = _groups[transport] = dist.new_group()
        ringcoll.use(group, transport=transport)
    used = communicator(group, _CPU).transport.name
    if used != transport:
        raise ArgumentError(
            "the environment asks for another transport",
            argument="algorithms",
            expected=used,
            got=transport,
        )
    return group


def close_groups() -> None:
    """Release the groups over other transports than the run's; called by all ranks."""
    while _groups:
        _, group = _groups.popitem()
        ringcoll.close(group)
        dist.destroy_process_group(group)


class _Plans:
    """The library, of which every function prepares its call, and does not run it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(ringcoll, name).plan


class _Persistent:
    """A call that is prepared when it is first made; ``before`` runs before each call."""

    def __init__(
        self,
        prepare: Callable[[bool], Callable[[], object]],
        before: Callable[[], object] | None,
    ) -> None:
        self._prepare, self._before = prepare, before
        self._prepared: dict[bool, Callable[[], object]] = {}  # by whether it is asynchronous

    def __call__(self, async_op: bool) -> Any:
        if self._before is not None:
            self._before()
        prepared = self._prepared.get(async_op)
        if prepared is None:
            prepared = self._prepared[async_op] = self._prepare(async_op)
        return prepared()


class _Arguments:
    """Arguments that both libraries take."""

    def __init__(self, workload: Workload, buffers: Buffers, rank: int, world_size: int) -> None:
        self.inp, self.out, self.in_place = buffers.inp, buffers.out, buffers.in_place
        self.op, self.root = workload.op, max(0, workload.root)
        self.is_root = rank == self.root
        scatters = self.is_root and workload.collective == "scatter"
        gathers = self.is_root and workload.collective == "gather"
        self.sources = _blocks(self.inp, world_size) if scatters else None
        self.results = _blocks(self.out, world_size) if gathers else None

    def ready(self) -> Tensor:
        """The output, holding the input: for functions that only work in place."""
        if not self.in_place:
            self.out.copy_(self.inp)
        return self.out


def _blocks(whole: Tensor, world_size: int) -> list[Tensor]:
    count = whole.numel() // world_size
    return [whole[block * count : (block + 1) * count] for block in range(world_size)]


class _Ringcoll:
    """The collectives of this library."""

    def __init__(
        self,
        arguments: _Arguments,
        algorithm: str,
        segment_bytes: int | None,
        group: dist.ProcessGroup | None,
        library: Any = ringcoll,
    ) -> None:
        self.a, self.library, self.group = arguments, library, group
        self.whole: dict[str, Any] = {"algorithm": algorithm}
        self.cut = self.whole | {"segment_bytes": segment_bytes}
        self.op: object = premul_sum(FACTOR) if arguments.op == "mulsum" else arguments.op

    def all_reduce(self, async_op: bool) -> Any:
        out = None if self.a.in_place else self.a.out
        return self.library.all_reduce(
            self.a.inp, self.op, self.group, async_op, out=out, **self.cut
        )

    def reduce(self, async_op: bool) -> Any:
        a = self.a
        out = a.out if a.is_root and not a.in_place else None
        return self.library.reduce(
            a.inp, a.root, self.op, self.group, async_op, out=out, **self.cut
        )

    def broadcast(self, async_op: bool) -> Any:
        a = self.a
        tensor = a.ready() if a.is_root else a.out
        return self.library.broadcast(tensor, a.root, self.group, async_op, **self.cut)

    def all_gather(self, async_op: bool) -> Any:
        return self.library.all_gather_single(
            self.a.out, self.a.inp, self.group, async_op, **self.cut
        )

    def reduce_scatter(self, async_op: bool) -> Any:
        a = self.a
        return self.library.reduce_scatter_single(
            a.out, a.inp, self.op, self.group, async_op, **self.cut
        )

    def gather(self, async_op: bool) -> Any:
        a = self.a
        return self.library.gather(a.inp, a.results, a.root, self.group, async_op, **self.cut)

    def scatter(self, async_op: bool) -> Any:
        a = self.a
        return self.library.scatter(a.out, a.sources, a.root, self.group, async_op, **self.cut)

    def all_to_all(self, async_op: bool) -> Any:
        a = self.a
        return self.library.all_to_all_single(
            a.out, a.inp, None, None, self.group, async_op, **self.whole
        )

    def barrier(self, async_op: bool) -> Any:
        return self.library.barrier(self.group, async_op, **self.whole)


class _Native:
    """The collectives of torch.distributed, on the same tensors."""

    def __init__(self, arguments: _Arguments) -> None:
        self.a = arguments

    @property
    def op(self) -> Any:
        if self.a.op == "mulsum":
            raise NotImplementedError("torch.distributed makes PREMUL_SUM for NCCL only")
        return getattr(dist.ReduceOp, OPERATORS[self.a.op].upper())

    def all_reduce(self, async_op: bool) -> Any:
        return dist.all_reduce(self.a.ready(), self.op, async_op=async_op)

    def reduce(self, async_op: bool) -> Any:
        return dist.reduce(self.a.ready(), self.a.root, self.op, async_op=async_op)

    def broadcast(self, async_op: bool) -> Any:
        tensor = self.a.ready() if self.a.is_root else self.a.out
        return dist.broadcast(tensor, self.a.root, async_op=async_op)

    def all_gather(self, async_op: bool) -> Any:
        # The newer name came with torch 2.13.
        function = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return function(self.a.out, self.a.inp, async_op=async_op)

    def reduce_scatter(self, async_op: bool) -> Any:
        function = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return function(self.a.out, self.a.inp, self.op, async_op=async_op)

    def gather(self, async_op: bool) -> Any:
        return dist.gather(self.a.inp, self.a.results, self.a.root, async_op=async_op)

    def scatter(self, async_op: bool) -> Any:
        return dist.scatter(self.a.out, self.a.sources, self.a.root, async_op=async_op)

    def all_to_all(self, async_op: bool) -> Any:
        return dist.all_to_all_single(self.a.out, self.a.inp, async_op=async_op)

    def barrier(self, async_op: bool) -> Any:
        return dist.barrier(async_op=async_op)
