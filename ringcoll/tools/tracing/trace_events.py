"""The picture: the notes of all ranks, in the Trace Event Format.

chrome://tracing and Perfetto read this format ("Trace Event Format", Google, 2016): ``X`` is a
slice, ``b`` and ``e`` begin and end a flight, ``s`` and ``f`` are the two ends of an arrow, ``M``
names a row. Times are in microseconds. Each process row is a rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from ringcoll.runtime.watch import PhaseSpan, ThreadWait
from ringcoll.tools.tracing.clocks import Clock, Sighting, agree
from ringcoll.tools.tracing.records import MessageEnd, Records, Span, TracedOperation
from ringcoll.tools.tracing.summary import (
    PhaseTimes,
    findings,
    phase_times,
    shares,
    summarize,
    summarize_phases,
)

# The rows of a rank: their names in events, and their titles and numbers.
_TRACKS = {
    "operation": ("operations", 1),
    "wait": ("waits", 2),
    "post": ("posts of messages", 3),
    "reduce": ("reductions", 4),
    "copy": ("copies", 5),
}
_PHASES = 9  # number of the row of phases, which is shown above the others
_ROWS = 10  # numbers from one group's rows to the next group's

_Event = dict[str, Any]


class Delivery(NamedTuple):
    """Both ends of a message, and the receiver's wait for it."""

    source: int
    target: int
    sent: MessageEnd
    received: MessageEnd
    wait: Span
    group: int


def deliveries(ranks: list[Records]) -> Iterator[Delivery]:
    """Pair sends with the receives whose waits are over.

    Within an operation and an ordered pair of ranks, the i-th receive gets the i-th send: the
    executor posts them in this order.
    """
    sends: dict[tuple[int, int, int, int], list[MessageEnd]] = {}
    for rank in ranks:
        for operation in rank.operations:
            for message in operation.messages:
                if message.is_send:
                    key = operation.group, operation.number, rank.rank, message.peer
                    sends.setdefault(key, []).append(message)
    for rank in ranks:
        for operation in rank.operations:
            arrivals = operation.arrivals()
            posted = {
                peer: iter(sends.get((operation.group, operation.number, peer, rank.rank), ()))
                for peer in range(rank.world_size)
            }
            for number, message in enumerate(operation.messages):
                if message.is_send:
                    continue
                sent = next(posted[message.peer], None)
                if sent is not None and number in arrivals:
                    wait = arrivals[number]
                    yield Delivery(message.peer, rank.rank, sent, message, wait, operation.group)


def document(ranks: list[Records]) -> dict[str, Any]:
    """Make the file's contents from the notes of each rank, in order."""
    arrived = list(deliveries(ranks))
    clocks = agree(
        len(ranks),
        [sighting for rank in ranks for sighting in rank.sightings[0]],
        [sighting for rank in ranks for sighting in rank.sightings[1]],
        (Sighting(item.source, item.target, item.sent.begin, item.wait.end) for item in arrived),
    )
    starts = [
        clock.corrected(item.begin)
        for rank, clock in zip(ranks, clocks, strict=True)
        for items in (rank.operations, rank.phases[:1], rank.waits)
        for item in items
    ]
    writer = _Writer(clocks, min(starts, default=0))
    events: list[_Event] = []
    for rank in ranks:
        events += _names(rank)
        for span, times in zip(rank.phases, phase_times(rank), strict=True):
            events.append(writer.phase(rank.rank, span, times))
        waits = sorted(rank.waits, key=lambda wait: (wait.begin, -wait.end))
        events += [writer.thread_wait(rank.rank, wait) for wait in waits]
        for operation in rank.operations:
            events += writer.operation(rank.rank, operation)
    for number, delivery in enumerate(arrived):
        events += writer.arrow(number, delivery)
    # Begins stay before ends, and slices before the slices in them: the sort is stable.
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
                {call: own.as_json() for call, own in summarize(rank).items()} for rank in ranks
            ],
            "phases": [
                {name: times.as_json() for name, times in summarize_phases(rank).items()}
                for rank in ranks
            ],
            "findings": findings(ranks),
        },
    }


def _names(records: Records) -> Iterator[_Event]:
    """Names of the rows of a rank, and their order."""
    rows = [(0, "process", f"rank {records.rank}", records.rank)]
    if records.phases or records.waits:
        rows.append((_PHASES, "thread", "phases", 0))
    for group, ranks in enumerate(records.groups):
        whose = f" (ranks {' '.join(map(str, ranks))})" if len(records.groups) > 1 else ""
        for title, number in _TRACKS.values():
            row = _ROWS * group + number
            rows.append((row, "thread", title + whose, row))
    for thread, kind, title, order in rows:
        common = {"ph": "M", "pid": records.rank, "tid": thread}
        yield {**common, "name": f"{kind}_name", "args": {"name": title}}
        yield {**common, "name": f"{kind}_sort_index", "args": {"sort_index": order}}


