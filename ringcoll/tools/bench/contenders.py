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

`Oracle` has inputs whose exact result is known, so that a wrong element can be counted.
Floating-point sums depend on the order of the additions, so that "close enough" hides lost and
doubled contributions. Here the inputs are small integers, such that every partial sum, in any
order, is exact in the dtype: the result is then known to the last bit. They differ by rank and by
index. A table as long as the largest prime below 2^16 is repeated, so that data that end up
displaced by a power of two show. Source of the idea: nccl-tests, ``verifiable``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial, reduce
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

_OF_TORCH = {"f8e4m3": "float8_e4m3fn", "f8e5m2": "float8_e5m2"}  # the other names are the same
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, _OF_TORCH.get(name, name)) for name in DTYPE_NAMES
}
"""Dtypes by the names of nccl-tests, and more by those of torch."""

_CPU = torch.device("cpu")
_TAG = 1
_LIMIT_S = 300.0

_FACTOR = 2.0  # of PREMUL_SUM
_PERIOD = 65521  # of the table of inputs
_LARGEST = 1 << 20  # more different values would not show more
_SAME_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
_ANY = ("sum", "max", "bor")  # on bool these are "or", as in torch; see ringcoll.runtime.reduction
_ALL = ("product", "min", "band")
_COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    **dict.fromkeys(("sum", "avg", "premul_sum"), torch.add),
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
# Functions on single tensors, by what follows the collective's name: the newest first.
_OF_SINGLE = ("_single", "_into_tensor", "_tensor", "")


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
    own_op = premul_sum(_FACTOR) if workload.op == "mulsum" else workload.op
    is_persistent = name in (PERSISTENT, SHARED)
    function, copies = _bound(ringcoll, own_op, *place, plans=is_persistent)
    function = partial(
        function,
        group=_group_over(transport) if transport else None,
        algorithm=AUTO if is_persistent else name,
        **{"segment_bytes": segment_bytes} if contract(workload.collective).can_be_cut else {},
    )
    return _call(_prepared_once(function) if is_persistent else function, copies, buffers)


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
    names = (f"{workload.collective}{end}" for end in _OF_SINGLE)
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


def _prepared_once(plan: Callable[..., Callable[[], object]]) -> Callable[..., Any]:
    """A call that is prepared when it is first made, asynchronous or not."""
    prepared = lru_cache(lambda async_op: plan(async_op=async_op))
    return lambda async_op: prepared(async_op)()


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


# --- inputs and exact results -----------------------------------------------------------


@lru_cache(maxsize=256)
def _hashes(rank: int) -> Tensor:
    """Well mixed numbers of 32 bits, a number for each index of the period."""
    mixed = torch.arange(_PERIOD, dtype=torch.int64, device="cpu") + (rank + 1) * 0x9E3779B1
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 0x2C1B3C6D)):
        mixed = ((mixed ^ (mixed >> shift)) * factor) & 0xFFFFFFFF
    return mixed ^ (mixed >> 15)


def _exact_up_to(dtype: torch.dtype) -> int:
    """Up to here the dtype has every integer."""
    if dtype is torch.bool:
        return 1
    if dtype.is_floating_point or dtype.is_complex:
        return round(2 / torch.finfo(dtype).eps)
    return int(torch.iinfo(dtype).max)


def _doublings(dtype: torch.dtype) -> int:
    """How many factors of two a product may have."""
    if dtype.is_floating_point or dtype.is_complex:
        return min(60, int(torch.finfo(dtype).max).bit_length() - 1)
    return int(torch.iinfo(dtype).max).bit_length() - 1


