"""A schedule: the programs of all ranks, read in one way, and written in words.

A schedule is written as text that is read back, and in NCCL's words. A sum of floats depends on the
order in which it is made: `verify` finds the order of every chunk; here an order becomes a sum that
a person reads, and a chunk becomes the elements that it has in a vector of some length.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import count

from ringcoll.errors import ScheduleError
from ringcoll.schedules.ir.contracts import balanced_share, contract
from ringcoll.schedules.ir.counting import MOST_STEPS
from ringcoll.schedules.ir.steps import (
    Buffer,
    Copy,
    Operation,
    Program,
    Recv,
    RecvReduce,
    Reduce,
    Ref,
    Send,
    Step,
    Written,
    check_room,
)
from ringcoll.schedules.ir.verifier import Order, Proof, finals_of


@dataclass(frozen=True, eq=False)
class Schedule(Written):
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
        `steps` is the way to read a schedule.
    stated_cost
        Rounds, traffic and reduced data as the entry of the algorithm states them; `verify`
        compares them with the counted ones. ``None`` if no cost is stated.

    Raises
    ------
    ScheduleError
        ``world_size`` is below 1, or ``root`` is not a rank.
    """

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
        return map(partial(self._stated, rank), count(), super().steps(rank))

    def _stated(self, rank: int, number: int, step: Step) -> Step:
        """Step ``number`` of a rank, with all facts of its reductions."""
        if not any(map(_leaves_facts, step)):
            return step
        stated = list(step)
        for index, old in enumerate(step):
            if isinstance(old, RecvReduce | Reduce):
                final = (rank, number, index) in self._finals if old.unstated_final else old.final
                if isinstance(old, Reduce):
                    stated[index] = Reduce(old.into, old.sources, final)
                    continue
                left = old.peer < rank if old.unstated_order else old.received_left
                stated[index] = RecvReduce(old.peer, old.into, old.local, left, final)
        return Step(*stated)

    @cached_property
    def _finals(self) -> frozenset[tuple[int, int, int]]:
        """Rank, step and index of the reductions that complete a chunk without stating it."""
        return finals_of(self)

    def _header(self) -> tuple[str, str, int, int, int, int]:
        sizes = self.world_size, self.num_chunks, self.num_slots
        return self.collective, self.algorithm, *sizes, self.root

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
                if len(programs[-1]) == MOST_STEPS:
                    raise ScheduleError(f"line {number}: a rank has more than {MOST_STEPS:,} steps")
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
            header[1], header[2], world_size, num_chunks, num_slots, lambda rank: frozen[rank], root
        )
        try:
            check_room(schedule, text.count("["))
        except ScheduleError as error:
            raise ScheduleError(f"line 1: {error}") from None
        return schedule


def _leaves_facts(operation: Operation) -> bool:
    """Whether a program leaves a fact of an operation to the library."""
    if isinstance(operation, RecvReduce):
        return operation.unstated_order or operation.unstated_final
    return isinstance(operation, Reduce) and operation.unstated_final


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


def _parse_refs(text: str, line: int) -> tuple[Ref, ...]:
    refs = []
    for word in text.split():
        match = _REF.fullmatch(word)
        if match is None or (match[1] == "tmp") != bool(match[2]):
            raise ScheduleError(f"line {line}: {word!r} is not a reference")
        refs.append(Ref(Buffer(match[1]), int(match[3]), int(match[2] or 0)))
    return tuple(refs)


def _parse(text: str, line: int) -> Operation:
    refs = partial(_parse_refs, line=line)
    if match := _SEND.fullmatch(text):
        return Send(int(match[2]), refs(match[1]))
    if match := _RECV.fullmatch(text):
        return Recv(int(match[2]), refs(match[1]))
    if match := _RECV_REDUCE.fullmatch(text):
        received_left = match[2] == "recv"
        reduced, local = refs(match[1]), refs(match[3] if received_left else match[2])
        return RecvReduce(int(match[4]), reduced, local, received_left, match[5] is not None)
    if match := _COPY.fullmatch(text):
        (into,), (source,) = refs(match[1]), refs(match[2])
        return Copy(into, source)
    if match := _REDUCE.fullmatch(text):
        (into,) = refs(match[1])
        return Reduce(into, refs(match[2].replace("+", " ")), match[3] is not None)
    raise ScheduleError(f"line {line}: {text!r} is not an operation")


