"""The picture of a simulated run, in the Trace Event Format.

The rows, names and categories are those of ``ringcoll trace``: each process row is a rank, ``X``
is a slice, ``b`` and ``e`` begin and end a flight, ``s`` and ``f`` are the ends of an arrow, ``M``
names a row. Times are in microseconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from ringcoll.schedule import Schedule

TRACKS = {
    "operation": ("operations", 1),
    "wait": ("waits", 2),
    "post": ("posts of messages", 3),
    "reduce": ("reductions", 4),
}
"""The rows of a rank: their titles and numbers."""

_Event = dict[str, Any]
_ONE = {"group": 0, "number": 0}
"""The picture has one operation of one group."""


class SimulatedSpan(NamedTuple):
    """A time of a rank, for a trace.

    ``kind`` is "receive", the wait for a message; "reduce"; "send", a message until its last byte
    has left; or "leave", the wait for the sends of a wave. ``peer`` is -1 if there is no message.
    ``wave_s`` is the time at which the wave began.
    """

    kind: str
    rank: int
    peer: int
    step: int
    begin_s: Any
    end_s: Any
    nbytes: Any
    posted_s: Any
    wave_s: Any


def document(
    all_spans: Iterable[SimulatedSpan],
    ends: Sequence[Any],
    schedule: Schedule,
    segments: int,
    topology: str,
    findings: str,
) -> dict[str, Any]:
    """Make the contents of the file, from the spans of all ranks and the ends of their runs."""
    events: list[_Event] = []
    spans: list[list[tuple[int, SimulatedSpan]]] = [[] for _ in ends]
    for number, span in enumerate(all_spans):
        spans[span.rank].append((number, span))
    summary = []
    for rank, end in enumerate(ends):
        events += _names(rank)
        begin = min((span.wave_s for _, span in spans[rank]), default=end)
        parts = _shares([span for _, span in spans[rank]], begin, end)
        title = f"{schedule.algorithm} {schedule.collective}"
        about = {"algorithm": schedule.algorithm, "segments": segments, **_ONE, **parts}
        events.append(_slice(rank, "operation", begin, end, title, about))
        summary.append({schedule.collective: parts, "total": parts})
        for number, span in spans[rank]:
            events += _span(number, span)
    events.sort(key=lambda event: event.get("ts", -math.inf))  # stable: begins before ends
    return {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "otherData": {
            "transport": f"simulated: {topology}",
            "world_size": schedule.world_size,
            "operations_left_out": 0,
            "clocks": [],
            "summary": summary,
            "phases": [{} for _ in ends],
            "findings": findings.splitlines(),
        },
    }


def _shares(spans: list[SimulatedSpan], begin: Any, end: Any) -> dict[str, Any]:
    """The parts of a rank's time, and its messages, as ``ringcoll trace`` names them."""
    kinds: dict[str, tuple[str, ...]] = {"waiting": ("receive", "leave"), "reducing": ("reduce",)}
    parts = {
        name: float(sum(span.end_s - span.begin_s for span in spans if span.kind in kind))
        for name, kind in kinds.items()
    }
    total = float(end - begin)
    parts |= {"moving": 0.0, "python": max(0.0, total - sum(parts.values()))}
    sent = [span.nbytes for span in spans if span.kind == "send"]
    return {
        "operations": 1,
        "total_s": total,
        **{f"{name}_s": seconds for name, seconds in parts.items()},
        **{f"{name}_share": seconds / total if total else 0.0 for name, seconds in parts.items()},
        "sent_bytes": float(sum(sent)),
        "received_bytes": float(sum(span.nbytes for span in spans if span.kind == "receive")),
        "sent_messages": len(sent),
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
    rank, nbytes = span.rank, float(span.nbytes)
    about: dict[str, Any] = {"peer": span.peer, "step": span.step, "bytes": nbytes, **_ONE}
    name = f"step {span.step}: "
    if span.kind in ("send", "receive"):
        way = "to" if span.kind == "send" else "from"
        title = f"{name}{nbytes:g} B {way} rank {span.peer}"
        common = {"name": title, "cat": span.kind, "id": hex(number + 1)}
        args = {**about, "way": span.kind, "tag": 0, "complete": True}
        yield _event("b", rank, "post", span.wave_s, args=args, **common)
        yield _event("e", rank, "post", span.end_s, **common)
    if span.kind == "send":
        title = f"{name}send to rank {span.peer}"
        yield _slice(rank, "post", span.wave_s, span.wave_s, title, about)
    elif span.kind == "receive":
        title = f"{name}receive from rank {span.peer}"
        yield _slice(rank, "wait", span.begin_s, span.end_s, title, about)
        arrow: dict[str, Any] = {"name": "message", "cat": "message", "id": number}
        yield _event("s", span.peer, "post", span.posted_s, **arrow)
        yield _event("f", rank, "wait", span.end_s, bp="e", **arrow)
    else:
        track = "wait" if span.kind == "leave" else "reduce"
        title = f"{name}{'wait for sends' if span.kind == 'leave' else 'reduce'}"
        yield _slice(rank, track, span.begin_s, span.end_s, title, about)
