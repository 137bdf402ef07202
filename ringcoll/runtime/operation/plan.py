"""Plans: a rank's part of a schedule, bound to lengths and segments.

Problem: run a schedule with as little work as possible, without ever writing memory that is still
being read. A plan is compiled once and cached; it is a flat list of instructions on numbered
*regions* of memory, and holds offsets, never tensors.

Segments run as a wavefront: with S segments, segment j does step w - j in wave w, and with it the
steps behind it in which no rank sends. It needs nothing from the algorithm, as the segments are
disjoint in every buffer. In each wave everything is posted, receives first, then local work is
done, then messages are waited for in program order. Receives of the next wave are posted as well
where their memory is free. Segments that fit a core's cache are *slices*: what has come is reduced
in its wave, where it came if the transport lends it, and leaves with the next one.

Two hazards are dealt with here, and nowhere else:

- Transports read the user's memory in place, so memory is written only after the sends that read it
  have completed (`_Compiler.guard`).
- All reads of a step see the state before it. A write to something that another operation of the
  step still has to read goes to staging memory first, and is committed when the step is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, pairwise
from weakref import WeakValueDictionary

from ringcoll.runtime.operation.instructions import (
    ALIGNMENT,
    Combine,
    Instruction,
    Layout,
    Memory,
    Move,
    Post,
    Region,
    Space,
    Supply,
    Wait,
    departing,
    joined,
    loans,
)
from ringcoll.schedules import (
    Copy,
    Operation,
    Recv,
    RecvReduce,
    Reduce,
    Ref,
    Schedule,
    Send,
    Step,
    contract,
    sends_alike,
)


@dataclass(frozen=True)
class Plan:
    """The program of one rank.

    All spaces but input and output lie in one tensor of working memory. Regions of
    ``Space.ARRIVING`` have the offsets of staging memory, and may be in a tensor of their own, of
    another dtype. A total that the next `Post` sends, before anything else reads or writes it, may
    be rounded to another dtype right away.
    """

    schedule: Schedule
    rank: int
    segments: int
    regions: tuple[Region, ...]  # which the instructions name by number
    instructions: tuple[Instruction, ...]
    workspace_numel: int  # of working memory, with so many more that it can be aligned
    arriving_numel: int  # end of the last region of ``Space.ARRIVING``
    departing: frozenset[int]  # indices of each `Combine` whose total is sent next
    waves: tuple[int, ...]  # indices of the instructions with which waves begin

    @property
    def sent_numel(self) -> int:
        """Elements that the rank sends in one run."""
        posts = (item for item in self.instructions if isinstance(item, Post))
        return sum(numel for post in posts for _, _, numel in post.sends)

    @cached_property
    def lent(self) -> dict[int, dict[int, int]]:
        """Messages that may be read where they lie, on a transport that lends them.

        By the index of a `Combine`: from the position of a source to the number of the message that
        arrives there. Nothing else reads that region, so that nothing has to be written to it.
        """
        return loans(self.instructions, self.regions, self.waves)


# A wave waits for sends beyond this number before it posts new sends. So a transport has few
# messages to remember; gloo was seen to handle 50 messages to one peer.
_MOST_SENDS = 32
# Elements. Longer messages are not received early: to ask for them costs little beside moving
# them, and the second staging area would cost memory.
_MOST_EARLY = 1 << 16
# Ranks. To find steps in which all of them do alike, each rank reads the programs of all: of so
# many, to find steps that are local, and exchanges.
_MOST_LOCAL, _MOST_EXCHANGED = 64, 16


def _alike(
    schedule: Schedule, rank: int, steps: Sequence[Step], holds: Callable[[Step], bool]
) -> set[int]:
    """Numbers of a rank's steps for which something holds on all ranks, which all find alike."""
    alike = {number for number, step in enumerate(steps) if holds(step)}
    for peer in range(schedule.world_size):
        if alike and peer != rank:
            others = list(schedule.steps(peer))
            alike = {n for n in alike if holds(others[n] if n < len(others) else Step())}
    return alike


def _overlap(some: Iterable[Region], others: Sequence[Region]) -> bool:
    return any(region.overlaps(other) for region in some for other in others)


def _touched(operation: Operation) -> tuple[Ref, ...]:
    return (*operation.writes, *operation.reads)


_Active = list[tuple[int, int, Step]]  # steps of a wave: segment, number of the step, step


