"""The hops of a topology: pairs of ranks between which a search sends; and which ranks are near.

A hop is a pair of ranks whose route passes no other rank, so a hop is a link, or a way through
switches. A *limit* is a link that several hops share, or the speed of one hop. Speeds are in chunks
a *round*, and a round is the time of one chunk on the slowest hop: the unit of SCCL. Ranks are near
each other if they are of one host, below one switch, or joined by fast hops.

Orders of ranks. Most algorithms send between ranks of near numbers, but numbers are given without
regard to the network. The best cyclic order is a travelling salesman's tour: in it, messages from
each rank to the next, there and back, take the least time in all. All tours are tried on up to 8
ranks, in ``(k - 1)!`` trials. On more ranks the tour that goes to the nearest rank next is improved
by turning pieces round (2-opt: G. A. Croes, 1958) until no turn helps, in passes of ``k ** 2``.

Demands of a collective are read from the contracts, so every collective that reduces nothing can be
searched for. A collective that reduces is one of these backwards, with messages the other way in
the opposite order of steps: a reduce-scatter is an all-gather, a reduce is a broadcast. An
all-reduce is a reduce-scatter, and then an all-gather. Source: Z. Cai et al., "Synthesizing Optimal
Collective Algorithms", arXiv 2008.08708, sections 3.3 and 3.4.

A search answers with *moves*: in each step, which chunk goes from which rank to which. Every rank
that gets a chunk gets it once, so the moves of a chunk are a tree that begins at its owner.
Backwards the same tree reduces the chunk: each rank adds the chunks of its children to its own, and
sends the sum to its parent. Chunks that a rank holds for others only are in scratch memory.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from heapq import heappop, heappush
from itertools import pairwise, permutations
from typing import NamedTuple

import networkx as nx

from ringcoll.errors import ArgumentError
from ringcoll.lab.simulation import Node, Topology
from ringcoll.schedules import (
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
from ringcoll.schedules.algorithms import alone
from ringcoll.schedules.cost import numbered

_MOST_RANKS = 1 << 12
"""Ranks between which hops through switches are counted; they are as many as pairs."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Chunks that some hops, by their index, carry together in a round."""

    speed: Fraction
    hops: tuple[int, ...]


@dataclass(frozen=True)
class HopGraph:
    """The hops between ranks, and their limits; each hop is in at least one limit."""

    world_size: int
    hops: tuple[tuple[int, int], ...]
    limits: tuple[Limit, ...]
    bandwidth: Fraction  # bytes per second of a hop that carries one chunk a round

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
        return graph if nx.is_strongly_connected(graph.network) else None

    @property
    def limits_of_hops(self) -> list[list[int]]:
        """The numbers of the limits of each hop."""
        numbers: list[list[int]] = [[] for _ in self.hops]
        for number, limit in enumerate(self.limits):
            for hop in limit.hops:
                numbers[hop].append(number)
        return numbers

    @property
    def same_both_ways(self) -> bool:
        """Whether the reversed graph is the graph itself, so that a search serves both."""

        def limits(graph: HopGraph) -> Counter[tuple[Fraction, frozenset[tuple[int, int]]]]:
            return Counter(
                (limit.speed, frozenset(graph.hops[index] for index in limit.hops))
                for limit in graph.limits
            )

        return limits(self) == limits(self.reversed)

    @cached_property
    def network(self) -> nx.DiGraph:
        """The hops as arcs between ranks."""
        network = nx.DiGraph()
        network.add_nodes_from(range(self.world_size))
        network.add_edges_from(self.hops)
        return network

    def distances(self, source: int) -> dict[int, int]:
        """Fewest hops from a rank to each rank that it reaches."""
        return dict(nx.single_source_shortest_path_length(self.network, source))

    def without_slow(self, speed: Fraction) -> HopGraph | None:
        """The graph without hops slower than a round's speed; ``None`` if it is not connected."""
        slow = {index for limit in self.limits if limit.speed < speed for index in limit.hops}
        graph = self._of([hop for hop in range(len(self.hops)) if hop not in slow], speed)
        return graph if nx.is_strongly_connected(graph.network) else None

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


_MOST_TIMES = 1 << 40  # a solver computes with whole numbers of 64 bits


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
    if max(fastest, default=slowest) > _MOST_TIMES * slowest:
        message = "the fastest way between two ranks is too many times as fast as the slowest one"
        expected = f"at most {_MOST_TIMES} times"
        got = f"{float(max(fastest)):g} and {float(slowest):g} bytes per second"
        raise ArgumentError(message, "topology", expected, got)
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
    pairs: Iterable[tuple[Node, Node]]
    if all(isinstance(node, int) for pair in ends for node in pair):
        pairs = dict.fromkeys(pair for pair in ends if pair[0] != pair[1])
    elif world_size <= _MOST_RANKS:
        pairs = permutations(range(world_size), 2)
    else:
        message = "there are too many ranks below switches"
        raise ArgumentError(message, "topology", f"at most {_MOST_RANKS} ranks", world_size)
    for source, target in pairs:
        assert isinstance(source, int)
        assert isinstance(target, int)
        route = topology.route(source, target)
        if all(isinstance(topology.links[index].target, str) for index in route[:-1]):
            yield (source, target), route


