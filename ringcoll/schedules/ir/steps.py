"""The intermediate representation: operations, steps, programs as they are written.

A collective algorithm is a function that yields the *steps* of one rank. A step is
the set of operations that the rank does at the same time. Steps are global: a message
that is sent in step *s* is received in step *s*. Everything else in the library
(verifier, cost, drawings, executor) only reads these data.

Data are addressed by *reference*, never by bytes::

    in[3]     chunk 3 of the input      (read only)
    out[3]    chunk 3 of the output
    tmp0[3]   slot 0 of scratch memory, which holds data as long as chunk 3

A chunk number names the same data on every rank. For the collectives on a vector
(all-reduce, broadcast, reduce) it is the piece of the vector; for the collectives on
blocks (all-gather, scatter, ...) it is the block, so rank 2 of an all-gather has
``in[2]`` and no other input; for all-to-all it is ``src * world_size + dst``.

Within a step all reads see the state before the step. A place has one writer per
step, except that several recv-reduces into one place accumulate in program
order. A message carries a tuple of chunks; per step and ordered pair of ranks,
the i-th send pairs with the i-th receive.

A program may leave two facts of a reduction to the library: which operand is left,
and whether the reduction completes its chunk. `Schedule.steps` states both.

The vocabulary is NCCL's; see "Demystifying NCCL", arXiv 2507.04786, section 5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from fractions import Fraction
from functools import lru_cache, wraps
from typing import ClassVar, NamedTuple, ParamSpec, Self

from ringcoll.errors import ScheduleError, printable
from ringcoll.schedules.ir.contracts import CONTRACTS, contract
from ringcoll.schedules.ir.outside import laboratory

_Numbers = ParamSpec("_Numbers")


class Buffer(StrEnum):
    """The three places where data live."""

    INPUT = "in"
    OUTPUT = "out"
    SCRATCH = "tmp"


class Ref(NamedTuple):
    """A place for one chunk of data on one rank.

    ``chunk`` names the data, and with it the length; ``slot`` is the place in
    scratch memory, and 0 in the other buffers.
    """

    buffer: Buffer
    chunk: int
    slot: int = 0

    @property
    def place(self) -> tuple[Buffer, int]:
        """The memory: two references with the same place overlap."""
        return self.buffer, self.slot if self.buffer is Buffer.SCRATCH else self.chunk

    def __str__(self) -> str:
        slot = self.slot if self.buffer is Buffer.SCRATCH else ""
        return f"{self.buffer.value}{slot}[{self.chunk}]"

    def __repr__(self) -> str:
        if self.buffer is Buffer.SCRATCH:
            return f"tmp({self.slot!r}, {self.chunk!r})"
        return f"{'inp' if self.buffer is Buffer.INPUT else 'out'}({self.chunk!r})"


def _made_once(make: Callable[_Numbers, Ref]) -> Callable[_Numbers, Ref]:
    """Make each reference once; ``True`` and 1.0 are other numbers than 1."""
    known = lru_cache(maxsize=1 << 16, typed=True)(make)

    @wraps(make)
    def reference(*numbers: _Numbers.args, **named: _Numbers.kwargs) -> Ref:
        try:
            return known(*numbers, **named)  # type: ignore[arg-type]  # they may have no hash
        except TypeError:  # the number of a rank that stands for all ranks has no hash
            return make(*numbers, **named)

    return reference


@_made_once
def inp(chunk: int) -> Ref:
    """Chunk of the input."""
    return Ref(Buffer.INPUT, chunk)


@_made_once
def out(chunk: int) -> Ref:
    """Chunk of the output."""
    return Ref(Buffer.OUTPUT, chunk)


@_made_once
def tmp(slot: int, chunk: int) -> Ref:
    """Slot of scratch memory that holds data as long as ``chunk``."""
    return Ref(Buffer.SCRATCH, chunk, slot)


def _refs(refs: Iterable[Ref]) -> str:
    return " ".join(map(str, refs))


def _mapped(ref: Callable[[Ref], Ref], refs: tuple[Ref, ...]) -> tuple[Ref, ...]:
    return tuple(map(ref, refs))


# Each operation says what it ``reads`` of the state before the step, and what it ``writes``;
# `mapped` makes the same operation with other references and another peer.


@dataclass(frozen=True, slots=True)
class _Message:
    peer: int
    refs: tuple[Ref, ...]

    def mapped(self, ref: Callable[[Ref], Ref], peer: Callable[[int], int]) -> Self:
        return type(self)(peer(self.peer), _mapped(ref, self.refs))


class Send(_Message):
    """Send the chunks, as one message, to ``peer``."""

    __slots__ = ()
    writes: ClassVar[tuple[Ref, ...]] = ()

    @property
    def reads(self) -> tuple[Ref, ...]:
        return self.refs

    def __str__(self) -> str:
        return f"send {_refs(self.refs)} to {self.peer}"


class Recv(_Message):
    """Receive one message from ``peer`` into the chunks."""

    __slots__ = ()
    reads: ClassVar[tuple[Ref, ...]] = ()

    @property
    def writes(self) -> tuple[Ref, ...]:
        return self.refs

    def __str__(self) -> str:
        return f"recv {_refs(self.refs)} from {self.peer}"


@dataclass(frozen=True, slots=True)
class RecvReduce:
    """Receive one message and reduce it with local data.

    ``into[i] = local[i] (+) received[i]``, or ``received[i] (+) local[i]`` where
    ``received_left`` is set: the order matters to the last bit. ``final`` marks
    the reduction that completes the chunk. ``unstated_order`` and ``unstated_final``
    say that the program leaves ``received_left`` or ``final`` to the library; no
    operation of `Schedule.steps` has them set.
    """

    peer: int
    into: tuple[Ref, ...]
    local: tuple[Ref, ...]
    received_left: bool
    final: bool
    unstated_order: bool = False
    unstated_final: bool = False

    @property
    def reads(self) -> tuple[Ref, ...]:
        return self.local

    @property
    def writes(self) -> tuple[Ref, ...]:
        return self.into

    def mapped(self, ref: Callable[[Ref], Ref], peer: Callable[[int], int]) -> RecvReduce:
        into, local = _mapped(ref, self.into), _mapped(ref, self.local)
        return replace(self, peer=peer(self.peer), into=into, local=local)

    def __str__(self) -> str:
        pair = ("recv", _refs(self.local)) if self.received_left else (_refs(self.local), "recv")
        mark = " final" if self.final else ""
        return f"recv_reduce {_refs(self.into)} = {pair[0]} + {pair[1]} from {self.peer}{mark}"


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy a chunk on this rank."""

    into: Ref
    source: Ref

    @property
    def reads(self) -> tuple[Ref, ...]:
        return (self.source,)

    @property
    def writes(self) -> tuple[Ref, ...]:
        return (self.into,)

    def mapped(self, ref: Callable[[Ref], Ref], peer: Callable[[int], int]) -> Copy:
        return Copy(ref(self.into), ref(self.source))

    def __str__(self) -> str:
        return f"copy {self.into} = {self.source}"


