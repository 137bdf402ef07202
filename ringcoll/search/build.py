"""What a collective demands of a search, and how the moves of chunks become a schedule.

Demands are read from the contracts, so every collective that reduces nothing can be searched for. A
collective that reduces is one of these backwards: a reduce-scatter is an all-gather, and a reduce a
broadcast, in which every message goes the other way, in the opposite order of steps. An all-reduce
is a reduce-scatter, and then an all-gather. Source: Z. Cai et al., "Synthesizing Optimal Collective
Algorithms", arXiv 2008.08708, sections 3.3 and 3.4.

A search answers with *moves*: in each step, which chunk goes from which rank to which. Every rank
that gets a chunk gets it once, so the moves of a chunk are a tree that begins at its owner.
Backwards the same tree reduces the chunk: each rank reduces what its children send with its own
data, and sends the result to its parent. What a rank holds for others only is in scratch memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

from ringcoll.algorithms import alone
from ringcoll.errors import ArgumentError
from ringcoll.schedule import (
    CONTRACTS,
    Operation,
    Ref,
    Schedule,
    Step,
    copy,
    inp,
    out,
    recv,
    recv_reduce,
    send,
    tmp,
)

SEARCHED = {name: rules.made_of for name, rules in CONTRACTS.items() if rules.made_of}
"""The phases of the package's collectives: what is searched for, and if it is used backwards."""


def phases_of(collective: str) -> tuple[tuple[str, bool], ...]:
    """The phases of a collective; none if there is no such collective, or nothing to search for."""
    rules = CONTRACTS.get(collective)
    return () if rules is None else rules.made_of


@dataclass(frozen=True)
class Demand:
    """Where the chunks of a collective are, which reduces nothing, and where they have to be."""

    collective: str
    world_size: int
    root: int
    chunks: int  # of each block
    owners: tuple[int, ...]  # of each chunk, at the beginning
    wanted: tuple[frozenset[int], ...]  # the ranks that have each chunk at the end, maybe its owner

    @property
    def for_all(self) -> bool:
        """Whether every rank wants every chunk, so that none passes on what it does not want."""
        return all(len(ranks) == self.world_size for ranks in self.wanted)


def demand_of(collective: str, world_size: int, chunks: int = 1, root: int = 0) -> Demand:
    """Read the demand of a collective from its contract, with blocks cut into chunks.

    Raises
    ------
    ArgumentError
        The collective reduces, or there is nothing to search for.

    Examples
    --------
    >>> demand = demand_of("scatter", 3, root=1)
    >>> demand.owners, [sorted(ranks) for ranks in demand.wanted]
    ((1, 1, 1), [[0], [1], [2]])
    """
    rules = CONTRACTS.get(collective)
    if rules is None or rules.reduces:
        raise ArgumentError(
            "the collective is not searched for", argument="collective",
            expected=", ".join(SEARCHED), got=repr(collective),
        )  # fmt: skip
    outputs = [{*rules.outputs(rank, world_size, root)} for rank in range(world_size)]
    blocks = [block for block in range(rules.num_blocks(world_size)) for _ in range(chunks)]
    owners = tuple(rules.owner(block, world_size, root) for block in blocks)
    wanted = (frozenset(r for r, own in enumerate(outputs) if block in own) for block in blocks)
    return Demand(collective, world_size, root, chunks, owners, tuple(wanted))


class ChunkMove(NamedTuple):
    """A chunk goes from one rank to another."""

    chunk: int
    source: int
    target: int


Moves = Sequence[Sequence[ChunkMove]]
"""The moves of each step."""


def schedule_of_moves(
    collective: str, algorithm: str, demand: Demand, phases: Sequence[Moves]
) -> Schedule:
    """Build the schedule of a collective from the moves of its phases, as of `phases_of`."""
    programs: list[list[Step]] = [[] for _ in range(demand.world_size)]
    if demand.world_size == 1:
        programs = [[*alone(len(demand.owners))]]
        phases = ()
    slots: _Slots = {}
    for number, moves in enumerate(phases):
        _, backwards = phases_of(collective)[number]
        turned = _turned(moves) if backwards else moves
        if len(phases) == 1:  # all outputs of an all-reduce hold all chunks
            slots = _slots(demand, turned, backwards)
        operations: _Operations = [[[] for _ in moves] for _ in range(demand.world_size)]
        if backwards:
            _add_reductions(operations, demand, turned, slots)
        else:
            _add_copies(operations, demand, turned, slots, inp if number == 0 else out)
        for program, steps in zip(programs, operations, strict=True):
            program.extend(Step(*step) for step in steps)
    frozen = tuple(map(tuple, programs))
    return Schedule(
        collective=collective,
        algorithm=algorithm,
        world_size=demand.world_size,
        num_chunks=len(demand.owners),
        num_slots=max(slots.values(), default=-1) + 1,
        program=lambda rank: frozen[rank],
        root=demand.root,
    )


