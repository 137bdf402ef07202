"""The table that nccl-tests prints, for programs that read the tables of nccl-tests.

A block is the output of a run of nccl-tests: header, lines, footer. Each contender has a
block, although the contenders were measured side by side.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import ringcoll.tools.bench as benchmarks
from ringcoll.tools.bench import FEW_SAMPLES, as_size, time_in_words
from ringcoll.tools.cli.output import echo


class Printer:
    """Prints blocks: line by line if there is only one block, otherwise at the end."""

    def __init__(
        self, request: benchmarks.BenchRequest, facts: dict[str, Any], *, streams: bool
    ) -> None:
        self.request, self.facts = request, facts
        self.devices: list[dict[str, Any]] = []
        self.streams = streams and len(request.contenders) == 1

    def start(self, devices: list[dict[str, Any]]) -> None:
        """Take the descriptions of the ranks, which are there now."""
        self.devices = devices
        if self.streams:
            print_lines(preamble(self.request, self.facts, devices))
            print_lines(header(*self.request.contenders))

    def results(self, results: list[benchmarks.Result]) -> None:
        """Take the results of one size."""
        if self.streams:
            print_lines(map(line, results))

    def end(self, results: list[benchmarks.Result]) -> None:
        """Take all results."""
        if not self.streams:
            print_lines(preamble(self.request, self.facts, self.devices))
        for name in dict.fromkeys((*self.request.contenders, *(r.contender for r in results))):
            own = [result for result in results if result.contender == name]
            if not self.streams:
                print_lines(header(name))
                print_lines(map(line, own))
            print_lines(footer(self.request, own))
        print_lines(limit_lines(results))


def print_lines(lines: Iterable[str]) -> None:
    """Print lines."""
    for line in lines:
        echo(line)


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
    request: benchmarks.BenchRequest, facts: dict[str, Any], devices: Sequence[dict[str, Any]]
) -> Iterator[str]:
    """The lines before the first block."""
    sizes, step = request.nbytes, "0(bytes)"
    if len(sizes) > 1:
        factor, rest = divmod(sizes[1], max(1, sizes[0]))
        is_factor = not rest and sizes[0] * factor ** (len(sizes) - 1) == sizes[-1]
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
    for warning in benchmarks.oversubscribed(facts["world_size"]):
        yield f"# {warning}"
    yield "#"
    yield "# Using devices"
    for item in devices:
        yield (
            "#  Rank {rank:2} Group {group:2} Pid {pid:6} on {hostname:>10} "
            "device {device:2} [{device_kind}] {device_info}".format(**item)
        )


_NAMES = ("size", "count", "type", "redop", "root", *("time", "algbw", "busbw", "#wrong") * 2)
_UNITS = ("(B)", "(elements)", "", "", "", *("(us)", "(GB/s)", "(GB/s)", "") * 2)
_WIDTHS = (10, 12, 8, 6, 6, *(7, 6, 6, 6) * 2)


def header(contender: str) -> Iterator[str]:
    """The first lines of a block."""
    yield "#"
    yield f"# Algorithm: {contender}"
    yield f"# {'':49}  {'out-of-place':^31}  {'in-place':^31}".rstrip()
    for cells in (_NAMES, _UNITS):
        row = (f"{cell:>{width}}" for cell, width in zip(cells, _WIDTHS, strict=True))
        yield f"# {'  '.join(row)}".rstrip()


def line(result: benchmarks.Result) -> str:
    """One line of a block."""
    workload = result.workload
    return (
        f"{result.nbytes:12}  {result.count:12}  {workload.dtype:>8}  "
        f"{workload.op:>6}  {workload.root:6}"
        f"{_half(result, result.out_of_place)}{_half(result, result.in_place)}"
    )


def _half(result: benchmarks.Result, timing: benchmarks.Timing | None) -> str:
    time = algbw = busbw = wrong = "N/A"
    if timing is not None and timing.samples_s:
        median = timing.summary.p50_s
        time = _number(median * 1e6, 7)
        algbw, busbw = _number(result.algbw(median), 6), _number(result.busbw(median), 6)
        wrong = "N/A" if timing.wrong is None else f"{timing.wrong:g}"
    return f"  {time:>7}  {algbw:>6}  {busbw:>6}  {wrong:>6}"


def footer(request: benchmarks.BenchRequest, results: Sequence[benchmarks.Result]) -> Iterator[str]:
    """The last lines of a block."""
    wrong = benchmarks.wrong_in(results)
    for reason in dict.fromkeys(result.refused for result in results if result.refused):
        yield f"# not available: {reason}"
    few = sum(timing.summary.few for _, _, timing in benchmarks.timings(results))
    if few:
        yield f"# {'Few samples':20} : {few} medians are {FEW_SAMPLES}"
    yield f"# {'Out of bounds values':20} : {wrong} {'FAILED' if wrong else 'OK'}"
    yield f"# {'Avg bus bandwidth':20} : {benchmarks.average_busbw(results):g} "
    yield "#"
    yield f"# Collective test concluded: {request.collective}"


def limit_lines(results: Sequence[benchmarks.Result]) -> Iterator[str]:
    """The lines below the blocks: the limits of each size, and how near each contender comes."""
    for row in benchmarks.efficiencies(results):
        shares = ", ".join(f"{name} {value:.2f}" for name, value in row.of.items())
        yield (
            f"# {as_size(row.nbytes)}: exchange {time_in_words(row.exchange_s)} + add "
            f"{time_in_words(row.add_s)}, copy {time_in_words(row.copy_s)}; efficiency: {shares}"
        )
