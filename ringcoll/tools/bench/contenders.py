"""The contenders: one call of a collective by ringcoll or torch.distributed, or a limit of both.

Sizes are those of nccl-tests: ``nbytes`` is asked for; for the collectives on blocks
(all-gather, reduce-scatter, gather, scatter, all-to-all) it is divided by the number of
ranks, rounded down, and ``count`` is then the number of elements of one block. The size
that is shown is that of the larger side: k blocks.

Out of place means that the inputs survive. torch.distributed has no separate output
for all-reduce, reduce and broadcast: there, a copy of the input counts into the time.
In place means nccl-tests' places: the same tensor, or this rank's block of the larger one.

Three limits are contenders, too, timed in the same rounds as the others, on tensors of their own:

``exchange``
    The bytes that a rank has to send, sent to the next rank and received from the previous
    rank, in one message over the transport of the run: 2(k-1)/k of the data for all-reduce.
``add``
    The elements that a rank has to add, added to a tensor in place: (k-1)/k of the data.
``copy``
    A copy of the data in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import ringcoll
from ringcoll.errors import ArgumentError
from ringcoll.runtime.collectives import communicator
from ringcoll.runtime.reduction import OPERATORS, premul_sum
from ringcoll.runtime.transport import Message
from ringcoll.schedules import contract
from ringcoll.tools.bench.names import AUTO, DTYPE_NAMES, NATIVE, OVER, PERSISTENT, SHARED

_TORCH_NAMES = {"f8e4m3": "float8_e4m3fn", "f8e5m2": "float8_e5m2"}  # the other names are the same
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, _TORCH_NAMES.get(name, name)) for name in DTYPE_NAMES
}
"""Dtypes by the names of nccl-tests, and more by those of torch."""

_CPU = torch.device("cpu")
_TAG = 1
_LIMIT_S = 300.0

PREMUL_FACTOR = 2.0
# Functions on single tensors, by what follows the collective's name: the newest first.
_SINGLE_TENSOR_ENDINGS = ("_single", "_into_tensor", "_tensor", "")


@dataclass(frozen=True)
class Workload:
    """One line of a table: a collective, and the size that is asked for.

    Parameters
    ----------
    collective, nbytes
        Name of the collective, and size in bytes.
    dtype, op
        By the names of nccl-tests: see `DTYPES` and `ringcoll.runtime.reduction.OPERATORS`. ``op``
        is ``"none"`` where nothing is reduced.
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
    """Elements of the vector or of a block, size of the whole, elements of input and output."""

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
    rules = contract(workload.collective)
    if rules.at_least_once:
        return Shape(0, 0, 0, 0)
    count = numel // rules.blocks_of_rank(world_size)
    send, recv = (  # rank 0 is the root; of an exscan, it has no output
        count * max(len(blocks(rank, world_size, 0)) for rank in (0, world_size - 1))
        for blocks in (rules.inputs, rules.outputs)
    )
    return Shape(count, max(send, recv) * itemsize, send, recv)


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
        ones = partial(_ones, dtype=DTYPES[workload.dtype], device=device, shared=shared)
        sizes = shape(workload, world_size)
        send, recv, count = sizes.send_numel, sizes.recv_numel, sizes.count
        if not in_place:
            return cls(ones(send), ones(recv), in_place)
        whole = ones(max(send, recv))
        rooted = contract(workload.collective).rooted
        block = rank if not rooted or rank == workload.root else 0
        own = whole[block * count : (block + 1) * count]
        inp, out = own if send < recv else whole, own if recv < send else whole
        return cls(inp, out, in_place)


def _ones(numel: int, dtype: torch.dtype, device: torch.device, shared: bool) -> Tensor:
    if not shared:
        return torch.ones(numel, dtype=torch.float32, device=device).to(dtype)
    if device.type != "cpu":
        raise ArgumentError("is on the CPU", "shared_tensors", "cpu", device)
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
    """Make the function that runs a workload once on the default group.

    ``contender`` is the name of an algorithm, `AUTO`, `PERSISTENT` or `SHARED`, perhaps `OVER` a
    transport; or `NATIVE`.
    """
    place = workload, buffers, rank, world_size
    if contender == NATIVE:
        if workload.op == "mulsum" or contract(workload.collective).is_prefix:
            return _refuse
        op = OPERATORS.get(workload.op, "sum").upper()  # of a collective that has none, any
        return _call(*_bound(dist, getattr(dist.ReduceOp, op), *place), buffers)
    name, _, transport = contender.partition(OVER)
    own_op = premul_sum(PREMUL_FACTOR) if workload.op == "mulsum" else workload.op
    is_persistent = name in (PERSISTENT, SHARED)
    function, copies = _bound(ringcoll, own_op, *place, plans=is_persistent)
    function = partial(
        function,
        group=_group_over(transport) if transport else None,
        algorithm=AUTO if is_persistent else name,
        **{"segment_bytes": segment_bytes} if contract(workload.collective).can_be_cut else {},
    )
    if is_persistent:  # prepared when it is first called, asynchronous or not
        prepared = lru_cache(function)
        return _call(lambda async_op: prepared(async_op=async_op)(), copies, buffers)
    return _call(function, copies, buffers)


def _refuse(async_op: bool) -> None:
    raise NotImplementedError("torch.distributed makes PREMUL_SUM for NCCL only, and has no scan")


