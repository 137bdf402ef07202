"""Spanning trees that use links in the best way together, for large data in many segments.

The problem. Every chunk goes to all ranks, so its way is a spanning tree from its owner. In R rounds
a hop of speed b carries b * R chunks, rounded down. Which R is enough for a tree of each chunk? By
Edmonds' theorem: if every rank gets, in a flow from all owners, as much as there are chunks. And
the trees exist: a tree grows hop by hop, and a hop may be taken if all other trees still exist
after that, which one more flow tells. The nearest ranks are joined first, so trees are low.

Assumptions: no hop shares a link with another one, so there are no switches.

Cost. The chunks of a tree of depth d need d steps. In S segments the schedule takes d + S - 1 waves of
R / S rounds: R rounds in the end. With more chunks R per chunk comes down to the lower bound.

Sources: J. Edmonds, "Edge-disjoint branchings", 1973; L. Lovasz, "On two minimax theorems in graph theory",
1976, for the proof by which trees grow; L. Zhao et al., "ForestColl", arXiv 2402.06787, for its use.
"""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import count
from math import ceil

from ringcoll.errors import ArgumentError
from ringcoll.search.build import ChunkMove, Moves
from ringcoll.search.demand import Demand
from ringcoll.search.flow import ORIGIN, maximum_flow
from ringcoll.search.hops import HopGraph
from ringcoll.simulation import Node


def tree_moves(graph: HopGraph, demand: Demand, least: Fraction) -> tuple[int, Moves]:
    """Find a tree for each chunk, so that all together need the fewest rounds."""
    if not demand.for_all:
        raise ArgumentError(
            "trees are for collectives in which every rank wants every chunk",
            argument="collective", expected="all_gather, broadcast, or what is made of them",
            got=repr(demand.collective),
        )  # fmt: skip
    if any(len(limit.hops) > 1 for limit in graph.limits):
        raise ArgumentError(
            "trees are for networks without switches", argument="topology",
            expected="links between ranks", got="hops that share a link",
        )  # fmt: skip
    for rounds in count(max(1, ceil(least * demand.chunks))):
        rooms = {graph.hops[limit.hops[0]]: int(limit.speed * rounds) for limit in graph.limits}
        owners = Counter(demand.owners)
        if all(_reached(rooms, owners, rank) for rank in range(demand.world_size)):
            break
    steps: list[list[ChunkMove]] = []
    for chunk, owner in enumerate(demand.owners):
        owners[owner] -= 1
        for depth, source, target in _grown(rooms, owners, owner, demand.world_size):
            steps += [[] for _ in range(depth + 1 - len(steps))]
            steps[depth].append(ChunkMove(chunk, source, target))
    return rounds, steps


def _grown(
    rooms: dict[tuple[int, int], int], others: Counter[int], owner: int, world_size: int
) -> list[tuple[int, int, int]]:
    """Depth, source and target of the hops of a tree, whose room is taken; the other trees exist."""
    depths = {owner: 0}
    hops = []
    while len(depths) < world_size:
        leaving = [
            (depths[source], -room, source, target)
            for (source, target), room in rooms.items()
            if room and source in depths and target not in depths
        ]
        for _, _, source, target in sorted(leaving):
            rooms[source, target] -= 1
            if _reached(rooms, others, target, beside=source):
                break
            rooms[source, target] += 1
        else:
            raise AssertionError("Lovasz's proof says that a hop can be taken")
        depths[target] = depths[source] + 1
        hops.append((depths[source], source, target))
    return hops


def _reached(
    rooms: dict[tuple[int, int], int], owners: Counter[int], rank: int, beside: int | None = None
) -> bool:
    """Whether a flow brings a chunk for each tree to a rank, from the owners and from ``beside``."""
    total = owners.total()
    sources: dict[Node, int] = {rank: number for rank, number in owners.items() if number}
    if beside is not None:
        sources[beside] = total
    network = {ORIGIN: sources}
    for (source, target), room in rooms.items():
        if room:
            network.setdefault(source, {})[target] = room
    return maximum_flow(network, ORIGIN, rank, total)[0] == total
