"""Contenders side by side with native: ``ringcoll bench --vs native``, and curves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

import ringcoll.tools.bench as benchmarks
from ringcoll.runtime.machine import forced_transport
from ringcoll.schedules.algorithms import ALIASES
from ringcoll.tools.bench import (
    FEW_SAMPLES,
    LIMITS,
    NATIVE,
    OVER,
    as_size,
    spread_in_words,
    time_in_words,
)
from ringcoll.tools.cli import measuring
from ringcoll.tools.cli.output import echo, grouped, print_table, print_text

_FEATURED = ("ring", "tree", "double_tree")
_SECOND_TRANSPORT = "gloo"  # the transport of torch's isend and irecv, for the first two
_BEST_OF_REST = "best of the rest"
_RANKS_IN_WORDS = {"rank0": "rank 0", "avg": "mean", "min": "fastest rank", "max": "slowest rank"}


def contenders(
    collective: str, world_size: int, device: str, transport: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The algorithms that are compared with native, and others, of which the best joins them."""
    everything, _ = measuring.contenders(collective, "all", world_size)
    featured = [name for name in _FEATURED if ALIASES.get(name, name) in everything]
    full = {ALIASES.get(name, name) for name in featured}
    rest = [name for name in everything if name not in full and name != NATIVE]
    if not featured:  # a collective with few algorithms: all of them
        featured, rest = rest, []
    if device == "cpu" and transport != _SECOND_TRANSPORT and forced_transport("cpu") is None:
        featured += [f"{name}{OVER}{_SECOND_TRANSPORT}" for name in featured[:2]]
    return tuple(featured), tuple(rest)


def with_data(
    collective: str, dtype: str, sizes: Sequence[int], world_size: int
) -> tuple[int, ...]:
    """The sizes at which there is something to move."""
    workloads = [benchmarks.Workload(collective, nbytes, dtype) for nbytes in sizes]
    fitting = [each.nbytes for each in workloads if benchmarks.shape(each, world_size).count]
    if not fitting:
        raise click.UsageError("at no size is there an element to move; a barrier has none")
    return tuple(fitting)


def _title(workload: benchmarks.Workload) -> str:
    dtype = str(benchmarks.DTYPES[workload.dtype]).removeprefix("torch.")
    op = "" if workload.op in ("none", "sum") else f", {workload.op}"
    return f"{workload.collective} of {dtype}{op}"


def announce(request: benchmarks.BenchRequest, facts: dict[str, Any]) -> None:
    """Say what will be compared."""
    names = [benchmarks.label(name) for name in request.contenders if name not in LIMITS]
    if request.scouts:
        names.insert(-1, f"the best of {len(request.scouts)} others")
    about = "" if request.seconds is None else f"; about {request.seconds:.0f} s"
    print_text(
        f"{_title(request.workloads[0])} on {benchmarks.ran_on(facts)}",
        f"{', '.join(names)}{about}",
        "",
    )


def medians(results: Sequence[benchmarks.Result]) -> str:
    """The last medians, for the progress bar."""
    words = "  ".join(
        f"{benchmarks.label(result.contender)} {time_in_words(result.summary.p50_s)}"
        for result in results
        if result.timed
    )
    return f"{as_size(results[0].nbytes)}: {words}"


_COLUMNS = (
    "size\n", "algorithm\n", "median\n(us)", "spread\n", "busbw\n(GB/s)", "speed\n/native",
    "#wrong\n", "rounds\n",
)  # fmt: skip


def print_comparison(
    results: Sequence[benchmarks.Result], facts: dict[str, Any], picture: Path | None
) -> None:
    """Print the table, what it says, and where the picture is."""
    print_table(_COLUMNS, grouped(_rows(results)), left=2)
    print_text("", "* lowest median of its size")
    if any(result.scouted for result in results):
        print_text("+ the best of the rest at its size")
    if any(result.timed and result.summary.few for result in results):
        print_text(f"~ median and spread are {FEW_SAMPLES}")
    print_text(*benchmarks.oversubscribed(facts["world_size"]), "", *benchmarks.sentences(results))
    if picture is not None:
        echo(f"\n{picture.resolve()}")


def _rows(results: Sequence[benchmarks.Result]) -> Iterator[tuple[str, ...]]:
    table = benchmarks.by_size(results)
    for result in results:
        row, first = table.get(result.nbytes, {}), as_size(result.nbytes)
        name = benchmarks.label(result.contender) + ("+" if result.scouted else "")
        if result.timed is None:
            yield (first, name, *"-" * (len(_COLUMNS) - 2))
            continue
        summary = result.summary
        fastest = summary.p50_s == min(other.summary.p50_s for other in row.values())
        native = row.get(NATIVE)
        yield (
            first,
            name,
            f"{'*' if fastest else ''}{summary.p50_s * 1e6:.1f}",
            spread_in_words(summary),
            f"{result.busbw(summary.p50_s):.4f}",
            "-" if native is None else f"{benchmarks.speed_against(result, native):.2f}",
            "-" if result.wrong is None else str(result.wrong),
            str(summary.samples),
        )


def draw(
    results: Sequence[benchmarks.Result], path: Path, facts: dict[str, Any], whose: str
) -> None:
    """Draw times and bandwidths over the size; the times are ``whose``, one of `OVER_RANKS`."""
    curves: dict[str, list[benchmarks.Result]] = {}
    for result in results:
        curves.setdefault(_BEST_OF_REST if result.scouted else result.contender, []).append(result)
    title = (
        f"{_title(results[0].workload)}, {facts['world_size']} processes "
        f"on {facts['cores']} cores, {facts['transport']}: medians, quartiles shaded"
    )
    benchmarks.save(benchmarks.draw(curves, title, _RANKS_IN_WORDS[whose]), path)