@dataclass(frozen=True, slots=True)
class Reduce:
    """Reduce chunks on this rank, from left to right; ``final`` as in `RecvReduce`."""

    into: Ref
    sources: tuple[Ref, ...]
    final: bool
    unstated_final: bool = False

    @property
    def reads(self) -> tuple[Ref, ...]:
        return self.sources

    @property
    def writes(self) -> tuple[Ref, ...]:
        return (self.into,)

    def mapped(self, ref: Callable[[Ref], Ref], peer: Callable[[int], int]) -> Reduce:
        return replace(self, into=ref(self.into), sources=_mapped(ref, self.sources))

    def __str__(self) -> str:
        mark = " final" if self.final else ""
        return f"reduce {self.into} = {' + '.join(map(str, self.sources))}{mark}"


Operation = Send | Recv | RecvReduce | Copy | Reduce


def send(peer: int, *refs: Ref) -> Send:
    """Send ``refs`` to ``peer`` as one message."""
    return Send(peer, refs)


def recv(peer: int, *refs: Ref) -> Recv:
    """Receive one message from ``peer`` into ``refs``."""
    return Recv(peer, refs)


def recv_reduce(
    peer: int,
    into: Ref | tuple[Ref, ...],
    local: Ref | tuple[Ref, ...],
    *,
    received_left: bool | None = None,
    final: bool | None = None,
) -> RecvReduce:
    """Receive from ``peer``, reduce with ``local``, store in ``into``.

    Parameters
    ----------
    peer, into, local
        The peer, and the chunks, as many in ``into`` as in ``local``.
    received_left
        Whether the received data are the left operand of the reduction. Operands have to
        stay in rank order for an operator that does not commute, and two ranks that
        reduce the same pair get the same bits only if both have the same operand on the
        left. By default the operand of the lower rank is left: ``peer < rank``.
    final
        Whether the reduction completes the chunk, so that it holds the contribution of
        every rank. By default the library finds out, by a run of all ranks on symbols.
    """
    into = (into,) if isinstance(into, Ref) else into
    local = (local,) if isinstance(local, Ref) else local
    return RecvReduce(
        peer, into, local, bool(received_left), bool(final), received_left is None, final is None
    )


