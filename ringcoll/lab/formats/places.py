"""The places of other systems, and schedules in the small steps of thread blocks.

Here a chunk number names the same data on every rank. MSCCL and MSCCL++ count the chunks of each
buffer from 0: on rank 2 of an all-gather, input 0 is chunk 2. `Places` converts one into the other.

In a step of a schedule, a message carries any chunks, and all reads see the state before the step.
A thread block does one thing at a time, each with chunks that lie side by side. So messages are
cut, at both ends alike, and the pieces of a step are put in an order in which each place is read
before it is written (`pieces`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from ringcoll.errors import ScheduleError
from ringcoll.schedules import (
    Buffer,
    Copy,
    Operation,
    Recv,
    RecvReduce,
    Reduce,
    Ref,
    Schedule,
    Send,
    Step,
    check_room,
    contract,
)

Place = tuple[str, int]
"""Memory of a rank: ``"i"``, ``"o"`` or ``"io"`` and a chunk, or any other word and a number."""

_LETTERS = {Buffer.INPUT: "i", Buffer.OUTPUT: "o", Buffer.SCRATCH: "s"}  # of MSCCL and MSCCL++
_MOST_NAMED = 1 << 22  # chunks: those of a 64-rank all-to-all a thousand times


class Places:
    """The buffers of all ranks; the arguments are those of a `Schedule`."""

    def __init__(self, collective: str, world_size: int, num_chunks: int, root: int = 0) -> None:
        self.rules = contract(collective)
        self.world_size, self.num_chunks, self.root = world_size, num_chunks, root
        self.per_block = self.rules.chunks_per_block(num_chunks, world_size)

    @classmethod
    def of(cls, schedule: Schedule) -> Places:
        """The buffers of a schedule."""
        return cls(schedule.collective, schedule.world_size, schedule.num_chunks, schedule.root)

    def check_room(self, num_named: int) -> None:
        """Raise if there would be too many chunks for a program that names so many."""
        if num_named > _MOST_NAMED:
            raise ScheduleError(f"the steps name {num_named} chunks; at most {_MOST_NAMED} may be")
        facts = self.rules.collective, "", self.world_size, self.num_chunks, 0
        check_room(Schedule(*facts, lambda rank: (), self.root), num_named)

    def inputs(self, rank: int) -> list[int]:
        """The chunks that a rank has at the beginning."""
        return self._chunks(self.rules.inputs(rank, self.world_size, self.root))

    def outputs(self, rank: int) -> list[int]:
        """The chunks that a rank must have at the end."""
        return self._chunks(self.rules.outputs(rank, self.world_size, self.root))

    def _chunks(self, blocks: Sequence[int]) -> list[int]:
        return [block * self.per_block + item for block in blocks for item in range(self.per_block)]

    def _blocks(self, rank: int, letter: str) -> Sequence[int]:
        """The blocks of a buffer; the formats give every rank the buffers of a root."""
        of_rank = self.rules.inputs if letter == "i" else self.rules.outputs
        return of_rank(rank, self.world_size, rank if self.rules.rooted else 0)

    def num_places(self, rank: int, letter: str) -> int:
        """Chunks that a rank's input (``"i"``) or output (``"o"``) has room for."""
        return len(self._blocks(rank, letter)) * self.per_block

    def run(
        self, rank: int, letter: str, indices: Iterable[int], *, in_place: bool
    ) -> tuple[Place, ...]:
        """The places with some indices in a rank's input, output or scratch buffer."""
        if letter == "s":
            return tuple(("s", index) for index in indices)
        word = "io" if in_place else letter
        blocks, each = self._blocks(rank, letter), self.per_block
        return tuple((word, blocks[index // each] * each + index % each) for index in indices)

    def index(self, rank: int, ref: Ref) -> tuple[str, int]:
        """The letter of a reference's buffer, and its place in the buffer."""
        letter = _LETTERS[ref.buffer]
        if ref.buffer is Buffer.SCRATCH:
            return letter, ref.slot
        block, item = divmod(ref.chunk, self.per_block)
        return letter, self._blocks(rank, letter).index(block) * self.per_block + item

    def memory(self, rank: int, ref: Ref) -> tuple[Buffer, int]:
        """The memory behind a reference, if input and output share memory where they may."""
        buffer, number = ref.place
        if (
            buffer is Buffer.INPUT
            and self.rules.in_place
            and number // self.per_block in self._blocks(rank, "o")
        ):
            return Buffer.OUTPUT, number
        return buffer, number


@dataclass(frozen=True)
class Piece:
    """One action of a thread block, with adjacent chunks.

    ``kind`` is ``"send"``, ``"recv"``, ``"recv_reduce"``, ``"copy"``, or ``"add"``, which adds the
    source to the target. A recv-reduce reads its local operands; what an addition reads of its
    target is not among the sources.
    """

    kind: str
    peer: int  # -1 for local pieces
    sources: tuple[Ref, ...]
    targets: tuple[Ref, ...]

    @property
    def count(self) -> int:
        """Number of chunks."""
        return len(self.sources or self.targets)


def pieces(schedule: Schedule, places: Places, longest: int) -> list[list[list[Piece]]]:
    """Cut a schedule: the pieces of each rank and step, of at most ``longest`` chunks."""
    world_size = schedule.world_size
    programs = (schedule.steps(rank) for rank in range(world_size))
    result: list[list[list[Piece]]] = [[] for _ in range(world_size)]
    for number, steps in enumerate(zip_longest(*programs, fillvalue=Step())):
        sends: dict[tuple[int, int], list[Send]] = {}
        cut: list[list[Piece]] = [[] for _ in range(world_size)]
        for rank, step in enumerate(steps):
            for operation in step:
                if isinstance(operation, Send):
                    sends.setdefault((rank, operation.peer), []).append(operation)
        for rank, step in enumerate(steps):
            for operation in step:
                if isinstance(operation, Recv | RecvReduce):
                    sent = sends[operation.peer, rank].pop(0)
                    for piece, other in _message(places, rank, operation, sent, longest):
                        cut[rank].append(piece)
                        cut[operation.peer].append(other)
                else:
                    cut[rank] += _local(places, rank, operation)
        for rank, unordered in enumerate(cut):
            result[rank].append(_in_order(places, rank, number, unordered))
    return result


def _runs(places: Places, lists: Sequence[tuple[int, Sequence[Ref]]], longest: int) -> list[slice]:
    """The runs in which the chunks of all lists, each of a rank, are adjacent."""
    starts, length = [0], len(lists[0][1])
    columns = [[places.index(rank, ref) for ref in refs] for rank, refs in lists]
    for index in range(1, length):
        if index - starts[-1] == longest or any(
            (column[index - 1][0], column[index - 1][1] + 1) != column[index] for column in columns
        ):
            starts.append(index)
    return [slice(*ends) for ends in zip(starts, [*starts[1:], length], strict=True)]


def _message(
    places: Places, rank: int, operation: Recv | RecvReduce, sent: Send, longest: int
) -> Iterator[tuple[Piece, Piece]]:
    """The pieces of a message: those of the receiver, each with that of the sender."""
    peer, into, local = operation.peer, operation.writes, operation.reads
    kind = "recv_reduce" if local else "recv"
    lists = [(peer, sent.refs), (rank, into), (rank, local or into)]
    for run in _runs(places, lists, longest) if into else ():
        yield Piece(kind, peer, local[run], into[run]), Piece("send", rank, sent.refs[run], ())


def _local(places: Places, rank: int, operation: Operation) -> Iterator[Piece]:
    if isinstance(operation, Copy):
        yield Piece("copy", -1, (operation.source,), (operation.into,))
    elif isinstance(operation, Reduce):
        into, sources = operation.into, list(operation.sources)
        # The operand that shares memory with the target has to be the first one.
        place = places.memory(rank, into)
        sources.sort(key=lambda ref: places.memory(rank, ref) != place)
        if sources[0] != into:
            yield Piece("copy", -1, (sources[0],), (into,))
        yield from (Piece("add", -1, (ref,), (into,)) for ref in sources[1:])


def _in_order(places: Places, rank: int, step: int, unordered: list[Piece]) -> list[Piece]:
    """Put the pieces of one step in order: each reads places that are not yet written."""
    ordered = [piece for piece in unordered if piece.kind == "send"]
    rest = [piece for piece in unordered if piece.kind != "send"]
    read = [{places.memory(rank, ref) for ref in piece.sources} for piece in rest]
    written = [{places.memory(rank, ref) for ref in piece.targets} for piece in rest]
    waiting = list(range(len(rest)))
    while waiting:
        for number in waiting:
            if not any(
                # A sum is made in order; otherwise the old value is read.
                (written[number] & written[other] and other < number)
                or (written[number] & read[other] and not written[number] & written[other])
                or (rest[number].peer == rest[other].peer >= 0 and other < number)
                for other in waiting
                if other != number
            ):
                break
        else:
            raise ScheduleError(
                f"rank {rank} exchanges places in step {step}, and a thread block does one thing "
                "after the other: copy one of them to scratch memory first"
            )
        waiting.remove(number)
        ordered.append(rest[number])
    return ordered
