"""``ringcoll bench``: one collective, in the table of nccl-tests, or beside native."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

import ringcoll.tools.bench as benchmarks
from ringcoll.runtime.machine import json_text, replace_file
from ringcoll.runtime.reduction import OPERATORS
from ringcoll.runtime.transport import catalogue
from ringcoll.schedules import contract
from ringcoll.tools.bench import DTYPE_NAMES, LIMITS, NATIVE, OVER_RANKS, as_size
from ringcoll.tools.cli import comparison, measuring, options
from ringcoll.tools.cli.app import command
from ringcoll.tools.cli.nccl_tests_table import Printer, limit_lines, print_lines
from ringcoll.tools.cli.output import echo, print_csv, print_json

_STEP_OPTIONS = {"stepbytes", "stepfactor"}
_COMPARISON_DEFAULTS = {"minbytes": "4", "maxbytes": "16M", "warmup": 2, "most": 200, "seconds": 50}
"""Defaults of options with --vs; with more rounds the quartiles hardly move."""


def _set_defaults(ctx: click.Context, param: click.Parameter, name: str | None) -> str | None:
    if name is not None:
        ctx.default_map = _COMPARISON_DEFAULTS
    return name


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
        ringcoll bench --vs native
        ringcoll bench --vs native -k 8 --seconds 120 --picture eight.svg
        ringcoll bench all_gather --vs native -b 1K -e 64M
    """
)
@options.usual_collective
@measuring.ranks_option(4)
@click.option("--algorithms", default="auto", show_default=True, metavar="NAMES",
              shell_complete=options.complete_algorithms,
              help="Names from `ringcoll list`, auto, persistent (auto, prepared once), "
              "shared_tensors (the same, in shared memory), native for torch's own, algorithms of "
              "yours such as star.py:star, files such as ring.xml; or all. ring@gloo: over gloo. "
              "One block is printed for each.")  # fmt: skip
@options.sizes_options("32M", "32M", factor=1, step="1M")
@click.option("-n", "--iters", "most", type=click.IntRange(1, 10**6), default=20, show_default=True,
              help="Times that each operation is timed; with --seconds, at most.")  # fmt: skip
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
@click.option("--vs", type=options.OneOf([NATIVE]), is_eager=True, callback=_set_defaults,
              help="Compare with torch.distributed's own: in place, with sizes from 4 to 16M by a "
              "factor of 4, and other algorithms, for 50 seconds, unless said "
              "otherwise.")  # fmt: skip
@click.option("--seconds", type=options.FiniteRange(min=0),
              help="Time to spend on measuring; more of it means more repetitions.")  # fmt: skip
@options.file_option("--picture", callback=options.new_picture,
                     help="Draw the curves into this file; needs ringcoll[plot].")  # fmt: skip
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
    vs: str | None,
    picture: Path | None,
    file: Path | None,
    as_json: bool,
    as_csv: bool,
    **settings: Any,
) -> None:
    """Measure COLLECTIVE (all_reduce), with the flags, columns and JSON of nccl-tests.

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

    With --vs there is one table instead, which says who wins. Without --algorithms it has
    ring, tree and double tree, ring and tree over gloo's point-to-point messages, if the
    others do not use these, and the best of all other algorithms: short runs choose it for each
    size. The spread is the interquartile range over the median.

    Exit status: 1 if any element was wrong, or an algorithm was refused.
    """
    measuring.refuse_unused_transport(ctx, device)
    world_size = measuring.ranks_to_use(ranks, 4)
    rules = contract(collective)
    roots = range(world_size) if root == "all" else [int(root)]
    if rules.rooted and max(roots) >= world_size:
        raise click.BadParameter(f"rank {root} is not one of {world_size}", param_hint="--root")
    if not options.typed(ctx) & _STEP_OPTIONS:
        if vs is not None:
            stepfactor = 4
        elif minbytes < maxbytes < minbytes + stepbytes:
            stepfactor = 2  # with nccl-tests' step of 1 MiB, such a range would be one size
    sizes = options.sizes_between(minbytes, maxbytes, stepfactor, stepbytes)
    measuring.check_memory(max(minbytes, maxbytes), world_size, device)
    own, modules = measuring.contenders(collective, algorithms, world_size)
    scouts: tuple[str, ...] = ()
    if vs is not None:
        if "algorithms" not in options.typed(ctx):
            own, scouts = comparison.contenders(collective, world_size, device, transport)
        own = (*own, NATIVE)
        sizes = comparison.with_data(collective, settings["dtypes"][0], sizes, world_size)
    named = (*own, *(LIMITS if limits else ()))
    request = benchmarks.BenchRequest(
        collective,
        tuple(dict.fromkeys(named)),
        sizes,
        roots=tuple(roots),
        timed_modes=(False, True) if vs is None else (rules.in_place,),
        scouts=scouts,
        over_ranks=OVER_RANKS[average],
        check=bool(check),
        modules=modules,
        device=device,
        **settings,
    )
    if not request.workloads:
        raise click.UsageError(f"operator {request.ops[0]} is not defined for {request.dtypes[0]}")
    if (vs or picture) and len(request.workloads) > len(sizes):
        raise click.UsageError("--vs and --picture are for one datatype, operator and root")
    facts = benchmarks.environment(world_size) | {"transport": catalogue.resolved(device)}
    printer = Printer(request, facts, streams=not (as_json or as_csv or vs))
    if vs and not (as_json or as_csv) and measuring.is_first_rank():
        comparison.announce(request, facts)
    results = measuring.measured(
        request,
        world_size,
        comparison.medians if vs else lambda results: as_size(results[0].nbytes),
        first_text=None if vs else collective,
        shown=not printer.streams and measuring.is_first_rank(),
        on_report=printer.results,
        on_start=printer.start,
    )
    if vs is not None:
        results.sort(key=lambda result: (result.nbytes, result.contender == NATIVE))
    if printer.devices:  # under a launcher rank 0 has them, and prints
        everything = benchmarks.document(request, facts, printer.devices, results)
        compared = [result for result in results if result.contender not in LIMITS]
        if picture is not None:
            comparison.draw(compared, picture, facts, request.over_ranks)
        if vs is not None:
            drawn = None if picture is None else str(picture.resolve())
            everything |= {"findings": list(benchmarks.sentences(compared)), "picture": drawn}
        if as_json:
            print_json(everything)
        elif as_csv:
            print_csv(list(benchmarks.csv_records(results)))
        elif vs is not None:
            comparison.print_comparison(compared, facts, picture)
            print_lines(limit_lines(results))
        else:
            printer.end(results)
            if picture is not None:
                echo(f"# Drawing the curves into {picture}")
        if file is not None:
            replace_file(file, json_text(everything, indent=2) + "\n")
            if not (as_json or as_csv):
                echo(f"# Writing JSON output to {file}")
    if benchmarks.failed(results):
        ctx.exit(1)