def copy(into: Ref, source: Ref) -> Copy:
    """Copy ``source`` to ``into``."""
    return Copy(into, source)


def reduce(into: Ref, *sources: Ref, final: bool | None = None) -> Reduce:
    """Reduce ``sources``, from left to right, into ``into``; ``final`` as in `recv_reduce`."""
    return Reduce(into, sources, bool(final), final is None)


class Step(tuple[Operation, ...]):
    """The operations that one rank does at the same time; empty where the rank waits."""

    __slots__ = ()

    def __new__(cls, *operations: Operation) -> Self:
        """Make a step of operations."""
        return super().__new__(cls, operations)

    def __repr__(self) -> str:
        return f"Step({', '.join(map(repr, self))})"

    def __str__(self) -> str:
        return " ; ".join(map(str, self))


Program = Iterator[Step]


class Shown:
    """Something that a notebook shows as a picture, which the laboratory draws."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return laboratory.picture(self)


@dataclass(frozen=True, eq=False)
class Written(Shown):
    """The programs of all ranks as they are written; a `Schedule` fills in the facts left out.

    Parameters are those of `ringcoll.schedules.ir.schedule.Schedule`. The name of the algorithm,
    which may come from a file, is made `printable`.
    """

    collective: str
    algorithm: str
    world_size: int
    num_chunks: int
    num_slots: int
    program: Callable[[int], Iterable[Step]] = field(repr=False)
    root: int = 0
    stated_cost: tuple[int, Fraction, Fraction] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "algorithm", printable(self.algorithm))
        if self.world_size < 1:
            raise ScheduleError(f"world_size must be at least 1, got {self.world_size}")
        if not 0 <= self.root < self.world_size:
            raise ScheduleError(f"root {self.root} is not in a world of {self.world_size} ranks")

    def steps(self, rank: int) -> Program:
        """Produce the steps of one rank, lazily, as they are written.

        Raises
        ------
        ScheduleError
            There is no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise ScheduleError(f"rank {rank} is not in a world of {self.world_size} ranks")
        return iter(self.program(rank))


_MOST_UNCHECKED = 1 << 20  # chunks of all ranks, and slots, for which there is always memory


def num_places(schedule: Written) -> int:
    """Chunks in the inputs and outputs of all ranks, which a right schedule names all."""
    rules, world_size, root = contract(schedule.collective), schedule.world_size, schedule.root
    blocks = sum(
        len(of_rank(rank, world_size, root))
        for of_rank in (rules.inputs, rules.outputs)
        for rank in range(world_size)
    )
    return blocks * schedule.num_chunks // rules.num_blocks(world_size)


def check_room(schedule: Written, num_refs: int) -> None:
    """Raise if the references of a text are too few for the chunks and slots that it states.

    The verifier keeps an entry for each chunk of each rank. A schedule that keeps its contract
    names each of them: it writes all outputs, and it reads all inputs if it reduces. Collectives
    that do not reduce have no more input than output.
    """
    if schedule.collective not in CONTRACTS:  # the verifier and the executor refuse the name
        return
    for name, needed in (("num_chunks", num_places(schedule)), ("num_slots", schedule.num_slots)):
        if needed > max(_MOST_UNCHECKED, 2 * num_refs):
            raise ScheduleError(
                f"{name}={getattr(schedule, name)} is too large for the steps, which name "
                f"{num_refs} chunks"
            )
