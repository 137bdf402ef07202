"""What a rank notes while it is traced: numbers only, as JSON between ranks."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, Self

from ringcoll.tracing.clocks import Sighting

__all__ = ["KINDS", "Message", "Operation", "Records", "Span", "deliveries"]

KINDS = ("wait", "post", "reduce", "copy")
"""What a rank can be doing within an operation, apart from running Python."""


class Span(NamedTuple):
    """Something that a rank did from ``begin`` to ``end``, in ns on its own clock.

    ``message`` is the number of the message that was waited for, or -1; ``nbytes`` what
    was reduced or copied.
    """

    kind: str
    begin: int
    end: int
    step: int
    message: int = -1
    nbytes: int = 0


class Message(NamedTuple):
    """One end of a message; ``begin`` and ``end`` are those of the call that posted it."""

    is_send: bool
    peer: int
    step: int
    nbytes: int
    tag: int
    begin: int
    end: int


@dataclass(slots=True)
class Operation:
    """One operation of a group, as one rank has seen it.

    ``number`` is the same on all ranks; ``error`` names what it failed with.
    """

    number: int
    description: str
    collective: str
    algorithm: str
    segments: int
    begin: int
    end: int = 0
    error: str = ""
    messages: list[Message] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

    def arrivals(self) -> dict[int, Span]:
        """The wait of each message that has been waited for."""
        return {span.message: span for span in self.spans if span.message >= 0}


@dataclass(slots=True)
class Records:
    """All that one rank has noted.

    ``sightings`` are the messages that measured the clocks, before and after; a rank has
    those that it exchanged with rank 0. ``left_out`` counts operations beyond the limit.
    """

    rank: int
    world_size: int
    transport: str
    operations: list[Operation] = field(default_factory=list)
    sightings: tuple[list[Sighting], list[Sighting]] = field(default_factory=lambda: ([], []))
    left_out: int = 0

    def packed(self) -> bytes:
        """As compressed JSON."""
        return zlib.compress(json.dumps(asdict(self)).encode(), 1)

    @classmethod
    def unpacked(cls, data: bytes) -> Self:
        """Read what `packed` has written."""
        found: dict[str, Any] = json.loads(zlib.decompress(data))
        operations = [_operation(one) for one in found.pop("operations")]
        first, last = ([Sighting(*one) for one in row] for row in found.pop("sightings"))
        return cls(**found, operations=operations, sightings=(first, last))


def _operation(found: dict[str, Any]) -> Operation:
    messages = [Message(*one) for one in found.pop("messages")]
    spans = [Span(*one) for one in found.pop("spans")]
    return Operation(**found, messages=messages, spans=spans)


class Delivery(NamedTuple):
    """A message at both ends: operation and number of the message there, and the wait for it."""

    source: int
    target: int
    sent: Message
    received: Message
    wait: Span


def deliveries(ranks: list[Records]) -> Iterator[Delivery]:
    """Pair sends with the receives that have been waited for.

    Within an operation and an ordered pair of ranks, the i-th send that is posted is the
    one that the i-th receive gets: the executor posts them in this order.
    """
    sends: dict[tuple[int, int, int], list[Message]] = {}
    for one in ranks:
        for operation in one.operations:
            for message in operation.messages:
                if message.is_send:
                    key = operation.number, one.rank, message.peer
                    sends.setdefault(key, []).append(message)
    for one in ranks:
        for operation in one.operations:
            taken: dict[int, int] = {}
            arrivals = operation.arrivals()
            for number, message in enumerate(operation.messages):
                if message.is_send:
                    continue
                index = taken.get(message.peer, 0)
                taken[message.peer] = index + 1
                posted = sends.get((operation.number, message.peer, one.rank), [])
                if index < len(posted) and number in arrivals:
                    yield Delivery(message.peer, one.rank, posted[index], message, arrivals[number])
