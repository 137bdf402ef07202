"""How long schedules take on a topology, in their best numbers of segments.

A schedule is simulated in 1, 4, 16, 64 and 256 segments, until more segments gain hardly anything.
Where that is a work of many seconds, the time in more than 16 segments follows from those of as
many segments as the schedule has steps, 8 at least, and of 16 segments as long: by then each
further one takes as long as the one before. Of trees such times were wrong by 0.4 % at most.
Schedules of more than 12 steps are simulated to the end. A search has to beat the registered
algorithms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from ringcoll.algorithms import Algorithm, algorithms
from ringcoll.schedule import Schedule, estimated_messages, step_count
from ringcoll.simulation import Topology, simulate

MOST_MESSAGES = 1 << 18
"""Messages of all segments in a run: 3 s by events, and there are some 25 algorithms."""
HARDLY = 1.03
"""Times as fast, which is not worth more messages: a model is not better, and messages cost."""
_EXACT_MESSAGES = 1 << 13  # of a run by events that is not shortened
_SEGMENTS = (4, 16, 64, 256)
_FEW, _MOST_STEPS, _MANY = 8, 12, 16


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
    """How long schedules take on a topology.

    Each run is made once, as runs of one length of a segment serve several sizes.
    """

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
        """The time of a schedule of so many messages, in its best number of segments.

        Segments do not change what a link carries: no run is shorter than the busiest link needs.
        """
        whole = self.run(schedule, nbytes)
        best = SearchTime(whole.seconds, schedule.algorithm, 1)
        for segments in _SEGMENTS:
            if messages * segments > MOST_MESSAGES or best.seconds <= HARDLY * whole.busiest_s:
                break
            is_long = whole.engine == "events" and messages * segments > _EXACT_MESSAGES
            if is_long and segments > _MANY and (steps := step_count(schedule)) <= _MOST_STEPS:
                few = max(_FEW, steps)
                few_s, many_s = (
                    self.run(schedule, max(1, nbytes * number // segments), number).seconds
                    for number in (few, _MANY)
                )
                seconds = many_s + (segments - _MANY) * (many_s - few_s) / (_MANY - few)
            else:
                seconds = self.run(schedule, nbytes, segments).seconds
            if seconds >= best.seconds / HARDLY:
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
