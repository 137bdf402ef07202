"""Where the time of each rank has gone, in numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from ringcoll.tracing.records import Records, TracedOperation

PARTS = {"waiting": ("wait",), "moving": ("post", "copy"), "reducing": ("reduce",)}
"""The parts of an operation's time, and the kinds of spans that each part is made of."""


@dataclass(frozen=True)
class Shares:
    """Shares of the time of some operations of a rank, and of their messages.

    Parameters
    ----------
    operations
        Number of operations.
    total_s
        Time from the begin to the end of each operation, added up, in seconds.
    waiting_s
        Time of waits for messages to arrive, or for sent messages to be taken.
    moving_s
        Time of posts, and of copies: into and out of working memory, and between dtypes.
    reducing_s
        Time in the reduction operator.
    python_s
        All other time.
    sent_bytes, received_bytes, sent_messages
        Bytes and messages on the wire.
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
        """Share of a part: ``waiting``, ``moving``, ``reducing`` or ``python``, 0 to 1."""
        seconds: float = getattr(self, f"{part}_s")
        return seconds / self.total_s if self.total_s else 0.0

    def as_json(self) -> dict[str, Any]:
        """The fields, and the shares of the parts."""
        return asdict(self) | {f"{part}_share": self.share(part) for part in (*PARTS, "python")}


def shares(operations: Iterable[TracedOperation]) -> Shares:
    """Add up the parts of some operations of a rank."""
    operations = list(operations)
    total = sum(operation.end - operation.begin for operation in operations)
    parts = {
        f"{part}_s": 1e-9
        * sum(
            span.end - span.begin
            for operation in operations
            for span in operation.spans
            if span.kind in kinds
        )
        for part, kinds in PARTS.items()
    }
    sent = [
        message.nbytes
        for operation in operations
        for message in operation.messages
        if message.is_send
    ]
    received = [
        operation.messages[number].nbytes
        for operation in operations
        for number in operation.arrivals()
        if not operation.messages[number].is_send
    ]
    return Shares(
        operations=len(operations),
        total_s=total * 1e-9,
        python_s=total * 1e-9 - sum(parts.values()),
        sent_bytes=sum(sent),
        received_bytes=sum(received),
        sent_messages=len(sent),
        **parts,
    )


def summarize(records: Records) -> dict[str, Shares]:
    """Shares of each kind of call of a rank, by its description, and of ``"total"``."""
    calls: dict[str, list[TracedOperation]] = {}
    for operation in records.operations:
        calls.setdefault(operation.description, []).append(operation)
    by_call = {description: shares(alike) for description, alike in calls.items()}
    return by_call | {"total": shares(records.operations)}
