"""Lower bounds that no schedule on a topology beats.

Steps: a chunk needs as many steps as hops. Rounds per chunk: whoever wants blocks gets them through
every cut between their owners and itself, so the data of a cut, over the speed of its links, is a
time that no schedule is below. The worst cut is found by maximum flows, also through switches
(L. Zhao et al., "ForestColl", arXiv 2402.06787, section 4). For an all-gather and a broadcast the bound
is reached by trees that are pipelined; for other collectives it may be too low.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from fractions import Fraction
from math import lcm

from ringcoll.search.demand import Demand
from ringcoll.search.flow import ORIGIN, maximum_flow
from ringcoll.search.hops import HopGraph
from ringcoll.simulation import Node, Topology


def least_steps(graph: HopGraph, demand: Demand) -> int:
    """The most hops from an owner of a chunk to a rank that wants the chunk."""
    targets: dict[int, set[int]] = defaultdict(set)
    for owner, wanted in zip(demand.owners, demand.wanted, strict=True):
        targets[owner] |= wanted
    return max(
        (distances[rank] for owner, ranks in targets.items()
         for distances in [graph.distances(owner)] for rank in ranks),
        default=0,
    )  # fmt: skip


def least_rounds_per_chunk(
    topology: Topology, graph: HopGraph, demand: Demand, *, backwards: bool = False
) -> Fraction:
    """The rounds that a chunk of each block needs at least, if steps cost nothing.

    Examples
    --------
    >>> from ringcoll.search import demand_of
    >>> from ringcoll.search import hops_of
    >>> from ringcoll.simulation import dgx1
    >>> str(least_rounds_per_chunk(dgx1(), hops_of(dgx1()), demand_of("all_gather", 8)))
    '7/6'
    """
    speeds = _speeds(topology, graph, backwards)
    owners, wanted = demand.owners[:: demand.chunks], demand.wanted[:: demand.chunks]
    pairs = [
        (owner, rank)
        for owner, ranks in zip(owners, wanted, strict=True)
        for rank in sorted(ranks - {owner})
    ]
    least = Fraction(0)
    for sink, amounts in _by_second(pairs).items():
        least = _worst_cut(speeds, sink, amounts, least)
    if all(len(ranks - {owner}) <= 1 for owner, ranks in zip(owners, wanted, strict=True)):
        # Each block goes to one rank, so what leaves an owner is a flow, too: seen backwards.
        speeds = _speeds(topology, graph, not backwards)
        for source, amounts in _by_second((rank, owner) for owner, rank in pairs).items():
            least = _worst_cut(speeds, source, amounts, least)
    return least


_Speeds = dict[Node, dict[Node, Fraction | None]]
"""Chunks a round on each link, by its ends; ``None`` if the link is never full."""


def _speeds(topology: Topology, graph: HopGraph, backwards: bool) -> _Speeds:
    speeds: _Speeds = defaultdict(dict)
    for link in topology.links:
        source, target = (link.target, link.source) if backwards else (link.source, link.target)
        before = speeds[source].get(target, Fraction(0))
        speeds[source][target] = (
            None
            if link.capacity is None or before is None
            else before + Fraction(link.capacity) / graph.bandwidth
        )
    return speeds


def _by_second(pairs: Iterable[tuple[int, int]]) -> dict[int, Counter[int]]:
    """How often each rank occurs before each other one."""
    amounts: dict[int, Counter[int]] = defaultdict(Counter)
    for first, second in pairs:
        amounts[second][first] += 1
    return amounts


def _worst_cut(speeds: _Speeds, sink: int, amounts: Counter[int], least: Fraction) -> Fraction:
    """The rounds until all amounts can have reached a rank, and at least ``least``."""
    total = amounts.total()
    while True:
        rooms = {
            source: {
                target: Fraction(total) if speed is None else least * speed
                for target, speed in arcs.items()
            }
            for source, arcs in speeds.items()
        }
        scale = lcm(*(room.denominator for arcs in rooms.values() for room in arcs.values()))
        network: dict[Node, dict[Node, int]] = {
            source: {target: int(room * scale) for target, room in arcs.items()}
            for source, arcs in rooms.items()
        }
        network[ORIGIN] = {owner: amount * scale for owner, amount in amounts.items()}
        _, near = maximum_flow(network, ORIGIN, sink, total * scale)
        if not near:
            return least
        # The data that have to leave these nodes, over the speed of the links that leave them.
        leaving = [
            speed
            for source in near & speeds.keys()
            for target, speed in speeds[source].items()
            if target not in near and speed is not None
        ]
        amount = sum(amount for owner, amount in amounts.items() if owner in near)
        least = Fraction(amount) / sum(leaving, Fraction(0))
