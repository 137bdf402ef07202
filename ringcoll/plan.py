"""Plans: a rank's part of a schedule, bound to lengths and segments.

Problem: run a schedule with as little work as possible, without ever writing
memory that is still being read. A plan is compiled once and cached; it is a flat
list of instructions on numbered *regions* of memory, and holds offsets, never
tensors.

Segments run as a wavefront: with S segments, segment j does step w - j in wave
w. It needs nothing from the algorithm, as the segments are disjoint in every
buffer. In each wave everything is posted, receives first, then local work is
done, then messages are waited for in program order. Receives of the next wave are
posted as well where their memory is free.

Two hazards are dealt with here, and nowhere else:

- Transports read the user's memory in place, so memory is written only after the
  sends that read it have completed (`_Compiler.guard`).
- All reads of a step see the state before it. A write to something that another
  operation of the step still has to read goes to staging memory first, and is
  committed when the step is over.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate, pairwise
from typing import NamedTuple

from ringcoll.contracts import contract
from ringcoll.errors import ScheduleError
from ringcoll.schedule import (
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
)

__all__ = ["Combine", "Layout", "Move", "Plan", "Post", "Region", "Space", "Wait", "compile_plan"]


class Space(IntEnum):
    """The memory that a plan works on."""

    INPUT = 0
    OUTPUT = 1
    SCRATCH = 2
    STAGING = 3  # messages on arrival, and results that have to wait
    PACKING = 4  # messages of several pieces, before they are sent


class Region(NamedTuple):
    """A run of elements: ``numel`` from ``offset`` in one tensor of a space."""

    space: Space
    part: int
    offset: int
    numel: int

    def overlaps(self, other: Region) -> bool:
        """Whether the two have an element in common."""
        return (
            self.space is other.space
            and self.part == other.part
            and self.offset < other.offset + other.numel
            and other.offset < self.offset + self.numel
        )


class Post(NamedTuple):
    """Post receives and sends: (peer, view, numel), numbered on from the last post."""

    receives: tuple[tuple[int, int, int], ...]
    sends: tuple[tuple[int, int, int], ...]


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
    """Reduce two views into a third, and finish it where ``final`` is set."""

    into: int
    left: int
    right: int
    final: bool


class Finish(NamedTuple):
    """Finish a view that needed no reduction."""

    into: int


Instruction = Post | Wait | Move | Combine | Finish


@dataclass(frozen=True)
class Layout:
    """Where the blocks of a collective lie, and how long they are.

    Parameters
    ----------
    lengths
        (block, numel) of every block that this rank has to know.
    split_input, split_output
        Whether each block is a tensor of its own, as in list forms, or all lie one
        after the other in a single tensor.
    in_place
        Whether blocks that are both input and output share their memory.
    """

    lengths: tuple[tuple[int, int], ...]
    split_input: bool = False
    split_output: bool = False
    in_place: bool = False


@dataclass(frozen=True)
class Plan:
    """What one rank executes.

    Parameters
    ----------
    regions
        The memory that the instructions name by number. All spaces but input and
        output are parts of one tensor of working memory.
    instructions
        What to do, in order.
    workspace_numel
        Elements of working memory, beyond the user's tensors.
    """

    schedule: Schedule
    rank: int
    segments: int
    regions: tuple[Region, ...]
    instructions: tuple[Instruction, ...]
    workspace_numel: int


# Pieces of staging memory start at multiples of this many elements, so that
# they are aligned for vector instructions whatever the dtype.
_ALIGNMENT = 64

# More sends in flight than this are waited for before new ones are posted. It
# bounds what a transport has to remember; gloo was seen to handle 50 to one peer.
_MOST_SENDS = 32


# Longer messages are not received early: asking for them costs little beside moving
# them, and the second staging area would cost memory.
_MOST_EARLY = 1 << 16


def _part(numel: int, parts: int, index: int) -> tuple[int, int]:
    """Offset and length of a part of a balanced division; the first ones are longer."""
    short, longer = divmod(numel, parts)
    return index * short + min(index, longer), short + (index < longer)


def _align(numel: int) -> int:
    return -(-numel // _ALIGNMENT) * _ALIGNMENT


class _Memory:
    """Where references lie: the layout and the schedule's chunks together."""

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
            # The side with fewer blocks is a part of the other one.
            if len(inputs) > len(outputs):
                self.outputs |= {b: self.inputs[b] for b in outputs if b in self.inputs}
            else:
                self.inputs |= {b: self.outputs[b] for b in inputs if b in self.outputs}
        longest = max(self.length.values(), default=0)
        longest_chunk = -(-longest // self.per_block)
        self.segment_stride = _align(-(-longest_chunk // segments))
        self.slot_stride = self.segment_stride * segments
        self.scratch_numel = schedule.num_slots * self.slot_stride

    def _lay_out(
        self, space: Space, blocks: Sequence[int], split: bool
    ) -> dict[int, tuple[Space, int, int]]:
        """(space, part, offset) of each block."""
        if split:
            return {block: (space, part, 0) for part, block in enumerate(blocks)}
        starts = accumulate((self.length[block] for block in blocks), initial=0)
        return {block: (space, 0, start) for block, start in zip(blocks, starts, strict=False)}

    def region(self, ref: Ref, segment: int) -> Region:
        """The memory of one segment of what is referred to."""
        block, piece = divmod(ref.chunk, self.per_block)
        try:
            length = self.length[block]
        except KeyError:
            raise ScheduleError(
                f"the length of chunk {ref.chunk} is not known to this rank; "
                "the algorithm needs blocks of equal length"
            ) from None
        start, numel = _part(length, self.per_block, piece)
        if self.segments > 1:
            offset, numel = _part(numel, self.segments, segment)
            start += offset
        if ref.buffer is Buffer.SCRATCH:
            base = ref.slot * self.slot_stride + segment * self.segment_stride
            return Region(Space.SCRATCH, 0, base, numel)
        places = self.inputs if ref.buffer is Buffer.INPUT else self.outputs
        space, part, first = places[block]
        return Region(space, part, first + start, numel)


def _joined(regions: Iterable[Region]) -> list[Region]:
    """Adjacent regions made one; empty ones left out unless there is nothing else."""
    result: list[Region] = []
    for region in regions:
        if result and result[-1].numel == 0:
            result.pop()
        if result and region.numel == 0:
            continue
        last = result[-1] if result else None
        if (
            last is not None
            and (last.space, last.part) == (region.space, region.part)
            and last.offset + last.numel == region.offset
        ):
            result[-1] = last._replace(numel=last.numel + region.numel)
        else:
            result.append(region)
    return result


def _touched(operation: Operation) -> tuple[Ref, ...]:
    """All that an operation reads or writes."""
    match operation:
        case Send() | Recv():
            return operation.refs
        case RecvReduce():
            return (*operation.into, *operation.local)
        case Copy():
            return operation.into, operation.source
        case Reduce():
            return operation.into, *operation.sources


class _Bump:
    """Hands out consecutive regions of one part of a space, from the start again in each wave."""

    def __init__(self, space: Space, part: int = 0) -> None:
        self.space, self.part, self.used, self.most = space, part, 0, 0

    def take(self, numel: int) -> Region:
        region = Region(self.space, self.part, self.used, numel)
        self.used += _align(numel)
        self.most = max(self.most, self.used)
        return region


_Active = list[tuple[int, int, Step]]
"""What goes on in a wave: (segment, number of the step, step)."""


@dataclass
class _Arrival:
    """A receive that was posted, and what has to be done when it is there."""

    message: int
    step: int
    operation: Recv | RecvReduce
    segment: int
    target: Region
    staged: bool
    deferred: bool


class _Compiler:
    def __init__(
        self, schedule: Schedule, rank: int, layout: Layout, segments: int, posts_early: bool
    ) -> None:
        self.schedule, self.rank, self.segments = schedule, rank, segments
        self.posts_early = posts_early
        self.memory = _Memory(schedule, rank, layout, segments)
        self.drops_empty = len(layout.lengths) == 1 and layout.lengths[0][1] > 0
        self.numbers: dict[Region, int] = {}
        self.instructions: list[Instruction] = []
        self.sends: list[tuple[Wait, Region]] = []  # in flight
        self.messages = 0
        self.staging = _Bump(Space.STAGING)
        # What arrives early: waves take turns, as one area may fill while the other is in use.
        self.early_areas = [_Bump(Space.STAGING, 1), _Bump(Space.STAGING, 2)]
        self.packing = _Bump(Space.PACKING)
        self.commits: list[tuple[Region, Region]] = []

    def compile(self) -> Plan:
        waves = self.waves(list(self.schedule.steps(self.rank)))
        ahead: dict[int, _Arrival] = {}
        for active, following in pairwise([*waves, []]):
            ahead = self.wave(active, ahead, following)
        for wait, _ in self.sends:
            self.instructions.append(wait)
        # All working memory is one tensor, in which the areas lie one after the other.
        sizes = {
            (Space.SCRATCH, 0): self.memory.scratch_numel,
            **{
                (area.space, area.part): area.most
                for area in (self.staging, *self.early_areas, self.packing)
            },
        }
        starts = dict(zip(sizes, accumulate(sizes.values(), initial=0), strict=False))
        return Plan(
            schedule=self.schedule,
            rank=self.rank,
            segments=self.segments,
            regions=tuple(
                Region(space, 0, offset + starts[space, part], numel)
                if (space, part) in starts
                else Region(space, part, offset, numel)
                for space, part, offset, numel in self.numbers
            ),
            instructions=tuple(self.instructions),
            workspace_numel=sum(sizes.values()),
        )

    def waves(self, steps: list[Step]) -> list[_Active]:
        """The waves in which this rank does anything."""
        waves: list[_Active] = []
        for wave in range(len(steps) + self.segments - 1):
            first = max(0, wave - len(steps) + 1)
            active = [
                (segment, wave - segment, steps[wave - segment])
                for segment in range(first, min(self.segments, wave + 1))
                if steps[wave - segment]
            ]
            if active:
                waves.append(active)
        return waves

    def number(self, region: Region) -> int:
        return self.numbers.setdefault(region, len(self.numbers))

    def guard(self, written: Region) -> None:
        """Wait for the sends that still read what is about to be written."""
        kept = []
        for wait, region in self.sends:
            if region.overlaps(written):
                self.instructions.append(wait)
            else:
                kept.append((wait, region))
        self.sends = kept

    def move(self, into: Region, source: Region) -> None:
        if into.numel and into != source:
            self.guard(into)
            self.instructions.append(Move(self.number(into), self.number(source)))

    def combine(self, into: Region, left: Region, right: Region, final: bool) -> None:
        if into.numel:
            self.guard(into)
            views = self.number(into), self.number(left), self.number(right)
            self.instructions.append(Combine(*views, final))

    def wave(
        self, active: _Active, ahead: dict[int, _Arrival], following: _Active
    ) -> dict[int, _Arrival]:
        """Compile a wave; returns the receives of the following one that it posts as well.

        Receives are known by their position in program order. ``ahead`` are those of
        this wave that are posted already.
        """
        self.staging.used = self.packing.used = 0
        while len(self.sends) > _MOST_SENDS:
            self.instructions.append(self.sends.pop(0)[0])
        receives: list[_Arrival] = []
        arrivals = dict(ahead)
        for position, (segment, number, step, source) in enumerate(self.receives(active)):
            if position not in ahead:
                target, *how = self.receive(source, step, segment, self.staging)
                arrivals[position] = _Arrival(0, number, source, segment, target, *how)
                receives.append(arrivals[position])
        sends: list[tuple[Wait, Region]] = []
        for segment, number, step in active:
            for operation in step:
                if isinstance(operation, Send) and self.carries(operation, segment):
                    region = self.packed(operation.refs, segment)
                    sends.append((Wait(0, operation.peer, number, False), region))
        early = self.early(active, following) if self.posts_early else {}
        self.post([*receives, *early.values()], sends)
        for segment, _, step in active:
            for operation in step:
                if isinstance(operation, Copy | Reduce):
                    self.local(operation, step, segment)
        pending: dict[Region, Region] = {}
        for _, arrival in sorted(arrivals.items()):
            self.instructions.append(
                Wait(arrival.message, arrival.operation.peer, arrival.step, True)
            )
            self.arrived(arrival, pending)
        for into, result in self.commits:
            self.move(into, result)
        self.commits = []
        return early

    def post(self, receives: list[_Arrival], sends: list[tuple[Wait, Region]]) -> None:
        if not receives and not sends:
            return
        self.instructions.append(
            Post(
                tuple(
                    (item.operation.peer, self.number(item.target), item.target.numel)
                    for item in receives
                ),
                tuple((wait.peer, self.number(region), region.numel) for wait, region in sends),
            )
        )
        for arrival in receives:
            arrival.message = self.messages
            self.messages += 1
        for wait, region in sends:
            self.sends.append((wait._replace(message=self.messages), region))
            self.messages += 1

    def receives(self, active: _Active) -> Iterator[tuple[int, int, Step, Recv | RecvReduce]]:
        for segment, number, step in active:
            for operation in step:
                if isinstance(operation, Recv | RecvReduce) and self.carries(operation, segment):
                    yield segment, number, step, operation

    def early(self, active: _Active, following: _Active) -> dict[int, _Arrival]:
        """Receives of the following wave that may be posted with this one.

        A sender that finds its receive posted does not have to ask for it. They go to
        an area that this wave does not use, or to a place that it does not
        touch and that no send still reads. Receives from one peer stay in order.
        """
        touched = [
            self.memory.region(ref, segment)
            for segment, _, step in active
            for operation in step
            for ref in _touched(operation)
        ]
        touched += [region for _, region in self.sends]
        found: dict[int, _Arrival] = {}
        late: set[int] = set()  # peers
        self.early_areas.reverse()
        area = self.early_areas[0]
        area.used = 0
        for position, (segment, number, step, operation) in enumerate(self.receives(following)):
            refs = operation.into if isinstance(operation, RecvReduce) else operation.refs
            places = self.regions(refs, segment)
            direct = isinstance(operation, Recv) and any(
                place.overlaps(region) for place in places for region in touched
            )
            if operation.peer in late or direct or self.numel(refs, segment) > _MOST_EARLY:
                late.add(operation.peer)
                continue
            target, *how = self.receive(operation, step, segment, area)
            found[position] = _Arrival(0, number, operation, segment, target, *how)
        return found

    def regions(self, refs: Iterable[Ref], segment: int) -> list[Region]:
        return _joined(self.memory.region(ref, segment) for ref in refs)

    def packed(self, refs: tuple[Ref, ...], segment: int) -> Region:
        """One region with all of a message in it; copied together if need be."""
        pieces = self.regions(refs, segment)
        if len(pieces) == 1:
            return pieces[0]
        whole = self.packing.take(sum(piece.numel for piece in pieces))
        start = whole.offset
        for piece in pieces:
            self.move(whole._replace(offset=start, numel=piece.numel), piece)
            start += piece.numel
        return whole

    def receive(
        self, operation: Recv | RecvReduce, step: Step, segment: int, area: _Bump
    ) -> tuple[Region, bool, bool]:
        """Decide where a message is to arrive: (target, staged, deferred)."""
        if isinstance(operation, RecvReduce):
            deferred = self.read_later(operation, operation.into, step, segment)
            deferred = deferred or self.reads_itself(operation, segment)
            return area.take(self.numel(operation.into, segment)), True, deferred
        pieces = self.regions(operation.refs, segment)
        # It may arrive at any time, so whoever reads the place at all is in the way.
        read = any(
            piece.overlaps(region)
            for other in step
            for region in self.reads(other, operation, segment)
            for piece in pieces
        )
        if len(pieces) == 1 and not read:
            self.guard(pieces[0])
            return pieces[0], False, False
        deferred = self.read_later(operation, operation.refs, step, segment)
        return area.take(sum(piece.numel for piece in pieces)), True, deferred

    def carries(self, operation: Send | Recv | RecvReduce, segment: int) -> bool:
        """Whether a message is sent at all.

        Where a vector has fewer elements than chunks, messages of empty chunks are
        left out, at both ends alike. If everything is empty they are kept, as are
        those of empty blocks: somebody has to notice when ranks disagree on a length.
        """
        refs = operation.into if isinstance(operation, RecvReduce) else operation.refs
        return not self.drops_empty or self.numel(refs, segment) > 0

    def numel(self, refs: Iterable[Ref], segment: int) -> int:
        return sum(self.memory.region(ref, segment).numel for ref in refs)

    def read_later(self, writer: Operation, into: Iterable[Ref], step: Step, segment: int) -> bool:
        """Whether an operation that is done after this one reads what this one writes.

        Local work is done first, then messages in program order. Sends do not
        count here: `guard` waits for them.
        """
        targets = [self.memory.region(ref, segment) for ref in into]
        order = sorted(step, key=lambda operation: isinstance(operation, Recv | RecvReduce))
        done = next(index for index, operation in enumerate(order) if operation is writer)
        return any(
            region.overlaps(target)
            for other in order[done + 1 :]
            if not isinstance(other, Send)
            for region in self.reads(other, writer, segment)
            for target in targets
        )

    def reads_itself(self, operation: RecvReduce, segment: int) -> bool:
        """Whether a later chunk of a recv-reduce reads the place of an earlier one's result."""
        written: list[Region] = []
        for target, mine in zip(operation.into, operation.local, strict=True):
            local = self.memory.region(mine, segment)
            if target.place != mine.place and any(local.overlaps(other) for other in written):
                return True
            written.append(self.memory.region(target, segment))
        return False

    def reads(self, operation: Operation, writer: Operation, segment: int) -> list[Region]:
        """What an operation reads of the state before the step."""
        match operation:
            case Send(refs=refs):
                pass
            case Copy(source=source):
                refs = (source,)
            case Reduce(sources=sources):
                refs = sources
            case RecvReduce(into=into, local=local):
                # One that accumulates onto the result of another reads it on purpose.
                chained = isinstance(writer, RecvReduce)
                refs = tuple(
                    mine
                    for target, mine in zip(into, local, strict=True)
                    if not (chained and target.place == mine.place)
                )
            case _:
                refs = ()
        return [self.memory.region(ref, segment) for ref in refs]

    def local(self, operation: Copy | Reduce, step: Step, segment: int) -> None:
        into = self.memory.region(operation.into, segment)
        deferred = self.read_later(operation, (operation.into,), step, segment)
        if isinstance(operation, Copy):
            source = self.memory.region(operation.source, segment)
            if into == source:
                return
            if deferred:
                staged = self.staging.take(into.numel)
                self.move(staged, source)
                self.commits.append((into, staged))
            else:
                self.move(into, source)
            return
        sources = [self.memory.region(ref, segment) for ref in operation.sources]
        clobbers = any(into.overlaps(source) for source in sources[2:])
        target = self.staging.take(into.numel) if deferred or clobbers else into
        total = sources[0]
        for index, source in enumerate(sources[1:], start=2):
            self.combine(target, total, source, operation.final and index == len(sources))
            total = target
        if len(sources) == 1:
            self.move(target, total)
            if operation.final and target.numel:
                self.guard(target)
                self.instructions.append(Finish(self.number(target)))
        if deferred:
            self.commits.append((into, target))
        elif clobbers:
            self.move(into, target)

    def arrived(self, arrival: _Arrival, pending: dict[Region, Region]) -> None:
        """Do with a message what its operation says."""
        operation, staged, segment = arrival.operation, arrival.target, arrival.segment
        if not arrival.staged:
            return
        start = staged.offset
        if isinstance(operation, Recv):
            for piece in self.regions(operation.refs, segment):
                source = staged._replace(offset=start, numel=piece.numel)
                if arrival.deferred:
                    self.commits.append((piece, source))
                else:
                    self.move(piece, source)
                start += piece.numel
            return
        # Results that are held back are known by their single chunks.
        joined = not (arrival.deferred or pending)
        for into, local in self.pieces(operation, segment, joined=joined):
            received = staged._replace(offset=start, numel=into.numel)
            start += into.numel
            held = pending.get(into) if into == local else None
            left = held or local
            pair = (received, left) if operation.received_left else (left, received)
            if held is not None:
                self.combine(held, *pair, operation.final)
            elif arrival.deferred:
                self.combine(received, *pair, operation.final)
                pending[into] = received
                self.commits.append((into, received))
            else:
                self.combine(into, *pair, operation.final)

    def pieces(
        self, operation: RecvReduce, segment: int, *, joined: bool
    ) -> list[tuple[Region, Region]]:
        """(into, local) of a recv-reduce, with pieces joined that are adjacent in both."""
        result: list[tuple[Region, Region]] = []
        for target, mine in zip(operation.into, operation.local, strict=True):
            into, local = self.memory.region(target, segment), self.memory.region(mine, segment)
            if result and joined:
                both = (*_joined((result[-1][0], into)), *_joined((result[-1][1], local)))
                # One region for each side, and not the one shifted against the other.
                if len(both) == 2 and (both[0] == both[1] or not both[0].overlaps(both[1])):
                    result[-1] = both
                    continue
            result.append((into, local))
        return result


def compile_plan(
    schedule: Schedule,
    rank: int,
    layout: Layout,
    segments: int = 1,
    *,
    posts_early: bool = True,
) -> Plan:
    """Compile a rank's part of a schedule.

    Parameters
    ----------
    schedule
        A verified schedule.
    rank
        Whose part.
    layout
        Lengths and places of the blocks.
    segments
        Number of segments that each chunk is cut into, at least 1.
    posts_early
        Whether receives may be posted a wave before their sends. Not on a transport
        that matches by order alone, where a wave is one group.

    Raises
    ------
    ScheduleError
        The schedule passes on blocks whose length this rank does not know.
    """
    return _Compiler(schedule, rank, layout, segments, posts_early).compile()
