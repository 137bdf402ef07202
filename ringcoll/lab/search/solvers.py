"""Three searches: SCCL's, which is exact; and for larger graphs a greedy one, and one for trees.

SCCL's search finds a schedule of so many steps and rounds, or proves that there is none. Each block
is cut into C chunks. A schedule has S steps, step s takes r_s rounds, and all steps together R. In
a step a limit of speed b carries at most b * r_s chunks. A rank can send in a step what it had
before the step. So S counts latencies, and R / C is the time of the data.

The model, for the solver CP-SAT of OR-Tools. A variable is true if a chunk takes a hop in a step;
there is none if the chunk cannot be there so early, or is of no use so late. Then

- a rank that wants a chunk gets it exactly once, any other rank at most once;
- a rank that sends a chunk got it in an earlier step, unless the rank is the owner;
- in a step, the chunks on the hops of a limit are at most b * r_s.

Chunks of a block can change places, and so can ranks of a regular graph; the solver finds such
symmetries itself. One thread, with a limit that does not depend on the clock: the answer depends
on the arguments alone, and on the version of the solver.

Source: Z. Cai et al., "Synthesizing Optimal Collective Algorithms", arXiv 2008.08708, section 3.
The paper's model has the step of an arrival as an integer, for the solver Z3.

The greedy search, for an all-gather or a broadcast on many ranks. In every step each link takes
chunks that its source has and its target lacks, as many as the link carries, until no link can take
any more. A seed draws which link is first, and which chunk it takes. A step is as long as a chunk
needs on one of the links, so faster links take several chunks in a step, and slower ones none. The
search tries the speed of every link as this measure, and several seeds; the caller takes the
schedule that is simulated fastest. The work grows with links times chunks: with the square of the
ranks if the ranks have few links. Source: W. Won et al., "TACOS", arXiv 2304.05301. There a slow
link may be under way while fast links go on; here the steps of a schedule are global, so a message
ends in the step in which it begins.

Trees that share out the links, for large data in many segments. Every chunk goes to all ranks along
a tree of hops from its root, is reduced up such a tree, or both. In many segments a schedule takes
as long as its fullest link, so all trees together have to fill links evenly. Trees of an all-reduce
use their hops in both directions at the same time, one segment going up while another one comes
down: there is no second phase, and n bytes pass the way to a rank that is the leaf of every tree.
A tree grows from its root by the cheapest hop, each time. The price of a hop is the growth of the
loads of its limits, each to a high power, whose sum is nearly that of the fullest one. In further
rounds each tree is taken out, and grown again beside the others; the best set is kept. This is the
approximation of fractional packings of spanning trees by N. Garg and J. Koenemann, FOCS 1998, with
whole chunks. Where hops go both ways at the same speed, W. T. Tutte and C. Nash-Williams, 1961,
have the bound on the packing: the links between the parts of any partition carry (parts - 1) times
the data. A tree needs ``ranks * hops`` looks, or ``ranks ** 2`` where each rank reaches each other
one by one hop. Source of the use of trees: L. Zhao et al., "ForestColl", arXiv 2402.06787.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from fractions import Fraction
from random import Random
from typing import Any, NamedTuple

import networkx as nx

from ringcoll.errors import ArgumentError, MissingExtraError
from ringcoll.lab.search.hops import ChunkMove, Demand, HopGraph, Moves


class SolverAnswer(Enum):
    """The solver's answer for a number of steps, rounds and chunks."""

    POSSIBLE = "possible"
    IMPOSSIBLE = "impossible"  # proved
    UNKNOWN = "unknown"  # the effort was too small


class SolvedMoves(NamedTuple):
    """The answer, and the moves of each step if there are any."""

    answer: SolverAnswer
    moves: Moves = ()


