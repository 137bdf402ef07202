"""Measurements as data: the JSON and CSV of `ringcoll bench`, and those of `ringcoll compare`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any

from ringcoll.bench.contenders import LIMITS, NATIVE
from ringcoll.bench.measure import BenchRequest, Result, Timing
from ringcoll.bench.verdicts import by_size, efficiencies, speed_against

_JSON_VERSION = 2  # of the layout of nccl-tests that is followed
_US = 1e6


def timings(results: Iterable[Result]) -> Iterator[tuple[Result, str, Timing]]:
    """The measurements that have a time, and their modes: ``"out_of_place"`` and ``"in_place"``."""
    for result in results:
        for mode in ("out_of_place", "in_place"):
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
    return sum(widths) / len(widths) if widths else 0.0


def document(
    request: BenchRequest,
    facts: dict[str, Any],
    devices: Sequence[dict[str, Any]],
    results: Sequence[Result],
) -> dict[str, Any]:
    """Everything, as JSON with the keys and units of nccl-tests where it has them.

    ``results`` have ``algorithm`` beyond these; ``environment`` and ``limits`` are ours.
    """
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
        "end_time": datetime.now().astimezone().isoformat(timespec="seconds"),
        "errors": [f"{result.contender}: {result.refused}" for result in results if result.refused],
        "limits": [asdict(efficiency) for efficiency in efficiencies(results)],
    }


def _what(result: Result) -> dict[str, Any]:
    workload = result.workload
    return {
        "algorithm": result.contender,
        "size": result.nbytes,
        "count": result.count,
        "type": workload.dtype,
        "redop": workload.op,
        "root": workload.root,
    }


def _record(result: Result) -> dict[str, Any]:
    modes = ("out_of_place", "in_place")
    times: dict[str, Any] = {name: None for mode in modes for name in (mode, f"{mode}_per_iter")}
    actual = 0
    for _, mode, timing in timings([result]):
        median, actual = timing.summary.p50_s, timing.turn * len(timing.samples_s)
        times[mode] = {
            "time": median * _US,
            "alg_bw": result.algbw(median),
            "bus_bw": result.busbw(median),
            "nwrong": timing.wrong,
        }
        times[f"{mode}_per_iter"] = _per_iteration(timing)
    return (
        _what(result)
        | {"root": str(result.workload.root)}
        | times
        | {
            "actual_iterations": actual,
            "experiment_name": result.workload.collective,
            "error": result.refused,
        }
    )


_STATISTICS = ("min", "max", "avg", "p25", "p50", "p75", "p95", "p99", "stdev")


def _per_iteration(timing: Timing) -> dict[str, Any]:
    summary = timing.summary
    return {f"{name}_us": getattr(summary, f"{name}_s") * _US for name in _STATISTICS} | {
        "cv_pct": 100 * summary.stdev_s / summary.avg_s if summary.avg_s else 0.0,
        "iterations_per_sample": timing.turn,
        "times_us": [sample * _US for sample in timing.samples_s],
    }


def csv_records(results: Iterable[Result]) -> Iterator[dict[str, Any]]:
    """The table for CSV: a row for each size, contender and mode, times in microseconds."""
    for result in results:
        for _, mode, timing in timings([result]):
            median = timing.summary.p50_s
            yield _what(result) | {
                "mode": mode,
                "time_us": median * _US,
                "algbw": result.algbw(median),
                "busbw": result.busbw(median),
                "wrong": timing.wrong,
                "samples": timing.summary.samples,
                "spread": timing.summary.spread,
                "error": None,
            }
        if result.refused:
            yield _what(result) | {"error": result.refused}


def comparison_records(results: Sequence[Result]) -> Iterator[dict[str, Any]]:
    """A row for each size and contender of `ringcoll compare`, times in seconds."""
    table = by_size(results)
    for result in results:
        native = table.get(result.nbytes, {}).get(NATIVE)
        record: dict[str, Any] = {
            "nbytes": result.nbytes,
            "numel": result.count,
            "dtype": "float32",
            "algorithm": result.contender,
            "best_of_the_rest": result.scouted,
            "wrong": result.wrong,
            "refused": result.refused,
        }
        if result.timed is not None:
            summary = result.timed.summary
            record |= asdict(summary) | {
                "spread": summary.spread,
                "algbw": result.algbw(summary.p50_s),
                "busbw": result.busbw(summary.p50_s),
                "speed_against_native": speed_against(result, native) if native else None,
            }
        yield record