def _bound(
    library: Any,
    op: object,
    workload: Workload,
    buffers: Buffers,
    rank: int,
    world_size: int,
    *,
    plans: bool = False,
) -> tuple[Callable[..., Any], bool]:
    """A library's function with its tensors; and whether the output is a copy of the input.

    If ``plans``, the function prepares its call, and does not run it.
    """
    names = (f"{workload.collective}{end}" for end in _SINGLE_TENSOR_ENDINGS)
    function = getattr(library, next(name for name in names if hasattr(library, name)))
    function = function.plan if plans else function
    inp, out, apart = buffers.inp, buffers.out, not buffers.in_place
    root = max(0, workload.root)
    is_root = rank == root
    match workload.collective:
        case "all_reduce" if library is dist:
            return partial(function, out, op), apart
        case "all_reduce" | "scan" | "exscan":
            call = partial(function, inp, op, out=out if apart else None)
        case "reduce" if library is dist:
            return partial(function, out, root, op), apart
        case "reduce":
            call = partial(function, inp, root, op, out=out if apart and is_root else None)
        case "broadcast":
            return partial(function, out, root), apart and is_root
        case "reduce_scatter":
            call = partial(function, out, inp, op)
        case "gather":
            blocks = [*out.tensor_split(world_size)] if is_root else None
            call = partial(function, inp, blocks, root)
        case "scatter":
            blocks = [*inp.tensor_split(world_size)] if is_root else None
            call = partial(function, out, blocks, root)
        case "barrier":
            call = function
        case _:
            call = partial(function, out, inp)
    return call, False


def _call(function: Callable[..., Any], copies: bool, buffers: Buffers) -> Caller:
    """A function with ``async_op``; for functions that only work in place, the copy counts."""
    inp, out = buffers.inp, buffers.out

    def call(async_op: bool) -> Any:
        if copies:
            out.copy_(inp)
        return function(async_op=async_op)

    return call


_groups: dict[str, dist.ProcessGroup] = {}  # by their transport


def _group_over(transport: str) -> dist.ProcessGroup:
    """The group of all ranks over a transport, which all ranks make alike, until `close_groups`."""
    group = _groups.get(transport)
    if group is None:
        group = _groups[transport] = dist.new_group()
        ringcoll.use(group, transport=transport)
    used = communicator(group, _CPU).transport.name
    check_transport(used, transport, "algorithms")
    return group


def check_transport(used: str, wanted: str, argument: str) -> None:
    """Raise `ArgumentError` if the environment has forced another transport."""
    if used != wanted:
        text = "the environment asks for another transport"
        raise ArgumentError(text, argument, used, wanted)


def close_groups() -> None:
    """Release the groups over other transports than the run's; called by all ranks."""
    while _groups:
        _, group = _groups.popitem()
        ringcoll.close(group)
        dist.destroy_process_group(group)


# --- limits ---------------------------------------------------------------------------


def exchanged_nbytes(workload: Workload, world_size: int) -> int:
    """Bytes that a rank has to send: the data times the collective's bandwidth factor.

    >>> exchanged_nbytes(Workload("all_reduce", 1000), 4)
    1500
    """
    factor = contract(workload.collective).busbw_factor(world_size)
    return int(shape(workload, world_size).nbytes * factor)


def added_numel(workload: Workload, world_size: int) -> int:
    """Elements that a rank has to add; none where nothing is reduced.

    >>> added_numel(Workload("all_reduce", 4000), 4)
    750
    """
    if not contract(workload.collective).reduces:
        return 0
    sizes = shape(workload, world_size)
    return sizes.nbytes // DTYPES[workload.dtype].itemsize * (world_size - 1) // world_size


def limit_caller(
    name: str, workload: Workload, world_size: int, device: torch.device
) -> Callable[[int], object]:
    """Make the function that does one of `LIMITS` so many times; called by all ranks alike."""
    if name == "exchange":
        return _exchange(exchanged_nbytes(workload, world_size), world_size, device)
    dtype = DTYPES[workload.dtype]
    numel = shape(workload, world_size).nbytes // dtype.itemsize
    numel = added_numel(workload, world_size) if name == "add" else numel
    here, there = (torch.ones(numel, device=device).to(dtype) for _ in range(2))
    if name == "copy":
        return lambda times: [here.copy_(there) for _ in range(times)]
    there.zero_()  # the sum of thousands of additions stays what it is
    try:
        here.add_(there)
    except RuntimeError as error:
        raise ArgumentError(f"torch cannot add {workload.dtype}") from error
    return lambda times: [here.add_(there) for _ in range(times)]


def _exchange(nbytes: int, world_size: int, device: torch.device) -> Callable[[int], object]:
    out, into = (torch.ones(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    rank = dist.get_rank()
    ringcoll.all_reduce(torch.ones(1, device=device))  # the ranks have met
    transport = communicator(None, out.device).transport
    receives = [Message((rank - 1) % world_size, into, _TAG)]
    sends = [Message((rank + 1) % world_size, out, _TAG)]
    if world_size == 1:
        receives = sends = []

    def exchange(times: int) -> None:
        for _ in range(times):
            for handle in transport.post(receives, sends):
                transport.wait(handle, _LIMIT_S)

    return exchange
