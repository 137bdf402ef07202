"""The intermediate representation: operations, steps, schedules.

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

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from fractions import Fraction
from functools import cached_property, lru_cache, partial, wraps
from itertools import count
from typing import ClassVar, NamedTuple, ParamSpec, Self

from ringcoll.errors import ScheduleError
from ringcoll.schedule.contracts import CONTRACTS, contract

__all__ = [
    "Buffer",
    "Copy",
    "Operation",
    "Program",
    "Recv",
    "RecvReduce",
    "Reduce",
    "Ref",
    "Schedule",
    "Send",
    "Step",
    "check_room",
    "copy",
    "inp",
    "num_places",
    "out",
    "recv",
    "recv_reduce",
    "reduce",
    "send",
    "tmp",
]


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
            return f"tmp({self.slot}, {self.chunk})"
        return f"{'inp' if self.buffer is Buffer.INPUT else 'out'}({self.chunk})"


def _remembered(make: Callable[_Numbers, Ref]) -> Callable[_Numbers, Ref]:
    """Make each reference once."""
    known = lru_cache(maxsize=1 << 16)(make)

    @wraps(make)
    def reference(*numbers: _Numbers.args, **named: _Numbers.kwargs) -> Ref:
        try:
            return known(*numbers, **named)  # type: ignore[arg-type]  # they may have no hash
        except TypeError:  # the number of a rank that stands for all ranks has no hash
            return make(*numbers, **named)

    return reference


@_remembered
def inp(chunk: int) -> Ref:
    """Chunk of the input."""
    return Ref(Buffer.INPUT, chunk)


@_remembered
def out(chunk: int) -> Ref:
    """Chunk of the output."""
    return Ref(Buffer.OUTPUT, chunk)


@_remembered
def tmp(slot: int, chunk: int) -> Ref:
    """Slot of scratch memory that holds data as long as ``chunk``."""
    return Ref(Buffer.SCRATCH, chunk, slot)


def _refs(refs: Iterable[Ref]) -> str:
    return " ".join(map(str, refs))


def _all(ref: Callable[[Ref], Ref], refs: tuple[Ref, ...]) -> tuple[Ref, ...]:
    return tuple(map(ref, refs))


# Each operation says what it ``reads`` of the state before the step, and what it ``writes``; `mapped`
# makes the same operation with other references and another peer.


@dataclass(frozen=True, slots=True)
class Send:
    """Send the chunks, as one message, to ``peer``."""

    peer: int
    refs: tuple[Ref, ...]
    writes: ClassVar[tuple[Ref, ...]] = ()

    @property
    def reads(self) -> tuple[Ref, ...]:
        return self.refs

    def mapped(self, ref: Callable[[Ref], Ref], peer: Callable[[int], int]) -> Send:
        return Send(peer(self.peer), _all(ref, self.refs))

    def __str__(self) -> str:
        return f"send {_refs(self.refs)} to {self.peer}"


@dataclass(frozen=True, slots=True)
class Recv:
    """Receive one message from ``peer`` into the chunks."""

    peer: int
    refs: tuple[Ref, ...]
    reads: ClassVar[tuple[Ref, ...]] = ()

    @property
    def writes(self) -> tuple[Ref, ...]:
        return self.refs

    def mapped(self, ref: Callable[[Ref], Ref], peer: Callable[[int], int]) -> Recv:
        return Recv(peer(self.peer), _all(ref, self.refs))

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
        into, local = _all(ref, self.into), _all(ref, self.local)
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
        return replace(self, into=ref(self.into), sources=_all(ref, self.sources))

    def __str__(self) -> str:
        mark = " final" if self.final else ""
        return f"reduce {self.into} = {' + '.join(map(str, self.sources))}{mark}"


Operation = Send | Recv | RecvReduce | Copy | Reduce


def _leaves_facts(operation: Operation) -> bool:
    """Whether a program leaves a fact of an operation to the library."""
    if isinstance(operation, RecvReduce):
        return operation.unstated_order or operation.unstated_final
    return isinstance(operation, Reduce) and operation.unstated_final


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


@dataclass(frozen=True, eq=False)
class Schedule:
    """The programs of all ranks, for one collective and one world size.

    Parameters
    ----------
    collective
        Name of the contract that the schedule keeps, such as ``"all_reduce"``.
    algorithm
        Name of the algorithm, such as ``"ring"``.
    world_size
        Number of ranks.
    num_chunks
        Number of chunks of data; a multiple of the contract's blocks.
    num_slots
        Slots of scratch memory that a rank may use.
    root
        The root of a rooted collective, otherwise 0.
    program
        The steps of a rank as they are written. Called with the rank; evaluated lazily.
        Whoever reads a schedule calls `steps`.
    stated_cost
        Rounds, traffic and reduced data as the entry of the algorithm states them; `verify`
        compares them with the counted ones. ``None`` if no cost is stated.

    Raises
    ------
    ScheduleError
        ``world_size`` is below 1, or ``root`` is not a rank.
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
        if self.world_size < 1:
            raise ScheduleError(f"world_size must be at least 1, got {self.world_size}")
        if not 0 <= self.root < self.world_size:
            raise ScheduleError(f"root {self.root} is not in a world of {self.world_size} ranks")

    def steps(self, rank: int) -> Program:
        """Produce the steps of one rank, lazily; every reduction states its order and `final`.

        The steps of other ranks are produced only if a reduction leaves ``final`` to the
        library: then all ranks are run on symbols, once for a schedule.

        Raises
        ------
        ScheduleError
            There is no such rank.
        VerificationError
            A reduction leaves ``final`` to the library, and the schedule is wrong.
        """
        if not 0 <= rank < self.world_size:
            raise ScheduleError(f"rank {rank} is not in a world of {self.world_size} ranks")
        return map(partial(self._stated, rank), count(), self.program(rank))

    def _stated(self, rank: int, number: int, step: Step) -> Step:
        """Step ``number`` of a rank, with all facts of its reductions."""
        if not any(map(_leaves_facts, step)):
            return step

        def is_final(index: int, operation: RecvReduce | Reduce) -> bool:
            if operation.unstated_final:
                return (rank, number, index) in self._finals
            return operation.final

        stated = list(step)
        for index, old in enumerate(step):
            if isinstance(old, RecvReduce):
                left = old.peer < rank if old.unstated_order else old.received_left
                stated[index] = RecvReduce(
                    old.peer, old.into, old.local, left, is_final(index, old)
                )
            elif isinstance(old, Reduce):
                stated[index] = Reduce(old.into, old.sources, is_final(index, old))
        return Step(*stated)

    @cached_property
    def _finals(self) -> frozenset[tuple[int, int, int]]:
        """Rank, step and index of the reductions that complete a chunk without stating it."""
        from ringcoll.schedule.verifier import finals_of  # the verifier imports this module

        return finals_of(self)

    def _header(self) -> tuple[str, str, int, int, int, int]:
        return (
            self.collective,
            self.algorithm,
            self.world_size,
            self.num_chunks,
            self.num_slots,
            self.root,
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schedule):
            return NotImplemented
        return self._header() == other._header() and all(
            tuple(self.steps(rank)) == tuple(other.steps(rank)) for rank in range(self.world_size)
        )

    def __hash__(self) -> int:
        return hash(self._header())

    def to_text(self) -> str:
        """Write the schedule as text that `from_text` reads back."""
        lines = [
            f"schedule {self.collective} {self.algorithm} world_size={self.world_size} "
            f"num_chunks={self.num_chunks} num_slots={self.num_slots} root={self.root}"
        ]
        for rank in range(self.world_size):
            lines.append(f"rank {rank}")
            lines += [f"  {step}".rstrip() or "  -" for step in self.steps(rank)]
        return "\n".join(lines) + "\n"

    @classmethod
    def from_text(cls, text: str) -> Schedule:
        """Read a text of `to_text`.

        Raises
        ------
        ScheduleError
            The text is malformed, the message names the line; or the header states far more chunks,
            or slots, than the steps can fill, which would only take memory.
        """
        lines = text.splitlines()
        header = _HEADER.fullmatch(lines[0] if lines else "")
        if header is None:
            raise ScheduleError("line 1: expected 'schedule COLLECTIVE ALGORITHM world_size=...'")
        world_size, num_chunks, num_slots, root = map(int, header.groups()[2:])
        programs: list[list[Step]] = []
        for number, line in enumerate(lines[1:], start=2):
            if line == f"rank {len(programs)}":
                programs.append([])
            elif line.startswith("  ") and programs:
                body = line.strip()
                operations = [] if body == "-" else body.split(" ; ")
                programs[-1].append(Step(*(_parse(text, number) for text in operations)))
            else:
                raise ScheduleError(f"line {number}: expected a step or 'rank {len(programs)}'")
        if len(programs) != world_size:
            raise ScheduleError(
                f"line {len(lines)}: the text ends after {len(programs)} ranks, "
                f"expected {world_size}"
            )
        frozen = tuple(map(tuple, programs))
        schedule = cls(
            collective=header[1],
            algorithm=header[2],
            world_size=world_size,
            num_chunks=num_chunks,
            num_slots=num_slots,
            program=lambda rank: frozen[rank],
            root=root,
        )
        try:
            check_room(schedule, text.count("["))
        except ScheduleError as error:
            raise ScheduleError(f"line 1: {error}") from None
        return schedule


