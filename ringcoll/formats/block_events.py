"""Events: what thread blocks do, one thing after the other, and what waits for what.

Events are in an order in which each comes after those that it waits for. There is none if the thread
blocks wait for each other in a circle. A send does not wait for its receive: connections are buffers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from ringcoll.errors import ScheduleError
from ringcoll.schedule import Ref

Place = tuple[str, int]
"""Memory of a rank: ``"i"`` or ``"o"`` and a chunk, or any other word and a number."""

_SHOWN = 6  # events of a circle


class EventKind(Enum):
    """The kind of an event; `RECV` and `REDUCE` take a message."""

    SEND = auto()
    RECV = auto()
    REDUCE = auto()
    """Receive, and reduce with the places that are read."""
    COPY = auto()
    ADD = auto()
    """Write the sum of all places that are read."""
    NOTHING = auto()


@dataclass(slots=True)
class Event:
    """One thing that a rank does.

    Parameters
    ----------
    rank, kind
        The rank, and what it does.
    reads, writes
        Places, in the order of the message.
    before
        Numbers of the events that this event waits for.
    where
        Place in the original, for errors.
    message
        Number of the event that sends what this event receives.
    """

    rank: int
    kind: EventKind
    reads: tuple[Place, ...]
    writes: tuple[Place, ...]
    before: list[int]
    where: str
    message: int = -1

    # What the events are found to do.
    sources: tuple[Ref, ...] = field(default=(), init=False)
    targets: tuple[Ref, ...] = field(default=(), init=False)
    finals: tuple[bool, ...] = field(default=(), init=False)


def _waits_for(event: Event) -> Sequence[int]:
    return event.before if event.message < 0 else [*event.before, event.message]


def ordered(events: Sequence[Event]) -> list[int]:
    """An order of the events, or an error that names those in a circle."""
    missing = [len(_waits_for(event)) for event in events]
    after: list[list[int]] = [[] for _ in events]
    for number, event in enumerate(events):
        for earlier in _waits_for(event):
            after[earlier].append(number)
    ready = deque(number for number, count in enumerate(missing) if not count)
    order = []
    while ready:
        number = ready.popleft()
        order.append(number)
        for later in after[number]:
            missing[later] -= 1
            if not missing[later]:
                ready.append(later)
    if len(order) == len(events):
        return order
    number = next(number for number, count in enumerate(missing) if count)
    circle: list[int] = []
    while number not in circle:
        circle.append(number)
        number = next(earlier for earlier in _waits_for(events[number]) if missing[earlier])
    places = list(dict.fromkeys(events[each].where for each in circle[circle.index(number) :]))
    told = ", which waits for ".join(places[1:_SHOWN]) + " ..." * (len(places) > _SHOWN)
    raise ScheduleError(
        f"{places[0]} waits for {f'{told}, which waits for ' * bool(told)}{places[0]}: this is a "
        "deadlock"
    )