def infix(order: Order) -> str:
    """Write an order in postfix as a sum.

    >>> infix((0, 1, "+", 2, 3, "+", "+"))
    '(x0 + x1) + (x2 + x3)'
    """
    stack: list[str] = []
    for item in order:
        if isinstance(item, int):
            stack.append(f"x{item}")
        else:
            right, left = stack.pop(), stack.pop()
            stack.append(f"({left} + {right})")
    (total,) = stack
    return total.removeprefix("(").removesuffix(")") if len(order) > 1 else total


def chunks_by_order(proof: Proof) -> dict[Order, list[int]]:
    """The chunks that are reduced in each order; chunks ascend.

    >>> from ringcoll.schedules import schedule_of, verify
    >>> proof = verify(schedule_of("all_reduce", "recursive_doubling", 4))
    >>> chunks_by_order(proof)
    {(0, 1, '+', 2, 3, '+', '+'): [0]}
    """
    chunks: dict[Order, list[int]] = {}
    for chunk, order in proof.orders.items():
        chunks.setdefault(order, []).append(chunk)
    return chunks


def check_reduces(collective: str) -> None:
    """Check that a collective has sums.

    Raises
    ------
    ScheduleError
        There is no such collective, or it reduces no data.
    """
    rules = contract(collective)
    if not rules.reduces or rules.at_least_once:
        raise ScheduleError(f"{collective} reduces no data, so that there is no order of reduction")


def chunk_elements(schedule: Written, numel: int) -> list[range]:
    """The elements of every chunk.

    Parameters
    ----------
    schedule
        A schedule of a collective that reduces.
    numel
        Elements of the whole data: of the vector, or of all blocks of a rank.

    Raises
    ------
    ScheduleError
        ``numel`` is below 0, or the blocks of a rank would not have equal lengths; or the
        collective reduces no data.

    Examples
    --------
    >>> from ringcoll.schedules import schedule_of
    >>> chunk_elements(schedule_of("all_reduce", "ring", 3), 5)
    [range(0, 2), range(2, 4), range(4, 5)]
    """
    check_reduces(schedule.collective)
    rules = contract(schedule.collective)
    blocks = rules.num_blocks(schedule.world_size)
    per_block = rules.chunks_per_block(schedule.num_chunks, schedule.world_size)
    if numel < 0 or numel % blocks:
        raise ScheduleError(
            f"{schedule.collective} on {schedule.world_size} ranks cannot divide {numel} elements "
            f"into blocks of equal length: expected a multiple of {blocks}, at least 0"
        )
    elements = []
    for chunk in range(schedule.num_chunks):
        block, index = divmod(chunk, per_block)
        offset, length = balanced_share(numel // blocks, per_block, index)
        start = block * (numel // blocks) + offset
        elements.append(range(start, start + length))
    return elements


def primitives(schedule: Schedule, rank: int) -> list[str]:
    """A rank's program in NCCL's vocabulary.

    The receive of one step and the send of the next become one primitive where they concern the
    same place: ``recvReduceSend`` passes on a partial result, ``recvReduceCopySend`` keeps and
    passes on a complete result, ``recvCopySend`` keeps and passes on data that are not reduced.

    Returns
    -------
    list of str
        A line for each moment; the primitives of a moment are joined by ``" | "``.

    References
    ----------
    "Demystifying NCCL", arXiv 2507.04786, table V.

    Examples
    --------
    >>> from ringcoll.schedules import schedule_of
    >>> primitives(schedule_of("all_reduce", "ring", 3), 0)
    ['send', 'recvReduceSend', 'recvReduceCopySend', 'recvCopySend', 'recv']
    """
    moments: list[str] = []
    arrived: list[tuple[str, frozenset[tuple[object, int]]]] = []
    for step in (*schedule.steps(rank), Step()):
        waiting = list(arrived)
        arrived, words = [], []
        copied = {operation.source.place for operation in step if isinstance(operation, Copy)}
        for operation in step:
            match operation:
                case Send():
                    places = frozenset(ref.place for ref in operation.refs)
                    source = next((item for item in waiting if item[1] == places), None)
                    if source is not None:
                        waiting.remove(source)
                        words.append(source[0] + "Send")
                    else:
                        words.append("copySend" if places <= copied else "send")
                        copied -= places
                case Recv():
                    arrived.append(("recvCopy", frozenset(ref.place for ref in operation.refs)))
                case RecvReduce():
                    word = "recvReduceCopy" if operation.final else "recvReduce"
                    arrived.append((word, frozenset(ref.place for ref in operation.into)))
                case Reduce():
                    words.append("reduceCopy" if operation.final else "reduce")
                case Copy():
                    pass
        kept = ["recv" if word == "recvCopy" else word for word, _ in waiting]
        words = [*kept, *words, *["copy"] * len(copied)]
        if words:
            moments.append(" | ".join(words))
    return moments
