"""Random schedules: every step does what the algorithms avoid.

They keep no contract, but every rule of `ringcoll.schedules.ir.steps`: reads are of places that have
been written, each place has one writer a step, except recv-reduces that accumulate, and
sends pair with receives. Few places and many operations a step make it likely that a place
is sent, read and written at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from ringcoll.schedules import (
    Buffer,
    Operation,
    Recv,
    RecvReduce,
    Ref,
    Schedule,
    Send,
    Step,
    contract,
    copy,
    inp,
    out,
    reduce,
    tmp,
)

__all__ = ["Size", "random_schedule"]

_Place = tuple[Buffer, int]


@dataclass(frozen=True)
class Size:
    """How large a random schedule is."""

    world_size: int
    steps: int
    chunks_per_block: int
    slots: int
    messages: int
    """At most so many in a step, over all ranks."""
    locals: int
    """At most so many local operations of a rank in a step."""


class _Rank:
    """What a rank holds, and what it writes in the step that is being made."""

    def __init__(self, inputs: list[int], outputs: list[int], slots: int, in_place: bool) -> None:
        self.outputs, self.slots, self.in_place = outputs, slots, in_place
        self.inputs = set(inputs)
        self.held: dict[_Place, int] = {}  # place to chunk
        for chunk in inputs:
            self.held[self.place(inp(chunk))] = chunk
        self.begin()

    def begin(self) -> None:
        self.written: dict[_Place, int] = {}
        self.accumulating: set[_Place] = set()
        self.sends: list[Operation] = []
        self.receives: list[Operation] = []
        self.locals: list[Operation] = []

    def place(self, ref: Ref) -> _Place:
        if self.in_place and ref.buffer is Buffer.INPUT and ref.chunk in self.outputs:
            return Buffer.OUTPUT, ref.chunk
        return ref.place

    def refs(self, place: _Place, chunk: int) -> list[Ref]:
        """The ways to name a place that holds a chunk."""
        if place[0] is Buffer.SCRATCH:
            return [tmp(place[1], chunk)]
        if place[0] is Buffer.INPUT:
            return [inp(chunk)]
        shared = self.in_place and chunk in self.inputs
        return [out(chunk), inp(chunk)] if shared else [out(chunk)]

    def readable(self, random: Random, chunk: int | None = None) -> Ref | None:
        """Something that was there before the step, of a given chunk or of any."""
        found = [
            ref
            for place, held in self.held.items()
            if chunk is None or held == chunk
            for ref in self.refs(place, held)
        ]
        return random.choice(found) if found else None

    def writable(self, random: Random, chunk: int) -> Ref | None:
        """A place for a chunk that nothing else is written to in this step."""
        found = [out(chunk)] * 2 if chunk in self.outputs else []
        found += [tmp(slot, chunk) for slot in range(self.slots)]
        found = [ref for ref in found if self.place(ref) not in self.written]
        return random.choice(found) if found else None

    def write(self, ref: Ref) -> None:
        self.written[self.place(ref)] = ref.chunk

    def end(self, random: Random) -> Step:
        """The step: sends, receives and local operations, each in order, mixed."""
        self.held.update(self.written)
        queues = [self.sends, self.receives, self.locals]
        mixed = []
        while any(queues):
            queue = random.choice([queue for queue in queues if queue])
            mixed.append(queue.pop(0))
        self.begin()
        return Step(*mixed)


def _receive(random: Random, rank: _Rank, source: int, chunks: list[int]) -> Operation | None:
    """A receive, or recv-reduce, of the chunks; ``None`` if there is no room for them."""
    if random.random() < 0.4:
        refs = []
        for chunk in chunks:
            ref = rank.writable(random, chunk)
            if ref is None:
                break
            rank.write(ref)
            refs.append(ref)
        if len(refs) == len(chunks):
            return Recv(source, tuple(refs))
        for ref in refs:
            del rank.written[rank.place(ref)]
        return None
    into: list[Ref] = []
    local: list[Ref] = []
    undo = dict(rank.written), set(rank.accumulating)
    for chunk in chunks:
        ours = [
            ref
            for place in rank.accumulating
            if rank.written[place] == chunk and rank.held.get(place) == chunk
            for ref in rank.refs(place, chunk)
            if ref.buffer is not Buffer.INPUT
        ]
        if ours and random.random() < 0.6:
            target = mine = random.choice(ours)
        else:
            found, wanted = rank.writable(random, chunk), rank.readable(random, chunk)
            if found is None or wanted is None:
                break
            target, mine = found, wanted
            if random.random() < 0.5 and rank.held.get(rank.place(target)) == chunk:
                mine = target
        into.append(target)
        local.append(mine)
        rank.write(target)
        rank.accumulating.add(rank.place(target))
    if len(into) == len(chunks):
        final = random.random() < 0.3
        return RecvReduce(source, tuple(into), tuple(local), random.random() < 0.5, final)
    rank.written, rank.accumulating = undo
    return None


def random_schedule(random: Random, size: Size, collective: str, *, in_place: bool) -> Schedule:
    """Make a schedule that keeps the rules of steps, and no contract."""
    rules = contract(collective)
    world_size = size.world_size
    num_chunks = rules.num_blocks(world_size) * size.chunks_per_block

    def chunks_of(blocks: list[int]) -> list[int]:
        per_block = size.chunks_per_block
        return [block * per_block + part for block in blocks for part in range(per_block)]

    ranks = [
        _Rank(
            chunks_of(list(rules.inputs(rank, world_size, 0))),
            chunks_of(list(rules.outputs(rank, world_size, 0))),
            size.slots,
            in_place,
        )
        for rank in range(world_size)
    ]
    programs: list[list[Step]] = [[] for _ in ranks]
    for _ in range(size.steps):
        for _ in range(random.randint(0, size.messages)):
            if world_size == 1:
                break
            source, target = random.sample(range(world_size), 2)
            sent = [ranks[source].readable(random) for _ in range(random.choice([1, 1, 2, 3]))]
            refs = tuple(ref for ref in sent if ref is not None)
            if not refs:
                continue
            if random.random() < 0.3:
                # In order, as algorithms send them: adjacent ones become one view.
                refs = tuple(sorted(set(refs), key=lambda ref: (ref.buffer, ref.slot, ref.chunk)))
            arriving = _receive(random, ranks[target], source, [ref.chunk for ref in refs])
            if arriving is not None:
                ranks[source].sends.append(Send(target, refs))
                ranks[target].receives.append(arriving)
        for rank in ranks:
            for _ in range(random.randint(0, size.locals)):
                _local(random, rank)
        for program, rank in zip(programs, ranks, strict=True):
            program.append(rank.end(random))
    frozen = tuple(map(tuple, programs))
    return Schedule(
        collective, "random", world_size, num_chunks, size.slots, lambda rank: frozen[rank]
    )


def _local(random: Random, rank: _Rank) -> None:
    source = rank.readable(random)
    if source is None:
        return
    target = rank.writable(random, source.chunk)
    if target is None:
        return
    rank.write(target)
    if random.random() < 0.5:
        rank.locals.append(copy(target, source))
        return
    sources = [source]
    for _ in range(random.randint(0, 3)):
        other = rank.readable(random, source.chunk)
        assert other is not None
        sources.append(other)
    random.shuffle(sources)
    rank.locals.append(reduce(target, *sources, final=random.random() < 0.3))
