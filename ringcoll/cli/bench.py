"""``ringcoll bench``: one collective, in the table of nccl-tests, for programs that read theirs.

A block is the output of a run of nccl-tests: header, lines, footer. Each contender has a
block, although the contenders were measured side by side.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click

import ringcoll.bench as lab
from ringcoll.bench import (
    DTYPE_NAMES,
    FEW_SAMPLES,
    LIMITS,
    OVER_RANKS,
    as_size,
    time_in_words,
)
from ringcoll.cli import measuring, options
from ringcoll.cli.app import command
from ringcoll.cli.output import echo, print_csv, print_json
from ringcoll.machine import json_text, replace_file
from ringcoll.reduction import OPERATORS
from ringcoll.schedule import contract
from ringcoll.transport import catalogue

_STEPS = {"stepbytes", "stepfactor"}


def _root(ctx: click.Context, param: click.Parameter, value: str) -> str:
    if value != "all" and not value.isdecimal():
        raise click.BadParameter(f"{value!r} is neither a rank nor 'all'")
    return value


@command(
    examples="""
        ringcoll bench all_reduce -b 8 -e 128M -f 2
        ringcoll bench all_reduce -k 2 --algorithms ring,native -b 1K -e 1M -f 4
        ringcoll bench all_reduce -b 8 -e 64M -f 8 --algorithms auto,native --limits
        ringcoll bench all_reduce --device cuda --cuda-transport ucx -k 4 -e 256M
        ringcoll bench broadcast -r all -d half -J broadcast.json
        torchrun --nproc-per-node 4 -m ringcoll bench all_reduce
    """
)
@options.collective_argument
@measuring.ranks_option(4)
@click.option(
    "--algorithms",
    default="auto",
    show_default=True,
    metavar="NAMES",
    shell_complete=options.complete_algorithms,
    help="Names from `ringcoll list`, auto, persistent (auto, prepared once), "
    "shared_tensors (the same, in shared memory), native for torch's own, algorithms of "
    "yours such as star.py:star, files such as ring.xml; or all. ring@gloo: over gloo. "
    "One block is printed for each.",
)
@options.sizes_options("32M", "32M", factor=1, step="1M")
@click.option("-n", "--iters", "most", type=click.IntRange(1, 10**6), default=20, show_default=True,
              help="Times that each operation is timed.")  # fmt: skip
@click.option("-w", "--warmup_iters", "warmup", type=click.IntRange(0, 10**6), default=1,
              show_default=True, help="Times that it runs before.")  # fmt: skip
@click.option("-c", "--check", type=click.IntRange(0, 1), default=1, show_default=True,
              help="Whether every element of every result is checked, untimed.")  # fmt: skip
@click.option("-o", "--op", "ops", default="sum", show_default=True, metavar="OP",
              callback=measuring.operators,
              help=f"One of {', '.join(OPERATORS)}; or all, the first "
              f"{measuring.NCCL_OPERATORS}. A file is -J, as in nccl-tests.")  # fmt: skip
@click.option("-d", "--datatype", "dtypes", default="float", show_default=True, metavar="TYPE",
              callback=measuring.dtypes,
              help=f"One of {', '.join(DTYPE_NAMES)}; or all, the first "
              f"{measuring.NCCL_DTYPES}.")  # fmt: skip
@click.option("-r", "--root", default="0", show_default=True, metavar="RANK", callback=_root,
              help="Root of a rooted collective; or all.")  # fmt: skip
@click.option("-z", "--blocking", type=click.IntRange(0, 2), default=2, show_default=True,
              help="2: short operations run several in a turn, each waited for. 0: they are "
              "all started, then waited for. 1: a barrier before each.")  # fmt: skip
@click.option("-a", "--average", type=click.IntRange(0, 3), default=3, show_default=True,
              help="The time of: 0 rank 0, 1 the average of the ranks, 2 the fastest, "
              "3 the slowest.")  # fmt: skip
@measuring.segments_option
@measuring.device_option
@measuring.transport
@measuring.cuda_transport
@click.option("--limits", is_flag=True,
              help="Also time an exchange of what has to be sent, an addition of what has to be "
              "added, and a copy; and print how near each algorithm comes.")  # fmt: skip
@options.file_option("-J", "--output_file", "--output", "file",
                     help="Write everything to this file, as JSON.")  # fmt: skip
@options.json_option
@options.csv_option
@click.pass_context
def bench(
    ctx: click.Context,
    /,
    collective: str,
    ranks: int | None,
    algorithms: str,
    minbytes: int,
    maxbytes: int,
    stepbytes: int,
    stepfactor: int,
    check: int,
    root: str,
    average: int,
    device: str,
    transport: str,
    cuda_transport: str,
    limits: bool,
    file: Path | None,
    as_json: bool,
    as_csv: bool,
    **settings: Any,
) -> None:
    """Measure COLLECTIVE, with the flags, columns and JSON of nccl-tests.

    Ranks are started on this machine; under torchrun, mpiexec and srun, those that are there are
    used.

    Without -i and -f, sizes go up by 1 MiB, as in nccl-tests; by the factor 2, if the largest is
    less than 1 MiB above the smallest.

    Size is that of the vector, or of all blocks of a rank; time the median of the
    iterations; algbw size over time; busbw that times a factor for the data that each
    rank has to move: 2(k-1)/k for all-reduce, (k-1)/k for collectives on blocks, 1 for
    broadcast and reduce. #wrong counts elements that differ in any bit from the exact
    result, on all ranks.

    Several algorithms take turns within one run, in an order that changes.

    The efficiency that --limits prints is (exchange + add) over the time of the algorithm:
    an exchange with both neighbours at once of what a rank has to send, over the same
    transport, and an in-place addition of what it has to add.

    Exit status: 1 if any element was wrong, or an algorithm was refused.
    """
    measuring.refuse_unused_transport(ctx, device)
    world_size = measuring.ranks_to_use(ranks, 4)
    rules = contract(collective)
    roots = range(world_size) if root == "all" else [int(root)]
    if rules.rooted and max(roots) >= world_size:
        raise click.BadParameter(f"rank {root} is not one of {world_size}", param_hint="--root")
    if minbytes < maxbytes < minbytes + stepbytes and not options.typed(ctx) & _STEPS:
        stepfactor = 2  # with nccl-tests' step of 1 MiB, such a range would be one size
    own, modules = measuring.contenders(collective, algorithms, world_size)
    named = (*own, *(LIMITS if limits else ()))
    measuring.check_memory(max(minbytes, maxbytes), world_size, device)
    request = lab.BenchRequest(
        collective,
        tuple(dict.fromkeys(named)),
        options.sizes_between(minbytes, maxbytes, stepfactor, stepbytes),
        roots=tuple(roots),
        over_ranks=OVER_RANKS[average],
        check=bool(check),
        modules=modules,
        device=device,
        **settings,
    )
    if not request.workloads:
        raise click.UsageError(f"operator {request.ops[0]} is not defined for {request.dtypes[0]}")
    facts = lab.environment(world_size) | {"transport": catalogue.resolved(device)}
    printer = _Printer(request, facts, streams=not (as_json or as_csv))
    results = measuring.measured(
        request,
        world_size,
        lambda results: as_size(results[0].nbytes),
        first_text=collective,
        shown=not printer.streams and measuring.is_first_rank(),
        on_report=printer.results,
        on_start=printer.start,
    )
    if printer.devices:  # under a launcher rank 0 has them, and prints
        everything = lab.document(request, facts, printer.devices, results)
        if as_json:
            print_json(everything)
        elif as_csv:
            print_csv(list(lab.csv_records(results)))
        else:
            printer.end(results)
        if file is not None:
            replace_file(file, json_text(everything, indent=2) + "\n")
            if not (as_json or as_csv):
                echo(f"# Writing JSON output to {file}")
    if lab.failed(results):
        ctx.exit(1)


class _Printer:
    """Prints blocks: line by line if there is only one block, otherwise at the end."""

    def __init__(self, request: lab.BenchRequest, facts: dict[str, Any], *, streams: bool) -> None:
        self.request, self.facts = request, facts
        self.devices: list[dict[str, Any]] = []
        self.streams = streams and len(request.contenders) == 1

    def start(self, devices: list[dict[str, Any]]) -> None:
        self.devices = devices
        if self.streams:
            _print(preamble(self.request, self.facts, devices))
            _print(header(*self.request.contenders))

    def results(self, results: list[lab.Result]) -> None:
        if self.streams:
            _print(map(line, results))

    def end(self, results: list[lab.Result]) -> None:
        if not self.streams:
            _print(preamble(self.request, self.facts, self.devices))
        for name in dict.fromkeys((*self.request.contenders, *(r.contender for r in results))):
            own = [result for result in results if result.contender == name]
            if not self.streams:
                _print(header(name))
                _print(map(line, own))
            _print(footer(self.request, own))
        _print(limit_lines(results))


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        echo(line)


# --- the table --------------------------------------------------------------------------

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
    request: lab.BenchRequest, facts: dict[str, Any], devices: Sequence[dict[str, Any]]
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
    for warning in lab.oversubscribed(facts["world_size"]):
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


def line(result: lab.Result) -> str:
    """One line of a block."""
    workload = result.workload
    return (
        f"{result.nbytes:12}  {result.count:12}  {workload.dtype:>8}  "
        f"{workload.op:>6}  {workload.root:6}"
        f"{_half(result, result.out_of_place)}{_half(result, result.in_place)}"
    )


def _half(result: lab.Result, timing: lab.Timing | None) -> str:
    time = algbw = busbw = wrong = "N/A"
    if timing is not None and timing.samples_s:
        median = timing.summary.p50_s
        time = _number(median * 1e6, 7)
        algbw, busbw = _number(result.algbw(median), 6), _number(result.busbw(median), 6)
        wrong = "N/A" if timing.wrong is None else f"{timing.wrong:g}"
    return f"  {time:>7}  {algbw:>6}  {busbw:>6}  {wrong:>6}"


def footer(request: lab.BenchRequest, results: Sequence[lab.Result]) -> Iterator[str]:
    """The last lines of a block."""
    wrong = lab.wrong_in(results)
    for reason in dict.fromkeys(result.refused for result in results if result.refused):
        yield f"# not available: {reason}"
    few = sum(timing.summary.few for _, _, timing in lab.timings(results))
    if few:
        yield f"# {'Few samples':20} : {few} medians are {FEW_SAMPLES}"
    yield f"# {'Out of bounds values':20} : {wrong} {'FAILED' if wrong else 'OK'}"
    yield f"# {'Avg bus bandwidth':20} : {lab.average_busbw(results):g} "
    yield "#"
    yield f"# Collective test concluded: {request.collective}"


def limit_lines(results: Sequence[lab.Result]) -> Iterator[str]:
    """The lines below the blocks: the limits of each size, and how near each contender comes."""
    for row in lab.efficiencies(results):
        shares = ", ".join(f"{name} {value:.2f}" for name, value in row.of.items())
        yield (
            f"# {as_size(row.nbytes)}: exchange {time_in_words(row.exchange_s)} + add "
            f"{time_in_words(row.add_s)}, copy {time_in_words(row.copy_s)}; efficiency: {shares}"
        )
