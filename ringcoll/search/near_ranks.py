"""Ranks that are near each other on a network: those of one host, below one switch, or joined by fast hops."""

from __future__ import annotations

from collections.abc import Iterable

from ringcoll.cost import numbered
from ringcoll.search.hops import HopGraph, hops_of
from ringcoll.simulation import Node, Topology


def near_ranks(topology: Topology) -> tuple[int, ...]:
    """A number for the group of each rank: its host, the ranks below its switch, or all that fast links join."""
    if (hosts := hosts_named(topology)) is not None:
        return hosts
    groups = groups_of_ranks(topology, hops_of(topology))
    if not groups:
        return (0,) * topology.world_size
    number = {rank: index for index, ranks in enumerate(groups[0]) for rank in ranks}
    return numbered(tuple(number[rank] for rank in range(topology.world_size)))


def hosts_named(topology: Topology) -> tuple[int, ...] | None:
    """The host of each rank, if each rank has a link to a node that is named ``host`` and something more."""
    names = {
        link.source: link.target
        for link in topology.links
        if isinstance(link.target, str) and link.target.startswith("host")
    }
    ranks = range(topology.world_size)
    return numbered(tuple(names[rank] for rank in ranks)) if names.keys() >= {*ranks} else None


def groups_of_ranks(topology: Topology, graph: HopGraph) -> list[list[frozenset[int]]]:
    """The ranks in groups that are near each other: below one switch, or joined by hops above some speed."""
    switches: dict[Node, set[int]] = {}
    for link in topology.links:
        if isinstance(link.source, int) and isinstance(link.target, str):
            switches.setdefault(link.target, set()).add(link.source)
    found = [_joined(topology.world_size, [sorted(ranks) for ranks in switches.values()])]
    speeds = {
        hop: limit.speed for limit in graph.limits if len(limit.hops) == 1 for hop in limit.hops
    }
    for least in sorted(set(speeds.values()))[:8]:
        fast = [graph.hops[hop] for hop, speed in speeds.items() if speed > least]
        found.append(_joined(topology.world_size, fast))
    kept: list[list[frozenset[int]]] = []
    for groups in found:
        if 1 < len(groups) < topology.world_size and groups not in kept:
            kept.append(groups)
    return kept


def _joined(world_size: int, sets: Iterable[Iterable[int]]) -> list[frozenset[int]]:
    """Groups of ranks that are joined by sets of which they are members."""
    group: dict[int, set[int]] = {rank: {rank} for rank in range(world_size)}
    for members in sets:
        first, *others = members
        for other in others:
            if group[other] is not group[first]:
                group[first] |= group[other]
                for rank in group[other]:
                    group[rank] = group[first]
    return list(dict.fromkeys(frozenset(ranks) for ranks in group.values()))
