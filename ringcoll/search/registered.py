"""How long schedules take on a topology, and the registered algorithms, which a search has to beat."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import inf
from typing import NamedTuple

from ringcoll.algorithms import Algorithm, algorithms
from ringcoll.schedule import Schedule, estimated_messages
from ringcoll.simulation import Topology, simulate

_MOST_MESSAGES = 1 << 18
"""Messages of all segments in a run: 3 s by events, and there are some 25 algorithms."""


class SearchTime(NamedTuple):
    """Simulated seconds of a schedule, in its best number of segments."""

    seconds: float
    algorithm: str
    segments: int


def fastest_times(
    schedules: Iterable[Schedule], topology: Topology, nbytes: int
) -> list[SearchTime]:
    """Simulate each schedule in 1, 4, 16 and 64 segments, until more segments take longer, or have too many messages."""
    return [
        min(_times(schedule, topology, nbytes, estimated_messages(schedule, _MOST_MESSAGES)))
        for schedule in schedules
    ]


def _times(
    schedule: Schedule, topology: Topology, nbytes: int, messages: int
) -> Iterator[SearchTime]:
    fewer = inf
    for segments in (1, 4, 16, 64):
        if segments > 1 and messages * segments > _MOST_MESSAGES:
            return
        seconds = float(simulate(schedule, nbytes, topology, segments=segments).seconds)
        yield SearchTime(seconds, schedule.algorithm, segments)
        if seconds >= fewer:
            return
        fewer = seconds


def registered_times(
    collective: str,
    topology: Topology,
    nbytes: int,
    root: int = 0,
    advance: Callable[[str], object] = lambda name: None,
    entries: Iterable[Algorithm] | None = None,
) -> list[SearchTime]:
    """Simulate every registered algorithm of a collective, or ``entries``, as `fastest_times` does, the fastest first.

    Algorithms that need to know hosts get two. Those with too many messages are left out. ``advance``
    is called with the name of each.
    """
    world_size = topology.world_size
    times = []
    for entry in algorithms(collective, world_size) if entries is None else entries:
        advance(entry.name)
        schedule = entry.schedule(world_size, root)
        messages = estimated_messages(schedule, _MOST_MESSAGES)
        if messages <= _MOST_MESSAGES:
            times.append(min(_times(schedule, topology, nbytes, messages)))
    return sorted(times)
