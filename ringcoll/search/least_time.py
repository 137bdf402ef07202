"""Lower bounds in seconds that no schedule on a topology beats.

Latency: data go from each rank to each rank that needs them, over links that each have a latency. Bandwidth:
what a set of ranks lacks has to come in over the links around the set, and what others need of it has to go
out; the links around a set are its narrowest cut, by a maximum flow through the switches. The sets are single
ranks, the ranks below a switch, and those joined by links above a speed; on up to 32 ranks, flows find the
worst set of all (`ringcoll.search.bounds`).

An all-reduce has one more bound: in each partition of the ranks into P parts each element crosses between parts
P - 1 times to be reduced, and P - 1 times to be spread, so the links out of all parts carry 2 (P - 1) vectors.
For P = k equal ranks that is the well-known 2 (k - 1) / k vectors a rank (P. Patarasuk and X. Yuan, 2009).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from heapq import heappop, heappush
from math import ceil, inf

from ringcoll.schedule import Contract, contract
from ringcoll.search.bounds import least_rounds_per_chunk
from ringcoll.search.demand import demand_of, phases_of
from ringcoll.search.flow import ORIGIN, maximum_flow
from ringcoll.search.hops import HopGraph, hops_of
from ringcoll.search.near_ranks import groups_of_ranks
from ringcoll.simulation import Node, Topology

_END: Node = -2
_EXACT_RANKS = 32
_STEPS = 1 << 40


@dataclass(frozen=True, slots=True)
class LeastTime:
    """The least seconds of a collective on a topology, and what they are due to.

    Parameters
    ----------
    latency_s
        Seconds from the farthest rank to the rank that needs its data.
    s_per_byte
        Seconds for each byte of the whole data, by the narrowest cut.
    farthest, narrowest
        The two ranks, and the cut, in words.
    """

    latency_s: float
    s_per_byte: float
    farthest: str
    narrowest: str

    def seconds(self, nbytes: int) -> float:
        """The bound for so many bytes of the whole data."""
        return max(self.latency_s, nbytes * self.s_per_byte)

    def reason(self, nbytes: int) -> str:
        """The pair of ranks, or the cut, that the bound is due to."""
        return self.farthest if nbytes * self.s_per_byte < self.latency_s else self.narrowest


def least_time(collective: str, topology: Topology, root: int = 0) -> LeastTime:
    r"""Find the least seconds that a collective takes on a topology, whatever the schedule.

    Examples
    --------
    >>> from ringcoll.simulation import topology_from_text
    >>> line = topology_from_text("0 -- 1 10 1" "\n" "1 -- 2 0.5 1")
    >>> bound = least_time("all_reduce", line)
    >>> round(bound.seconds(1 << 20) * 1e6), bound.narrowest
    (2097, 'the links around rank 2')
    """
    rules = contract(collective)
    if topology.world_size == 1:
        return LeastTime(0.0, 0.0, "one rank", "one rank")
    graph = hops_of(topology)
    latency_s, farthest = _farthest(rules, topology, root)
    bounds = [*_of_sets(rules, topology, graph, root)]
    phases = phases_of(collective)
    if len(phases) == 1 and topology.world_size <= _EXACT_RANKS:
        base, backwards = phases[0]
        turned = graph.reversed if backwards else graph
        demand = demand_of(base, topology.world_size, 1, root)
        rounds = least_rounds_per_chunk(topology, turned, demand, backwards=backwards)
        block = Fraction(1, rules.blocks_of_rank(topology.world_size))
        bounds.append((float(rounds * block / graph.bandwidth), "the narrowest cut"))
    # Of equal bounds the first is named.
    s_per_byte, narrowest = max(bounds, key=lambda bound: bound[0], default=(0.0, "no link"))
    return LeastTime(latency_s, s_per_byte, farthest, narrowest)


def _farthest(rules: Contract, topology: Topology, root: int) -> tuple[float, str]:
    """The largest latency between ranks of which one needs data of the other."""
    world_size = topology.world_size
    sources: dict[int, set[int]] = {}
    for rank in range(world_size):
        blocks = rules.outputs(rank, world_size, root)
        if rules.reduces:
            sources[rank] = set(range(rules.contributors(rank, world_size))) if blocks else set()
        else:
            sources[rank] = {rules.owner(block, world_size, root) for block in blocks}
    most, ends = 0.0, (0, 0)
    for source in range(world_size):
        distances = _latencies(topology, source)
        for rank, needed in sources.items():
            if source in needed and rank != source and distances[rank] > most:
                most, ends = distances[rank], (source, rank)
    return most + float(topology.alpha_s), f"the way from rank {ends[0]} to rank {ends[1]}"


def _latencies(topology: Topology, source: int) -> dict[Node, float]:
    """Seconds from a rank to each node, on the ways with the least latency (E. W. Dijkstra, 1959)."""
    leaving: dict[Node, list[tuple[Node, float]]] = {}
    for link in topology.links:
        leaving.setdefault(link.source, []).append((link.target, float(link.latency_s)))
    distances: dict[Node, float] = {}
    waiting: list[tuple[float, str, Node]] = [(0.0, "", source)]
    while waiting:
        seconds, _, node = heappop(waiting)
        if node not in distances:
            distances[node] = seconds
            for target, latency_s in leaving.get(node, ()):
                heappush(waiting, (seconds + latency_s, str(target), target))
    return distances


def _of_sets(
    rules: Contract, topology: Topology, graph: HopGraph, root: int
) -> Iterator[tuple[float, str]]:
    """Seconds for each byte that sets of ranks need at least, and the set in words."""
    world_size = topology.world_size
    everyone = frozenset(range(world_size))
    whole = rules.blocks_of_rank(world_size)
    speeds: dict[frozenset[int], float] = {}

    def speed_out(ranks: frozenset[int]) -> float:
        if ranks not in speeds:
            speeds[ranks] = _flow(topology, ranks, everyone - ranks)
        return speeds[ranks]

    def entering(ranks: frozenset[int]) -> int:
        if rules.reduces:
            lacking = [
                rank
                for rank in ranks
                if not ranks >= {*range(rules.contributors(rank, world_size))}
            ]
            return len({b for rank in lacking for b in rules.outputs(rank, world_size, root)})
        wanted = {b for rank in ranks for b in rules.outputs(rank, world_size, root)}
        return len(wanted.difference(*(rules.inputs(rank, world_size, root) for rank in ranks)))

    for partition, words in _partitions(topology, graph):
        for ranks, name in zip(partition, words, strict=True):
            for inner, outer in ((ranks, everyone - ranks), (everyone - ranks, ranks)):
                needed_s = entering(inner) / whole / speed_out(outer)
                yield needed_s, f"the links around {name}"
        if len(rules.phases) == 2 and len(partition) > 2:
            out_of_all = sum(map(speed_out, partition))
            yield (
                2 * (len(partition) - 1) / out_of_all,
                f"the links between {words[0]} and the like",
            )
    if len(rules.phases) == 2 and world_size <= _EXACT_RANKS:
        for rank in range(1, world_size):
            for ends in ((0, rank), (rank, 0)):
                speed = _flow(topology, frozenset(ends[:1]), frozenset(ends[1:]))
                yield 1 / speed, f"the narrowest cut between rank {ends[0]} and rank {ends[1]}"


def _partitions(
    topology: Topology, graph: HopGraph
) -> Iterator[tuple[list[frozenset[int]], list[str]]]:
    """The ranks one by one, by their switch, and joined by hops above each speed; with words for the parts."""
    ranks = range(topology.world_size)
    yield [frozenset([rank]) for rank in ranks], [f"rank {rank}" for rank in ranks]
    for groups in groups_of_ranks(topology, graph):
        yield groups, [f"ranks {', '.join(map(str, sorted(group)))}" for group in groups]


def _flow(topology: Topology, sources: frozenset[int], sinks: frozenset[int]) -> float:
    """Bytes a second that can leave some ranks for others at most, over all links together."""
    limited = [link.capacity for link in topology.links if link.capacity is not None]
    scale = _STEPS / float(max(limited, default=1))  # flows are of whole numbers
    endless = _STEPS * (1 + len(limited))
    capacities: dict[Node, dict[Node, int]] = {}
    for link in topology.links:
        room = endless if link.capacity is None else ceil(float(link.capacity) * scale)
        arcs = capacities.setdefault(link.source, {})
        arcs[link.target] = arcs.get(link.target, 0) + room
    capacities[ORIGIN] = dict.fromkeys(sources, endless)
    for rank in sinks:
        capacities.setdefault(rank, {})[_END] = endless
    flow, _ = maximum_flow(capacities, ORIGIN, _END, endless)
    return inf if flow >= endless else flow / scale
