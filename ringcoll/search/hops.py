"""The hops of a topology: the pairs of ranks between which a search sends, and what they share.

A hop is a pair of ranks whose route passes no other rank, so a hop is a link, or a way through
switches. A *limit* is a link that several hops share, or the speed of one hop. Speeds are in chunks
a *round*, and a round is the time of one chunk on the slowest hop: the unit of SCCL.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from ringcoll.errors import ArgumentError
from ringcoll.simulation import Topology

_MOST_RANKS = 1 << 12
"""Ranks between which hops through switches are counted; they are as many as pairs."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Chunks that some hops, by their index, carry together in a round."""

    speed: Fraction
    hops: tuple[int, ...]


@dataclass(frozen=True)
class HopGraph:
    """The hops between ranks, and their limits.

    Parameters
    ----------
    world_size
        Number of ranks.
    hops
        Pairs of ranks, from and to.
    limits
        What hops carry in a round; each hop is in at least one limit.
    bandwidth
        Bytes per second of a hop that carries one chunk a round.
    """

    world_size: int
    hops: tuple[tuple[int, int], ...]
    limits: tuple[Limit, ...]
    bandwidth: Fraction

    @property
    def reversed(self) -> HopGraph:
        """The graph with all hops the other way."""
        return replace(self, hops=tuple((target, source) for source, target in self.hops))

    @property
    def both_ways(self) -> HopGraph | None:
        """The graph of the hops that have one back; ``None`` if they do not join all ranks."""
        pairs = set(self.hops)
        kept = [hop for hop, (source, target) in enumerate(self.hops) if (target, source) in pairs]
        graph = self._of(kept, Fraction(1))
        return graph if len(graph.distances(0)) == self.world_size else None

    @property
    def same_both_ways(self) -> bool:
        """Whether the reversed graph is the graph itself, so that a search serves both."""

        def limits(graph: HopGraph) -> list[tuple[Fraction, list[tuple[int, int]]]]:
            return sorted(
                (limit.speed, sorted(graph.hops[index] for index in limit.hops))
                for limit in graph.limits
            )

        return limits(self) == limits(self.reversed)

    def distances(self, source: int) -> dict[int, int]:
        """Fewest hops from a rank to each rank that it reaches."""
        distance = {source: 0}
        waiting = deque([source])
        while waiting:
            rank = waiting.popleft()
            for target in self.targets[rank]:
                if target not in distance:
                    distance[target] = distance[rank] + 1
                    waiting.append(target)
        return distance

    @property
    def targets(self) -> list[list[int]]:
        """The ranks that each rank sends to."""
        targets: list[list[int]] = [[] for _ in range(self.world_size)]
        for source, target in self.hops:
            targets[source].append(target)
        return targets

    def without_slow(self, speed: Fraction) -> HopGraph | None:
        """The graph without hops slower than a speed, which becomes a round; or ``None``.

        ``None`` if some ranks are not connected any more.
        """
        slow = {index for limit in self.limits if limit.speed < speed for index in limit.hops}
        graph = self._of([hop for hop in range(len(self.hops)) if hop not in slow], speed)
        ends = (graph.distances(0), graph.reversed.distances(0))
        return graph if all(len(reached) == self.world_size for reached in ends) else None

    def _of(self, kept: Sequence[int], speed: Fraction) -> HopGraph:
        """The graph of some hops, with a round in which a hop of such a speed carries a chunk."""
        number = {hop: place for place, hop in enumerate(kept)}
        limits = tuple(
            Limit(limit.speed / speed, tuple(number[hop] for hop in users))
            for limit in self.limits
            if (users := [hop for hop in limit.hops if hop in number])
        )
        hops = tuple(self.hops[hop] for hop in kept)
        return HopGraph(self.world_size, hops, limits, self.bandwidth * speed)


def hops_of(topology: Topology) -> HopGraph:
    """Find the hops of a topology, and what they share.

    Raises
    ------
    ArgumentError
        There are too many ranks for hops through switches.
    """
    routes = dict(_routes(topology))
    fastest = [
        min(Fraction(topology.links[index].fastest) for index in route) for route in routes.values()
    ]
    slowest = min(fastest, default=Fraction(1))
    users: dict[int, list[int]] = {}
    for hop, route in enumerate(routes.values()):
        for index in route:
            users.setdefault(index, []).append(hop)
    limits = [Limit(speed / slowest, (hop,)) for hop, speed in enumerate(fastest)]
    for index, hops in sorted(users.items()):
        capacity = topology.links[index].capacity
        if capacity is not None and capacity < sum(fastest[hop] for hop in hops):
            limits.append(Limit(Fraction(capacity) / slowest, tuple(hops)))
    return HopGraph(topology.world_size, tuple(routes), tuple(limits), slowest)


def _routes(topology: Topology) -> Iterator[tuple[tuple[int, int], tuple[int, ...]]]:
    """Each hop, with the indices of its links."""
    world_size = topology.world_size
    ends = [(link.source, link.target) for link in topology.links]
    if all(isinstance(node, int) for pair in ends for node in pair):
        pairs = {pair: None for pair in ends if pair[0] != pair[1]}
    elif world_size <= _MOST_RANKS:
        pairs = {(a, b): None for a in range(world_size) for b in range(world_size) if a != b}
    else:
        raise ArgumentError(
            "there are too many ranks below switches",
            argument="topology",
            expected=f"at most {_MOST_RANKS} ranks",
            got=world_size,
        )
    for source, target in pairs:
        assert isinstance(source, int)
        assert isinstance(target, int)
        route = topology.route(source, target)
        if all(isinstance(topology.links[index].target, str) for index in route[:-1]):
            yield (source, target), route
