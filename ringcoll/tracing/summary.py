"""Where the time of each rank has gone, in numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ringcoll.tracing.records import Operation, Records

__all__ = ["PARTS", "Shares", "shares", "summarize"]

PARTS = {"waiting": ("wait",), "moving": ("post", "copy"), "reducing": ("reduce",)}
"""The parts of an operation's time, and the kinds of spans that they are made of."""


@dataclass(frozen=True)
class Shares:
    """The time of some operations of one rank, and what was sent.

    Parameters
    ----------
    operations
        How many there were.
    total_s
        From the beginning to the end of each, added up.
    waiting_s
        Waiting for messages to arrive, or for sent ones to be taken.
    moving_s
        Posting messages, and copying: into and out of working memory, and between dtypes.
    reducing_s
        In the reduction operator.
    python_s
        Everything else.
    sent_bytes, received_bytes, sent_messages
        On the wire.
    """

    operations: int
    total_s: float
    waiting_s: float
    moving_s: float
    reducing_s: float
    python_s: float
    sent_bytes: int
    received_bytes: int
    sent_messages: int

    def share(self, part: str) -> float:
        """A part over the total: ``waiting``, ``moving``, ``reducing`` or ``python``."""
        seconds: float = getattr(self, f"{part}_s")
        return seconds / self.total_s if self.total_s else 0.0

    def as_json(self) -> dict[str, Any]:
        """As data, with the shares."""
        names = (*PARTS, "python")
        return {
            "operations": self.operations,
            "total_s": self.total_s,
            **{f"{name}_s": getattr(self, f"{name}_s") for name in names},
            **{f"{name}_share": self.share(name) for name in names},
            "sent_bytes": self.sent_bytes,
            "received_bytes": self.received_bytes,
            "sent_messages": self.sent_messages,
        }


def shares(operations: Iterable[Operation]) -> Shares:
    """Add up the parts of some operations of one rank."""
    found = list(operations)
    total = sum(one.end - one.begin for one in found)
    parts = {
        part: sum(
            span.end - span.begin for one in found for span in one.spans if span.kind in kinds
        )
        for part, kinds in PARTS.items()
    }
    sent = [message.nbytes for one in found for message in one.messages if message.is_send]
    received = [
        one.messages[number].nbytes
        for one in found
        for number in one.arrivals()
        if not one.messages[number].is_send
    ]
    return Shares(
        operations=len(found),
        total_s=total * 1e-9,
        waiting_s=parts["waiting"] * 1e-9,
        moving_s=parts["moving"] * 1e-9,
        reducing_s=parts["reducing"] * 1e-9,
        python_s=(total - sum(parts.values())) * 1e-9,
        sent_bytes=sum(sent),
        received_bytes=sum(received),
        sent_messages=len(sent),
    )


def summarize(records: Records) -> dict[str, Shares]:
    """What each kind of call has taken on a rank, and ``"total"``."""
    calls: dict[str, list[Operation]] = {}
    for one in records.operations:
        calls.setdefault(one.description, []).append(one)
    found = {description: shares(some) for description, some in calls.items()}
    return found | {"total": shares(records.operations)}
