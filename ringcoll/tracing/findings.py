"""Sentences on phases: who waits for whom, and which phases need most memory."""

from __future__ import annotations

from collections.abc import Sequence

from ringcoll.tracing.phase_times import PhaseTimes, summarize_phases
from ringcoll.tracing.records import Records

_LEAST_SHARE = 0.05  # of a rank's time; shorter waits are seldom worth a sentence
_MOST_SENTENCES = 8


def findings(ranks: Sequence[Records]) -> list[str]:
    """Sentences: who waits for whom, and in which phase; and the peak of memory by phase.

    Examples
    --------
    >>> from ringcoll.tracing.phases import PhaseSpan, ThreadWait
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
            worst = max(by_phase, key=lambda name: by_phase[name])
            where = ""
            if len(by_phase) > 1:
                place = "outside the phases in it" if worst in outermost else f"in {worst}"
                where = f", {100 * by_phase[worst] / seconds:.0f} % of that {place}"
            waits.append(
                (share, f"rank {rank} waits {100 * share:.0f} % of {unit} for rank {peer}{where}")
            )
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
