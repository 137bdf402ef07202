"""Links that messages share: max-min fair rates, computed anew only where they change.

Only a *crowded* link, which has more messages than lanes, makes one message slower than another.
So when a message begins or ends, only the messages get new rates that are joined to it by crowded
links; without a crowded link that is the message itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ringcoll.simulation.topology import Number, Topology

__all__ = ["Flows", "SimulatedMessage"]


class SimulatedMessage:
    """A message on its way; ``left`` and ``arrival`` are ``None`` until its last byte has left."""

    __slots__ = (
        "arrival",
        "before",
        "chunks",
        "latency",
        "left",
        "nbytes",
        "peer",
        "posted",
        "rate",
        "receiver",
        "remaining",
        "route",
        "sender",
        "since",
        "step",
        "version",
    )

    def __init__(
        self, sender: Any, peer: int, chunks: int, step: int, nbytes: Number, posted: Number
    ) -> None:
        self.sender, self.peer, self.chunks, self.step = sender, peer, chunks, step
        self.nbytes, self.posted = nbytes, posted
        self.before = sender.last
        self.receiver: Any = None
        self.left: Any = None
        self.arrival: Any = None
        self.route: tuple[int, ...] = ()
        self.latency: Number = 0
        self.remaining: Any = nbytes
        self.rate: Any = 0
        self.since: Any = posted
        self.version = 0


class Flows:
    """The messages on each link of a topology, and their rates.

    Parameters
    ----------
    topology
        The links.
    number
        Type of the numbers: exact fractions, or floats.
    """

    def __init__(self, topology: Topology, number: Callable[[Number], Any]) -> None:
        self.lanes = [link.lanes for link in topology.links]
        self.capacity: list[Any] = [
            None if link.capacity is None else number(link.capacity) for link in topology.links
        ]
        self.fastest: list[Any] = [number(link.fastest) for link in topology.links]
        # A dictionary is a set in order: sums of floats should not depend on addresses.
        self.users: list[dict[SimulatedMessage, None]] = [{} for _ in topology.links]
        self.changed: dict[SimulatedMessage, None] = {}

    def begin(self, message: SimulatedMessage, now: Number) -> None:
        """Let the bytes of a message move from now on."""
        message.since = now
        for index in message.route:
            self.users[index][message] = None
        self.changed[message] = None

    def end(self, message: SimulatedMessage) -> None:
        """Take a message away whose last byte has left."""
        self.changed.pop(message, None)
        for index in message.route:
            crowded = self.crowded(index)
            del self.users[index][message]
            if crowded:
                self.changed.update(self.users[index])

    def crowded(self, index: int) -> bool:
        """Whether a link has more messages than lanes."""
        lanes = self.lanes[index]
        # One message on less than one lane is slow, but shares the link with nobody.
        return lanes is not None and len(self.users[index]) > max(lanes, 1)

    def share(self, now: Number) -> Iterable[tuple[Any, SimulatedMessage]]:
        """Give new rates where they have changed; yield the messages with their new ends."""
        joined = self._joined()
        for message, rate in self._rates(joined):
            if rate != message.rate:
                message.remaining -= message.rate * (now - message.since)
                message.since, message.rate = now, rate
                message.version += 1
                yield now + max(message.remaining, 0) / rate, message

    def _joined(self) -> dict[SimulatedMessage, None]:
        """The messages whose rates may change: those joined to a changed one by crowded links."""
        joined, self.changed = self.changed, {}
        waiting, seen = list(joined), set[int]()
        while waiting:
            for index in waiting.pop().route:
                if index not in seen and self.crowded(index):
                    seen.add(index)
                    new = [other for other in self.users[index] if other not in joined]
                    joined.update(dict.fromkeys(new))
                    waiting += new
        return joined

    def _rates(
        self, active: dict[SimulatedMessage, None]
    ) -> Iterable[tuple[SimulatedMessage, Any]]:
        """Fill the links evenly until one is full; its messages keep their rates; and go on."""
        links = {index for message in active for index in message.route if self.crowded(index)}
        room = {index: self.capacity[index] for index in sorted(links)}
        number = {index: len(self.users[index]) for index in room}
        most = {message: min(map(self.fastest.__getitem__, message.route)) for message in active}
        while most:
            fair = min((room[index] / number[index] for index in room), default=None)
            slow = [message for message, rate in most.items() if fair is None or rate <= fair]
            rate_of = {message: most[message] for message in slow}
            if not slow:
                rate_of = {
                    message: fair
                    for index in room
                    if room[index] / number[index] == fair
                    for message in self.users[index]
                    if message in most
                }
            for message, rate in rate_of.items():
                yield message, rate
                del most[message]
                for index in message.route:
                    if index in room:
                        room[index] -= rate
                        number[index] -= 1
                        if not number[index]:
                            del room[index]
