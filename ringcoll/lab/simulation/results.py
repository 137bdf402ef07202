"""A simulated run: its numbers before, and its results after; the picture for Perfetto.

Results are times, loads of links and the critical path. The picture is in the Trace Event Format,
with the rows, names and categories of ``ringcoll trace``: each process row is a rank, ``X`` is a
slice, ``b`` and ``e`` begin and end a flight, ``s`` and ``f`` are the ends of an arrow, ``M`` names
a row. Times of the picture are in microseconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple

from ringcoll.errors import ArgumentError
from ringcoll.lab.simulation.topology import Link, Number, Topology
from ringcoll.schedules import Schedule, Shown, chunks_of_data


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


class LinkLoad(NamedTuple):
    """Bytes that a link has carried, and the share of its capacity that they used.

    ``share`` is a fraction of the time of the run; ``None`` for a link that is never full.
    """

    link: Link
    nbytes: Any
    share: Any


class PathStep(NamedTuple):
    """A part of the critical path: it begins when the part before it ends.

    Parameters
    ----------
    rank
        The rank that ends a wave at ``end_s``.
    waits_for
        The rank whose message this rank took last; ``None`` if it waited for its own work.
    step
        The step of the message, or the last step of the wave.
    begin_s, end_s
        Seconds: from the post of the message, or the beginning of the wave, to its end.
    """

    rank: int
    waits_for: int | None
    step: int
    begin_s: Any
    end_s: Any


@dataclass(frozen=True, eq=False, kw_only=True)
class SimulatedRun(Shown):
    """One simulated run of a schedule; all times are in seconds.

    Parameters
    ----------
    schedule, nbytes, topology, segments, late, slowness
        The arguments of `ringcoll.lab.simulation.simulate`.
    engine
        The engine that ran it, one of `ringcoll.lab.simulation.simulate_call.ENGINES`.
    seconds
        Time at which the last rank has ended.
    ends
        Time at which each rank has ended.
    waited_s
        Seconds that each rank has waited for messages of others.
    link_nbytes
        Bytes that each link of the topology has carried.
    path
        The critical path: its parts follow each other without a gap, and the last one ends the
        run.
    num_messages
        Messages of all ranks.
    spans
        All times of all ranks; ``None`` without ``trace=True``.
    """

    schedule: Schedule
    nbytes: int
    topology: Topology
    segments: int
    engine: str
    seconds: Any
    ends: tuple[Any, ...] = field(repr=False)
    waited_s: tuple[Any, ...] = field(repr=False)
    link_nbytes: tuple[Any, ...] = field(repr=False)
    path: tuple[PathStep, ...] = field(repr=False)
    num_messages: int
    late: Mapping[int, Any] = field(default_factory=dict)
    slowness: Mapping[int, Any] = field(default_factory=dict)
    spans: tuple[SimulatedSpan, ...] | None = field(default=None, repr=False)

    def loads(self) -> list[LinkLoad]:
        """The links that have carried anything, those with the highest share first."""
        loads = []
        for link, nbytes in zip(self.topology.links, self.link_nbytes, strict=True):
            if nbytes:
                full = link.capacity * self.seconds if link.capacity is not None else None
                loads.append(LinkLoad(link, nbytes, nbytes / full if full else None))
        return sorted(loads, key=lambda load: (-(load.share or 0), -load.nbytes))

    @property
    def busiest_s(self) -> Any:
        """Seconds that the busiest link would take for what it has carried, if it never waited."""
        loads = zip(self.topology.links, self.link_nbytes, strict=True)
        return max((nbytes / link.capacity for link, nbytes in loads if link.capacity), default=0)

    def picture(self) -> dict[str, Any]:
        """The run in the Trace Event Format, which Perfetto reads, as ``ringcoll trace`` writes it.

        Raises
        ------
        ArgumentError
            The run was simulated without ``trace=True``.
        """
        if self.spans is None:
            raise ArgumentError("the run has no trace", "trace", True, False)
        return _document(self, self.spans)

    def as_json(self) -> dict[str, Any]:
        """The numbers of the run, as JSON can hold them."""
        return {
            "collective": self.schedule.collective,
            "algorithm": self.schedule.algorithm,
            "world_size": self.schedule.world_size,
            "nbytes": self.nbytes,
            "segments": self.segments,
            "engine": self.engine,
            "topology": self.topology.name,
            "source": self.topology.source,
            "seconds": float(self.seconds),
            "messages": self.num_messages,
            "ends_s": [float(end) for end in self.ends],
            "waited_s": [float(waited) for waited in self.waited_s],
            "links": [
                {
                    "link": load.link.name,
                    "bytes": float(load.nbytes),
                    "share": None if load.share is None else float(load.share),
                }
                for load in self.loads()
            ],
            "path": [
                step._asdict() | {"begin_s": float(step.begin_s), "end_s": float(step.end_s)}
                for step in self.path
            ],
        }

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        name = f"{self.schedule.algorithm} {self.schedule.collective}"
        pieces = f" in {self.segments} segments" if self.segments > 1 else ""
        yield f"{name} of {self.nbytes} bytes{pieces} on {self.schedule.world_size} ranks"
        yield f"{self.topology.name}: {float(self.seconds) * 1e6:.6g} us"
        for load in self.loads()[:1]:
            share = "" if load.share is None else f", {float(load.share):.0%} of its capacity"
            yield f"fullest link: {load.link.name}, {float(load.nbytes):.6g} bytes{share}"
        waited = [float(seconds) for seconds in self.waited_s]
        slowest = max(range(len(waited)), key=waited.__getitem__)
        yield f"longest wait for messages: rank {slowest}, {waited[slowest] * 1e6:.6g} us"
        ranks = [str(self.path[0].rank)] if self.path else []
        for step in self.path:
            if step.waits_for is not None:
                ranks[-1:] = [str(step.waits_for), str(step.rank)]
        if len(ranks) > 8:
            ranks = [*ranks[:4], "...", *ranks[-4:]]
        yield f"critical path: rank {' -> '.join(ranks)}" if ranks else "critical path: none"


class RunSettings:
    """The numbers of a run: all exact fractions, or all floats if any of them is a float."""

    def __init__(
        self,
        schedule: Schedule,
        nbytes: int,
        topology: Topology,
        segments: int,
        late: Mapping[int, Number],
        slowness: Mapping[int, Number],
    ) -> None:
        self.schedule, self.topology, self.segments = schedule, topology, segments
        costs = (topology.alpha_s, topology.overhead_s, topology.gamma_s_per_byte)
        numbers = [*costs, *late.values(), *slowness.values()]
        for link in topology.links:
            numbers += (link.fastest, link.latency_s)
        self.is_exact = not any(isinstance(value, float) for value in numbers)
        self.number: Callable[[Any], Any] = Fraction if self.is_exact else float
        self.alpha, self.overhead, self.gamma = (self.number(cost) for cost in costs)
        # Bytes of a segment of a chunk.
        self.unit = self.number(Fraction(nbytes, chunks_of_data(schedule) * segments))
        ranks = range(schedule.world_size)
        self.late: list[Any] = [self.number(late.get(rank, 0)) for rank in ranks]
        self.slowness: list[Any] = [self.number(slowness.get(rank, 1)) for rank in ranks]


class RunOutcome(NamedTuple):
    """An engine's findings, for all ranks and links; see `SimulatedRun`."""

    ends: tuple[Any, ...]
    waited_s: tuple[Any, ...]
    link_chunks: tuple[int, ...]
    path: tuple[PathStep, ...]
    num_messages: int
    spans: tuple[SimulatedSpan, ...] | None


