"""How long schedules take on a topology, and the registered algorithms, which a search has to beat."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import inf
from typing import NamedTuple

from ringcoll.algorithms import algorithms
from ringcoll.schedule.ir import Schedule
from ringcoll.simulation import Topology, simulate

__all__ = ["SearchTime", "fastest_times", "registered_times"]


class SearchTime(NamedTuple):
    """Simulated seconds of a schedule, in its best number of segments."""

    seconds: float
    algorithm: str
    segments: int


def fastest_times(
    schedules: Iterable[Schedule], topology: Topology, nbytes: int
) -> list[SearchTime]:
    """Simulate each schedule in 1, 4, 16 and 64 segments, until more segments take longer."""
    return [min(_times(schedule, topology, nbytes)) for schedule in schedules]


def _times(schedule: Schedule, topology: Topology, nbytes: int) -> Iterator[SearchTime]:
    fewer = inf
    for segments in (1, 4, 16, 64):
        seconds = float(simulate(schedule, nbytes, topology, segments=segments).seconds)
        yield SearchTime(seconds, schedule.algorithm, segments)
        if seconds >= fewer:
            return
        fewer = seconds


def registered_times(
    collective: str, topology: Topology, nbytes: int, root: int = 0
) -> list[SearchTime]:
    """Simulate every registered algorithm of a collective as `fastest_times` does, the fastest first.

    Algorithms that need to know hosts get two.
    """
    world_size = topology.world_size
    schedules = [entry.schedule(world_size, root) for entry in algorithms(collective, world_size)]
    return sorted(fastest_times(schedules, topology, nbytes))
