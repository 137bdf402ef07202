"""The table and the JSON of nccl-tests, for programs that read those of nccl-tests.

A block is the output of a run of nccl-tests: header, lines, footer. Each contender has a
block, although the contenders were measured side by side.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any

from ringcoll.bench.environment import oversubscribed
from ringcoll.bench.limits import LIMITS
from ringcoll.bench.measure import BenchRequest, Result, Timing
from ringcoll.bench.summary import FEW_SAMPLES

__all__ = [
    "average_busbw",
    "document",
    "failed",
    "footer",
    "header",
    "line",
    "preamble",
    "records",
    "wrong_in",
]

_JSON_VERSION = 2  # of the layout of nccl-tests that is followed
_MISSING = ("N/A",) * 4
_OVER_RANKS = {
    "rank0": "of rank 0",
    "avg": "averaged over the ranks",
    "min": "of the fastest rank",
    "max": "of the slowest rank",
}
_BLOCKING = {
    0: "# Blocking Disabled: operations of one turn are all started, then waited for",
    1: "# Blocking Enabled: wait for completion and barrier after each collective",
    2: "# Blocking Enabled: wait for completion after each collective (no barrier)",
}


def _number(value: float, width: int) -> str:
    """A number in a fixed width, with as many decimals as fit, two at most.

    >>> _number(2943.254, 7), _number(99999.94, 7), _number(11.4, 6), _number(1234567.0, 7)
    ('2943.25', '99999.9', ' 11.40', '1234567')
    """
    digits = len(str(math.floor(value))) if value >= 1 else 0
    for decimals in (2, 1, 0):
        if digits + decimals + bool(decimals) <= width:
            return f"{value:{width}.{decimals}f}"
    return f"{value:{width}.0e}"


def preamble(
    request: BenchRequest, facts: dict[str, Any], devices: Sequence[dict[str, Any]]
) -> Iterator[str]:
    """The lines before the first block."""
    sizes, step = request.nbytes, "0(bytes)"
    if len(sizes) > 1:
        factor, rest = divmod(sizes[1], max(1, sizes[0]))
        is_factor = (
            not rest and len(sizes) > 1 and sizes[0] * factor ** (len(sizes) - 1) == sizes[-1]
        )
        step = f"{factor}(factor)" if is_factor else f"{sizes[1] - sizes[0]}(bytes)"
    yield f"# ringcoll version {facts['ringcoll']} torch {facts['torch']} python {facts['python']}"
    yield f"# Collective test starting: {request.collective}"
    yield (
        f"# nRanks {facts['world_size']} nCores {facts['cores']} minBytes {sizes[0]} "
        f"maxBytes {sizes[-1]} step: {step} warmup iters: {request.warmup} "
        f"iters: {request.most} agg iters: 1 validation: {int(request.check)} graph: 0"
    )
    yield f"# time: median, {_OVER_RANKS[request.over_ranks]}"
    yield _BLOCKING[request.blocking]
    for warning in oversubscribed(facts["world_size"]):
        yield f"# {warning}"
    yield "#"
    yield "# Using devices"
    for item in devices:
        yield (
            f"#  Rank {item['rank']:2} Group {item['group']:2} Pid {item['pid']:6} on "
            f"{item['hostname']:>10} device {item['device']:2} [{item['device_kind']}] {item['device_info']}"
        )


_NAMES = ("size", "count", "type", "redop", "root", *("time", "algbw", "busbw", "#wrong") * 2)
_UNITS = ("(B)", "(elements)", "", "", "", *("(us)", "(GB/s)", "(GB/s)", "") * 2)
_WIDTHS = (10, 12, 8, 6, 6, *(7, 6, 6, 6) * 2)


def header(contender: str) -> Iterator[str]:
    """The first lines of a block."""
    yield "#"
    yield f"# Algorithm: {contender}"
    over = f"{'':49}  {'out-of-place':^31}  {'in-place':^31}"
    yield f"# {over}".rstrip()
    for cells in (_NAMES, _UNITS):
        row = (f"{cell:>{width}}" for cell, width in zip(cells, _WIDTHS, strict=True))
        yield f"# {'  '.join(row)}".rstrip()


def line(result: Result) -> str:
    """One line of a block."""
    workload = result.workload
    first = (
        f"{result.nbytes:12}  {result.count:12}  {workload.dtype:>8}  "
        f"{workload.op:>6}  {workload.root:6}"
    )
    return first + _half(result, result.out_of_place) + _half(result, result.in_place)


def _half(result: Result, timing: Timing | None) -> str:
    cells = _MISSING
    if timing is not None and timing.samples_s:
        median = timing.summary.p50_s
        cells = (
            _number(median * 1e6, 7),
            _number(result.algbw(median), 6),
            _number(result.busbw(median), 6),
            "N/A" if timing.wrong is None else f"{timing.wrong:g}",
        )
    widths = (7, 6, 6, 6)
    return "".join(f"  {cell:>{width}}" for cell, width in zip(cells, widths, strict=True))


def footer(request: BenchRequest, results: Sequence[Result]) -> Iterator[str]:
    """The last lines of a block."""
    wrong = wrong_in(results)
    for reason in dict.fromkeys(result.refused for result in results if result.refused):
        yield f"# not available: {reason}"
    few = sum(timing.summary.few for _, timing in _timings(results))
    if few:
        yield f"# {'Few samples':20} : {few} medians are {FEW_SAMPLES}"
    yield f"# {'Out of bounds values':20} : {wrong} {'FAILED' if wrong else 'OK'}"
    yield f"# {'Avg bus bandwidth':20} : {average_busbw(results):g} "
    yield "#"
    yield f"# Collective test concluded: {request.collective}"


def _timings(results: Iterable[Result]) -> Iterator[tuple[Result, Timing]]:
    for result in results:
        for timing in (result.out_of_place, result.in_place):
            if timing is not None and timing.samples_s:
                yield result, timing


def wrong_in(results: Iterable[Result]) -> int:
    """Wrong elements in all results together."""
    return sum(result.wrong or 0 for result in results)


def failed(results: Sequence[Result]) -> bool:
    """Whether an element was wrong, or an algorithm was refused."""
    refused = any(result.refused and result.contender not in LIMITS for result in results)
    return refused or wrong_in(results) > 0


def average_busbw(results: Iterable[Result]) -> float:
    """Mean bus bandwidth over all sizes, out of place and in place, in GB/s."""
    widths = [result.busbw(timing.summary.p50_s) for result, timing in _timings(results)]
    return sum(widths) / len(widths) if widths else 0.0


def document(
    request: BenchRequest,
    facts: dict[str, Any],
    devices: Sequence[dict[str, Any]],
    results: Sequence[Result],
) -> dict[str, Any]:
    """Everything, as JSON with the keys and units of nccl-tests where it has them.

    ``results`` have ``algorithm`` beyond these; the environment is ours, and variables
    that say nothing about the measurement are left out.
    """
    now = datetime.now().astimezone()
    wrong = wrong_in(results)
    contenders = list(dict.fromkeys(result.contender for result in results))
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
        "results": [_record(result) for result in results],
        # nccl-tests writes these as words
        "out_of_bounds": {"count": wrong, "okay": "false" if wrong else "true"},
        "average_bus_bandwidth": {
            "bandwidth": average_busbw(results),
            "okay": "unchecked",
            "by_algorithm": {
                name: average_busbw(result for result in results if result.contender == name)
                for name in contenders
            },
        },
        "end_time": now.isoformat(timespec="seconds"),
        "errors": [f"{result.contender}: {result.refused}" for result in results if result.refused],
    }


def records(results: Iterable[Result]) -> Iterator[dict[str, Any]]:
    """The table for CSV: a row for each size, contender and mode, times in microseconds."""
    for result in results:
        workload = result.workload
        first = {
            "algorithm": result.contender,
            "size": result.nbytes,
            "count": result.count,
            "type": workload.dtype,
            "redop": workload.op,
            "root": workload.root,
        }
        modes = {"out_of_place": result.out_of_place, "in_place": result.in_place}
        for mode, timing in modes.items():
            if timing is not None and timing.samples_s:
                median = timing.summary.p50_s
                yield first | {
                    "mode": mode,
                    "time_us": median * 1e6,
                    "algbw": result.algbw(median),
                    "busbw": result.busbw(median),
                    "wrong": timing.wrong,
                    "samples": timing.summary.samples,
                    "spread": timing.summary.spread,
                    "error": None,
                }
        if result.refused:
            yield first | {"error": result.refused}


def _record(result: Result) -> dict[str, Any]:
    workload = result.workload
    record: dict[str, Any] = {
        "algorithm": result.contender,
        "size": result.nbytes,
        "count": result.count,
        "type": workload.dtype,
        "redop": workload.op,
        "root": str(workload.root),
    }
    actual = 0
    for key, timing in (("out_of_place", result.out_of_place), ("in_place", result.in_place)):
        record[key] = record[f"{key}_per_iter"] = None
        if timing is None or not timing.samples_s:
            continue
        median, actual = timing.summary.p50_s, timing.turn * len(timing.samples_s)
        record[key] = {
            "time": median * 1e6,
            "alg_bw": result.algbw(median),
            "bus_bw": result.busbw(median),
            "nwrong": timing.wrong,
        }
        record[f"{key}_per_iter"] = _per_iteration(timing)
    return record | {
        "actual_iterations": actual,
        "experiment_name": workload.collective,
        "error": result.refused,
    }


def _per_iteration(timing: Timing) -> dict[str, Any]:
    summary = timing.summary
    return {
        "min_us": summary.min_s * 1e6,
        "max_us": summary.max_s * 1e6,
        "avg_us": summary.avg_s * 1e6,
        "p25_us": summary.p25_s * 1e6,
        "p50_us": summary.p50_s * 1e6,
        "p75_us": summary.p75_s * 1e6,
        "p95_us": summary.p95_s * 1e6,
        "p99_us": summary.p99_s * 1e6,
        "stdev_us": summary.stdev_s * 1e6,
        "cv_pct": 100 * summary.stdev_s / summary.avg_s if summary.avg_s else 0.0,
        "iterations_per_sample": timing.turn,
        "times_us": [sample * 1e6 for sample in timing.samples_s],
    }
