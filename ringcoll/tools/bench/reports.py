"""Measurements in sentences, as JSON and as CSV, with the facts that they have to be read with.

A contender counts as faster than another at a size if the quartiles of their times do not overlap;
otherwise the two are about even. This describes the measurements; it is no test of significance.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import groupby
from statistics import fmean
from typing import Any

import numpy as np
import torch

from ringcoll._package import __version__
from ringcoll.runtime.machine import cores, cpu
from ringcoll.schedules.algorithms import ALIASES
from ringcoll.tools.bench.contenders import Workload
from ringcoll.tools.bench.measure import BenchRequest, Result, Timing
from ringcoll.tools.bench.names import LIMITS, NATIVE, OVER
from ringcoll.tools.bench.units import as_size

# Variables that change what is measured. Files of results are passed on, so no others are in them.
_VARIABLES = ("GLOO_", "KMP_", "MKL_", "NCCL_", "OMP_", "RINGCOLL_", "TORCH_", "UCX_")
_JSON_VERSION = 2  # of the layout of nccl-tests that is followed
_STATISTICS = ("min", "max", "avg", "p25", "p50", "p75", "p95", "p99", "stdev")
_MODES = ("out_of_place", "in_place")
_US = 1e6


def oversubscribed(world_size: int) -> tuple[str, ...]:
    """A sentence to print beside results if ranks have to share cores; otherwise nothing."""
    available = cores()
    shared = f"{world_size} ranks share {available} core{'s' * (available != 1)}"
    sentence = f"{shared}: times include waiting for the scheduler"
    return (sentence,) if world_size > available else ()


def ran_on(facts: dict[str, Any]) -> str:
    """Say on how many processes, over which transport and on which machine something runs."""
    return (
        f"{facts['world_size']} processes over {facts['transport']}, {facts['cores']} cores "
        f"({facts['cpu']}), load {facts['load_average'][0]}"
    )


def environment(world_size: int) -> dict[str, Any]:
    """Describe software, machine and load, for JSON; called before anything is started.

    ``load_average`` is over 1, 5 and 15 minutes.
    """
    return {
        "ringcoll": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": cpu(),
        "cores": cores(),
        "world_size": world_size,
        "oversubscribed": world_size > cores(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": list(sys.argv),
        "variables": {
            name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)
        },
    }


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


def speed_against(result: Result, other: Result) -> float:
    """How many times as fast as another: its median over the own."""
    return other.summary.p50_s / result.summary.p50_s


def faster(first: Result, second: Result) -> str:
    """The contender that is faster; `EVEN` if their quartiles overlap."""
    for result, other in ((first, second), (second, first)):
        if result.summary.p75_s < other.summary.p25_s:
            return result.contender
    return EVEN


def _span_of(group: list[int], sizes: Sequence[int]) -> str:
    """A range of sizes in words.

    >>> _span_of([4, 16], [4, 16, 64]), _span_of([16], [4, 16, 64]), _span_of([4], [4])
    ('up to 16 B', 'at 16 B', 'at 4 B')
    """
    first, last = as_size(group[0]), as_size(group[-1])
    begins, ends = group[0] == sizes[0], group[-1] == sizes[-1]
    if ends and not begins:
        return f"from {first} on"
    if len(group) == 1:
        return f"at {first}"
    if begins:
        return "at every size" if ends else f"up to {last}"
    return f"from {first} to {last}"


def _ranges(sizes: Sequence[int], word: Callable[[int], str]) -> str:
    """The ranges of sizes of each word: "ring is faster up to 16 B, about even from ..."."""
    return ", ".join(f"{key} {_span_of(list(alike), sizes)}" for key, alike in groupby(sizes, word))


def duel(table: BySize, first: str, second: str, *, names: tuple[str, str] | None = None) -> str:
    """Say which of two contenders of `by_size` is faster at which sizes; ``names`` them so."""
    name, rival = names or (label(first), label(second))
    sizes = [nbytes for nbytes, row in sorted(table.items()) if first in row and second in row]
    if not sizes:
        return f"{name.capitalize()} and {rival} were not measured at a common size."
    words = {first: f"{name} is faster", second: f"{rival} is faster", EVEN: "about even"}
    ranges = _ranges(sizes, lambda n: words[faster(table[n][first], table[n][second])])
    return f"{name.capitalize()} against {rival}: {ranges}."


def _fastest(row: dict[str, Result]) -> str:
    return min(row, key=lambda name: row[name].summary.p50_s)


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
    text = f"The fastest of ringcoll runs at {ratios[low]:.2f} times"
    if low == high:
        return f"{text} the speed of native at {as_size(low)}."
    to = f"{ratios[high]:.2f} times (at {as_size(high)}) the speed of native"
    return f"{text} (at {as_size(low)}) to {to}."


def _correctness(results: Sequence[Result]) -> str:
    checked = [result for result in results if result.wrong is not None]
    if not checked:
        return "No result was checked."
    wrong = ", ".join(
        f"{label(result.contender)} at {as_size(result.nbytes)} ({result.wrong} elements)"
        for result in checked
        if result.wrong
    )
    if wrong:
        return f"WRONG results: {wrong}."
    ranks = checked[0].world_size
    every = "All results were" if len(checked) == len(results) else "All that ran was"
    return f"{every} right to the last bit, on all {ranks} ranks, in place and out of place."


def sentences(results: Sequence[Result]) -> Iterator[str]:
    """Say which contender wins at which sizes, and whether all results were right."""
    table = by_size(results)
    if table:
        yield f"Lowest median: {_ranges(sorted(table), lambda n: label(_fastest(table[n])))}."
    for other in ("tree", "double_tree"):
        if any("ring" in row and other in row for row in table.values()):
            yield duel(table, "ring", other)
    if (ratios := _against_native(table)) is not None:
        yield ratios
    for name, reason in dict.fromkeys((r.contender, r.refused) for r in results if r.refused):
        yield f"{label(name).capitalize()} is not available: {reason}"
    yield _correctness(results)


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
        medians = {result.contender: result.summary.p50_s for result in own if result.timed}
        if "exchange" not in medians:
            continue
        exchange_s, add_s, copy_s = (medians.pop(name, 0.0) for name in LIMITS)
        shares = {name: (exchange_s + add_s) / time_s for name, time_s in medians.items()}
        nbytes = own[0].nbytes
        comparisons.append(Efficiency(workload, nbytes, exchange_s, add_s, copy_s, shares))
    return comparisons


def timings(results: Iterable[Result]) -> Iterator[tuple[Result, str, Timing]]:
    """The measurements that have a time, and their modes: ``"out_of_place"`` and ``"in_place"``."""
    for result in results:
        for mode in _MODES:
            timing: Timing | None = getattr(result, mode)
            if timing is not None and timing.samples_s:
                yield result, mode, timing


def wrong_in(results: Iterable[Result]) -> int:
    """Wrong elements in all results together."""
    return sum(result.wrong or 0 for result in results)


def failed(results: Sequence[Result]) -> bool:
    """Whether an element was wrong, or an algorithm was refused."""
    refused = any(result.refused and result.contender not in LIMITS for result in results)
    return refused or wrong_in(results) > 0


def average_busbw(results: Iterable[Result]) -> float:
    """Mean bus bandwidth over all sizes, out of place and in place, in GB/s."""
    widths = [result.busbw(timing.summary.p50_s) for result, _, timing in timings(results)]
    return fmean(widths) if widths else 0.0


def document(
    request: BenchRequest,
    facts: dict[str, Any],
    devices: Sequence[dict[str, Any]],
    results: Sequence[Result],
) -> dict[str, Any]:
    """Everything, as JSON with the keys and units of nccl-tests where it has them.

    ``results`` have ``algorithm``, ``best_of_the_rest`` and ``speed_against_native`` beyond
    these; ``environment`` and ``limits`` are ours.
    """
    wrong = wrong_in(results)
    by_contender: dict[str, list[Result]] = {}
    for result in results:
        by_contender.setdefault(result.contender, []).append(result)
    natives = _natives(results)
    return {
        "version": _JSON_VERSION,
        "start_time": facts["started"],
        "args": facts["command"],
        "env": [f"{name}={value}" for name, value in facts["variables"].items()],
        "environment": facts,
        "config": {
            "collective": request.collective,
            "nranks": facts["world_size"],
            "minimum_bytes": request.nbytes[0],
            "maximum_bytes": request.nbytes[-1],
            "warmup_iters": request.warmup,
            "iterations": request.most,
            "aggregated_iterations": 1,
            "validation": int(request.check),
            "blocking_collectives": request.blocking,
            "average": request.over_ranks,
            "segment_bytes": request.segment_bytes,
            "devices": list(devices),
        },
        "results": [_record(result, natives) for result in results],
        # nccl-tests writes these as words
        "out_of_bounds": {"count": wrong, "okay": "false" if wrong else "true"},
        "average_bus_bandwidth": {
            "bandwidth": average_busbw(results),
            "okay": "unchecked",
            "by_algorithm": {name: average_busbw(own) for name, own in by_contender.items()},
        },
        "end_time": datetime.now().astimezone().isoformat(timespec="seconds"),
        "errors": [f"{result.contender}: {result.refused}" for result in results if result.refused],
        "limits": [asdict(efficiency) for efficiency in efficiencies(results)],
    }


def _identity(result: Result) -> dict[str, Any]:
    workload = result.workload
    return {
        "algorithm": result.contender,
        "size": result.nbytes,
        "count": result.count,
        "type": workload.dtype,
        "redop": workload.op,
        "root": workload.root,
        "best_of_the_rest": result.scouted,
    }


def _natives(results: Iterable[Result]) -> dict[tuple[Workload, str], float]:
    """The medians of native, by workload and mode."""
    return {
        (result.workload, mode): timing.summary.p50_s
        for result, mode, timing in timings(results)
        if result.contender == NATIVE
    }


def _numbers(
    result: Result, timing: Timing, mode: str, natives: dict[tuple[Workload, str], float]
) -> tuple[float, float, float, int | None, float | None]:
    """Time in us, algorithm and bus bandwidth, wrong elements, and speed against native."""
    median, native_s = timing.summary.p50_s, natives.get((result.workload, mode))
    speed = native_s / median if native_s else None
    return median * _US, result.algbw(median), result.busbw(median), timing.wrong, speed


def _record(result: Result, natives: dict[tuple[Workload, str], float]) -> dict[str, Any]:
    names = ("time", "alg_bw", "bus_bw", "nwrong", "speed_against_native")
    times: dict[str, Any] = {name: None for mode in _MODES for name in (mode, f"{mode}_per_iter")}
    actual = 0
    for _, mode, timing in timings([result]):
        summary, actual = timing.summary, timing.turn * len(timing.samples_s)
        times[mode] = dict(zip(names, _numbers(result, timing, mode, natives), strict=True))
        times[f"{mode}_per_iter"] = {
            **{f"{name}_us": getattr(summary, f"{name}_s") * _US for name in _STATISTICS},
            "cv_pct": 100 * summary.stdev_s / summary.avg_s if summary.avg_s else 0.0,
            "iterations_per_sample": timing.turn,
            "times_us": [sample * _US for sample in timing.samples_s],
        }
    return {
        **_identity(result),
        "root": str(result.workload.root),
        **times,
        "actual_iterations": actual,
        "experiment_name": result.workload.collective,
        "error": result.refused,
    }


def csv_records(results: Sequence[Result]) -> Iterator[dict[str, Any]]:
    """The table for CSV: a row for each size, contender and mode, times in microseconds."""
    natives = _natives(results)
    for result in results:
        for _, mode, timing in timings([result]):
            time_us, algbw, busbw, wrong, speed = _numbers(result, timing, mode, natives)
            yield _identity(result) | {
                "mode": mode,
                "time_us": time_us,
                "algbw": algbw,
                "busbw": busbw,
                "wrong": wrong,
                "samples": timing.summary.samples,
                "spread": timing.summary.spread,
                "speed_against_native": speed,
                "error": None,
            }
        if result.refused:
            yield _identity(result) | {"error": result.refused}