@dataclass
class _Arrival:
    """A receive that was posted, and the facts for the work on the message."""

    step: int
    operation: Recv | RecvReduce
    segment: int
    target: Region
    staged: bool = False
    deferred: bool = False
    message: int = 0


class _Compiler:
    def __init__(
        self, schedule: Schedule, rank: int, layout: Layout, segments: int, posts_early: bool
    ) -> None:
        self.schedule, self.rank, self.segments = schedule, rank, segments
        self.posts_early = posts_early
        self.memory = Memory(schedule, rank, layout, segments)
        self.drops_empty = len(layout.lengths) == 1 and layout.lengths[0][1] > 0
        self.numbers: dict[Region, int] = {}  # in order
        self.instructions: list[Instruction] = []
        self.sends: list[tuple[Wait, Region]] = []  # in flight
        self.messages = 0
        self.wave_starts: list[int] = []
        self.local_after: dict[int, list[Step]] = {}  # by the number of a step: see `waves`
        self.exchanges: set[int] = set()  # numbers of steps
        self.staging = Supply(Space.STAGING)
        # For early messages: waves take turns, as one area may fill while the other is in use.
        self.early_areas = [Supply(Space.STAGING, 1), Supply(Space.STAGING, 2)]
        self.packing = Supply(Space.PACKING)
        self.commits: list[tuple[Region, Region]] = []

    def compile(self) -> Plan:
        steps, world_size = list(self.schedule.steps(self.rank)), self.schedule.world_size
        if self.segments == 1 and 1 < world_size <= _MOST_EXCHANGED:
            sends = partial(sends_alike, world_size=world_size)
            self.exchanges = _alike(self.schedule, self.rank, steps, sends)
        waves = self.waves(steps)
        ahead: dict[int, _Arrival] = {}
        for active, following in pairwise([*waves, []]):
            self.wave_starts.append(len(self.instructions))
            ahead = self.wave(active, ahead, following)
        self.instructions += [wait for wait, _ in self.sends]
        # All working memory is one tensor, in which the areas lie one after the other.
        staging = (self.staging, *self.early_areas)
        sizes = {(area.space, area.tensor): area.most for area in (*staging, self.packing)}
        sizes[Space.SCRATCH, 0] = self.memory.scratch_numel
        used = sum(sizes.values())
        starts = dict(zip(sizes, accumulate(sizes.values(), initial=0), strict=False))
        for area in staging:
            starts[Space.ARRIVING, area.tensor] = starts[Space.STAGING, area.tensor]
        regions = tuple(
            region._replace(tensor=0, offset=region.offset + starts[region[:2]])
            if region[:2] in starts
            else region
            for region in self.numbers
        )
        arriving = [region for region in regions if region.space is Space.ARRIVING]
        return Plan(
            schedule=self.schedule,
            rank=self.rank,
            segments=self.segments,
            regions=regions,
            instructions=tuple(self.instructions),
            workspace_numel=used + ALIGNMENT if used else 0,
            arriving_numel=max((area.offset + area.numel for area in arriving), default=0),
            departing=departing(self.instructions, regions),
            waves=tuple(self.wave_starts),
        )

    def waves(self, steps: list[Step]) -> list[_Active]:
        """The waves in which this rank does anything.

        In segments, steps in which no rank sends belong to the wave of the step before them: what
        has come is reduced while it is in a cache, and before anything is posted, so that it may be
        lent.
        """
        local: set[int] = set()
        if self.segments > 1 and self.schedule.world_size <= _MOST_LOCAL:
            messages = Send | Recv | RecvReduce
            is_local = lambda step: not any(isinstance(each, messages) for each in step)  # noqa: E731
            local = _alike(self.schedule, self.rank, steps, is_local)
        stages = [number for number in range(len(steps)) if not number or number not in local]
        for number, end in pairwise([*stages, len(steps)]):
            self.local_after[number] = steps[number + 1 : end]
        waves: list[_Active] = []
        for wave in range(len(stages) + self.segments - 1):
            first = max(0, wave - len(stages) + 1)
            active = [
                (segment, number, steps[number])
                for segment in range(first, min(self.segments, wave + 1))
                if any((steps[number := stages[wave - segment]], *self.local_after[number]))
            ]
            if active:
                waves.append(active)
        return waves

    def number(self, region: Region) -> int:
        return self.numbers.setdefault(region, len(self.numbers))

    def guard(self, written: Region) -> None:
        """Wait for the sends that still read a region which is about to be written."""
        readers = [wait for wait, region in self.sends if region.overlaps(written)]
        if readers:
            self.instructions += readers
            self.sends = [send for send in self.sends if not send[1].overlaps(written)]

    def move(self, into: Region, source: Region) -> None:
        if not into.numel or into == source:
            return
        self.guard(into)
        self.instructions.append(Move(self.number(into), self.number(source)))

    def combine(self, into: Region, sources: Sequence[Region], final: bool) -> None:
        if not final and len(sources) == 1:
            self.move(into, sources[0])
        elif into.numel:
            self.guard(into)
            operands = tuple(map(self.number, sources))
            self.instructions.append(Combine(self.number(into), operands, final))

    def wave(
        self, active: _Active, ahead: dict[int, _Arrival], following: _Active
    ) -> dict[int, _Arrival]:
        """Compile a wave; return the receives of the following wave that it posts as well.

        Receives are numbered by their position in program order. ``ahead`` are the receives of
        this wave that are posted already.
        """
        self.staging.used = self.packing.used = 0
        while len(self.sends) > _MOST_SENDS:
            self.instructions.append(self.sends.pop(0)[0])
        receives: list[_Arrival] = []
        arrivals = dict(ahead)
        for position, (segment, number, step, source) in enumerate(self.receives(active)):
            if position not in ahead:
                arrivals[position] = self.receive(source, number, step, segment, self.staging)
                receives.append(arrivals[position])
        sends: list[tuple[Wait, Region]] = []
        for segment, number, step in active:
            for operation in step:
                if isinstance(operation, Send) and self.carries(operation, segment):
                    region = self.packed(operation.refs, segment)
                    sends.append((Wait(0, operation.peer, number, False), region))
        # An exchange is posted alone, on all ranks.
        is_exchange, is_next = (
            any(number in self.exchanges for _, number, _ in wave) for wave in (active, following)
        )
        is_early = self.posts_early and not is_exchange and not is_next
        early = self.early(active, following) if is_early else {}
        self.post([*receives, *early.values()], sends, is_exchange=is_exchange)
        for segment, _, step in active:
            for operation in step:
                if isinstance(operation, Copy | Reduce):
                    self.local(operation, step, segment)
        pending: dict[Region, Region] = {}
        for _, arrival in sorted(arrivals.items()):
            peer = arrival.operation.peer
            self.instructions.append(Wait(arrival.message, peer, arrival.step, True))
            self.arrived(arrival, pending)
        self.commit()
        for segment, number, _ in active:
            for step in self.local_after[number]:
                for operation in step:
                    assert isinstance(operation, Copy | Reduce)
                    self.local(operation, step, segment)
                self.commit()
        return early

    def commit(self) -> None:
        """Bring the results of a step from staging memory to their places."""
        for into, result in self.commits:
            self.move(into, result)
        self.commits = []

    def post(
        self, receives: list[_Arrival], sends: list[tuple[Wait, Region]], *, is_exchange: bool
    ) -> None:
        if not receives and not sends:
            return
        is_exchange = is_exchange and len(receives) == len(sends) == self.schedule.world_size - 1
        incoming = tuple(
            (arrival.operation.peer, self.number(arrival.target), arrival.target.numel)
            for arrival in receives
        )
        outgoing = tuple((wait.peer, self.number(region), region.numel) for wait, region in sends)
        self.instructions.append(Post(incoming, outgoing, is_exchange))
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

        A sender whose receive is posted does not have to ask for it. The messages arrive in an area
        that this wave does not use, or at a place that this wave does not touch and that no send
        still reads. Receives from one peer stay in order.
        """
        touched = [
            self.memory.region(ref, segment)
            for segment, number, first in active
            for step in (first, *self.local_after[number])
            for operation in step
            for ref in _touched(operation)
        ]
        touched += [region for _, region in self.sends]
        early: dict[int, _Arrival] = {}
        late: set[int] = set()  # peers
        self.early_areas.reverse()
        area = self.early_areas[0]
        area.used = 0
        for position, (segment, number, step, operation) in enumerate(self.receives(following)):
            places = self.regions(operation.writes, segment)
            is_direct = isinstance(operation, Recv) and _overlap(places, touched)
            is_long = self.numel(operation.writes, segment) > _MOST_EARLY
            if operation.peer in late or is_direct or is_long:
                late.add(operation.peer)
                continue
            early[position] = self.receive(operation, number, step, segment, area)
        return early

    def regions(self, refs: Iterable[Ref], segment: int) -> list[Region]:
        return joined(self.memory.region(ref, segment) for ref in refs)

    def packed(self, refs: tuple[Ref, ...], segment: int) -> Region:
        """A single region that holds a whole message; pieces are copied together if need be."""
        pieces = self.regions(refs, segment)
        if len(pieces) == 1:
            return pieces[0]
        whole = self.packing.take(sum(piece.numel for piece in pieces), pieces[0])
        start = whole.offset
        for piece in pieces:
            self.move(whole._replace(offset=start, numel=piece.numel), piece)
            start += piece.numel
        return whole

    def receive(
        self, operation: Recv | RecvReduce, number: int, step: Step, segment: int, area: Supply
    ) -> _Arrival:
        """Decide where a message arrives."""
        arrival = partial(_Arrival, number, operation, segment)
        if isinstance(operation, RecvReduce):
            deferred = self.read_later(operation, operation.into, step, segment)
            deferred = deferred or self.reads_itself(operation, segment)
            local = self.memory.region(operation.local[0], segment)
            target = area.take(self.numel(operation.into, segment), local)
            if len(operation.into) == 1 and not deferred:
                target = target._replace(space=Space.ARRIVING)
            return arrival(target, True, deferred)
        pieces = self.regions(operation.refs, segment)
        # The message may arrive at any time, so no operation of the step may read its place.
        is_read = any(_overlap(pieces, self.reads(other, operation, segment)) for other in step)
        if len(pieces) == 1 and not is_read:
            self.guard(pieces[0])
            return arrival(pieces[0])
        deferred = self.read_later(operation, operation.refs, step, segment)
        target = area.take(sum(piece.numel for piece in pieces), pieces[0])
        return arrival(target, True, deferred)

    def carries(self, operation: Send | Recv | RecvReduce, segment: int) -> bool:
        """Whether a message is sent at all.

        If a vector has fewer elements than chunks, messages of empty chunks are left out, at both
        ends alike. Messages of empty blocks are kept, and all messages of an empty vector:
        otherwise nobody would notice that ranks disagree on a length.
        """
        refs = operation.writes or operation.reads
        return not self.drops_empty or self.numel(refs, segment) > 0

    def numel(self, refs: Iterable[Ref], segment: int) -> int:
        return sum(self.memory.region(ref, segment).numel for ref in refs)

    def read_later(self, writer: Operation, into: Iterable[Ref], step: Step, segment: int) -> bool:
        """Whether a later operation of the step reads what this operation writes.

        Local work is done first, then messages in program order. Sends do not count here: `guard`
        waits for them.
        """
        targets = [self.memory.region(ref, segment) for ref in into]
        order = sorted(step, key=lambda operation: isinstance(operation, Recv | RecvReduce))
        done = next(index for index, operation in enumerate(order) if operation is writer)
        return any(
            not isinstance(other, Send) and _overlap(self.reads(other, writer, segment), targets)
            for other in order[done + 1 :]
        )

    def reads_itself(self, operation: RecvReduce, segment: int) -> bool:
        """Whether a later chunk of a recv-reduce reads the place of an earlier one's result."""
        written: list[Region] = []
        for target, operand in zip(operation.into, operation.local, strict=True):
            local = self.memory.region(operand, segment)
            if target.place != operand.place and _overlap([local], written):
                return True
            written.append(self.memory.region(target, segment))
        return False

    def reads(self, operation: Operation, writer: Operation, segment: int) -> list[Region]:
        """The regions of the state before the step that an operation reads."""
        refs = operation.reads
        # A recv-reduce onto the result of another recv-reduce reads it on purpose.
        if isinstance(operation, RecvReduce) and isinstance(writer, RecvReduce):
            pairs = zip(operation.into, operation.local, strict=True)
            refs = tuple(local for into, local in pairs if into.place != local.place)
        return [self.memory.region(ref, segment) for ref in refs]

    def local(self, operation: Copy | Reduce, step: Step, segment: int) -> None:
        into = self.memory.region(operation.into, segment)
        deferred = self.read_later(operation, (operation.into,), step, segment)
        if isinstance(operation, Copy):
            source = self.memory.region(operation.source, segment)
            if deferred and into != source:
                staged = self.staging.take(into.numel, source)
                self.move(staged, source)
                self.commits.append((into, staged))
            else:
                self.move(into, source)
            return
        sources = [self.memory.region(ref, segment) for ref in operation.sources]
        clobbers = any(into.overlaps(source) for source in sources[2:])
        target = self.staging.take(into.numel, into) if deferred or clobbers else into
        self.combine(target, sources, operation.final)
        if deferred:
            self.commits.append((into, target))
        elif clobbers:
            self.move(into, target)

    def arrived(self, arrival: _Arrival, pending: dict[Region, Region]) -> None:
        """Copy or reduce a message that has arrived."""
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
        # Pending results are keyed by their single chunks.
        joins = not (arrival.deferred or pending)
        for into, local in self.pieces(operation, segment, joins=joins):
            received = staged._replace(offset=start, numel=into.numel)
            start += into.numel
            held = pending.get(into) if into == local else None
            left = held or local
            pair = (received, left) if operation.received_left else (left, received)
            if held is not None:
                self.combine(held, pair, operation.final)
            elif arrival.deferred:
                self.combine(received, pair, operation.final)
                pending[into] = received
                self.commits.append((into, received))
            else:
                self.combine(into, pair, operation.final)

    def pieces(
        self, operation: RecvReduce, segment: int, *, joins: bool
    ) -> list[tuple[Region, Region]]:
        """(into, local) of a recv-reduce, with pieces joined that are adjacent in both."""
        result: list[tuple[Region, Region]] = []
        for target, operand in zip(operation.into, operation.local, strict=True):
            into, local = self.memory.region(target, segment), self.memory.region(operand, segment)
            if result and joins:
                both = (*joined((result[-1][0], into)), *joined((result[-1][1], local)))
                # A single region on each side, and neither shifted against the other.
                if len(both) == 2 and (both[0] == both[1] or not both[0].overlaps(both[1])):
                    result[-1] = both
                    continue
            result.append((into, local))
        return result


