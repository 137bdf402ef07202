"""A simulated run, as every engine has to know it, and the engine's findings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, NamedTuple

from ringcoll.schedule import Schedule, chunks_of_data
from ringcoll.simulation.links import Number
from ringcoll.simulation.picture import SimulatedSpan
from ringcoll.simulation.results import PathStep
from ringcoll.simulation.topology import Topology


def _fraction(value: Number) -> Fraction:
    return Fraction(value)


class RunSettings:
    """The numbers of a run: all exact fractions, or all floats if any of them is a float.

    Parameters
    ----------
    schedule, nbytes, topology, segments, late, slowness
        The arguments of `ringcoll.simulation.simulate`.

    Attributes
    ----------
    is_exact
        Whether the numbers are fractions.
    number
        Makes a number of the run's type.
    alpha, overhead, gamma
        The costs of a rank, in seconds, of the topology.
    unit
        Bytes of a segment of a chunk.
    late, slowness
        Seconds, and factor, of each rank.
    """

    def __init__(
        self,
        schedule: Schedule,
        nbytes: int,
        topology: Topology,
        segments: int,
        late: Mapping[int, Number],
        slowness: Mapping[int, Number],
    ) -> None:
        self.schedule, self.topology, self.segments = schedule, topology, segments
        costs = (topology.alpha_s, topology.overhead_s, topology.gamma_s_per_byte)
        numbers = [*costs, *late.values(), *slowness.values()]
        for link in topology.links:
            numbers += (link.fastest, link.latency_s)
        exact = not any(isinstance(value, float) for value in numbers)
        self.is_exact = exact
        self.number: Callable[[Any], Any] = _fraction if exact else float
        self.alpha, self.overhead, self.gamma = map(self.number, costs)
        self.unit = self.number(Fraction(nbytes, chunks_of_data(schedule) * segments))
        ranks = range(schedule.world_size)
        self.late: list[Any] = [self.number(late.get(rank, 0)) for rank in ranks]
        self.slowness: list[Any] = [self.number(slowness.get(rank, 1)) for rank in ranks]


class RunOutcome(NamedTuple):
    """An engine's findings, for all ranks and links; see `SimulatedRun`."""

    ends: tuple[Any, ...]
    waited_s: tuple[Any, ...]
    link_chunks: tuple[int, ...]
    path: tuple[PathStep, ...]
    num_messages: int
    spans: tuple[SimulatedSpan, ...] | None
