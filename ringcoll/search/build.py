"""The demand of a collective on a search: which rank has each chunk, and which ranks want it.

The demands are read from the contracts, so every collective that reduces nothing can be searched
for. A collective that reduces is one of these backwards: a reduce-scatter is an all-gather, and a
reduce a broadcast, in which every message goes the other way, in the opposite order of steps. An
all-reduce is a reduce-scatter, and then an all-gather. Source: Z. Cai et al., "Synthesizing Optimal
Collective Algorithms", arXiv 2008.08708, sections 3.3 and 3.4.

Moves of chunks become schedules: forwards, backwards with reductions, or one after the other.

A search answers with *moves*: in each step, which chunk goes from which rank to which. Every rank
that gets a chunk gets it once, so the moves of a chunk are a tree that begins at its owner.
Backwards the same tree reduces the chunk: each rank reduces what its children send with its own
data, and sends the result to its parent. What a rank holds for others only is in scratch memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
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
"""The phases of the package's collectives: what is searched for, and whether it is used backwards."""


def phases_of(collective: str) -> tuple[tuple[str, bool], ...]:
    """The phases of a collective; none if there is no such collective, or nothing to search for."""
    rules = CONTRACTS.get(collective)
    return () if rules is None else rules.made_of


@dataclass(frozen=True)
class Demand:
    """Where the chunks of a collective are, and where they have to be.

    Parameters
    ----------
    collective
        A collective that reduces nothing.
    world_size, root
        Number of ranks, and the root.
    chunks
        Chunks that each block is cut into.
    owners
        The rank that has each chunk at the beginning.
    wanted
        The ranks that have each chunk at the end, its owner too if the contract says so.
    """

    collective: str
    world_size: int
    root: int
    chunks: int
    owners: tuple[int, ...]
    wanted: tuple[frozenset[int], ...]

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
    blocks = range(rules.num_blocks(world_size))
    return Demand(
        collective,
        world_size,
        root,
        chunks,
        tuple(rules.owner(block, world_size, root) for block in blocks for _ in range(chunks)),
        tuple(
            frozenset(rank for rank, blocks in enumerate(outputs) if block in blocks)
            for block in blocks
            for _ in range(chunks)
        ),
    )


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
    slots: dict[tuple[int, int], int] = {}
    for number, moves in enumerate(phases):
        _, backwards = phases_of(collective)[number]
        turned = _turned(moves) if backwards else moves
        if len(phases) == 1:  # all outputs of an all-reduce hold all chunks
            slots = _slots(demand, turned, backwards)
        if backwards:
            steps = _reductions(demand, turned, slots)
        else:
            steps = _copies(demand, turned, slots, inp if number == 0 else out)
        for program, new in zip(programs, steps, strict=True):
            program.extend(new)
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


def _slots(demand: Demand, moves: Moves, backwards: bool) -> dict[tuple[int, int], int]:
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
    slots: dict[tuple[int, int], int] = {}
    count: dict[int, int] = defaultdict(int)
    for (rank, chunk), number in first.items():
        if free[rank] and free[rank][0][0] < number:
            _, slot = heappop(free[rank])
        else:
            slot, count[rank] = count[rank], count[rank] + 1
        slots[rank, chunk] = slot
        heappush(free[rank], (last.get((rank, chunk), number), slot))
    return slots


def _place(slots: dict[tuple[int, int], int], rank: int, chunk: int) -> Ref:
    slot = slots.get((rank, chunk))
    return out(chunk) if slot is None else tmp(slot, chunk)


def _copies(
    demand: Demand, moves: Moves, slots: dict[tuple[int, int], int], own: Callable[[int], Ref]
) -> Iterator[list[Step]]:
    """The steps of each rank; an owner has its chunks in ``own``, and copies them at the beginning."""
    operations = _empty(demand, moves)
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
    return _programs(operations)


def _reductions(
    demand: Demand, moves: Moves, slots: dict[tuple[int, int], int]
) -> Iterator[list[Step]]:
    """The steps of each rank; the owner of a chunk has the result in its output."""
    operations = _empty(demand, moves)
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
    return _programs(operations)


def _empty(demand: Demand, moves: Moves) -> list[list[list[Operation]]]:
    return [[[] for _ in moves] for _ in range(demand.world_size)]


def _programs(operations: list[list[list[Operation]]]) -> Iterator[list[Step]]:
    for steps in operations:
        yield [Step(*step) for step in steps]
