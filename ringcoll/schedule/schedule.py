"""A schedule: the programs of all ranks, read in one way, and written as text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import count

from ringcoll.errors import ScheduleError
from ringcoll.schedule.ir import (
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
from ringcoll.schedule.verifier import finals_of


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
        Whoever reads a schedule calls `steps`.
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
