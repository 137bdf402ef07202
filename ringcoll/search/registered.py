"""The registered algorithms on a topology, which a search has to beat."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ringcoll.algorithms import Algorithm, algorithms
from ringcoll.schedule import Schedule, estimated_messages
from ringcoll.search.times_on_network import MOST_MESSAGES, SearchTime, TimesOnNetwork
from ringcoll.simulation import Topology


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
    """Simulate every registered algorithm of a collective, or ``entries``, as `fastest_times` does, the fastest first.

    Algorithms that need to know hosts get two. Those with too many messages are left out. ``advance``
    is called with the name of each.
    """
    world_size = topology.world_size
    found, times = [], TimesOnNetwork(topology)
    for entry in algorithms(collective, world_size) if entries is None else entries:
        advance(entry.name)
        schedule = entry.schedule(world_size, root)
        messages = estimated_messages(schedule, MOST_MESSAGES)
        if messages <= MOST_MESSAGES:
            found.append(times.best(schedule, nbytes, messages))
    return sorted(found)
