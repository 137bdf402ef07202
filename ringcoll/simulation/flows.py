"""Links that messages share: max-min fair rates, computed anew only where they change.

Only a *crowded* link, which has more messages than lanes, makes one message slower than another.
So when a message begins or ends, only the messages get new rates that are joined to it by crowded
links; without a crowded link that is the message itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import Any

from ringcoll.simulation.links import Number
from ringcoll.simulation.topology import Topology


class SimulatedMessage:
    """A message on its way; ``left`` and ``arrival`` are ``None`` until its last byte has left."""

    __slots__ = (
        "arrival",
        "before",
        "chunks",
        "fastest",
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
        self.latency: Any = 0
        self.fastest: Any = 0
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
    crossings
        Messages on each link for a message that crosses it once; see `Folding`.
    """

    def __init__(
        self, topology: Topology, number: Callable[[Number], Any], crossings: Sequence[int]
    ) -> None:
        links = topology.links
        # One message on less than one lane is slow, but shares the link with nobody.
        self.limit = [inf if link.lanes is None else max(link.lanes, 1) for link in links]
        self.capacity: list[Any] = [
            None if link.capacity is None else number(link.capacity) for link in links
        ]
        self.fastest: list[Any] = [number(link.fastest) for link in links]
        self.latency: list[Any] = [number(link.latency_s) for link in links]
        self.crossings = crossings
        # A dictionary is a set in order: sums of floats should not depend on addresses.
        self.users: list[dict[SimulatedMessage, int]] = [{} for _ in links]
        self.number = [0] * len(links)
        self.chunks = [0] * len(links)
        self.changed: dict[SimulatedMessage, None] = {}

    def lay(self, message: SimulatedMessage, route: tuple[int, ...]) -> None:
        """Tell a message its route, and count its bytes."""
        message.route = route
        latency: Any = 0
        fastest: Any = inf
        for index in route:
            latency += self.latency[index]
            fastest = min(fastest, self.fastest[index])
            self.chunks[index] += message.chunks * self.crossings[index]
        message.latency, message.fastest = latency, fastest

    def begin(self, message: SimulatedMessage, now: Any) -> Any:
        """Let the bytes of a message move from now on; return its end if it shares no full link."""
        message.since = now
        crowded = False
        for index in message.route:
            users, messages = self.users[index], self.crossings[index]
            users[message] = users.get(message, 0) + messages
            self.number[index] += messages
            crowded = crowded or self.number[index] > self.limit[index]
        if crowded:
            self.changed[message] = None
            return None
        message.rate = message.fastest
        return now + message.nbytes / message.rate

    def end(self, message: SimulatedMessage) -> None:
        """Take a message away whose last byte has left."""
        self.changed.pop(message, None)
        for index in message.route:
            crowded = self.number[index] > self.limit[index]
            users = self.users[index]
            self.number[index] -= users.pop(message, 0)
            if crowded:
                self.changed.update(dict.fromkeys(users))

    def share(self, now: Any) -> Iterable[tuple[Any, SimulatedMessage]]:
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
                if index not in seen and self.number[index] > self.limit[index]:
                    seen.add(index)
                    new = [other for other in self.users[index] if other not in joined]
                    joined.update(dict.fromkeys(new))
                    waiting += new
        return joined

    def _rates(
        self, active: dict[SimulatedMessage, None]
    ) -> Iterable[tuple[SimulatedMessage, Any]]:
        """Fill the links evenly until one is full; its messages keep their rates; and go on."""
        links = {index for message in active for index in message.route}
        links = {index for index in links if self.number[index] > self.limit[index]}
        room = {index: self.capacity[index] for index in sorted(links)}
        number = {index: self.number[index] for index in room}
        most = {message: message.fastest for message in active}
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
                for index in dict.fromkeys(message.route):
                    if index in room:
                        messages = self.users[index][message]
                        room[index] -= rate * messages
                        number[index] -= messages
                        if not number[index]:
                            del room[index]
