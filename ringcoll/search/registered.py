"""How long schedules take on a topology, and the registered algorithms, which a search has to beat."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from ringcoll.algorithms import Algorithm, algorithms
from ringcoll.schedule import Schedule, estimated_messages
from ringcoll.simulation import SimulatedRun, Topology, simulate

MOST_MESSAGES = 1 << 18
"""Messages of all segments in a run: 3 s by events, and there are some 25 algorithms."""


HARDLY = 1.03
"""Times as fast, which is not worth more messages: a model is not better than that, and each message has its cost."""


class SearchTime(NamedTuple):
    """Simulated seconds of a schedule, in its best number of segments."""

    seconds: float
    algorithm: str
    segments: int


def fastest_times(
    schedules: Iterable[Schedule], topology: Topology, nbytes: int
) -> list[SearchTime]:
    """Simulate each schedule in 1, 4, 16, 64 and 256 segments, until more segments gain hardly anything, or have too many messages."""
    return [
        best_time(schedule, topology, nbytes, estimated_messages(schedule, MOST_MESSAGES))
        for schedule in schedules
    ]


def best_time(
    schedule: Schedule,
    topology: Topology,
    nbytes: int,
    messages: int,
    whole: SimulatedRun | None = None,
) -> SearchTime:
    """Simulate a schedule of so many messages; ``whole`` is its run in one segment, if that is known.

    Segments do not change what a link carries: no run is shorter than the busiest link needs.
    """
    whole = whole or simulate(schedule, nbytes, topology)
    best = SearchTime(float(whole.seconds), schedule.algorithm, 1)
    for segments in (4, 16, 64, 256):
        if messages * segments > MOST_MESSAGES or best.seconds <= HARDLY * whole.busiest_s:
            break
        seconds = float(simulate(schedule, nbytes, topology, segments=segments).seconds)
        if seconds >= best.seconds / HARDLY:
            break
        best = SearchTime(seconds, schedule.algorithm, segments)
    return best


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
        messages = estimated_messages(schedule, MOST_MESSAGES)
        if messages <= MOST_MESSAGES:
            times.append(best_time(schedule, topology, nbytes, messages))
    return sorted(times)
