"""What a plan is made of: regions of memory, and instructions that name them by number.

Problem: a schedule names chunks. Their lengths and places follow from the lengths of the user's
tensors, the number of segments, and whether a collective works in place. Here a chunk becomes a
`Region`: a run of elements in one of the tensors that a plan works on. There are offsets only,
never tensors.

A lent message is read where it lies, by the reduction that needs it. That saves a copy, but the
sender waits until the loan ends. So a rank may keep a loan only where nobody can wait for it in a
circle (`loans`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from ringcoll.errors import ScheduleError
from ringcoll.schedules import Buffer, Ref, Schedule, balanced_share, contract

ALIGNMENT = 64
"""Elements. Working memory has the same alignment as its operands, up to so many elements: the wide
accesses of processors and GPUs then fit both, whatever the dtype."""


class Space(IntEnum):
    """The memory that a plan works on."""

    INPUT = 0
    OUTPUT = 1
    SCRATCH = 2
    STAGING = 3  # messages on arrival, and results that have to wait
    PACKING = 4  # messages of several pieces, before they are sent
    ARRIVING = 5  # messages that are reduced at once, and then needed no more; within staging


class Region(NamedTuple):
    """A run of elements: ``numel`` from ``offset`` in one tensor of a space."""

    space: Space
    tensor: int
    offset: int
    numel: int

    def overlaps(self, other: Region) -> bool:
        """Whether the two regions share an element."""
        return (
            self.space is other.space
            and self.tensor == other.tensor
            and self.offset < other.offset + other.numel
            and other.offset < self.offset + self.numel
        )


@dataclass(frozen=True)
class Layout:
    """Lengths and places of the blocks of a collective."""

    lengths: tuple[tuple[int, int], ...]  # (block, numel) of every block that this rank has to know
    split_input: bool = False  # each block is a tensor, and does not lie in a single one end to end
    split_output: bool = False
    in_place: bool = False  # blocks that are both input and output share their memory


def _align(numel: int) -> int:
    return -(-numel // ALIGNMENT) * ALIGNMENT


class Memory:
    """The places of references, from the layout and the schedule's chunks."""

    def __init__(self, schedule: Schedule, rank: int, layout: Layout, segments: int) -> None:
        rules = contract(schedule.collective)
        world_size, root = schedule.world_size, schedule.root
        self.segments = segments
        self.per_block = rules.chunks_per_block(schedule.num_chunks, world_size)
        self.length = dict(layout.lengths)
        inputs = rules.inputs(rank, world_size, root)
        outputs = rules.outputs(rank, world_size, root)
        self.inputs = self._lay_out(Space.INPUT, inputs, layout.split_input)
        self.outputs = self._lay_out(Space.OUTPUT, outputs, layout.split_output)
        if layout.in_place:
            # The blocks of the smaller side lie within the larger side.
            if len(inputs) > len(outputs):
                self.outputs |= {b: self.inputs[b] for b in outputs if b in self.inputs}
            else:
                self.inputs |= {b: self.outputs[b] for b in inputs if b in self.outputs}
        longest_chunk = -(-max(self.length.values(), default=0) // self.per_block)
        self.segment_stride = _align(-(-longest_chunk // segments))
        self.slot_stride = self.segment_stride * segments
        self.scratch_numel = schedule.num_slots * self.slot_stride
        self.region = lru_cache(maxsize=1 << 12)(self._region)  # each is asked for again and again

    def _lay_out(
        self, space: Space, blocks: Sequence[int], split: bool
    ) -> dict[int, tuple[Space, int, int]]:
        if split:
            return {block: (space, tensor, 0) for tensor, block in enumerate(blocks)}
        starts = accumulate((self.length[block] for block in blocks), initial=0)
        return {block: (space, 0, start) for block, start in zip(blocks, starts, strict=False)}

    def _region(self, ref: Ref, segment: int) -> Region:
        block, piece = divmod(ref.chunk, self.per_block)
        try:
            length = self.length[block]
        except KeyError:
            raise ScheduleError(
                f"the length of chunk {ref.chunk} is not known to this rank; "
                "the algorithm needs blocks of equal length"
            ) from None
        start, numel = balanced_share(length, self.per_block, piece)
        if self.segments > 1:
            offset, numel = balanced_share(numel, self.segments, segment)
            start += offset
        if ref.buffer is Buffer.SCRATCH:
            base = ref.slot * self.slot_stride + segment * self.segment_stride
            return Region(Space.SCRATCH, 0, base, numel)
        places = self.inputs if ref.buffer is Buffer.INPUT else self.outputs
        space, tensor, first = places[block]
        return Region(space, tensor, first + start, numel)


def joined(regions: Iterable[Region]) -> list[Region]:
    """Join adjacent regions; leave empty regions out, unless all are empty."""
    regions = list(regions)
    result: list[Region] = []
    for region in [region for region in regions if region.numel] or regions[-1:]:
        last = result[-1] if result else None
        if (
            last is not None
            and last[:2] == region[:2]
            and last.offset + last.numel == region.offset
        ):
            result[-1] = last._replace(numel=last.numel + region.numel)
        else:
            result.append(region)
    return result


class Supply:
    """Hands out consecutive regions of working memory, from the start again in each wave."""

    def __init__(self, space: Space, tensor: int = 0) -> None:
        self.space, self.tensor, self.used, self.most = space, tensor, 0, 0

    def take(self, numel: int, like: Region) -> Region:
        """Take memory for so many elements, with the alignment of the region ``like``."""
        offset = self.used + like.offset % ALIGNMENT
        self.used = _align(offset + numel)
        self.most = max(self.most, self.used)
        return Region(self.space, self.tensor, offset, numel)


class Post(NamedTuple):
    """Post receives and sends: (peer, view, numel), numbered on from the last post.

    ``is_exchange``: every rank of the schedule sends one and the same message to all others.
    """

    receives: tuple[tuple[int, int, int], ...]
    sends: tuple[tuple[int, int, int], ...]
    is_exchange: bool = False


class Wait(NamedTuple):
    """Wait for the message with this number."""

    message: int
    peer: int
    step: int
    is_receive: bool


class Move(NamedTuple):
    """Copy one view to another."""

    into: int
    source: int


class Combine(NamedTuple):
    """Reduce views from left to right, and finish the total where ``final`` is set.

    ``into`` is one of the first two sources, or overlaps none.
    """

    into: int
    sources: tuple[int, ...]
    final: bool


Instruction = Post | Wait | Move | Combine

_MOST_LENT = 8  # messages of one peer in a wave of which some may be lent
_RECEIVED = (Space.SCRATCH, Space.STAGING, Space.ARRIVING)  # where a message may be read just once


def departing(instructions: Sequence[Instruction], regions: Sequence[Region]) -> frozenset[int]:
    """Indices of the reductions whose totals are sent next; see `Plan`."""
    sent: set[int] = set()
    totals: dict[int, int] = {}  # from a total that nothing has touched to its instruction
    for index, instruction in enumerate(instructions):
        match instruction:
            case Post(sends=sends):
                sent.update(totals[view] for _, view, _ in sends if view in totals)
                totals.clear()
                continue
            case Combine(into=into, sources=sources):
                touched = {into, *sources}
            case Move(into=target, source=source):
                touched = {target, source}
            case _:
                continue
        for total in tuple(totals):
            if any(regions[total].overlaps(regions[view]) for view in touched):
                del totals[total]
        if isinstance(instruction, Combine):
            totals[instruction.into] = index
    return frozenset(sent)


def loans(
    instructions: Sequence[Instruction], regions: Sequence[Region], waves: Sequence[int]
) -> dict[int, dict[int, int]]:
    """Messages that are read by a single reduction, and by nothing else; see `Plan.lent`.

    From the begin of the wave to the reduction a rank waits for no send of this wave or the next,
    and for no message of the next; and it posts no sends of the next. So a loan ends when all ranks
    have posted the wave, whatever becomes of the sends: nobody waits for a loan in a circle.
    """
    posts = [item for item in instructions if isinstance(item, Post)]
    views = {view for post in posts for _, view, numel in post.receives if numel}
    touched = _touched_views(regions, views)
    arriving: dict[int, int] = {}  # from a message to its view
    come: dict[int, int] = {}  # from a view to the message that has come there, and is not read yet
    come_first = 0  # the first message that the wave of these posts
    read: dict[int, tuple[int, int, int]] = {}  # from a view to its reduction, place there, message
    ended: list[tuple[int, int, int]] = []  # as in ``read``, when the next message comes there
    posted = 0  # messages so far
    for begin, end in pairwise([*waves, len(instructions)]):
        first, has_waited = posted, False
        waits = (item for item in instructions[begin:end] if isinstance(item, Wait))
        awaited = Counter(wait.peer for wait in waits if wait.is_receive)
        # Whether the rank has waited for none of its own sends of this wave. A transport may hold
        # back what follows a few messages that are lent, as they take its memory.
        is_free = max(awaited.values(), default=0) <= _MOST_LENT
        for index in range(begin, end):
            reads: Sequence[int]
            match instructions[index]:
                case Post(receives=receives, sends=sends):
                    for offset, (_, view, _) in enumerate(receives):
                        arriving[posted + offset] = view
                    posted += len(receives) + len(sends)
                    if sends:
                        come.clear()
                    reads, writes = [v for _, v, _ in sends], [v for _, v, _ in receives]
                case Wait(message=message, is_receive=False):
                    is_free = is_free and message < first
                    if message >= come_first:
                        come.clear()
                    continue
                case Wait(message=message):
                    if not has_waited:
                        come.clear()
                        has_waited, come_first = True, first
                    view = arriving.get(message, -1)
                    if is_free and view in touched.get(view, ()):
                        come[view] = message
                    continue
                case Move(into=into, source=source):
                    reads, writes = (source,), [into]
                case Combine(into=into, sources=sources):
                    reads, writes = sources, [into]
            near_reads = Counter(near for view in reads for near in touched.get(view, ()))
            near_writes = {near for view in writes for near in touched.get(view, ())}
            for view in near_reads.keys() | near_writes:
                message = come.pop(view, -1)
                if message >= 0:  # a reduction reads it once, and nothing else of the instruction
                    is_alone = view in reads and near_reads[view] == 1 and view not in near_writes
                    if is_alone and isinstance(instructions[index], Combine):
                        read[view] = index, reads.index(view), message
                elif view in read:
                    loan = read.pop(view)
                    if view in writes and not near_reads[view]:
                        ended.append(loan)
    lent: dict[int, dict[int, int]] = {}
    for reader, place, message in sorted([*ended, *read.values()]):
        lent.setdefault(reader, {})[place] = message
    return lent


def _touched_views(regions: Sequence[Region], views: Container[int]) -> dict[int, list[int]]:
    """From each region where a message may be read just once to those of ``views`` it overlaps."""
    touched: dict[int, list[int]] = {}
    before: list[int] = []  # that may overlap what follows
    numbers = [number for number, region in enumerate(regions) if region.space in _RECEIVED]
    for number in sorted(numbers, key=lambda number: regions[number]):
        region = regions[number]
        before = [
            other
            for other in before
            if regions[other][:2] == region[:2]
            and regions[other].offset + regions[other].numel > region.offset
        ]
        touched[number] = [number] if number in views else []
        for other in before:
            if regions[other].overlaps(region):
                touched[number] += [other] if other in views else []
                touched[other] += [number] if number in views else []
        before.append(number)
    return touched
