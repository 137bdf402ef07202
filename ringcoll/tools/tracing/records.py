"""The notes of a rank in a trace: numbers only, as JSON between ranks."""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, Self

from ringcoll.errors import TraceError
from ringcoll.runtime.watch import PhaseSpan, ThreadWait
from ringcoll.tools.tracing.clocks import Sighting

# Errors of packed data that are cut, that are no JSON, or that have other fields.
_MALFORMED = (zlib.error, ValueError, TypeError, LookupError, AttributeError, RecursionError)


class Span(NamedTuple):
    """Work of a rank from ``begin`` to ``end``, in ns on its own clock.

    ``kind`` is ``"wait"``, ``"post"``, ``"reduce"`` or ``"copy"``; ``message`` is the number of the
    message that the rank waited for, or -1; ``nbytes`` are the bytes that were reduced or copied.
    """

    kind: str
    begin: int
    end: int
    step: int
    message: int = -1
    nbytes: int = 0


class MessageEnd(NamedTuple):
    """An end of a message; the call that posted it took from ``begin`` to ``end``, in ns."""

    is_send: bool
    peer: int
    step: int
    nbytes: int
    tag: int
    begin: int
    end: int


@dataclass(slots=True)
class TracedOperation:
    """An operation of a group, as a rank has seen it.

    ``number`` is the same on all ranks; ``error`` is the text of the error, if it failed.
    ``group`` is the number of the traced group, and ``is_beside`` says whether another thread than
    the one that has entered the trace ran it. All ranks are ranks in the first group.
    """

    number: int
    description: str
    collective: str
    algorithm: str
    segments: int
    begin: int
    end: int = 0
    error: str = ""
    group: int = 0
    is_beside: bool = False
    messages: list[MessageEnd] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

    def arrivals(self) -> dict[int, Span]:
        """The waits that are over, by the number of the message."""
        return {span.message: span for span in self.spans if span.message >= 0}


@dataclass(slots=True)
class Records:
    """All notes of a rank.

    ``sightings`` are the messages between the rank and rank 0 that measured the clocks, before and
    after. ``left_out`` is the number of operations beyond the limit, ``phases_left_out`` that of
    phases and waits. ``groups`` are the ranks of each traced group.
    """

    rank: int
    world_size: int
    transport: str
    operations: list[TracedOperation] = field(default_factory=list)
    sightings: tuple[list[Sighting], list[Sighting]] = field(default_factory=lambda: ([], []))
    left_out: int = 0
    phases_left_out: int = 0
    groups: list[list[int]] = field(default_factory=list)
    phases: list[PhaseSpan] = field(default_factory=list)
    waits: list[ThreadWait] = field(default_factory=list)

    def packed(self) -> bytes:
        """As compressed JSON."""
        return zlib.compress(json.dumps(asdict(self)).encode(), 1)

    @classmethod
    def unpacked(cls, data: bytes) -> Self:
        """Read the data of `packed`.

        Raises
        ------
        TraceError
            The data are something else.
        """
        try:
            fields: dict[str, Any] = json.loads(zlib.decompress(data))
            operations = [_operation(item) for item in fields.pop("operations")]
            first, last = ([Sighting(*item) for item in row] for row in fields.pop("sightings"))
            phases = [PhaseSpan(**item) for item in fields.pop("phases")]
            waits = [ThreadWait(*item) for item in fields.pop("waits")]
            return cls(
                **fields, operations=operations, sightings=(first, last), phases=phases, waits=waits
            )
        except _MALFORMED as error:
            raise TraceError(f"not the notes of a rank: {error!r}") from error


def _operation(fields: dict[str, Any]) -> TracedOperation:
    messages = [MessageEnd(*item) for item in fields.pop("messages")]
    spans = [Span(*item) for item in fields.pop("spans")]
    return TracedOperation(**fields, messages=messages, spans=spans)
