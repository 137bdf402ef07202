"""Networks that look the same from every p-th rank: then p ranks stand for all of them.

Let the programs be turned ones (`ringcoll.simulation.rotations`), so that rank r + p sends to peer + p
whatever rank r sends to peer. If the links on the way are alike as well, and so are late and slow
ranks, then rank r + p has the times of rank r: the events of ranks 0 to p - 1 are those of all.

It is proved link by link, for all messages. The route of each message, turned by p ranks, has to
lead over other links *of the same numbers*, and a link has to be turned to the same link in every
route that it is a link of. So the turn is a permutation of the links; it does not
matter what the topology is called, or who made it. The links that turn into each other are an
*orbit*, of which one link stands for all. A message of rank r that crosses an orbit twice, as on a ring of
cables, meets itself there: it shares a link with the message of another rank, which is at the other place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ringcoll.simulation.links import Link, Number
from ringcoll.simulation.topology import Topology
from ringcoll.simulation.waves import RankWave


@dataclass(frozen=True, slots=True)
class Folding:
    """Ranks and links that stand for others.

    Parameters
    ----------
    period
        Ranks 0 to ``period - 1`` stand for all: rank r does what rank ``r % period`` does.
    standing_in
        The link that stands for each link, itself if it is alone.
    crossings
        Messages that cross each link where one message of ranks 0 to ``period - 1`` crosses the link that
        stands for it.
    """

    period: int
    standing_in: Sequence[int]
    crossings: Sequence[int]

    @classmethod
    def none(cls, topology: Topology) -> Folding:
        """Every rank, and every link, stands for itself."""
        links = len(topology.links)
        return cls(topology.world_size, range(links), [1] * links)


def folded(
    topology: Topology, programs: Sequence[Sequence[RankWave]], *of_ranks: Mapping[int, Number]
) -> Folding | None:
    """Find the fewest ranks that stand for all."""
    world_size = topology.world_size
    distances = [{peer for wave in steps for peer, *_ in wave.sends} for steps in programs]
    for period in range(len(programs), world_size // 2 + 1, len(programs)):
        if world_size % period or not all(
            numbers.get((rank + period) % world_size) == number
            for numbers in of_ranks
            for rank, number in numbers.items()
        ):
            continue
        turn = _turn(topology, distances, period)
        if turn is not None:
            return _folding(topology, turn, period)
    return None


def _turn(topology: Topology, distances: list[set[int]], period: int) -> dict[int, int] | None:
    """The link that each link becomes in a turn by ``period`` ranks, if all messages agree on it."""
    turn: dict[int, int] = {}
    for rank in range(period):
        for distance in distances[rank % len(distances)]:
            routes = _routes(topology, rank, distance, period)
            before = next(routes)
            for route in routes:
                if len(route) != len(before):
                    return None
                for old, new in zip(before, route, strict=True):
                    known = turn.get(old)
                    if known is None and _alike(topology.links[old], topology.links[new]):
                        turn[old] = new
                    elif known != new:
                        return None
                before = route
    return turn


def _routes(topology: Topology, rank: int, distance: int, period: int) -> Iterator[tuple[int, ...]]:
    """The routes from a rank, and from those that are turned, once around, to a distance."""
    world_size = topology.world_size
    for source in (*range(rank, world_size, period), rank):
        yield topology.route(source, (source + distance) % world_size)


def _alike(first: Link, second: Link) -> bool:
    return (first.bandwidth, first.latency_s, first.lanes) == (
        second.bandwidth,
        second.latency_s,
        second.lanes,
    )


def _folding(topology: Topology, turn: dict[int, int], period: int) -> Folding:
    turns = topology.world_size // period
    standing_in = list(range(len(topology.links)))
    crossings = [1] * len(topology.links)
    seen: set[int] = set()
    for first in turn:
        orbit: dict[int, None] = {}
        link = first
        while link not in seen:
            seen.add(link)
            orbit[link] = None
            link = turn[link]
        for link in orbit:
            standing_in[link] = first
            crossings[link] = turns // len(orbit)
    return Folding(period, standing_in, crossings)
