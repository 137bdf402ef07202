"""Measurements compared, in numbers and in sentences.

A contender counts as faster than another at a size if the quartiles of their times do
not overlap; otherwise the two are about even. That describes the measurements, and is no
test of significance.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from ringcoll.algorithms import ALIASES
from ringcoll.bench.contenders import LIMITS, NATIVE, OVER, Workload
from ringcoll.bench.measure import Result
from ringcoll.bench.units import as_size

EVEN = "even"
"""The answer of `faster` if the difference is within the spread."""

BySize = dict[int, dict[str, Result]]
"""Results by size, and by contender."""

_SHORT = {name: alias for alias, name in ALIASES.items()}


def label(name: str) -> str:
    """How a contender is called in a sentence or a legend."""
    name, over, transport = name.partition(OVER)
    called = _SHORT.get(name, name).replace("_", " ")
    return f"{called} over {transport}" if over else called


def by_size(results: Iterable[Result]) -> BySize:
    """Sort results by size; those that could not be timed are left out."""
    table: BySize = {}
    for result in results:
        if result.timed is not None:
            table.setdefault(result.nbytes, {})[result.contender] = result
    return table


def _median(result: Result) -> float:
    assert result.timed is not None
    return result.timed.summary.p50_s


def speed_against(result: Result, other: Result) -> float:
    """How many times as fast as another: its median over the own."""
    return _median(other) / _median(result)


def faster(first: Result, second: Result) -> str:
    """The contender that is faster; `EVEN` if their quartiles overlap."""
    assert first.timed is not None
    assert second.timed is not None
    if first.timed.summary.p75_s < second.timed.summary.p25_s:
        return first.contender
    return second.contender if second.timed.summary.p75_s < first.timed.summary.p25_s else EVEN


def _where(group: list[int], sizes: Sequence[int]) -> str:
    """A range of sizes in words.

    >>> _where([4, 16], [4, 16, 64]), _where([16], [4, 16, 64]), _where([4], [4])
    ('up to 16 B', 'at 16 B', 'at 4 B')
    """
    first, last = as_size(group[0]), as_size(group[-1])
    if group[0] == sizes[0] and group[-1] == sizes[-1]:
        return "at every size" if len(group) > 1 else f"at {first}"
    if group[0] == sizes[0]:
        return f"up to {last}" if len(group) > 1 else f"at {first}"
    if group[-1] == sizes[-1]:
        return f"from {first} on"
    return f"from {first} to {last}" if len(group) > 1 else f"at {first}"


def duel(table: BySize, first: str, second: str, *, names: tuple[str, str] | None = None) -> str:
    """Say which of two contenders of `by_size` is faster at which sizes; ``names`` them so."""
    called = names or (label(first), label(second))
    sizes = [nbytes for nbytes, row in sorted(table.items()) if first in row and second in row]
    if not sizes:
        return f"{called[0].capitalize()} and {called[1]} were not measured at a common size."
    words = {first: f"{called[0]} is faster", second: f"{called[1]} is faster", EVEN: "about even"}
    parts = [
        f"{words[word]} {_where(list(group), sizes)}"
        for word, group in groupby(sizes, lambda n: faster(table[n][first], table[n][second]))
    ]
    return f"{called[0].capitalize()} against {called[1]}: {', '.join(parts)}."


def _fastest(row: dict[str, Result]) -> str:
    return min(row, key=lambda name: _median(row[name]))


def _winners(table: BySize) -> str:
    sizes = sorted(table)
    parts = [
        f"{label(name)} {_where(list(group), sizes)}"
        for name, group in groupby(sizes, lambda nbytes: _fastest(table[nbytes]))
    ]
    return f"Lowest median: {', '.join(parts)}."


def _against_native(table: BySize) -> str | None:
    """Compare the fastest of ringcoll with native."""
    ratios: dict[int, float] = {}
    for nbytes, row in sorted(table.items()):
        own = {name: result for name, result in row.items() if name != NATIVE}
        if NATIVE in row and own:
            ratios[nbytes] = speed_against(own[_fastest(own)], row[NATIVE])
    if not ratios:
        return None
    low, high = min(ratios, key=ratios.__getitem__), max(ratios, key=ratios.__getitem__)
    if low == high:
        return (
            f"The fastest of ringcoll runs at {ratios[low]:.2f} times the speed of native "
            f"at {as_size(low)}."
        )
    return (
        f"The fastest of ringcoll runs at {ratios[low]:.2f} times (at {as_size(low)}) to "
        f"{ratios[high]:.2f} times (at {as_size(high)}) the speed of native."
    )


def _correctness(results: Sequence[Result]) -> str:
    checked = [result for result in results if result.wrong is not None]
    wrong = [result for result in checked if result.wrong]
    if not checked:
        return "No result was checked."
    if not wrong:
        ranks = checked[0].world_size
        every = "All results were" if len(checked) == len(results) else "All that ran was"
        return f"{every} right to the last bit, on all {ranks} ranks, in place and out of place."
    named = ", ".join(
        f"{label(result.contender)} at {as_size(result.nbytes)} ({result.wrong} elements)"
        for result in wrong
    )
    return f"WRONG results: {named}."


def sentences(results: Sequence[Result]) -> Iterator[str]:
    """Say which contender wins at which sizes, and whether all results were right."""
    table = by_size(results)
    if table:
        yield _winners(table)
    pairs = (("ring", "tree"), ("ring", "double_tree"))
    for first, second in pairs:
        if any(first in row and second in row for row in table.values()):
            yield duel(table, first, second)
    if (ratios := _against_native(table)) is not None:
        yield ratios
    for name, reason in dict.fromkeys((r.contender, r.refused) for r in results if r.refused):
        yield f"{label(name).capitalize()} is not available: {reason}"
    yield _correctness(results)


# --- limits ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Efficiency:
    """The limits of one workload and size shown, and how near each contender comes to them.

    The times are medians; ``add_s`` is 0 where nothing is reduced. ``of`` has for each contender
    ``(exchange_s + add_s)`` over its median.
    """

    workload: Workload
    nbytes: int
    exchange_s: float
    add_s: float
    copy_s: float
    of: dict[str, float]


def efficiencies(results: Sequence[Result]) -> list[Efficiency]:
    """Compare with the limits, where these were measured."""
    comparisons = []
    for workload in dict.fromkeys(result.workload for result in results):
        own = [result for result in results if result.workload == workload]
        medians = {result.contender: _median(result) for result in own if result.timed is not None}
        if "exchange" not in medians:
            continue
        exchange_s, add_s, copy_s = (medians.pop(name, 0.0) for name in LIMITS)
        shares = {name: (exchange_s + add_s) / time_s for name, time_s in medians.items()}
        nbytes = own[0].nbytes
        comparisons.append(Efficiency(workload, nbytes, exchange_s, add_s, copy_s, shares))
    return comparisons
