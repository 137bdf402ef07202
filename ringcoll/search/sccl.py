"""SCCL's search: a schedule of so many steps and rounds, or the proof that there is none.

The problem. Each block is cut into C chunks. A schedule has S steps, step s takes r_s rounds, and
all steps together R. In a step a limit of speed b carries at most b * r_s chunks. A rank can send
in a step what it had before the step. So S counts latencies, and R / C is the time of the data.

The model, for the solver CP-SAT of OR-Tools. A variable is true if a chunk takes a hop in a step;
there is none if the chunk cannot be there so early, or is of no use so late. Then

- a rank that wants a chunk gets it exactly once, any other rank at most once;
- who sends a chunk got it in an earlier step, unless the rank is the owner;
- in a step, the chunks on the hops of a limit are at most b * r_s.

Chunks of a block can change places, and so can ranks of a regular graph; the solver finds such
symmetries itself. One thread, with a limit that does not depend on the clock: the answer depends
on the arguments alone, and on the version of the solver.

Source: Z. Cai et al., "Synthesizing Optimal Collective Algorithms", arXiv 2008.08708, section 3.
The paper's model has the step of an arrival as an integer, for the solver Z3.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from ringcoll.errors import MissingExtraError
from ringcoll.search.build import ChunkMove, Demand, Moves
from ringcoll.search.hops import HopGraph


class Answer(Enum):
    """The solver's answer for a number of steps, rounds and chunks."""

    POSSIBLE = "possible"
    IMPOSSIBLE = "impossible"  # proved
    UNKNOWN = "unknown"  # the effort was too small


class SolvedMoves(NamedTuple):
    """The answer, and the moves of each step if there are any."""

    answer: Answer
    moves: Moves = ()


def _cp_model() -> Any:
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise MissingExtraError(
            "the search for schedules needs OR-Tools: pip install 'ringcoll[search]'"
        ) from error
    return cp_model


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
    solver_module = _cp_model()
    if rounds < steps:
        return SolvedMoves(Answer.IMPOSSIBLE)
    model = solver_module.CpModel()
    takes = _Takes(model, graph, demand, steps)
    if not takes.reachable:
        return SolvedMoves(Answer.IMPOSSIBLE)
    takes.add_arrivals()
    lengths = [model.new_int_var(1, rounds - steps + 1, f"rounds {step}") for step in range(steps)]
    model.add(sum(lengths) == rounds)
    takes.add_limits(lengths)
    solver = solver_module.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed
    solver.parameters.max_deterministic_time = effort
    status = solver.solve(model)
    if status == solver_module.INFEASIBLE:
        return SolvedMoves(Answer.IMPOSSIBLE)
    if status not in (solver_module.OPTIMAL, solver_module.FEASIBLE):
        return SolvedMoves(Answer.UNKNOWN)
    moves: list[list[ChunkMove]] = [[] for _ in range(steps)]
    for (chunk, hop, step), variable in takes.variables.items():
        if solver.value(variable):
            moves[step].append(ChunkMove(chunk, *graph.hops[hop]))
    return SolvedMoves(Answer.POSSIBLE, _useful(demand, moves))


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
        """A rank that wants a chunk gets it once; who sends a chunk got it before."""
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
    """The moves of each step, without those that bring a chunk where nobody wants it."""
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