@dataclass(frozen=True)
class Oracle:
    """Inputs and exact results of one collective.

    ``op`` is the name of an operator of `ringcoll.runtime.reduction`, unused where nothing is
    reduced.
    """

    collective: str
    op: str
    dtype: torch.dtype
    world_size: int
    root: int = 0

    @property
    def exact(self) -> bool:
        """Whether there are inputs with an exact result; a narrow float fails many ranks."""
        limit = _exact_up_to(self.dtype)
        if not contract(self.collective).reduces or self.dtype is torch.bool:
            return True
        return limit >= {"sum": 1, "avg": 2, "premul_sum": 2}.get(self.op, 0) * self.world_size

    def input(self, rank: int, numel: int) -> Tensor:
        """The input of a rank."""
        return self._repeated(self._contribution(rank), 0, numel)

    def output(self, rank: int, count: int) -> Tensor | None:
        """The output of a rank; ``None`` if it has none. ``count`` is of a block, or the vector."""
        k, rules = self.world_size, contract(self.collective)
        blocks = rules.outputs(rank, k, self.root)
        if not blocks:
            return None
        if rules.reduces:
            table = self._reduced(rules.contributors(rank, k))
            return self._repeated(table, blocks[0] * count, count)
        pieces = []
        for block in blocks:
            source = rules.owner(block, k, self.root)
            first = rules.inputs(source, k, self.root)[0]
            table = self._contribution(source)
            pieces.append(self._repeated(table, (block - first) * count, count))
        return torch.cat(pieces)

    def _contribution(self, rank: int) -> Tensor:
        """One period of the input of a rank, as integers."""
        k, hashes = self.world_size, _hashes(rank)
        limit = min(_exact_up_to(self.dtype), _LARGEST)
        if not contract(self.collective).reduces:
            return hashes % (limit + 1)
        if self.dtype is torch.bool:
            return self._bools(rank)
        match self.op:
            case "sum":
                return _up_to(limit // k, hashes)
            case "premul_sum":
                return _up_to(limit // int(_FACTOR * k), hashes)
            case "avg" if rank == k - 1 > 0:  # it makes the sum a multiple of k
                return -torch.stack([self._contribution(r) for r in range(k - 1)]).sum(0) % k
            case "avg":
                return _up_to(limit // k - (k > 1), hashes)
            case "product":  # at each index some ranks, not always the same, bring a 2
                turn = (rank + torch.arange(_PERIOD, device="cpu")) % k < _doublings(self.dtype)
                return 1 + (turn & (hashes % 2 == 1)).to(torch.int64)
            case "min" | "max":
                lowest = 0 if not self.dtype.is_signed else -(limit // 2)
                return hashes % limit + lowest
        bit = torch.bitwise_left_shift(torch.ones_like(hashes), hashes % (8 * self.dtype.itemsize))
        if self.op == "bxor":
            return hashes * 0x9E3779B97F4A7C1
        return ~bit if self.op == "band" else bit

    def _bools(self, rank: int) -> Tensor:
        """Make inputs such that, on average, one rank in k decides the result."""
        rare = _hashes(rank) % self.world_size == 0
        if self.op == "bxor":
            return _hashes(rank) % 2
        return (~rare if self.op in _ALL else rare).to(torch.int64)

    def _reduced(self, ranks: int) -> Tensor:
        """One period of the result, as integers."""
        op = self.op
        if self.dtype is torch.bool:
            op = "max" if op in _ANY else "min" if op in _ALL else op
        total = reduce(_COMBINE[op], map(self._contribution, range(ranks)))
        if op == "avg":
            total = total // self.world_size
        return total * int(_FACTOR) if op == "premul_sum" else total

    def _repeated(self, table: Tensor, start: int, numel: int) -> Tensor:
        """Elements from ``start`` on of a table that repeats itself for ever."""
        start %= _PERIOD
        if start + numel <= _PERIOD:
            return _converted(table[start : start + numel], self.dtype)
        values = _converted(table, self.dtype)
        return values.repeat(-(-(start + numel) // _PERIOD) or 1)[start : start + numel]


def _up_to(largest: int, hashes: Tensor) -> Tensor:
    """Numbers that add something; only where there are too few of them, some are 0."""
    return hashes % largest + 1 if largest > 1 else hashes % 2


def _converted(table: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype.is_floating_point and dtype.itemsize == 1:
        return table.to(torch.float32).to(dtype)  # there is no direct way to 8 bits
    return table.to(dtype, copy=True)  # the table stays as it is


def _bits(tensor: Tensor) -> Tensor:
    """The elements as integers of the same size, so that they compare bit by bit."""
    if tensor.dtype is torch.bool:  # to torch, any byte but 0 is true
        return tensor.view(torch.int8).ne(0).view(torch.int8).view(-1, 1)
    return tensor.view(_SAME_SIZE[tensor.itemsize]).view(tensor.numel(), -1)


def count_wrong(result: Tensor, expected: Tensor) -> int:
    """Count the elements that differ in any bit; both tensors flat, of one length and dtype.

    The result may be on a GPU, and is then compared there.
    """
    if not expected.numel():
        return 0
    return int((_bits(result) != _bits(expected.to(result.device))).any(1).sum())


def spoil(result: Tensor, expected: Tensor) -> None:
    """Overwrite every element with a wrong one, so that an element that is never written shows."""
    if expected.dtype is torch.bool:
        result.copy_(~expected)
    elif expected.numel():
        _bits(result).copy_(~_bits(expected))
