"""The places of other systems: an index in a rank's input, output or scratch buffer.

Here a chunk number names the same data on every rank. MSCCL and MSCCL++ count the chunks of each
buffer from 0: on rank 2 of an all-gather, input 0 is chunk 2. `Places` converts one into the other.
"""

from __future__ import annotations

from collections.abc import Sequence

from ringcoll.errors import ScheduleError
from ringcoll.schedule import Buffer, Ref, Schedule, check_room, contract

LETTERS = {Buffer.INPUT: "i", Buffer.OUTPUT: "o", Buffer.SCRATCH: "s"}
"""The letters that both MSCCL and MSCCL++ use for the buffers."""
_MOST_NAMED = 1 << 22  # chunks: those of a 64-rank all-to-all a thousand times


class Places:
    """The buffers of all ranks, for one collective.

    Parameters
    ----------
    collective, world_size, num_chunks, root
        As of a `Schedule`.

    Raises
    ------
    ScheduleError
        There is no such collective, or its blocks cannot be cut into so many chunks.
    """

    def __init__(self, collective: str, world_size: int, num_chunks: int, root: int = 0) -> None:
        self.rules = contract(collective)
        self.world_size, self.num_chunks, self.root = world_size, num_chunks, root
        self.per_block = self.rules.chunks_per_block(num_chunks, world_size)

    @classmethod
    def of(cls, schedule: Schedule) -> Places:
        """The places of a schedule's buffers."""
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

    def chunk(self, rank: int, letter: str, index: int) -> int:
        """The chunk that has the place ``index`` in a rank's input or output."""
        block, item = divmod(index, self.per_block)
        return self._blocks(rank, letter)[block] * self.per_block + item

    def index(self, rank: int, ref: Ref) -> tuple[str, int]:
        """The letter of a reference's buffer, and its place in the buffer."""
        letter = LETTERS[ref.buffer]
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