# Numbers have few enough digits for `int`, and each expression reads a line in time that grows
# with the line's length only.
_HEADER = re.compile(
    r"schedule (\S+) (\S+) world_size=(\d{1,18}) num_chunks=(\d{1,18}) num_slots=(\d{1,18}) "
    r"root=(\d{1,18})"
)
_REF = re.compile(r"(in|out|tmp)(\d{0,18})\[(\d{1,18})\]")
_SEND = re.compile(r"send (.*) to (\d{1,18})")
_RECV = re.compile(r"recv (.*) from (\d{1,18})")
_RECV_REDUCE = re.compile(r"recv_reduce ([^=]*) = ([^+]*) \+ (.*) from (\d{1,18})( final)?")
_COPY = re.compile(r"copy (\S+) = (\S+)")
_REDUCE = re.compile(r"reduce (\S+) = (.*?)( final)?")


_ALWAYS = 1 << 20  # chunks of all ranks, and slots, for which there is always memory


def num_places(schedule: Schedule) -> int:
    """Chunks in the inputs and outputs of all ranks; a schedule that keeps its contract names each of them."""
    rules, world_size, root = contract(schedule.collective), schedule.world_size, schedule.root
    blocks = sum(
        len(of_rank(rank, world_size, root))
        for of_rank in (rules.inputs, rules.outputs)
        for rank in range(world_size)
    )
    return blocks * schedule.num_chunks // rules.num_blocks(world_size)