def _turned(moves: Moves) -> Moves:
    """Moves the other way, in the opposite order of steps."""
    return [
        [ChunkMove(chunk, target, source) for chunk, source, target in step] for step in moves[::-1]
    ]


_Slots = dict[tuple[int, int], int]


def _slots(demand: Demand, moves: Moves, backwards: bool) -> _Slots:
    """A slot for each rank and chunk that passes the rank; free again after its last send."""
    first: dict[tuple[int, int], int] = {}
    last: dict[tuple[int, int], int] = {}
    for number, step in enumerate(moves):
        for chunk, source, target in step:
            last[source, chunk] = number
            ends = {demand.owners[chunk]} if backwards else demand.wanted[chunk]
            if target not in ends:
                first.setdefault((target, chunk), number)
    free: dict[int, list[tuple[int, int]]] = defaultdict(list)  # of a rank: (last use, slot)
    slots: _Slots = {}
    count: dict[int, int] = defaultdict(int)
    for (rank, chunk), number in first.items():
        if free[rank] and free[rank][0][0] < number:
            _, slot = heappop(free[rank])
        else:
            slot, count[rank] = count[rank], count[rank] + 1
        slots[rank, chunk] = slot
        heappush(free[rank], (last.get((rank, chunk), number), slot))
    return slots


def _place(slots: _Slots, rank: int, chunk: int) -> Ref:
    slot = slots.get((rank, chunk))
    return out(chunk) if slot is None else tmp(slot, chunk)


_Operations = list[list[list[Operation]]]
"""Of each rank, and of each step."""


def _add_copies(
    operations: _Operations, demand: Demand, moves: Moves, slots: _Slots, own: Callable[[int], Ref]
) -> None:
    """Add copies; an owner has its chunks in ``own``, and copies them at the beginning."""
    if own is inp:
        for chunk, owner in enumerate(demand.owners):
            if owner in demand.wanted[chunk]:
                operations[owner][0].append(copy(out(chunk), inp(chunk)))
    for number, step in enumerate(moves):
        messages: dict[tuple[int, int], list[int]] = defaultdict(list)
        for chunk, source, target in sorted(step):
            messages[source, target].append(chunk)
        for (source, target), chunks in sorted(messages.items()):
            refs = [
                own(chunk) if demand.owners[chunk] == source else _place(slots, source, chunk)
                for chunk in chunks
            ]
            operations[source][number].append(send(target, *refs))
            places = [_place(slots, target, chunk) for chunk in chunks]
            operations[target][number].append(recv(source, *places))


def _add_reductions(operations: _Operations, demand: Demand, moves: Moves, slots: _Slots) -> None:
    """Add reductions; the owner of a chunk has the result in its output."""
    last = {  # the message that completes a chunk
        chunk: (number, source)
        for number, step in enumerate(moves)
        for chunk, source, target in sorted(step)
        if target == demand.owners[chunk]
    }
    partial: dict[tuple[int, int], Ref] = {}
    for number, step in enumerate(moves):
        # A message completes all of its chunks or none of them.
        messages: dict[tuple[int, int, bool], list[int]] = defaultdict(list)
        for chunk, source, target in sorted(step):
            final = target == demand.owners[chunk] and last[chunk] == (number, source)
            messages[source, target, final].append(chunk)
        for (source, target, final), chunks in sorted(messages.items()):
            refs = [partial.get((source, chunk), inp(chunk)) for chunk in chunks]
            operations[source][number].append(send(target, *refs))
            local = tuple(partial.get((target, chunk), inp(chunk)) for chunk in chunks)
            into = tuple(_place(slots, target, chunk) for chunk in chunks)
            partial |= {(target, chunk): ref for chunk, ref in zip(chunks, into, strict=True)}
            operations[target][number].append(recv_reduce(source, into, local, final=final))
