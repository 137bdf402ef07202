"""Lower bounds of schedules on a topology, in steps, rounds and seconds; and simulated times.

Steps: a chunk needs as many steps as hops. Rounds per chunk: the blocks for a rank come through
every cut between their owners and the rank, so the data of a cut over the speed of its links is a
lower bound. Maximum flows find the worst cut, also through switches (L. Zhao et al., "ForestColl",
arXiv 2402.06787, section 4). Pipelined trees reach the bounds of an all-gather and a broadcast; the
bounds of other collectives may be too low.

Seconds: the latency of the way from a rank to a rank that needs its data. And for a set of ranks,
the data that it lacks, or that others need of it, over the narrowest cut around the set. The sets
are single ranks, the ranks below a switch, and ranks joined by links above a speed; on up to 32
ranks flows find the worst set of all, as for rounds.

In an all-reduce, and in each partition of the ranks into P parts, each element crosses between
parts P - 1 times to be reduced, and P - 1 times to be spread. So the links out of all parts carry
2 (P - 1) vectors; for P = k equal ranks, the well-known 2 (k - 1) / k vectors a rank (P. Patarasuk
and X. Yuan, 2009).

The time of a schedule is that in its best number of segments: 1, 4, 16, 64 or 256, until more gain
hardly anything. Where a run would take many seconds, and the schedule has at most 12 steps, the
time in more than 16 segments follows from runs of 16 segments and of as many as the schedule has
steps, 8 at least: by then each further segment takes as long as the one before. Such times of trees
were wrong by 0.4 % at most.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from math import inf
from typing import Any, NamedTuple

import networkx as nx
from networkx.algorithms.flow import edmonds_karp

from ringcoll.lab.search.hops import (
    Demand,
    HopGraph,
    demand_of,
    groups_of_ranks,
    hops_of,
    phases_of,
)
from ringcoll.lab.simulation import Node, Topology, simulate
from ringcoll.schedules import Contract, Schedule, contract, estimated_messages, step_count
from ringcoll.schedules.algorithms import Algorithm, algorithms

# Nodes before and behind several ranks; ranks begin at 0, and switches are words.
_ORIGIN: Node = -1
_END: Node = -2
_EXACT_RANKS = 32


def least_steps(graph: HopGraph, demand: Demand) -> int:
    """The most hops from an owner of a chunk to a rank that wants the chunk."""
    ways = {owner: graph.distances(owner) for owner in set(demand.owners)}
    wanted = zip(demand.owners, demand.wanted, strict=True)
    return max((ways[owner][rank] for owner, ranks in wanted for rank in ranks), default=0)


def least_rounds_per_chunk(
    topology: Topology, graph: HopGraph, demand: Demand, *, backwards: bool = False
) -> Fraction:
    """The rounds that a chunk of each block needs at least, if steps cost nothing."""
    arcs, back = ([*_arcs(topology, backwards=way)] for way in (backwards, not backwards))
    owners, wanted = demand.owners[:: demand.chunks], demand.wanted[:: demand.chunks]
    arriving: dict[int, Counter[int]] = defaultdict(Counter)  # blocks at a rank, by their owners
    leaving: dict[int, Counter[int]] = defaultdict(Counter)
    for owner, ranks in zip(owners, wanted, strict=True):
        for rank in sorted(ranks - {owner}):
            arriving[rank][owner] += 1
            leaving[owner][rank] += 1
    least = Fraction(0)
    for rank, blocks in arriving.items():
        least = _worst_cut(arcs, rank, blocks, least)
    if all(len(ranks - {owner}) <= 1 for owner, ranks in zip(owners, wanted, strict=True)):
        # Each block goes to one rank, so what leaves an owner is a flow, too: seen backwards.
        for owner, blocks in leaving.items():
            least = _worst_cut(back, owner, blocks, least)
    return least * graph.bandwidth


_Arc = tuple[Node, Node, Any]
"""From a node, to a node, and bytes per second: a fraction, or infinity."""


def _network(arcs: Iterable[_Arc]) -> nx.DiGraph:
    """A network for flows; arcs of the same ends are one."""
    network = nx.DiGraph()
    for source, target, speed in arcs:
        known = network.get_edge_data(source, target, {"capacity": 0})["capacity"]
        network.add_edge(source, target, capacity=known + speed)
    return network


def _arcs(topology: Topology, *, backwards: bool = False) -> Iterator[_Arc]:
    for link in topology.links:
        speed = inf if link.capacity is None else Fraction(link.capacity)
        ends = (link.target, link.source) if backwards else (link.source, link.target)
        yield (*ends, speed)


def _cut(network: nx.DiGraph) -> tuple[Any, set[Node]]:
    """The largest flow from the origin to the end, and the nodes before the narrowest cut."""
    try:
        flow, (near, _) = nx.minimum_cut(network, _ORIGIN, _END, flow_func=edmonds_karp)
    except nx.NetworkXUnbounded:
        return inf, set()
    return flow, near


def _worst_cut(arcs: Sequence[_Arc], sink: int, amounts: Counter[int], least: Fraction) -> Fraction:
    """The time until all amounts can have reached a rank, and at least ``least``."""
    if not least:  # ranks from which no link to the sink can be full need no time
        never_full = nx.DiGraph((b, a) for a, b, speed in arcs if speed == inf)
        free = {sink, *(nx.descendants(never_full, sink) if sink in never_full else ())}
        amounts = Counter({rank: each for rank, each in amounts.items() if rank not in free})
    while amounts:
        rooms = [(_ORIGIN, rank, each / least if least else inf) for rank, each in amounts.items()]
        flow, near = _cut(_network([*arcs, *rooms, (sink, _END, inf)]))
        if flow == sum(room for *_, room in rooms):
            return least
        # The data that have to leave these nodes, over the speed of the links that leave them.
        speed = sum(speed for a, b, speed in arcs if a in near and b not in near)
        least = sum(amount for owner, amount in amounts.items() if owner in near) / speed
    return least


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
    >>> from ringcoll.lab.simulation import topology_from_text
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
    sources: list[set[int]] = []
    for rank in range(world_size):
        blocks = rules.outputs(rank, world_size, root)
        if rules.reduces:
            sources.append(set(range(rules.contributors(rank, world_size))) if blocks else set())
        else:
            sources.append({rules.owner(block, world_size, root) for block in blocks})
    network = nx.MultiDiGraph()
    for link in topology.links:
        network.add_edge(link.source, link.target, latency_s=float(link.latency_s))
    most, ends = 0.0, (0, 0)
    for source in range(world_size):
        distances = nx.single_source_dijkstra_path_length(network, source, weight="latency_s")
        for rank, needed in enumerate(sources):
            if source in needed and rank != source and distances[rank] > most:
                most, ends = distances[rank], (source, rank)
    return most + float(topology.alpha_s), f"the way from rank {ends[0]} to rank {ends[1]}"


def _of_sets(
    rules: Contract, topology: Topology, graph: HopGraph, root: int
) -> Iterator[tuple[float, str]]:
    """Seconds for each byte that sets of ranks need at least, and the set in words."""
    world_size = topology.world_size
    everyone = frozenset(range(world_size))
    whole = rules.blocks_of_rank(world_size)

    @cache
    def speed(sources: frozenset[int], sinks: frozenset[int]) -> float:
        """Bytes per second from ranks to others; as one node each, they make a small network."""
        names: dict[Node, Node] = {
            **dict.fromkeys(sources, _ORIGIN),
            **dict.fromkeys(sinks, _END),
        }
        arcs = ((names.get(a, a), names.get(b, b), room) for a, b, room in _arcs(topology))
        return float(_cut(_network(arcs))[0])

    def entering(ranks: frozenset[int]) -> int:
        if rules.reduces:
            needed = {rank: {*range(rules.contributors(rank, world_size))} for rank in ranks}
            lacking = [rank for rank in ranks if not ranks >= needed[rank]]
            return len({b for rank in lacking for b in rules.outputs(rank, world_size, root)})
        wanted = {b for rank in ranks for b in rules.outputs(rank, world_size, root)}
        return len(wanted.difference(*(rules.inputs(rank, world_size, root) for rank in ranks)))

    each_rank = [frozenset([rank]) for rank in range(world_size)]
    for partition in [each_rank, *groups_of_ranks(topology, graph)]:
        words = [
            f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"
            for ranks in partition
        ]
        for ranks, name in zip(partition, words, strict=True):
            for inner, outer in ((ranks, everyone - ranks), (everyone - ranks, ranks)):
                needed_s = entering(inner) / whole / speed(outer, inner)
                yield needed_s, f"the links around {name}"
        if len(rules.phases) == 2 and len(partition) > 2:
            speeds = [speed(ranks, everyone - ranks) for ranks in partition]
            needed_s = 2 * (len(partition) - 1) / sum(speeds)
            yield needed_s, f"the links between {words[0]} and the like"
    if len(rules.phases) == 2 and world_size <= _EXACT_RANKS:
        for rank in range(1, world_size):
            for a, b in ((0, rank), (rank, 0)):
                s_per_byte = 1 / speed(frozenset([a]), frozenset([b]))
                yield s_per_byte, f"the narrowest cut between rank {a} and rank {b}"


MOST_MESSAGES = 1 << 18
"""Messages of all segments in a run: 3 s by events, and there are some 25 algorithms."""
MIN_SPEEDUP = 1.03
"""Times as fast, which is not worth more messages: a model is not better, and messages cost."""
_EXACT_MESSAGES = 1 << 13  # of a run by events that is not shortened
_SEGMENTS = (4, 16, 64, 256)
_FEW_SEGMENTS, _MOST_STEPS, _MANY_SEGMENTS = 8, 12, 16


class SearchTime(NamedTuple):
    """Simulated seconds of a schedule, in its best number of segments."""

    seconds: float
    algorithm: str
    segments: int


class RunTime(NamedTuple):
    """Seconds of a simulated run, those that its busiest link needs, and the engine."""

    seconds: float
    busiest_s: float
    engine: str


class TimesOnNetwork:
    """Times of schedules on a topology; runs of one length of a segment serve several sizes."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self._runs: dict[tuple[int, int, int], tuple[Schedule, RunTime]] = {}  # by identity

    def run(self, schedule: Schedule, nbytes: int, segments: int = 1) -> RunTime:
        """Simulate a schedule."""
        key = id(schedule), nbytes, segments
        if key not in self._runs:
            run = simulate(schedule, nbytes, self.topology, segments=segments)
            time = RunTime(float(run.seconds), float(run.busiest_s), run.engine)
            self._runs[key] = schedule, time
        return self._runs[key][1]

    def best(self, schedule: Schedule, nbytes: int, messages: int) -> SearchTime:
        """The time of a schedule of so many messages, in its best number of segments."""
        whole, many = self.run(schedule, nbytes), _MANY_SEGMENTS
        best = SearchTime(whole.seconds, schedule.algorithm, 1)
        for segments in _SEGMENTS:
            if messages * segments > MOST_MESSAGES or best.seconds <= MIN_SPEEDUP * whole.busiest_s:
                break  # with any segments the busiest link takes as long
            is_long = whole.engine == "events" and messages * segments > _EXACT_MESSAGES
            if is_long and segments > many and (steps := step_count(schedule)) <= _MOST_STEPS:
                few = max(_FEW_SEGMENTS, steps)
                few_s, many_s = (
                    self.run(schedule, max(1, nbytes * number // segments), number).seconds
                    for number in (few, many)
                )
                seconds = many_s + (segments - many) * (many_s - few_s) / (many - few)
            else:
                seconds = self.run(schedule, nbytes, segments).seconds
            if seconds >= best.seconds / MIN_SPEEDUP:
                break
            best = SearchTime(seconds, schedule.algorithm, segments)
        return best


def fastest_times(
    schedules: Iterable[Schedule], topology: Topology, nbytes: int
) -> list[SearchTime]:
    """Simulate each schedule, in its best number of segments."""
    times = TimesOnNetwork(topology)
    return [
        times.best(schedule, nbytes, estimated_messages(schedule, MOST_MESSAGES))
        for schedule in schedules
    ]


def registered_times(
    collective: str,
    topology: Topology,
    nbytes: int,
    root: int = 0,
    advance: Callable[[str], object] = lambda name: None,
    entries: Iterable[Algorithm] | None = None,
) -> list[SearchTime]:
    """Simulate every registered algorithm of a collective, or ``entries``, the fastest first.

    Each is simulated in its best number of segments. Algorithms that need to know hosts get two.
    Those with too many messages are left out. ``advance`` is called with the name of each.
    """
    world_size = topology.world_size
    best, times = [], TimesOnNetwork(topology)
    for entry in algorithms(collective, world_size) if entries is None else entries:
        advance(entry.name)
        schedule = entry.schedule(world_size, root)
        messages = estimated_messages(schedule, MOST_MESSAGES)
        if messages <= MOST_MESSAGES:
            best.append(times.best(schedule, nbytes, messages))
    return sorted(best)
