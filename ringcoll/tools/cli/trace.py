"""``ringcoll trace``: where the time of a collective, or of a trainer, goes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

import ringcoll.tools.bench as benchmarks
from ringcoll import training
from ringcoll.errors import ArgumentError, ScheduleError
from ringcoll.lab.pictures import last_run, overlap_picture, player_page, time_picture
from ringcoll.runtime.machine import read_json_file, replace_file
from ringcoll.runtime.reduction import OPERATORS
from ringcoll.runtime.user_files import UserModule, is_schedule_file
from ringcoll.schedules import contract
from ringcoll.tools.bench import DTYPE_NAMES, NATIVE, as_size, time_in_words
from ringcoll.tools.cli import measuring, options
from ringcoll.tools.cli.app import command, did_you_mean, nearest
from ringcoll.tools.cli.output import (
    PICTURES,
    echo,
    print_json,
    print_table,
    print_text,
    write_picture,
)
from ringcoll.training import TRAINERS, find_trainer, trainer_names, usual_task

_SHARES = ("waiting", "moving", "reducing", "python")
_PARTS = ("computing", "communicating", "waiting")

# Options that a trainer does not have.
_COLLECTIVE_OPTIONS = {"nbytes", "op", "dtype", "root", "segment_bytes"}
_ALGORITHM_OPTIONS = _COLLECTIVE_OPTIONS | {"algorithm"}


class _TracedName(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.5
    """The name of a collective, or of a trainer."""

    name = "what"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            if value.partition(":")[0] in TRAINERS:
                find_trainer(value)
                return value
            return options.collective_name.convert(value, param, ctx)
        except ArgumentError as error:
            self.fail(f"{value!r} is none of {error.expected}{nearest(error)}", param, ctx)
        except ScheduleError as error:
            trainers = (
                f"; or a trainer: {', '.join(trainer_names())}{did_you_mean(value, TRAINERS)}"
            )
            raise ScheduleError(f"{error}{trainers}") from None


@command(
    examples="""
        ringcoll trace all_reduce -k 4 -b 1M --algorithm ring
        ringcoll trace all_reduce -k 2 -b 4 --transport ucx -o short.json
        ringcoll trace broadcast --algorithm chain --segment-bytes 64K
        ringcoll trace pipeline:1f1b
        ringcoll trace bucketed -o overlap.svg
        ringcoll trace 3d:2x2x2 -k 8 -n 3
        ringcoll trace all_reduce --algorithm ring -o measured.html
        torchrun --nproc-per-node 4 -m ringcoll trace all_gather
    """
)
@click.argument("what", type=_TracedName(), shell_complete=options.collective_name.shell_complete)
@measuring.ranks_option(4)
@options.bytes_option()
@click.option("--algorithm", default="auto", show_default=True, metavar="NAME",
              shell_complete=options.complete_algorithms,
              help="A name from `ringcoll list`, auto, an algorithm of your own, such as "
              "star.py:star, or a file such as best.txt.")  # fmt: skip
@measuring.transport
@options.file_option("-o", "--output", "file", default="trace.json", show_default=True,
                     help="The file to write: a trace; or, by its ending, .svg, .png or .pdf with "
                     "the last operation, or step of a trainer, over time, or .html, a page that "
                     "plays it beside the model.")  # fmt: skip
@click.option("-n", "--iters", "times", type=click.IntRange(1, 10**6), default=5,
              show_default=True,
              help="Times that the operation runs, or steps, in the trace.")  # fmt: skip
@click.option("-w", "--warmup_iters", "warmup", type=click.IntRange(0, 10**6), default=2,
              show_default=True, help="Times that it runs, or steps, before.")  # fmt: skip
@click.option("--op", default="sum", show_default=True, metavar="OP", callback=measuring.operator,
              help=f"One of {', '.join(OPERATORS)}.")  # fmt: skip
@click.option("-d", "--datatype", "dtype", default="float", callback=measuring.dtype,
              show_default=True, metavar="TYPE",
              help=f"One of {', '.join(DTYPE_NAMES)}.")  # fmt: skip
@options.root_option
@measuring.segments_option
@options.json_option
@click.pass_context
def trace(
    ctx: click.Context,
    /,
    what: str,
    ranks: int | None,
    nbytes: int,
    algorithm: str,
    transport: str,
    file: Path,
    times: int,
    warmup: int,
    op: str,
    dtype: str,
    root: int | None,
    segment_bytes: int | None,
    as_json: bool,
) -> None:
    """Draw where the time of WHAT goes, on real processes: of a collective, or of a trainer.

    The file has every send, receive, wait, reduction and copy of all ranks on one clock,
    with an arrow for each message; https://ui.perfetto.dev and chrome://tracing open it.

    The table has, for each rank, the time from the beginning to the end of the
    operations, and its shares: waiting for messages, moving (posting messages, and
    copies), reducing, and Python, which is all the rest.

    WHAT may be a trainer of `ringcoll train`, such as pipeline:1f1b. It trains the model that
    it needs, or the perceptron. The file then has the phases of each step, too. The table
    has the time of each phase, without the phases in it: computing, communicating, and
    waiting for other ranks; and the peak of memory. Sentences say who waits for whom.
    """
    world_size = measuring.ranks_to_use(ranks, 4)
    is_page = file.suffix.lower() == ".html"
    is_picture = file.suffix.lower() in PICTURES
    written = file.with_name(f"{file.name}.trace") if is_picture else file
    target: Any = {"path": str(written.absolute()), "warmup": warmup, "times": times}
    if what.partition(":")[0] in TRAINERS:
        if is_page:
            raise click.UsageError("a page plays a collective; of a trainer there are pictures")
        refused = (
            _COLLECTIVE_OPTIONS if find_trainer(what)[0].takes_algorithm else _ALGORITHM_OPTIONS
        )
        for param in ctx.command.params:
            if param.name in refused & options.typed(ctx):
                raise click.UsageError(f"the trainer {what} cannot use {param.opts[-1]}")
        name, modules = _algorithm("all_reduce", algorithm, world_size)
        task = usual_task([what])
        task.epoch(0, world_size)  # raises if there are too few samples for a step
        training.check_trainer(what, task, world_size, training.Gradients(name))
        summary = measuring.on_ranks(
            benchmarks.trace_training_on_rank,
            benchmarks.TrainerTraceRequest(
                what, task, training.Gradients(name), **target, modules=modules
            ),
            world_size=world_size,
            backend="ringcoll",
        )
        if not summary:  # under a launcher rank 0 has it, and prints
            return
        if is_picture:
            write_picture(file, overlap_picture(_read(written)))
        title = f"{what} trains a {task.model} with {task.optimizer}"
        unit, findings = "steps", [*summary["findings"], ""]
        columns = ["rank", "phase", "times", "total", *_PARTS, "beside", "peak memory"]
        rows = _phase_rows(summary["phases"])
    else:
        has_root = options.check_root(what, root)
        if (root or 0) >= world_size:
            raise click.BadParameter(f"rank {root} is not one of {world_size}", param_hint="--root")
        name, modules = _algorithm(what, algorithm, world_size)
        measuring.check_memory(nbytes, world_size)
        op = op if contract(what).reduces else "none"
        workload = benchmarks.Workload(what, nbytes, dtype, op, (root or 0) if has_root else -1)
        request = benchmarks.TraceRequest(
            workload,
            name,
            **target,
            segment_bytes=segment_bytes,
            transport=transport,
            modules=modules,
        )
        summary = measuring.on_ranks(
            benchmarks.trace_on_rank, request, world_size=world_size, backend="gloo"
        )
        if not summary:
            return
        if is_page:
            _write_page(file, _read(written), what, root, name)
        elif is_picture:
            write_picture(file, time_picture(_read(written)))
        title, unit, findings = f"{what} of {as_size(nbytes)}", "times", []
        columns = ["rank", "operations", "total", *_SHARES, "sent", "received", "messages"]
        rows = _call_rows(summary["ranks"])
    if as_json:
        facts = {"environment": benchmarks.environment(world_size), "file": str(file.absolute())}
        print_json(facts | summary)
        return
    echo(
        f"{title} on {world_size} ranks over {summary['transport']}, {times} {unit} after {warmup}"
    )
    print_text(*benchmarks.oversubscribed(world_size), "")
    print_table(columns, rows, left=2)
    worst = max(summary["clocks"], key=lambda clock: float(clock["uncertainty_us"]))
    opened = "" if is_picture else ": open it in https://ui.perfetto.dev or chrome://tracing"
    print_text(
        "",
        *findings,
        f"Clocks of the ranks are known to {worst['uncertainty_us']:.3g} us or better"
        f" (rank {worst['rank']}).",
        f"Wrote {file.absolute()}{opened}.",
    )


def _algorithm(collective: str, text: str, world_size: int) -> tuple[str, tuple[UserModule, ...]]:
    names, modules = measuring.contenders(collective, text, world_size)
    if len(names) != 1 or names[0] == NATIVE:
        raise click.BadParameter("one algorithm of ringcoll's, or auto", param_hint="--algorithm")
    return names[0], modules


def _read(written: Path) -> dict[str, Any]:
    """Read a trace that is drawn, and remove it."""
    trace: dict[str, Any] = read_json_file(written)
    written.unlink()
    return trace


def _write_page(
    file: Path, trace: dict[str, Any], collective: str, root: int | None, asked: str
) -> None:
    """Write a page that plays the last operation of a trace."""
    run = last_run(trace)
    name = asked if is_schedule_file(asked) else run.name.rpartition(" ")[0]
    _, schedule, _ = options.asked_schedule(name, collective, run.world_size, root)
    settings = {"clock": "time", "times": "trace"}
    replace_file(file, player_page(schedule, trace=trace, settings=settings))


def _phase_rows(ranks: list[dict[str, dict[str, Any]]]) -> Iterator[tuple[str, ...]]:
    """A line for each rank and phase."""
    for rank, phases in enumerate(ranks):
        for name, times in phases.items():
            total, peak = times["total_s"], times["peak_nbytes"]
            parts = [times[f"{part}_s"] for part in _PARTS]
            yield (
                str(rank),
                name,
                str(times["times"]),
                time_in_words(total),
                *(_with_percent(part, 100 * part / total if total else 0) for part in parts),
                time_in_words(times["beside_s"]),
                "?" if peak is None else f"{peak / (1 << 20):.1f} MiB",
            )


def _call_rows(ranks: list[dict[str, dict[str, Any]]]) -> Iterator[tuple[str, ...]]:
    """A line for each rank and call; the total only if there are several calls."""
    for rank, calls in enumerate(ranks):
        for call, shares in calls.items():
            if call == "total" and len(calls) == 2:
                continue
            yield (
                str(rank),
                f"{shares['operations']} x {call}",
                time_in_words(shares["total_s"]),
                *(
                    _with_percent(shares[f"{name}_s"], 100 * shares[f"{name}_share"])
                    for name in _SHARES
                ),
                as_size(shares["sent_bytes"]),
                as_size(shares["received_bytes"]),
                str(shares["sent_messages"]),
            )


def _with_percent(seconds: float, percent: float) -> str:
    return f"{time_in_words(seconds)} {percent:3.0f}%"
