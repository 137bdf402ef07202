"""`synthesize`: the schedules of a collective on a topology, by one of the searches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import ceil, isqrt
from typing import NamedTuple

from ringcoll.errors import ArgumentError, TooLargeError
from ringcoll.lab.search.bounds import least_rounds_per_chunk, least_steps, least_time
from ringcoll.lab.search.hops import (
    SEARCHED,
    Demand,
    Moves,
    demand_of,
    hops_of,
    phases_of,
    schedule_of_moves,
)
from ringcoll.lab.search.solvers import (
    SolverAnswer,
    greedy_moves,
    solve,
    speeds_of_steps,
    tree_moves,
)
from ringcoll.lab.simulation import Topology, simulate
from ringcoll.schedules import Schedule, contract

METHODS = {
    "exact": "every schedule that no other one beats in steps and rounds, with proofs; SCCL",
    "greedy": "chunks and links matched at random, step by step, on large graphs; TACOS",
    "trees": "spanning trees that share out the links, for large data in segments",
}
"""The searches, and what they are."""

_PATIENCE = 3
"""Questions without an answer after which the exact search goes on to more steps."""
_TRIALS = 4
"""Seeds that the greedy search tries: on tori of 16 to 128 ranks they differ by a step or two."""
_MOST_WORK = {"exact": 1 << 15, "greedy": 1 << 19, "trees": 1 << 17}
"""Ranks times hops times chunks of a block: about a minute for an all-gather, on a chain of 90, 360
and 180 ranks."""


class SearchedShape(NamedTuple):
    """Steps, rounds of all steps together, and chunks of a block.

    The rounds of trees are those of all segments together, if there are many. Rounds are whole
    numbers but in the greedy search, whose steps may be shorter than a round.
    """

    steps: int
    rounds: Fraction | int
    chunks: int

    @property
    def rounds_per_chunk(self) -> Fraction:
        """The time of the data, where the slowest hop carries a block in 1."""
        return Fraction(self.rounds, self.chunks)


class SearchedPoint(NamedTuple):
    """A schedule, and its shape."""

    shape: SearchedShape
    schedule: Schedule


@dataclass(frozen=True, kw_only=True)
class SearchedFront:
    """The answer of a search.

    Parameters
    ----------
    collective, topology
        The collective and the topology for which schedules were searched.
    points
        The schedules; those of the exact search with more and more steps and fewer rounds.
    impossible
        Shapes that the exact search has proved impossible.
    unknown
        Shapes that the exact search has neither found nor proved impossible: the effort was too
        small. If there is none, no schedule of as many steps and chunks beats the points.
    least_steps, least_rounds_per_chunk
        Lower bounds for every schedule.
    """

    collective: str
    topology: Topology
    points: tuple[SearchedPoint, ...]
    impossible: tuple[SearchedShape, ...]
    unknown: tuple[SearchedShape, ...]
    least_steps: int
    least_rounds_per_chunk: Fraction


class _Search:
    """A collective on a topology, and the graphs of its phases."""

    def __init__(self, collective: str, topology: Topology, root: int) -> None:
        phases = phases_of(collective)
        if not phases:
            message = "the collective is not searched for"
            raise ArgumentError(message, "collective", ", ".join(SEARCHED), repr(collective))
        if not 0 <= root < topology.world_size or (root and not contract(collective).rooted):
            message = "the root is no rank, or the collective has no root"
            raise ArgumentError(message, "root", f"0 to {topology.world_size - 1}", root)
        self.collective, self.topology, self.root = collective, topology, root
        self.base = phases[0][0]
        self.backwards = [backwards for _, backwards in phases]
        graph = hops_of(topology)
        self.graphs = [graph.reversed if turned else graph for turned in self.backwards]
        self.same_phases = len(self.graphs) > 1 and graph.same_both_ways

    @cached_property
    def least_steps(self) -> list[int]:
        """The fewest steps of each phase."""
        return [least_steps(graph, self.demand(1)) for graph in self.graphs]

    @cached_property
    def least_rounds(self) -> list[Fraction]:
        """The fewest rounds per chunk of each phase."""
        return [
            least_rounds_per_chunk(self.topology, graph, self.demand(1), backwards=turned)
            for graph, turned in zip(self.graphs, self.backwards, strict=True)
        ]

    @property
    def least_rounds_of_all(self) -> Fraction:
        """A bound for all phases, which may overlap; of several ones a round is that of a block."""
        if len(self.graphs) < 2:
            return sum(self.least_rounds, Fraction(0))
        bound = least_time(self.collective, self.topology, self.root).s_per_byte
        blocks = len(self.demand(1).owners)
        return (Fraction(bound) * self.graphs[0].bandwidth * blocks).limit_denominator(1 << 12)

    def demand(self, chunks: int) -> Demand:
        return demand_of(self.base, self.topology.world_size, chunks, self.root)

    def point(
        self, method: str, shape: SearchedShape, phases: Sequence[Moves], demand: Demand
    ) -> SearchedPoint:
        """The schedule of a shape, whose steps and rounds are those of all phases."""
        name = "_".join(map(str, (method, *shape))).replace("/", ":")
        return SearchedPoint(shape, schedule_of_moves(self.collective, name, demand, phases))


def _exact(
    search: _Search,
    most_chunks: int,
    more_steps: int,
    effort: float,
    seed: int,
    refused: dict[SearchedShape, SolverAnswer],
) -> Iterator[SearchedPoint]:
    """For more and more steps, the schedule with the fewest rounds per chunk, if it has fewer."""
    fewest, bound = max(search.least_steps), max(search.least_rounds)
    phases = len(search.graphs)
    below: Fraction | None = None
    for steps in range(fewest, fewest + more_steps + 1):
        patience = _PATIENCE
        for shape in _candidates(search, steps, most_chunks, bound, below):
            answer, moves = _solved(search, shape, effort, seed)
            total = SearchedShape(phases * steps, phases * shape.rounds, shape.chunks)
            if answer is SolverAnswer.POSSIBLE:
                yield search.point("exact", total, moves, search.demand(shape.chunks))
                below = shape.rounds_per_chunk
                break
            refused[total] = answer
            patience -= answer is SolverAnswer.UNKNOWN
            if not patience:
                break


def _candidates(
    search: _Search, steps: int, most_chunks: int, bound: Fraction, below: Fraction | None
) -> Iterator[SearchedShape]:
    """The shapes of a phase that may be better than ``below``, of fewest rounds per chunk first."""
    num_blocks = len(search.demand(1).owners)
    shapes = [
        SearchedShape(steps, rounds, chunks)
        for chunks in range(1, most_chunks + 1)
        # In so many rounds every hop carries everything in every step.
        for rounds in range(max(steps, ceil(bound * chunks)), steps * num_blocks * chunks + 1)
        if below is None or rounds < below * chunks
    ]
    yield from sorted(shapes, key=lambda shape: (shape.rounds_per_chunk, shape.chunks))


def _solved(
    search: _Search, shape: SearchedShape, effort: float, seed: int
) -> tuple[SolverAnswer, list[Moves]]:
    """The moves of all phases; the first phase without moves answers for all."""
    demand = search.demand(shape.chunks)
    phases: list[Moves] = []
    for graph in search.graphs:
        if search.same_phases and phases:
            phases.append(phases[0])
            continue
        answer, moves = solve(
            graph, demand, shape.steps, int(shape.rounds), effort=effort, seed=seed
        )
        if answer is not SolverAnswer.POSSIBLE:
            return answer, []
        phases.append(moves)
    return SolverAnswer.POSSIBLE, phases


def _greedy(search: _Search, chunks: int, seed: int, nbytes: int) -> SearchedPoint:
    """The fastest of the schedules for all lengths of a step, each the shortest of some seeds."""
    demand = search.demand(chunks)
    points = []
    for graphs in zip(*map(speeds_of_steps, search.graphs), strict=True):
        seeds = range(seed, seed + _TRIALS)
        phases = [
            min((greedy_moves(graph, demand, seed=each) for each in seeds), key=len)
            for graph in graphs
        ]
        steps = sum(map(len, phases))
        rounds = steps * search.graphs[0].bandwidth / graphs[0].bandwidth
        rounds = int(rounds) if rounds.denominator == 1 else rounds
        shape = SearchedShape(steps, rounds, chunks)
        points.append(search.point("greedy", shape, phases, demand))
    if len(points) == 1:
        return points[0]
    return min(points, key=lambda point: simulate(point.schedule, nbytes, search.topology).seconds)


def trees_of(collective: str, topology: Topology, most_chunks: int) -> list[Schedule]:
    """Schedules of trees, without the bounds, which take longer to find."""
    search = _Search(collective, topology, 0)
    return [_trees(search, chunks).schedule for chunks in _numbers(most_chunks)]


def _numbers(most_chunks: int) -> list[int]:
    return sorted({1 << power for power in range(most_chunks.bit_length())} | {most_chunks})


def _trees(search: _Search, chunks: int) -> SearchedPoint:
    """A tree for each chunk; the rounds are those of the fullest link, as in many segments."""
    demand = search.demand(chunks)
    if not demand.for_all:
        message = "trees are for collectives in which every rank wants every chunk"
        expected = "all_gather, broadcast, or what is made of them"
        raise ArgumentError(message, "collective", expected, repr(search.collective))
    if len(search.graphs) > 1 and (graph := search.graphs[1].both_ways):
        # One vector: each chunk goes up its tree and down again, at the same time as others.
        vector = demand_of("broadcast", search.topology.world_size, chunks)
        rounds, vector, moves = tree_moves(graph, vector, both_ways=True)
        shape = SearchedShape(2 * len(moves), rounds * search.topology.world_size, chunks)
        return search.point("trees", shape, [moves, moves], vector)
    answers = [tree_moves(graph, demand, both_ways=False) for graph in search.graphs]
    phases = [moves for _, _, moves in answers]
    shape = SearchedShape(sum(map(len, phases)), sum(rounds for rounds, *_ in answers), chunks)
    return search.point("trees", shape, phases, demand)


def _check_work(method: str, world_size: int, num_hops: int, chunks: int) -> None:
    """Refuse a search that would take many minutes, before it begins."""
    work, most = world_size * num_hops * chunks, _MOST_WORK[method]
    if method == "exact" and chunks > 2:  # a question for each number of chunks and rounds
        work = work * chunks // 2
        if world_size * num_hops * 2 <= most < work:
            fewer = isqrt(2 * most // (world_size * num_hops))
            raise TooLargeError(
                f"the search 'exact' of up to {chunks} chunks on {world_size} ranks with "
                f"{num_hops} hops or more is too large; {max(2, fewer)} chunks would do",
                most=most,
            )
    if work > most:
        dense = num_hops > 8 * world_size  # hops then grow with the square of the ranks
        ranks = int(world_size * (most / work) ** (1 / (3 if dense else 2)))
        raise TooLargeError(
            f"the search {method!r} on {world_size} ranks with {num_hops} hops or more, and "
            f"{chunks} chunks, is too large; about {max(2, ranks)} ranks would do",
            most=most,
        )


def synthesize(
    collective: str,
    topology: Topology,
    *,
    method: str = "exact",
    root: int = 0,
    most_chunks: int = 2,
    more_steps: int = 2,
    effort: float = 2.0,
    seed: int = 0,
    nbytes: int = 1 << 20,
) -> SearchedFront:
    """Search for the schedules of a collective that suit a topology.

    Parameters
    ----------
    collective
        One of `SEARCHED`, or another with such a contract.
    topology
        The network.
    method
        One of `METHODS`.
    root
        The root of a rooted collective.
    most_chunks
        Chunks of a block: the exact search tries every number up to this one, the others the
        powers of two below it and the number itself.
    more_steps
        Steps of a phase beyond the fewest ones, for the exact search.
    effort
        Work of the solver for one shape; see `ringcoll.lab.search.solvers.solve`.
    seed
        Seed of the solver, and of the greedy search.
    nbytes
        Bytes for which the greedy search simulates its schedules, to take the fastest.

    Raises
    ------
    ArgumentError
        The collective or the method is unknown, a number is out of range, or the method does not
        know the collective, or the network.
    TooLargeError
        There are too many ranks, hops and chunks for the method.
    MissingExtraError
        The exact search needs OR-Tools.

    Examples
    --------
    >>> from ringcoll.lab.simulation import ring
    >>> front = synthesize("all_gather", ring(4, bandwidth=1e9), method="greedy", most_chunks=1)
    >>> front.points[0].shape, str(front.least_rounds_per_chunk)
    (SearchedShape(steps=2, rounds=2, chunks=1), '3/2')
    """
    if method not in METHODS:
        raise ArgumentError("no such search", "method", ", ".join(METHODS), repr(method))
    for name, value, least in (("most_chunks", most_chunks, 1), ("more_steps", more_steps, 0)):
        if value < least:
            raise ArgumentError("too low", name, f"at least {least}", value)
    if phases_of(collective):
        _check_work(method, topology.world_size, topology.world_size, min(most_chunks, 2))
    search = _Search(collective, topology, root)
    _check_work(method, topology.world_size, len(search.graphs[0].hops), most_chunks)
    refused: dict[SearchedShape, SolverAnswer] = {}
    if topology.world_size == 1:
        phases = [()] * len(search.graphs)
        points = [search.point(method, SearchedShape(0, 0, 1), phases, search.demand(1))]
    elif method == "exact":
        points = list(_exact(search, most_chunks, more_steps, effort, seed, refused))
    else:
        points = [
            _trees(search, chunks) if method == "trees" else _greedy(search, chunks, seed, nbytes)
            for chunks in _numbers(most_chunks)
        ]
    return SearchedFront(
        collective=collective,
        topology=topology,
        points=tuple(points),
        impossible=tuple(shape for shape in refused if refused[shape] is SolverAnswer.IMPOSSIBLE),
        unknown=tuple(shape for shape in refused if refused[shape] is SolverAnswer.UNKNOWN),
        least_steps=sum(search.least_steps),
        least_rounds_per_chunk=search.least_rounds_of_all,
    )