def check_room(schedule: Schedule, num_refs: int) -> None:
    """Raise if the references of a text are too few for the chunks and slots that it states.

    The verifier keeps an entry for each chunk of each rank. A schedule that keeps its contract names
    each of them: it writes all outputs, and it reads all inputs if it reduces. Collectives that do
    not reduce have no more input than output.
    """
    if schedule.collective not in CONTRACTS:  # the verifier and the executor refuse the name
        return
    for name, needed in (("num_chunks", num_places(schedule)), ("num_slots", schedule.num_slots)):
        if needed > max(_ALWAYS, 2 * num_refs):
            raise ScheduleError(
                f"{name}={getattr(schedule, name)} is too large for the steps, which name "
                f"{num_refs} chunks"
            )


def _parse_refs(text: str, line: int) -> tuple[Ref, ...]:
    refs = []
    for word in text.split():
        match = _REF.fullmatch(word)
        if match is None or (match[1] == "tmp") != bool(match[2]):
            raise ScheduleError(f"line {line}: {word!r} is not a reference")
        refs.append(Ref(Buffer(match[1]), int(match[3]), int(match[2] or 0)))
    return tuple(refs)


def _parse(text: str, line: int) -> Operation:
    if match := _SEND.fullmatch(text):
        return Send(int(match[2]), _parse_refs(match[1], line))
    if match := _RECV.fullmatch(text):
        return Recv(int(match[2]), _parse_refs(match[1], line))
    if match := _RECV_REDUCE.fullmatch(text):
        received_left = match[2] == "recv"
        local = match[3] if received_left else match[2]
        return RecvReduce(
            int(match[4]),
            _parse_refs(match[1], line),
            _parse_refs(local, line),
            received_left,
            match[5] is not None,
        )
    if match := _COPY.fullmatch(text):
        (into,), (source,) = _parse_refs(match[1], line), _parse_refs(match[2], line)
        return Copy(into, source)
    if match := _REDUCE.fullmatch(text):
        (into,) = _parse_refs(match[1], line)
        return Reduce(into, _parse_refs(match[2].replace("+", " "), line), match[3] is not None)
    raise ScheduleError(f"line {line}: {text!r} is not an operation")
