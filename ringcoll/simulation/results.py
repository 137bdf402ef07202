"""A simulated run: its numbers before, and its results after; the picture for Perfetto.

Results are times, loads of links and the critical path. The picture is in the Trace Event Format,
with the rows, names and categories of ``ringcoll trace``: each process row is a rank, ``X`` is a
slice, ``b`` and ``e`` begin and end a flight, ``s`` and ``f`` are the ends of an arrow, ``M`` names
a row. Times of the picture are in microseconds.

`simulate`: checks a call, and lets the engine run it that does so in the least time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from math import isfinite
from typing import Any, NamedTuple

from ringcoll.errors import ArgumentError, TooLargeError
from ringcoll.schedule import (
    Schedule,
    Shown,
    chunks_of_data,
    estimated_messages,
    tally_of,
    without_collection,
)
from ringcoll.simulation.event_engine import EventEngine
from ringcoll.simulation.lockstep import (
    LockstepEngine,
    RankWave,
    in_segments,
    never_full,
    senders_of,
    waves_of,
)
from ringcoll.simulation.symmetry import Folding, folded, turned, turned_programs
from ringcoll.simulation.topology import Link, Number, Topology, checked


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
        The arguments of `ringcoll.simulation.simulate`.
    engine
        The engine that ran it, one of `ringcoll.simulation.results.ENGINES`.
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
            raise ArgumentError("the run has no trace", argument="trace", expected=True, got=False)
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
                part._asdict() | {"begin_s": float(part.begin_s), "end_s": float(part.end_s)}
                for part in self.path
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
        for part in self.path:
            if part.waits_for is not None:
                ranks[-1:] = [str(part.waits_for), str(part.rank)]
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
_ONE = {"group": 0, "number": 0}
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
        about = {"algorithm": schedule.algorithm, "segments": run.segments, **_ONE, **parts}
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


ENGINES = {
    "events": "the messages of all ranks, one by one",
    "steps": "all ranks step by step: turned programs, and no link that can be full",
    "symmetry": "the messages of some ranks that stand for all: turned programs and links",
}
"""The engines, and what they run."""

_MOST_NBYTES = 1 << 62
_MOST_SEGMENTS = 1 << 16
_MOST_TRACED = 1 << 20
"""Messages of a trace: a picture with more of them is some GiB."""
_MOST_MESSAGES = 1 << 21
"""Messages of a run by events, which take some 12 us each."""
_MOST_STEPS = 1 << 27
"""Steps of all ranks of a run by steps, which has 9 bytes for each; a message takes some 0.3 us."""
_MOST_PAIRS = 1 << 24
"""Pairs of ranks that exchange messages in turned programs; each has a route, of some 1.3 us."""
_MESSAGE_BY_EVENTS = 40
"""Cost of a message by events in messages by steps; measured at some 12 us and 0.3 us."""


def simulate(
    schedule: Schedule,
    nbytes: int,
    topology: Topology,
    *,
    segments: int = 1,
    late: Mapping[int, Number] | None = None,
    slowness: Mapping[int, Number] | None = None,
    trace: bool = False,
    engine: str = "auto",
) -> SimulatedRun:
    """Simulate a schedule on a topology; the model is that of `ringcoll.simulation`.

    The cost is about linear in the messages: in those of all ranks, or in those of the ranks that
    stand for all, if the programs and the network are alike for all ranks. That is proved before,
    see `ringcoll.simulation.symmetry`. A schedule should be verified before.

    Parameters
    ----------
    schedule
        The schedule, for as many ranks as the topology has.
    nbytes
        Size n of the whole data: the vector, or all blocks of one rank.
    topology
        The links, and the costs of a rank.
    segments
        Number of segments that each chunk is cut into.
    late
        Seconds by which ranks begin late, by rank.
    slowness
        Factors on ``alpha_s``, ``overhead_s`` and ``gamma_s_per_byte``, by rank: 2 is a rank that
        needs twice the time.
    trace
        Whether to keep all messages and waits, for `SimulatedRun.picture`.
    engine
        One of `ENGINES`; by default the one that takes the least time. The results are the same.

    Returns
    -------
    SimulatedRun
        Times in seconds: of type float, or exact fractions if no number of the topology, of
        ``late`` and of ``slowness`` is a float.

    Raises
    ------
    ArgumentError
        The topology has another number of ranks, a number is out of range, the data do not fit
        in the memory of a rank, there are too many messages for a trace, or there is no such
        engine, or it cannot run this schedule here.
    TooLargeError
        The messages would take many minutes, or too much memory.
    ScheduleError
        The collective is unknown, or sends and receives do not pair.

    Examples
    --------
    >>> from ringcoll.algorithms import schedule_of
    >>> from ringcoll.simulation import fat_tree
    >>> tree = fat_tree(4, ranks_per_leaf=2, bandwidth=1, oversubscription=2)
    >>> simulate(schedule_of("all_reduce", "recursive_doubling", 4), 12, tree).seconds
    Fraction(36, 1)
    """
    late, slowness = late or {}, slowness or {}
    if engine not in (*ENGINES, "auto"):
        known = ", ".join((*ENGINES, "auto"))
        raise ArgumentError("no such engine", argument="engine", expected=known, got=repr(engine))
    if topology.world_size != schedule.world_size:
        raise ArgumentError(
            "the schedule is for another number of ranks",
            argument="topology",
            expected=f"{schedule.world_size} ranks",
            got=topology.world_size,
        )
    checked("nbytes", nbytes, whole=True, most=_MOST_NBYTES)
    checked("segments", segments, positive=True, whole=True, most=_MOST_SEGMENTS)
    for name, values in (("late", late), ("slowness", slowness)):
        for rank, value in values.items():
            checked(f"{name}[{rank}]", value, positive=name == "slowness")
            checked(f"a rank of {name}", rank, whole=True, most=schedule.world_size - 1)
    _check_memory(schedule, nbytes, topology)
    if trace and (messages := sum(tally_of(schedule).sends) * segments) > _MOST_TRACED:
        raise ArgumentError(
            "there are too many messages for a trace",
            argument="trace",
            expected=f"at most {_MOST_TRACED} messages",
            got=messages,
        )
    settings = RunSettings(schedule, nbytes, topology, segments, late, slowness)
    with without_collection():
        name, outcome = _outcome(engine, settings, (late, slowness), trace=trace)
    seconds = max(outcome.ends)
    if isinstance(seconds, float) and not isfinite(seconds):
        raise ArgumentError("the run takes longer than a float can say", argument="topology")
    findings = outcome._asdict()
    link_chunks = findings.pop("link_chunks")
    return SimulatedRun(
        schedule=schedule,
        nbytes=nbytes,
        topology=topology,
        segments=segments,
        late=late,
        slowness=slowness,
        engine=name,
        seconds=seconds,
        link_nbytes=tuple(chunks * settings.unit for chunks in link_chunks),
        **findings,
    )


def _outcome(
    engine: str, settings: RunSettings, of_ranks: tuple[Mapping[int, Number], ...], *, trace: bool
) -> tuple[str, RunOutcome]:
    """Run an engine, or the one that takes the least time; return its name, too."""
    schedule, topology, segments = settings.schedule, settings.topology, settings.segments
    world_size = schedule.world_size
    programs = None if trace or engine == "events" else turned_programs(schedule)
    if programs is not None:
        _check_pairs(schedule, programs)
        folding = None if engine == "steps" else folded(topology, programs, *of_ranks)
        few = folding is not None and folding.period * _MESSAGE_BY_EVENTS <= world_size
        can_be_held = world_size * len(programs[0]) <= _MOST_STEPS
        if segments == 1 and engine != "symmetry" and not few and can_be_held:
            senders = senders_of(programs, world_size)
            if senders is not None and never_full(topology, programs):
                return "steps", LockstepEngine(settings, programs, senders).run()
        if folding is not None:
            sends = sum(len(wave.sends) for program in programs for wave in program)
            _check_messages(settings, sends * folding.period // len(programs))
            waves = []
            for rank in range(folding.period):
                of_rank = partial(turned, by=rank, world_size=world_size)
                steps = map(of_rank, programs[rank % len(programs)])
                waves.append(in_segments(steps, segments))
            return "symmetry", EventEngine(settings, waves, folding).run()
    if engine not in ("auto", "events"):
        raise ArgumentError(
            "the engine cannot run this schedule on this topology",
            argument="engine",
            expected="events, or auto",
            got=engine,
        )
    _check_messages(settings, estimated_messages(schedule, _MOST_MESSAGES))
    every = [waves_of(schedule, rank, segments) for rank in range(world_size)]
    return "events", EventEngine(settings, every, Folding.none(topology), trace=trace).run()


def _check_pairs(schedule: Schedule, programs: list[list[RankWave]]) -> None:
    """Refuse a run whose routes would take minutes to look up."""
    distances = [{peer for wave in steps for peer, *_ in wave.sends} for steps in programs]
    pairs = sum(map(len, distances)) * schedule.world_size // len(programs)
    if pairs > _MOST_PAIRS:
        raise TooLargeError(
            f"{schedule.algorithm} {schedule.collective} on {schedule.world_size} ranks has "
            f"messages between {pairs:,} pairs of ranks, expected at most {_MOST_PAIRS:,}",
            most=_MOST_PAIRS,
        )


def _check_messages(settings: RunSettings, messages: int) -> None:
    """Refuse a run by events that would take many minutes."""
    if messages * settings.segments > _MOST_MESSAGES:
        schedule, fewer = settings.schedule, _MOST_MESSAGES // max(1, messages)
        hint = f"; {fewer} segments would do" if fewer else ""
        raise TooLargeError(
            f"{schedule.algorithm} {schedule.collective} on {schedule.world_size} ranks has about "
            f"{messages * settings.segments:,} messages here, expected at most "
            f"{_MOST_MESSAGES:,}{hint}",
            most=0 if fewer else _MOST_MESSAGES,
        )


def _check_memory(schedule: Schedule, nbytes: int, topology: Topology) -> None:
    """The data and the scratch slots have to fit, in place, in the memory of a rank."""
    needed = nbytes + schedule.num_slots * Fraction(nbytes, chunks_of_data(schedule))
    if topology.memory_nbytes is not None and needed > topology.memory_nbytes:
        raise ArgumentError(
            "the data and the scratch memory do not fit in the memory of a rank",
            argument="nbytes",
            expected=f"at most {topology.memory_nbytes} bytes together",
            got=-(-needed.numerator // needed.denominator),
        )
