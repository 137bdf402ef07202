"""Where the time of each rank has gone: of its operations, of its phases, and in sentences.

A phase computes, communicates, or waits for some rank. Its time is that of the thread that has
entered the trace. Each moment of a phase is one of these::

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

from ringcoll.runtime.watch import PhaseSpan
from ringcoll.tools.tracing.recorder import Records, TracedOperation

PARTS = {"waiting": ("wait",), "moving": ("post", "copy"), "reducing": ("reduce",)}
"""The parts of an operation's time, and the kinds of spans that each part is made of."""
_LEAST_SHARE = 0.05  # of a rank's time; shorter waits are seldom worth a sentence
_MOST_SENTENCES = 8


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
    spans = [span for operation in operations for span in operation.spans]
    parts = {
        f"{part}_s": 1e-9 * sum(span.end - span.begin for span in spans if span.kind in kinds)
        for part, kinds in PARTS.items()
    }
    messages = [message for operation in operations for message in operation.messages]
    sent = [message.nbytes for message in messages if message.is_send]
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


def _timeline(records: Records) -> tuple[list[_Interval], list[_Interval], list[_Interval]]:
    """Operations, waits, and what runs beside, of the phases' thread: each a disjoint sequence.

    A wait is owned by the rank that is waited for.
    """
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
    return in_order, _disjoint(waits), list(_gaps(_disjoint(beside), in_order))


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


def findings(ranks: Sequence[Records]) -> list[str]:
    """Sentences: who waits for whom, and in which phase; and the peak of memory by phase.

    Examples
    --------
    >>> from ringcoll.runtime.watch import PhaseSpan, ThreadWait
    >>> records = [Records(rank, 2, "local") for rank in range(2)]
    >>> for rank in records:
    ...     rank.phases.append(PhaseSpan("step", {}, 0, begin=0, end=100))
    >>> records[1].waits.append(ThreadWait(10, 41, peer=0))
    >>> findings(records)
    ['rank 1 waits 31 % of a step for rank 0']
    """
    summaries = [summarize_phases(records) for records in ranks]
    if not any(summaries):
        return []
    waits: list[tuple[float, str]] = []
    for rank, (records, summary) in enumerate(zip(ranks, summaries, strict=True)):
        outermost = {span.name for span in records.phases if not span.depth}
        unit = "a step" if outermost == {"step"} else "its time"
        for peer, seconds in summary["total"].waiting_for_s.items() if summary else ():
            share = seconds / summary["total"].total_s
            if share < _LEAST_SHARE:
                continue
            by_phase = {
                name: times.waiting_for_s.get(peer, 0.0)
                for name, times in summary.items()
                if name != "total"
            }
            worst = max(by_phase, key=by_phase.__getitem__)
            sentence = f"rank {rank} waits {100 * share:.0f} % of {unit} for rank {peer}"
            if len(by_phase) > 1:
                place = "outside the phases in it" if worst in outermost else f"in {worst}"
                sentence += f", {100 * by_phase[worst] / seconds:.0f} % of that {place}"
            waits.append((share, sentence))
    waits.sort(reverse=True)
    sentences = [
        f"rank {records.rank}: {records.left_out} operations, and {records.phases_left_out} phases "
        "and waits, were left out"
        for records in ranks
        if records.left_out or records.phases_left_out
    ][:1]
    sentences += [sentence for _, sentence in waits[:_MOST_SENTENCES]]
    if len(waits) > _MOST_SENTENCES:
        sentences.append(f"and {len(waits) - _MOST_SENTENCES} waits that are shorter")
    if not waits:
        sentences.append(f"no rank waits {100 * _LEAST_SHARE:.0f} % of its time for another")
    return sentences + _peaks(summaries)


def _peaks(summaries: Sequence[dict[str, PhaseTimes]]) -> list[str]:
    """A sentence on the largest peak of each phase; none if no peak was measured."""
    largest: dict[str, tuple[int, int]] = {}
    for rank, summary in enumerate(summaries):
        for name, times in summary.items():
            if name != "total" and times.peak_nbytes is not None:
                largest[name] = max((times.peak_nbytes, -rank), largest.get(name, (0, 0)))
    if not largest:
        return []
    words = [
        f"{name} {nbytes / (1 << 20):.1f} MiB (rank {-rank})"
        for name, (nbytes, rank) in sorted(largest.items(), key=lambda item: item[1], reverse=True)
    ]
    return [f"peak memory: {', '.join(words)}"]