class _Writer:
    """Writes events with the times of a common clock, which starts with the first event."""

    def __init__(self, clocks: list[Clock], start: int) -> None:
        self.clocks, self.start = clocks, start
        self.flights = 0

    def time(self, rank: int, time_ns: int) -> float:
        return (self.clocks[rank].corrected(time_ns) - self.start) / 1000

    def event(self, kind: str, rank: int, row: int, time_ns: int, **rest: Any) -> _Event:
        return {"ph": kind, "pid": rank, "tid": row, "ts": self.time(rank, time_ns), **rest}

    def slice(
        self, rank: int, row: int, begin: int, end: int, cat: str, name: str, args: dict[str, Any]
    ) -> _Event:
        duration = round(self.time(rank, end) - self.time(rank, begin), 3)
        return self.event("X", rank, row, begin, dur=duration, name=name, cat=cat, args=args)

    def phase(self, rank: int, span: PhaseSpan, times: PhaseTimes) -> _Event:
        """A phase, with its times."""
        which = ", ".join(f"{what} {number}" for what, number in span.about.items())
        name = f"{span.name} ({which})" if which else span.name
        args = {"phase": span.name, "depth": span.depth, **span.about, **times.as_json()}
        return self.slice(rank, _PHASES, span.begin, span.end, "phase", name, args)

    def thread_wait(self, rank: int, wait: ThreadWait) -> _Event:
        """A wait in a phase, for a message or an operation."""
        name = f"wait for rank {wait.peer}" if wait.peer >= 0 else "wait for operations"
        args = {"peer": wait.peer, "group": wait.group}
        return self.slice(rank, _PHASES, wait.begin, wait.end, "idle", name, args)

    def operation(self, rank: int, operation: TracedOperation) -> Iterator[_Event]:
        """All events of an operation on a rank, except arrows."""
        about = {
            "call": operation.description,
            "group": operation.group,
            "number": operation.number,
            "algorithm": operation.algorithm,
            "segments": operation.segments,
            **shares([operation]).as_json(),
        }
        if operation.error:
            about["error"] = operation.error
        title = f"{operation.algorithm} {operation.collective}"
        begin, end = operation.begin, operation.end
        row = _row("operation", operation.group)
        yield self.slice(rank, row, begin, end, "operation", title, about)
        for span in operation.spans:
            args = {"group": operation.group, "number": operation.number, "step": span.step}
            name = f"step {span.step}: {span.kind}"
            if span.message >= 0:
                message = operation.messages[span.message]
                args |= _about(message)
                way = "send to" if message.is_send else "receive from"
                name = f"step {span.step}: {way} rank {message.peer}"
            elif span.nbytes:
                args["bytes"] = span.nbytes
            row = _row(span.kind, operation.group)
            yield self.slice(rank, row, span.begin, span.end, span.kind, name, args)
        arrivals, row = operation.arrivals(), _row("post", operation.group)
        for number, message in enumerate(operation.messages):  # from the post to the wait's end
            self.flights += 1
            about, way = _about(message), "to" if message.is_send else "from"
            name = f"step {message.step}: {message.nbytes} B {way} rank {message.peer}"
            common = {"name": name, "cat": about["way"], "id": hex(self.flights)}
            args = {
                "group": operation.group,
                "number": operation.number,
                "tag": message.tag,
                "complete": number in arrivals,
            }
            yield self.event("b", rank, row, message.begin, args=args | about, **common)
            end = arrivals[number].end if number in arrivals else operation.end
            yield self.event("e", rank, row, end, **common)

    def arrow(self, number: int, delivery: Delivery) -> list[_Event]:
        """An arrow from the post of a send to the end of the receiver's wait."""
        common = {"name": "message", "cat": "message", "id": number}
        # An arrow has to end within the slice of the wait; the last moment is outside.
        end = max(delivery.wait.begin, delivery.wait.end - 1)
        post, wait = _row("post", delivery.group), _row("wait", delivery.group)
        leaves = self.event("s", delivery.source, post, delivery.sent.begin, **common)
        arrives = self.event("f", delivery.target, wait, end, bp="e", **common)
        arrives["ts"] = max(arrives["ts"], leaves["ts"])
        return [leaves, arrives]


def _row(track: str, group: int) -> int:
    return _ROWS * group + _TRACKS[track][1]


def _about(message: MessageEnd) -> dict[str, Any]:
    return {
        "way": "send" if message.is_send else "receive",
        "peer": message.peer,
        "step": message.step,
        "bytes": message.nbytes,
    }
