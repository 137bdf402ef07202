"""Where the time of each phase has gone: computing, communicating, or waiting, and for whom.

It is the time of the thread that has entered the trace. Each moment of a phase is one of these::

    waiting        for a message: in an operation that runs in this thread; in an asynchronous
                   operation, while this thread waits for the operation; or between two ranks
    communicating  all other time in an operation, or in a wait for an operation
    computing      all other time

Asynchronous operations run in a thread of their own. The time in which they run while this thread
computes is ``beside``: a part of computing, and counted nowhere else. A wait that Python does not
see, as C++ code may wait for a future, looks like that too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from ringcoll.tracing.phases import PhaseSpan
from ringcoll.tracing.records import Records


@dataclass
class PhaseTimes:
    """Times of some phases of a rank, added up, without the phases in them.

    Parameters
    ----------
    times
        Number of phases.
    total_s, computing_s, communicating_s, waiting_s
        Time in seconds, and its parts: outside of operations, in operations and waits for them, and
        in waits for a message.
    beside_s
        Time, of computing, in which asynchronous operations ran.
    waiting_for_s
        Parts of ``waiting_s`` by the rank that was waited for.
    peak_nbytes
        Peak of memory in bytes, with the phases in it; ``None`` if it was not measured.
    """

    times: int = 0
    total_s: float = 0.0
    computing_s: float = 0.0
    communicating_s: float = 0.0
    waiting_s: float = 0.0
    beside_s: float = 0.0
    waiting_for_s: dict[int, float] = field(default_factory=dict)
    peak_nbytes: int | None = None

    def add(self, other: PhaseTimes) -> None:
        """Add the times of other phases."""
        self.times += other.times
        for name in ("total_s", "computing_s", "communicating_s", "waiting_s", "beside_s"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for peer, seconds in other.waiting_for_s.items():
            self.waiting_for_s[peer] = self.waiting_for_s.get(peer, 0.0) + seconds
        peaks = [each.peak_nbytes for each in (self, other) if each.peak_nbytes is not None]
        self.peak_nbytes = max(peaks, default=None)

    def as_json(self) -> dict[str, Any]:
        """The fields."""
        return asdict(self)


class _Interval(NamedTuple):
    """Time in ns, and to whom it belongs: a phase, a rank, or nobody in particular."""

    begin: int
    end: int
    owner: int = 0


def _disjoint(intervals: Iterable[_Interval]) -> list[_Interval]:
    """In the order of time; the earlier interval keeps what two have in common."""
    result, reached = [], float("-inf")
    for begin, end, owner in sorted(intervals):
        if end > reached:
            result.append(_Interval(int(max(begin, reached)), end, owner))
            reached = end
    return result


def _common(
    some: Sequence[_Interval], others: Sequence[_Interval]
) -> Iterator[tuple[int, _Interval]]:
    """The common parts of two disjoint sequences, with the owners of both."""
    first = 0
    for begin, end, owner in some:
        while first < len(others) and others[first].end <= begin:
            first += 1
        for index in range(first, len(others)):
            if others[index].begin >= end:
                break
            both = max(begin, others[index].begin), min(end, others[index].end)
            yield owner, _Interval(*both, others[index].owner)


def _without_inner(phases: Sequence[PhaseSpan]) -> list[_Interval]:
    """The time of each phase without the phases in it; phases are in the order of their begins."""
    pieces: list[_Interval] = []
    around: list[int] = []
    since = 0

    def until(time: int) -> None:
        if around and time > since:
            pieces.append(_Interval(since, time, around[-1]))

    for index, span in enumerate(phases):
        while around and phases[around[-1]].end <= span.begin:
            until(phases[around[-1]].end)
            since = phases[around.pop()].end
        until(span.begin)
        around.append(index)
        since = span.begin
    while around:
        until(phases[around[-1]].end)
        since = phases[around.pop()].end
    return pieces


class _Timeline(NamedTuple):
    """The waits and operations of the phases' thread: each a disjoint sequence."""

    busy: list[_Interval]
    waits: list[_Interval]  # owned by the rank that is waited for
    beside: list[_Interval]


def _timeline(records: Records) -> _Timeline:
    busy: list[_Interval] = []
    waits: list[_Interval] = []
    beside: list[_Interval] = []
    waits_of: dict[int, list[_Interval]] = defaultdict(list)  # in operations, by group
    for operation in records.operations:
        (beside if operation.is_beside else busy).append(_Interval(operation.begin, operation.end))
        for span in operation.arrivals().values():
            wait = _Interval(span.begin, span.end, operation.messages[span.message].peer)
            waits_of[operation.group].append(wait)
            if not operation.is_beside:
                waits.append(wait)
    joins: dict[int, list[_Interval]] = defaultdict(list)  # waits for operations, by group
    for own in records.waits:
        busy.append(_Interval(own.begin, own.end))
        if own.peer >= 0:
            waits.append(_Interval(own.begin, own.end, own.peer))
            continue
        for group in waits_of if own.group < 0 else (own.group,):
            joins[group].append(_Interval(own.begin, own.end))
    for group, joined in joins.items():
        waits += [both for _, both in _common(_disjoint(joined), _disjoint(waits_of[group]))]
    in_order = _disjoint(busy)
    return _Timeline(in_order, _disjoint(waits), list(_gaps(_disjoint(beside), in_order)))


def _gaps(some: Sequence[_Interval], others: Sequence[_Interval]) -> Iterator[_Interval]:
    """The time of a disjoint sequence that is not in another."""
    first = 0
    for begin, end, _ in some:
        while first < len(others) and others[first].end <= begin:
            first += 1
        since, index = begin, first
        while since < end and index < len(others) and others[index].begin < end:
            if since < others[index].begin:
                yield _Interval(since, others[index].begin)
            since, index = others[index].end, index + 1
        if since < end:
            yield _Interval(since, end)


def phase_times(records: Records) -> list[PhaseTimes]:
    """The times of each phase of a rank, in the order of their begins."""
    result = [PhaseTimes(times=1, peak_nbytes=span.peak_nbytes) for span in records.phases]
    pieces = _without_inner(records.phases)
    busy, waits, beside = _timeline(records)
    for begin, end, owner in pieces:
        result[owner].total_s += (end - begin) * 1e-9
    for owner, both in _common(pieces, busy):
        result[owner].communicating_s += (both.end - both.begin) * 1e-9
    for owner, both in _common(pieces, waits):
        seconds, waited = (both.end - both.begin) * 1e-9, result[owner].waiting_for_s
        waited[both.owner] = waited.get(both.owner, 0.0) + seconds
        result[owner].waiting_s += seconds
    for owner, both in _common(pieces, beside):
        result[owner].beside_s += (both.end - both.begin) * 1e-9
    for times in result:
        times.computing_s = max(0.0, times.total_s - times.communicating_s)
        times.communicating_s = max(0.0, times.communicating_s - times.waiting_s)
    return result


def summarize_phases(records: Records) -> dict[str, PhaseTimes]:
    """The times of a rank by the name of the phase, and of ``"total"``; empty without phases."""
    summary: dict[str, PhaseTimes] = {}
    total = PhaseTimes()
    for span, times in zip(records.phases, phase_times(records), strict=True):
        summary.setdefault(span.name, PhaseTimes()).add(times)
        total.add(times)
    return summary | {"total": total} if summary else {}