def near_ranks(topology: Topology) -> tuple[int, ...]:
    """The group of each rank: its host, the ranks below its switch, or all joined by fast links."""
    if (hosts := hosts_named(topology)) is not None:
        return hosts
    groups = groups_of_ranks(topology, hops_of(topology))
    if not groups:
        return (0,) * topology.world_size
    number = {rank: index for index, ranks in enumerate(groups[0]) for rank in ranks}
    return numbered(tuple(number[rank] for rank in range(topology.world_size)))


def hosts_named(topology: Topology) -> tuple[int, ...] | None:
    """The host of each rank, if each has a link to a node whose name begins with ``host``."""
    names = {
        link.source: link.target
        for link in topology.links
        if isinstance(link.target, str) and link.target.startswith("host")
    }
    ranks = range(topology.world_size)
    return numbered(tuple(names[rank] for rank in ranks)) if names.keys() >= {*ranks} else None


def groups_of_ranks(topology: Topology, graph: HopGraph) -> list[list[frozenset[int]]]:
    """The ranks in groups: those below one switch, then those joined by hops above each speed."""
    switches: dict[Node, set[int]] = {}
    for link in topology.links:
        if isinstance(link.source, int) and isinstance(link.target, str):
            switches.setdefault(link.target, set()).add(link.source)
    partitions = [_joined(topology.world_size, [sorted(ranks) for ranks in switches.values()])]
    speeds = {
        hop: limit.speed for limit in graph.limits if len(limit.hops) == 1 for hop in limit.hops
    }
    for least in sorted(set(speeds.values()))[:8]:
        fast = [graph.hops[hop] for hop, speed in speeds.items() if speed > least]
        partitions.append(_joined(topology.world_size, fast))
    kept: list[list[frozenset[int]]] = []
    for groups in partitions:
        if 1 < len(groups) < topology.world_size and groups not in kept:
            kept.append(groups)
    return kept


def _joined(world_size: int, sets: Iterable[Iterable[int]]) -> list[frozenset[int]]:
    """Groups of ranks that are joined by sets of which they are members."""
    graph = nx.empty_graph(world_size)
    for members in sets:
        nx.add_path(graph, members)
    return [frozenset(ranks) for ranks in nx.connected_components(graph)]


_ALL_TOURS = 8
_PASSES = 20
_Costs = list[list[float]]


def near_order(topology: Topology, nbytes: int) -> tuple[int, ...]:
    r"""Find the order of ranks whose tour takes the least time; its longest way is the last.

    Messages have so many bytes.

    Examples
    --------
    >>> from ringcoll.lab.simulation import topology_from_text
    >>> cables = "0 -- 2 10 1" "\n" "2 -- 1 10 1" "\n" "1 -- 3 10 1" "\n" "3 -- 0 10 1"
    >>> near_order(topology_from_text(cables), 1 << 20)
    (0, 2, 1, 3)
    """
    ranks = range(topology.world_size)
    if len(ranks) <= 3:
        return tuple(ranks)
    one_way = [[_seconds(topology, a, b, nbytes) for b in ranks] for a in ranks]
    costs = [[one_way[a][b] + one_way[b][a] for b in ranks] for a in ranks]
    if len(ranks) <= _ALL_TOURS:
        tours = ([0, *rest] for rest in permutations(ranks[1:]) if rest[0] < rest[-1])
        best = min(tours, key=lambda tour: sum(_ways(tour, costs)))
    else:
        best = _improved(_nearest(costs), costs)
    ways = _ways(best, costs)
    if max(ways) <= 1.01 * min(ways):
        return tuple(best)
    longest = max(ranks, key=lambda place: ways[place - 1])
    return tuple(best[longest:] + best[:longest])


def _seconds(topology: Topology, source: int, target: int, nbytes: int) -> float:
    if source == target:
        return 0.0
    links = [topology.links[index] for index in topology.route(source, target)]
    slowest = min(float(link.fastest) for link in links)
    return sum(float(link.latency_s) for link in links) + nbytes / slowest


def _ways(tour: list[int], costs: _Costs) -> list[float]:
    return [costs[a][b] for a, b in pairwise([*tour, tour[0]])]


def _nearest(costs: _Costs) -> list[int]:
    tour, left = [0], set(range(1, len(costs)))
    while left:
        here = costs[tour[-1]]
        tour.append(min(left, key=lambda rank: (here[rank], rank)))
        left.remove(tour[-1])
    return tour


def _improved(tour: list[int], costs: _Costs) -> list[int]:
    size = len(tour)
    for _ in range(_PASSES):
        is_better = False
        for i in range(size - 1):
            for j in range(i + 2, size if i else size - 1):
                a, b, c, d = tour[i], tour[i + 1], tour[j], tour[(j + 1) % size]
                if costs[a][c] + costs[b][d] < (costs[a][b] + costs[c][d]) * (1 - 1e-9):
                    tour[i + 1 : j + 1] = tour[i + 1 : j + 1][::-1]
                    is_better = True
        if not is_better:
            break
    return tour


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
        """Whether every rank wants every chunk: no rank passes on a chunk for others only."""
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
        message = "the collective is not searched for"
        raise ArgumentError(message, "collective", ", ".join(SEARCHED), repr(collective))
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
        turned = moves
        if backwards:
            turned = [[ChunkMove(chunk, b, a) for chunk, a, b in step] for step in moves[::-1]]
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
