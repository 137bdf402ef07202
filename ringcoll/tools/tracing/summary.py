"""The time of each rank: of its operations, of its phases, and in sentences.

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

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringcoll.tools.tracing.records import Records, TracedOperation

PARTS = {"waiting": ("wait",), "moving": ("post", "copy"), "reducing": ("reduce",)}
"""The parts of an operation's time, and the kinds of spans that each part is made of."""
_LEAST_SHARE = 0.05  # of a rank's time; shorter waits are seldom worth a sentence
_MOST_SENTENCES = 8
_States = NDArray[np.bool_]  # of a rank, for each piece of time


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


def phase_times(records: Records) -> list[PhaseTimes]:
    """The times of each phase of a rank, in the order of their begins.

    Between two neighbouring begins or ends, nothing changes on a rank. Such a piece of time belongs
    to the innermost phase, and to the wait that began first.
    """
    if not records.phases:
        return []
    arrivals = [
        (operation, span)
        for operation in records.operations
        for span in operation.arrivals().values()
    ]
    everything: list[Any] = [*records.phases, *records.operations, *records.waits]
    everything += [span for _, span in arrivals]
    edges = sorted({time for item in everything for time in (item.begin, item.end)})
    index = {time: place for place, time in enumerate(edges)}
    pieces_ns = np.diff(edges, append=edges[-1])

    innermost, awaited = np.full((2, len(edges)), -1)  # numbers of phases, and of ranks
    in_operation, beside = np.zeros((2, len(edges)), dtype=bool)
    for number, phase in enumerate(records.phases):
        innermost[index[phase.begin] : index[phase.end]] = number
    for operation in records.operations:
        of_thread = beside if operation.is_beside else in_operation
        of_thread[index[operation.begin] : index[operation.end]] = True
    for own in records.waits:
        in_operation[index[own.begin] : index[own.end]] = True
    joining = _joining(records, index)
    always = np.ones(len(edges), dtype=bool)
    waits = [(own.begin, own.end, own.peer, always) for own in records.waits if own.peer >= 0]
    for operation, span in arrivals:
        counted = joining[operation.group] if operation.is_beside else always
        waits.append((span.begin, span.end, operation.messages[span.message].peer, counted))
    for begin, end, peer, counted in sorted(waits, key=itemgetter(0, 1, 2), reverse=True):
        piece = slice(index[begin], index[end])
        awaited[piece][counted[piece]] = peer

    def seconds(state: _States) -> list[float]:
        """Time of each phase in a state."""
        owned = state & (innermost >= 0)
        by_phase = np.bincount(innermost[owned], pieces_ns[owned], len(records.phases))
        return (1e-9 * by_phase).tolist()  # type: ignore[no-any-return]

    is_waiting = awaited >= 0
    total_s, beside_s = seconds(always), seconds(beside & ~in_operation)
    computing_s, waiting_s = seconds(~in_operation), seconds(is_waiting)
    communicating_s = seconds(in_operation & ~is_waiting)
    waiting_for_s = {int(peer): seconds(awaited == peer) for peer in np.unique(awaited[is_waiting])}
    return [
        PhaseTimes(
            1,
            total_s[number],
            computing_s[number],
            communicating_s[number],
            waiting_s[number],
            beside_s[number],
            {peer: own[number] for peer, own in waiting_for_s.items() if own[number]},
            phase.peak_nbytes,
        )
        for number, phase in enumerate(records.phases)
    ]


def _joining(records: Records, index: dict[int, int]) -> dict[int, _States]:
    """When the phases' thread waits for the asynchronous operations of each group."""
    groups = {operation.group for operation in records.operations}
    joining = {group: np.zeros(len(index), dtype=bool) for group in groups}
    for own in records.waits:
        if own.peer < 0:
            for group in groups if own.group < 0 else groups & {own.group}:
                joining[group][index[own.begin] : index[own.end]] = True
    return joining


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