TRACKS = {
    "operation": ("operations", 1),
    "wait": ("waits", 2),
    "post": ("posts of messages", 3),
    "reduce": ("reductions", 4),
}
"""The rows of a rank: their titles and numbers."""

_Event = dict[str, Any]
_OPERATION = {"group": 0, "number": 0}
"""The picture has one operation of one group."""


def _document(run: SimulatedRun, all_spans: Iterable[SimulatedSpan]) -> dict[str, Any]:
    """The contents of the file, from the spans of all ranks."""
    schedule = run.schedule
    events: list[_Event] = []
    spans: list[list[tuple[int, SimulatedSpan]]] = [[] for _ in run.ends]
    for number, span in enumerate(all_spans):
        spans[span.rank].append((number, span))
    summary = []
    for rank, end in enumerate(run.ends):
        events += _names(rank)
        begin = min((span.wave_s for _, span in spans[rank]), default=end)
        parts = _shares([span for _, span in spans[rank]], begin, end)
        title = f"{schedule.algorithm} {schedule.collective}"
        about = {"algorithm": schedule.algorithm, "segments": run.segments, **_OPERATION, **parts}
        events.append(_slice(rank, "operation", begin, end, title, about))
        summary.append({schedule.collective: parts, "total": parts})
        for number, span in spans[rank]:
            events += _span(number, span)
    events.sort(key=lambda event: event.get("ts", -math.inf))  # stable: begins before ends
    return {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "otherData": {
            "transport": f"simulated: {run.topology.name}",
            "world_size": schedule.world_size,
            "operations_left_out": 0,
            "clocks": [],
            "summary": summary,
            "phases": [{} for _ in run.ends],
            "findings": str(run).splitlines(),
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
        row = {"ph": "M", "pid": rank, "tid": thread}
        yield {**row, "name": f"{kind}_name", "args": {"name": title}}
        yield {**row, "name": f"{kind}_sort_index", "args": {"sort_index": order}}


def _event(kind: str, rank: int, track: str, time: Any, **rest: Any) -> _Event:
    return {"ph": kind, "pid": rank, "tid": TRACKS[track][1], "ts": float(time) * 1e6, **rest}


def _slice(rank: int, track: str, begin: Any, end: Any, name: str, args: dict[str, Any]) -> _Event:
    duration = float(end - begin) * 1e6
    return _event("X", rank, track, begin, dur=duration, name=name, cat=track, args=args)


def _span(number: int, span: SimulatedSpan) -> Iterator[_Event]:
    rank, nbytes = span.rank, float(span.nbytes)
    about: dict[str, Any] = {"peer": span.peer, "step": span.step, "bytes": nbytes, **_OPERATION}
    name = f"step {span.step}: "
    if span.kind in ("send", "receive"):
        way = "to" if span.kind == "send" else "from"
        title = f"{name}{nbytes:g} B {way} rank {span.peer}"
        flight = {"name": title, "cat": span.kind, "id": hex(number + 1)}
        args = {**about, "way": span.kind, "tag": 0, "complete": True}
        yield _event("b", rank, "post", span.wave_s, args=args, **flight)
        yield _event("e", rank, "post", span.end_s, **flight)
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
