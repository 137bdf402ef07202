"""Greedy matching of chunks and links, step by step: for graphs that are too large for a proof.

The problem. An all-gather, or a broadcast, on many ranks. The time-expanded network has each rank once
for each step; a link joins its source in a step to its target in the next one. In every step each
link takes chunks that its source has and its target lacks, as many as the link carries, until no
link can take any more. Which chunk a link takes, and which link is first, is drawn by a seed.

A step is as long as a chunk needs on one of the links, so faster links take several chunks in a step,
and slower ones none. The search tries the speed of every link as this measure, and several seeds; the
caller takes the schedule that is simulated fastest.

The work grows with links times chunks, which is the square of the ranks if the ranks have few links.

Source: W. Won et al., "TACOS", arXiv 2304.05301. There a slow link may be under way while fast links go
on; here the steps of a schedule are global, so a message ends in the step in which it begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from ringcoll.errors import ArgumentError
from ringcoll.search.build import ChunkMove, Moves
from ringcoll.search.demand import Demand
from ringcoll.search.hops import HopGraph


def speeds_of_steps(graph: HopGraph) -> list[HopGraph]:
    """The graph for each length of a step that keeps all ranks connected."""
    speeds = sorted({limit.speed for limit in graph.limits})
    graphs = [graph.without_slow(speed) for speed in speeds]
    return [each for each in graphs if each is not None]


def greedy_moves(graph: HopGraph, demand: Demand, *, seed: int = 0) -> Moves:
    """Match chunks and hops, one round after the other, until every rank has every chunk.

    Parameters
    ----------
    graph
        The hops. A hop of less than one chunk a round is not used.
    demand
        Chunks that every rank wants.
    seed
        Seed of all choices: the same arguments give the same moves.

    Raises
    ------
    ArgumentError
        Some rank does not want a chunk.
    """
    if not demand.for_all:
        raise ArgumentError(
            "the greedy search is for collectives in which every rank wants every chunk",
            argument="collective", expected="all_gather, broadcast, or what is made of them",
            got=repr(demand.collective),
        )  # fmt: skip
    random = Random(seed)  # noqa: S311  # choices, not secrets
    held = [0] * demand.world_size  # the chunks of a rank, as bits
    for chunk, owner in enumerate(demand.owners):
        held[owner] |= 1 << chunk
    limits_of: list[list[int]] = [[] for _ in graph.hops]
    for index, limit in enumerate(graph.limits):
        for hop in limit.hops:
            limits_of[hop].append(index)
    steps: list[list[ChunkMove]] = []
    everything = (1 << len(demand.owners)) - 1
    while any(chunks != everything for chunks in held):
        step = list(_matched(graph, limits_of, held, len(steps), random))
        assert step, "the hops connect all ranks"
        for chunk, _, target in step:
            held[target] |= 1 << chunk
        steps.append(step)
    return steps


def _matched(
    graph: HopGraph, limits_of: list[list[int]], held: list[int], number: int, random: Random
) -> Iterator[ChunkMove]:
    """The moves of one round."""
    # A hop of 3/2 chunks a round takes 1 chunk in the first round, and 2 in the second.
    room = [int(limit.speed * (number + 1)) - int(limit.speed * number) for limit in graph.limits]
    arriving = list(held)
    waiting = list(range(len(graph.hops)))
    while waiting:
        random.shuffle(waiting)
        served = []
        for hop in waiting:
            source, target = graph.hops[hop]
            lacking = held[source] & ~arriving[target]
            if lacking and all(room[index] >= 1 for index in limits_of[hop]):
                chunk = _drawn(lacking, random)
                arriving[target] |= 1 << chunk
                for index in limits_of[hop]:
                    room[index] -= 1
                yield ChunkMove(chunk, source, target)
                served.append(hop)
        waiting = served


def _drawn(bits: int, random: Random) -> int:
    """One of the bits that are set, by chance: the first one from a place on."""
    place = random.randrange(bits.bit_length())
    above = bits >> place
    return place + (above & -above).bit_length() - 1
