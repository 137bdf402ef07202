"""The picture of a simulated run, in the Trace Event Format.

The rows, names and categories are those of ``ringcoll trace``: each process row is a rank, ``X``
is a slice, ``b`` and ``e`` begin and end a flight, ``s`` and ``f`` are the ends of an arrow, ``M``
names a row. Times are in microseconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from ringcoll.simulation.results import SimulatedRun, SimulatedSpan

__all__ = ["TRACKS", "document"]

TRACKS = {
    "operation": ("operations", 1),
    "wait": ("waits", 2),
    "post": ("posts of messages", 3),
    "reduce": ("reductions", 4),
}
"""The rows of a rank: their titles and numbers."""

_Event = dict[str, Any]


def document(run: SimulatedRun) -> dict[str, Any]:
    """Make the contents of the file."""
    assert run.spans is not None
    events: list[_Event] = []
    for rank, end in enumerate(run.ends):
        events += _names(rank)
        about: dict[str, Any] = {"algorithm": run.schedule.algorithm, "segments": run.segments}
        title = f"{run.schedule.algorithm} {run.schedule.collective}"
        # A late rank begins with its first message; without one it has nothing to show.
        begin = min((span.begin_s for span in run.spans if span.rank == rank), default=end)
        events.append(_slice(rank, "operation", begin, end, title, about))
    for number, span in enumerate(run.spans):
        events += _span(number, span)
    events.sort(key=lambda event: event.get("ts", -math.inf))  # stable: begins before ends
    return {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "otherData": {
            "transport": f"simulated: {run.topology.name}",
            "world_size": run.schedule.world_size,
        },
    }


def _names(rank: int) -> Iterator[_Event]:
    rows = [(0, "process", f"rank {rank}", rank)]
    rows += [(number, "thread", title, number) for title, number in TRACKS.values()]
    for thread, kind, title, order in rows:
        common = {"ph": "M", "pid": rank, "tid": thread}
        yield {**common, "name": f"{kind}_name", "args": {"name": title}}
        yield {**common, "name": f"{kind}_sort_index", "args": {"sort_index": order}}


def _event(kind: str, rank: int, track: str, time: Any, **rest: Any) -> _Event:
    return {"ph": kind, "pid": rank, "tid": TRACKS[track][1], "ts": float(time) * 1e6, **rest}


def _slice(rank: int, track: str, begin: Any, end: Any, name: str, args: dict[str, Any]) -> _Event:
    duration = float(end - begin) * 1e6
    return _event("X", rank, track, begin, dur=duration, name=name, cat=track, args=args)


def _span(number: int, span: SimulatedSpan) -> Iterator[_Event]:
    about: dict[str, Any] = {"peer": span.peer, "step": span.step, "bytes": float(span.nbytes)}
    begin, end, rank = span.begin_s, span.end_s, span.rank
    if span.kind in ("send", "receive"):
        way = "to" if span.kind == "send" else "from"
        name = f"step {span.step}: {float(span.nbytes):g} B {way} rank {span.peer}"
        common = {"name": name, "cat": span.kind, "id": hex(number + 1)}
        yield _event("b", rank, "post", begin, args=about | {"way": span.kind}, **common)
        yield _event("e", rank, "post", end, **common)
    elif span.kind == "wait":
        name = f"step {span.step}: receive from rank {span.peer}"
        yield _slice(rank, "wait", begin, end, name, about)
        arrow: dict[str, Any] = {"name": "message", "cat": "message", "id": number}
        yield _event("s", span.peer, "post", span.posted_s, **arrow)
        yield _event("f", rank, "wait", end, bp="e", **arrow)
    else:
        yield _slice(rank, "reduce", begin, end, f"step {span.step}: reduce", about)