def solve(
    graph: HopGraph, demand: Demand, steps: int, rounds: int, *, effort: float = 2.0, seed: int = 0
) -> SolvedMoves:
    """Search for moves of so many steps and rounds.

    Parameters
    ----------
    graph, demand
        The hops, and what the collective demands of them.
    steps, rounds
        Steps, and rounds of all steps together; a step takes at least one round.
    effort
        Limit of the solver's work, in its deterministic unit: some seconds of one core.
    seed
        Seed of the solver.

    Raises
    ------
    MissingExtraError
        OR-Tools is not installed.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise MissingExtraError(
            "the search for schedules needs OR-Tools: pip install 'ringcoll[search]'"
        ) from error
    if rounds < steps:
        return SolvedMoves(SolverAnswer.IMPOSSIBLE)
    model = cp_model.CpModel()
    takes = _Takes(model, graph, demand, steps)
    if not takes.reachable:
        return SolvedMoves(SolverAnswer.IMPOSSIBLE)
    takes.add_arrivals()
    lengths = [model.new_int_var(1, rounds - steps + 1, f"rounds {step}") for step in range(steps)]
    model.add(sum(lengths) == rounds)
    takes.add_limits(lengths)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed
    solver.parameters.max_deterministic_time = effort
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return SolvedMoves(SolverAnswer.IMPOSSIBLE)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return SolvedMoves(SolverAnswer.UNKNOWN)
    moves: list[list[ChunkMove]] = [[] for _ in range(steps)]
    for (chunk, hop, step), variable in takes.variables.items():
        if solver.value(variable):
            moves[step].append(ChunkMove(chunk, *graph.hops[hop]))
    return SolvedMoves(SolverAnswer.POSSIBLE, _useful(demand, moves))


@dataclass
class _Takes:
    """The variables: a chunk takes a hop in a step."""

    model: Any
    graph: HopGraph
    demand: Demand
    steps: int

    def __post_init__(self) -> None:
        graph, demand, steps = self.graph, self.demand, self.steps
        ahead = [graph.distances(rank) for rank in range(graph.world_size)]
        self.variables: dict[tuple[int, int, int], Any] = {}  # by chunk, hop, step
        self.arrivals: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        self.reachable = True
        for chunk, (owner, wanted) in enumerate(zip(demand.owners, demand.wanted, strict=True)):
            self.reachable &= all(ahead[owner].get(rank, steps + 1) <= steps for rank in wanted)
            to_go = [
                min((ahead[rank].get(target, steps) for target in wanted - {owner}), default=steps)
                for rank in range(graph.world_size)
            ]
            for hop, (source, target) in enumerate(graph.hops):
                earliest, latest = ahead[owner].get(source, steps), steps - to_go[target]
                for step in range(earliest, latest if target != owner else 0):
                    self.variables[chunk, hop, step] = self.model.new_bool_var("")
                    self.arrivals[chunk, target].append((step, hop))

    def add_arrivals(self) -> None:
        """A rank that wants a chunk gets it once; a rank that sends a chunk got it before."""
        for (chunk, rank), ways in self.arrivals.items():
            variables = [self.variables[chunk, hop, step] for step, hop in ways]
            if rank in self.demand.wanted[chunk]:
                self.model.add_exactly_one(variables)
            else:
                self.model.add_at_most_one(variables)
        for (chunk, hop, step), taken in self.variables.items():
            source = self.graph.hops[hop][0]
            if source != self.demand.owners[chunk]:
                before = [
                    self.variables[chunk, way, earlier]
                    for earlier, way in self.arrivals[chunk, source]
                    if earlier < step
                ]
                self.model.add_bool_or([*before, ~taken])

    def add_limits(self, lengths: list[Any]) -> None:
        """The chunks on the hops of a limit fit into the rounds of each step."""
        load: dict[tuple[int, int], list[Any]] = defaultdict(list)
        for (_, hop, step), variable in self.variables.items():
            load[hop, step].append(variable)
        for limit in self.graph.limits:
            above, below = limit.speed.numerator, limit.speed.denominator
            for step, length in enumerate(lengths):
                carried = [variable for hop in limit.hops for variable in load[hop, step]]
                if carried:
                    self.model.add(below * sum(carried) <= above * length)


def _useful(demand: Demand, moves: Sequence[Sequence[ChunkMove]]) -> Moves:
    """The moves of each step, without those that bring a chunk to a rank that has no use for it."""
    kept: list[list[ChunkMove]] = []
    passed_on: set[tuple[int, int]] = set()
    for step in reversed(moves):
        kept.append(
            [
                move
                for move in step
                if move.target in demand.wanted[move.chunk]
                or (move.chunk, move.target) in passed_on
            ]
        )
        passed_on |= {(move.chunk, move.source) for move in kept[-1]}
    return kept[::-1]


# Of powers from 6 to 16 and 6 to 100 rounds, with and without noise, these reach the bounds on the
# DGX-1 and on tori.
_POWER = 8
_ROUNDS = 10  # in which trees grow again, every second time with noise in the prices
_NOISE = 0.3


def speeds_of_steps(graph: HopGraph) -> list[HopGraph]:
    """The graph for each length of a step that keeps all ranks connected."""
    speeds = sorted({limit.speed for limit in graph.limits})
    return [faster for speed in speeds if (faster := graph.without_slow(speed)) is not None]


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
        message = "the greedy search is for collectives in which every rank wants every chunk"
        expected = "all_gather, broadcast, or what is made of them"
        raise ArgumentError(message, "collective", expected, repr(demand.collective))
    random = Random(seed)  # noqa: S311  # choices, not secrets
    held = [0] * demand.world_size  # the chunks of a rank, as bits
    for chunk, owner in enumerate(demand.owners):
        held[owner] |= 1 << chunk
    limits_of = graph.limits_of_hops
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
        used_hops = []
        for hop in waiting:
            source, target = graph.hops[hop]
            lacking = held[source] & ~arriving[target]
            if lacking and all(room[index] >= 1 for index in limits_of[hop]):
                chunk = _random_bit(lacking, random)
                arriving[target] |= 1 << chunk
                for index in limits_of[hop]:
                    room[index] -= 1
                yield ChunkMove(chunk, source, target)
                used_hops.append(hop)
        waiting = used_hops


def _random_bit(bits: int, random: Random) -> int:
    """One of the bits that are set, by chance: the first one from a place on."""
    place = random.randrange(bits.bit_length())
    above = bits >> place
    return place + (above & -above).bit_length() - 1


class _Packing:
    """The load of trees on each limit, in rounds; ``limits`` are of each hop, or both ways."""

    def __init__(self, graph: HopGraph, both_ways: bool) -> None:
        self.graph, self.limits = graph, graph.limits_of_hops
        if both_ways:
            own = dict(zip(graph.hops, self.limits, strict=True))
            self.limits = [own[a, b] + own[b, a] for a, b in graph.hops]
        self.leaving: list[list[int]] = [[] for _ in range(graph.world_size)]
        for hop, (source, _) in enumerate(graph.hops):
            self.leaving[source].append(hop)
        self.weights = [1 / float(limit.speed) for limit in graph.limits]  # of a chunk
        self.loads = [0.0] * len(graph.limits)
        self.random = Random(0)  # noqa: S311  # choices, not secrets

    def put(self, tree: Sequence[int], sign: int) -> None:
        """Put a tree on its limits, or take it away."""
        for hop in tree:
            for index in self.limits[hop]:
                self.loads[index] += sign * self.weights[index]

    def grown(self, root: int, scale: float, noise: float) -> list[int]:
        """The hops of a tree, from its root; those near the root first."""
        costs = [
            ((load + weight) / scale) ** _POWER - (load / scale) ** _POWER
            for load, weight in zip(self.loads, self.weights, strict=True)
        ]
        prices = [
            sum(costs[index] for index in limits) * (1 + noise * self.random.random())
            for limits in self.limits
        ]
        graph, tree = self.graph, []
        depths = {root: 0}
        # Price, depth and hop of ranks that are not in the tree.
        best: dict[int, tuple[float, int, int]] = {}
        newest = root
        while len(depths) < graph.world_size:
            for hop in self.leaving[newest]:
                target = graph.hops[hop][1]
                offer = prices[hop], depths[newest], hop
                if target not in depths and (target not in best or offer < best[target]):
                    best[target] = offer
            newest = min(best, key=lambda rank: best[rank])
            _, depth, hop = best.pop(newest)
            depths[newest] = depth + 1
            tree.append(hop)
        return tree


def tree_moves(
    graph: HopGraph, demand: Demand, *, both_ways: bool
) -> tuple[Fraction, Demand, Moves]:
    """Find a tree for each chunk, so that all together need few rounds.

    The result has the rounds of the fullest limit, the demand with the roots as owners, and the
    moves away from the roots. With ``both_ways`` chunks go up their trees as well, as in an
    all-reduce; then the root of a tree is its middle, whatever rank owns the chunk in ``demand``.
    """
    packing = _Packing(graph, both_ways)
    trees: list[list[int]] = [[] for _ in demand.owners]
    kept: list[list[int]] = []
    least = float("inf")
    for number in range(_ROUNDS):
        for chunk, root in enumerate(demand.owners):
            packing.put(trees[chunk], -1)
            scale = max(*packing.loads, *packing.weights)
            trees[chunk] = packing.grown(root, scale, noise=_NOISE * (number % 2))
            packing.put(trees[chunk], 1)
        if max(packing.loads) < least * (1 - 1e-9):
            least, kept = max(packing.loads), list(trees)
    uses = Counter(index for tree in kept for hop in tree for index in packing.limits[hop])
    rounds = max((uses[index] / graph.limits[index].speed for index in uses), default=Fraction(0))
    kind = nx.Graph if both_ways else nx.DiGraph
    networks = [kind([graph.hops[hop] for hop in tree]) for tree in kept]
    roots = [_middle(tree) for tree in networks] if both_ways else list(demand.owners)
    steps: list[list[ChunkMove]] = []
    for chunk, (root, tree) in enumerate(zip(roots, networks, strict=True)):
        depths = nx.single_source_shortest_path_length(tree, root)
        steps += [[] for _ in range(max(depths.values()) - len(steps))]
        for source, target in nx.bfs_edges(tree, root):
            steps[depths[source]].append(ChunkMove(chunk, source, target))
    return rounds, replace(demand, owners=tuple(roots)), steps


def _middle(tree: nx.Graph) -> int:
    """The rank from which the farthest one is nearest: half way along the longest path."""
    *_, (_, end) = nx.bfs_edges(tree, next(iter(tree)))
    *_, (_, farthest) = nx.bfs_edges(tree, end)
    path: list[int] = nx.shortest_path(tree, farthest, end)
    return path[len(path) // 2]
