"""The picture: what all ranks noted, in the Trace Event Format.

The format that chrome://tracing and Perfetto read ("Trace Event Format", Google, 2016):
``X`` is a slice, ``b`` and ``e`` begin and end something in flight, ``s`` and ``f`` are the
two ends of an arrow, ``M`` names things. Times are in microseconds. One process row is one
rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from ringcoll.tracing.clocks import Clock, Sighting, agree
from ringcoll.tracing.records import Message, Operation, Records, Span, deliveries
from ringcoll.tracing.summary import shares, summarize

__all__ = ["TRACKS", "document"]

TRACKS = {"operation": 1, "wait": 2, "post": 3, "reduce": 4, "copy": 5}
"""The rows of a rank: what they are called in events, and their number."""

_TITLES = {
    "operation": "operations",
    "wait": "waits",
    "post": "posts of messages",
    "reduce": "reductions",
    "copy": "copies",
}

_Event = dict[str, Any]


def document(ranks: list[Records]) -> dict[str, Any]:
    """Make the file's contents.

    Parameters
    ----------
    ranks
        What each rank noted, in order.
    """
    found = list(deliveries(ranks))
    clocks = agree(
        len(ranks),
        [item for one in ranks for item in one.sightings[0]],
        [item for one in ranks for item in one.sightings[1]],
        (Sighting(item.source, item.target, item.sent.begin, item.wait.end) for item in found),
    )
    starts = [
        clock.corrected(one.operations[0].begin)
        for one, clock in zip(ranks, clocks, strict=True)
        if one.operations
    ]
    writer = _Writer(clocks, min(starts, default=0))
    events: list[_Event] = []
    for one in ranks:
        events += _names(one)
        for operation in one.operations:
            events += writer.operation(one.rank, operation)
    for number, item in enumerate(found):
        events += writer.arrow(number, item.source, item.target, item.sent, item.wait)
    # Begins stay before ends, and slices before those in them: the sort is stable.
    events.sort(key=lambda event: event.get("ts", -math.inf))
    return {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "otherData": {
            "transport": ranks[0].transport,
            "world_size": len(ranks),
            "operations_left_out": ranks[0].left_out,
            "clocks": [
                {
                    "rank": rank,
                    "offset_us": clock.offset_ns / 1000,
                    "uncertainty_us": clock.uncertainty_ns / 1000,
                    "rate": clock.rate,
                    "slack_us": clock.slack_ns / 1000,
                }
                for rank, clock in enumerate(clocks)
            ],
            "summary": [
                {call: part.as_json() for call, part in summarize(one).items()} for one in ranks
            ],
        },
    }


def _names(one: Records) -> Iterator[_Event]:
    """What rows are called, and their order."""
    about: list[tuple[int, str, dict[str, Any]]] = [
        (0, "process_name", {"name": f"rank {one.rank}"})
    ]
    about += [(0, "process_sort_index", {"sort_index": one.rank})]
    for track, number in TRACKS.items():
        about += [(number, "thread_name", {"name": _TITLES[track]})]
        about += [(number, "thread_sort_index", {"sort_index": number})]
    for thread, name, args in about:
        yield {"ph": "M", "pid": one.rank, "tid": thread, "name": name, "args": args}


class _Writer:
    """Writes times on one clock, which starts with the first operation."""

    def __init__(self, clocks: list[Clock], start: int) -> None:
        self.clocks, self.start = clocks, start
        self.flights = 0

    def time(self, rank: int, time_ns: int) -> float:
        return (self.clocks[rank].corrected(time_ns) - self.start) / 1000

    def event(self, phase: str, rank: int, track: str, time_ns: int, **rest: Any) -> _Event:
        begin = self.time(rank, time_ns)
        return {"ph": phase, "pid": rank, "tid": TRACKS[track], "ts": begin, **rest}

    def slice(
        self, rank: int, track: str, begin: int, end: int, name: str, args: dict[str, Any]
    ) -> _Event:
        lasts = round(self.time(rank, end) - self.time(rank, begin), 3)
        return self.event("X", rank, track, begin, dur=lasts, name=name, cat=track, args=args)

    def operation(self, rank: int, one: Operation) -> Iterator[_Event]:
        """All of one operation on one rank, but for the arrows."""
        about = {
            "call": one.description,
            "number": one.number,
            "algorithm": one.algorithm,
            "segments": one.segments,
            **shares([one]).as_json(),
        }
        if one.error:
            about["error"] = one.error
        title = f"{one.algorithm} {one.collective}"
        yield self.slice(rank, "operation", one.begin, one.end, title, about)
        for span in one.spans:
            args = {"number": one.number, "step": span.step}
            if span.message >= 0:
                args |= _about(one.messages[span.message])
            elif span.nbytes:
                args["bytes"] = span.nbytes
            name = _span_name(one, span)
            yield self.slice(rank, span.kind, span.begin, span.end, name, args)
        arrivals = one.arrivals()
        for number, message in enumerate(one.messages):
            yield from self.flight(rank, one, message, arrivals.get(number))

    def flight(
        self, rank: int, one: Operation, message: Message, wait: Span | None
    ) -> Iterator[_Event]:
        """A message from its post until it has been waited for."""
        self.flights += 1
        way = "send" if message.is_send else "receive"
        same = {"name": _message_name(message), "cat": way, "id": hex(self.flights)}
        args = {"number": one.number, "tag": message.tag, "complete": wait is not None}
        args |= _about(message)
        yield self.event("b", rank, "post", message.begin, args=args, **same)
        end = one.end if wait is None else wait.end
        yield self.event("e", rank, "post", end, **same)

    def arrow(
        self, number: int, source: int, target: int, sent: Message, wait: Span
    ) -> list[_Event]:
        """From the post of a send to the end of the wait for it."""
        same = {"name": "message", "cat": "message", "id": number}
        # It ends within the slice to which it belongs, which its last moment does not.
        end = max(wait.begin, wait.end - 1)
        leaves = self.event("s", source, "post", sent.begin, **same)
        arrives = self.event("f", target, "wait", end, bp="e", **same)
        arrives["ts"] = max(arrives["ts"], leaves["ts"])
        return [leaves, arrives]


def _about(message: Message) -> dict[str, Any]:
    return {
        "way": "send" if message.is_send else "receive",
        "peer": message.peer,
        "step": message.step,
        "bytes": message.nbytes,
    }


def _message_name(message: Message) -> str:
    way = "to" if message.is_send else "from"
    return f"step {message.step}: {message.nbytes} B {way} rank {message.peer}"


def _span_name(one: Operation, span: Span) -> str:
    if span.message < 0:
        return f"step {span.step}: {span.kind}"
    message = one.messages[span.message]
    way = "send to" if message.is_send else "receive from"
    return f"step {span.step}: {way} rank {message.peer}"