_SPACES = ("in", "out", "scratch", "staging", "packing", "staging")


def listing(schedule: Schedule, rank: int) -> list[tuple[str, str]]:
    """The program of a rank in words: instructions, of chunks of one element each.

    Examples
    --------
    >>> from ringcoll.schedules.algorithms import schedule_of
    >>> for row in listing(schedule_of("broadcast", "linear", 3), 0):
    ...     print(*row)
    send m0 to 1: in[0:1]
    send m1 to 2: in[0:1]
    copy out[0:1] = in[0:1]
    wait until m0 was taken
    wait until m1 was taken
    """
    rules, world_size = contract(schedule.collective), schedule.world_size
    ends = [(each, world_size, schedule.root) for each in range(world_size)]
    blocks = {block for end in ends for block in (*rules.inputs(*end), *rules.outputs(*end))}
    numel = rules.chunks_per_block(schedule.num_chunks, world_size)
    plan = compile_plan(schedule, rank, Layout(tuple((block, numel) for block in sorted(blocks))))

    def at(number: int) -> str:
        space, _, offset, numel = plan.regions[number]
        return f"{_SPACES[space]}[{offset}:{offset + numel}]"

    rows: list[tuple[str, str]] = []
    messages = 0
    for item in plan.instructions:
        match item:
            case Post(receives=receives, sends=sends):
                for way, word, each in (("from", "receive", receives), ("to", "send", sends)):
                    for peer, view, _ in each:
                        rows.append((word, f"m{messages} {way} {peer}: {at(view)}"))
                        messages += 1
            case Wait(message=message, is_receive=is_receive):
                rows.append(
                    ("wait", f"for m{message}" if is_receive else f"until m{message} was taken")
                )
            case Move(into=into, source=source):
                rows.append(("copy", f"{at(into)} = {at(source)}"))
            case Combine(into=into, sources=sources, final=final):
                total = " + ".join(map(at, sources))
                rows.append(("combine", f"{at(into)} = {total}{', complete' if final else ''}"))
    return rows


# The groups of a program mostly begin with the same calls. A plan is kept as long as a group keeps
# it.
_known: WeakValueDictionary[tuple[object, ...], Plan] = WeakValueDictionary()


def compile_plan(
    schedule: Schedule, rank: int, layout: Layout, segments: int = 1, *, posts_early: bool = True
) -> Plan:
    """Compile a rank's part of a verified schedule, of which each chunk is cut into segments.

    Receives may be posted a wave before their sends (``posts_early``), but for a transport that
    matches by order alone: there a wave is one group. Raises `ScheduleError` if the schedule passes
    on blocks whose length this rank does not know.
    """
    key = schedule, rank, layout, segments, posts_early
    plan = _known.get(key)
    if plan is None:
        plan = _known[key] = _Compiler(*key).compile()
    return plan
