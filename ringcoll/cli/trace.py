"""``ringcoll trace``: where the time of a collective, or of a trainer, goes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import click
from click.core import ParameterSource

from ringcoll.bench import (
    DTYPES,
    NATIVE,
    Contender,
    TraceRequest,
    TrainerTraceRequest,
    TrainingRequest,
    Workload,
    as_size,
    check_fit,
    environment,
    oversubscribed,
    time_in_words,
    trace_on_rank,
    trace_training_on_rank,
)
from ringcoll.cli import measuring
from ringcoll.cli.app import command
from ringcoll.cli.output import PICTURES, print_json, print_table, print_text, write_picture
from ringcoll.cli.parameters import (
    asked_schedule,
    bytes_option,
    collective_name,
    complete_algorithms,
    file_option,
    json_option,
)
from ringcoll.errors import ArgumentError, ScheduleError
from ringcoll.machine import UserModule, is_schedule_file, read_json_file, replace_file
from ringcoll.pictures import last_run, overlap_picture, player_page, time_picture
from ringcoll.reduction import OPERATORS
from ringcoll.schedule import contract
from ringcoll.training import TRAINERS, Gradients, find_trainer, trainer_names, usual_task

_SHARES = ("waiting", "moving", "reducing", "python")
_PARTS = ("computing", "communicating", "waiting")

# Options of a collective, which a trainer cannot use.
_OF_COLLECTIVES = {
    "nbytes": "--bytes",
    "op": "--op",
    "dtype": "--datatype",
    "root": "--root",
    "segment_bytes": "--segment-bytes",
}


class _TracedName(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.5
    """The name of a collective, or of a trainer."""

    name = "what"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            if value.partition(":")[0] in TRAINERS:
                find_trainer(value)
                return value
            return collective_name.convert(value, param, ctx)
        except ArgumentError as error:
            self.fail(f"{value!r} is none of {error.expected}", param, ctx)
        except ScheduleError as error:
            raise ScheduleError(f"{error}; or a trainer: {', '.join(trainer_names())}") from None


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
@click.argument("what", type=_TracedName(), shell_complete=collective_name.shell_complete)
@measuring.ranks_option(4)
@bytes_option()
@click.option("--algorithm", default="auto", show_default=True, metavar="NAME",
              shell_complete=complete_algorithms,
              help="A name from `ringcoll list`, auto, an algorithm of your own, such as "
              "star.py:star, or a file such as best.txt.")  # fmt: skip
@measuring.transport
@file_option("-o", "--output", "file", default="trace.json", show_default=True,
             help="The file to write: a trace; or, by its ending, .svg, .png or .pdf with the last "
             "operation, or step of a trainer, over time, or .html, a page that plays it beside "
             "the model.")  # fmt: skip
@click.option("-n", "--iters", type=click.IntRange(1, 10**6), default=5, show_default=True,
              help="Times that the operation runs, or steps, in the trace.")  # fmt: skip
@click.option("-w", "--warmup_iters", type=click.IntRange(0, 10**6), default=2, show_default=True,
              help="Times that it runs, or steps, before.")  # fmt: skip
@click.option("--op", default="sum", show_default=True, metavar="OP", callback=measuring.operator,
              help=f"One of {', '.join(OPERATORS)}.")  # fmt: skip
@click.option("-d", "--datatype", "dtype", default="float", callback=measuring.dtype,
              show_default=True, metavar="TYPE", help=f"One of {', '.join(DTYPES)}.")  # fmt: skip
@click.option("-r", "--root", type=click.IntRange(min=0), help="Root of a rooted collective; 0.")
@measuring.segments_option
@json_option
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
    iters: int,
    warmup_iters: int,
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
    is_picture = file.suffix.lower() in PICTURES
    written = file.with_name(f"{file.name}.trace") if is_picture else file
    target = _Target(str(written.absolute()), warmup_iters, iters)
    if what.partition(":")[0] in TRAINERS:
        if file.suffix.lower() == ".html":
            raise click.UsageError("a page plays a collective; of a trainer there are pictures")
        _trace_trainer(ctx, what, algorithm, world_size, target, file, as_json=as_json)
        return
    collective = what
    rules = contract(collective)
    if root is not None and not rules.rooted:
        raise click.UsageError(f"{collective} has no root")
    if (root or 0) >= world_size:
        raise click.BadParameter(f"rank {root} is not one of {world_size}", param_hint="--root")
    name, modules = _algorithm(collective, algorithm, world_size)
    measuring.check_memory(nbytes, world_size)
    workload = Workload(
        collective,
        nbytes,
        dtype,
        op if rules.reduces else "none",
        (root or 0) if rules.rooted else -1,
    )
    request = TraceRequest(
        workload, name, *target, segment_bytes=segment_bytes, transport=transport, modules=modules
    )
    summary = measuring.on_ranks(trace_on_rank, request, world_size=world_size, backend="gloo")
    if summary:  # under a launcher rank 0 has it, and prints
        if is_picture:
            _draw(written, file, collective, root, name)
        _print(replace(request, path=str(file.absolute())), summary, world_size, as_json=as_json)


def _draw(written: Path, file: Path, collective: str, root: int | None, asked: str) -> None:
    """Draw the last operation of a trace."""
    trace = _read(written)
    if file.suffix.lower() != ".html":
        write_picture(file, time_picture(trace))
        return
    run = last_run(trace)
    name = asked if is_schedule_file(asked) else run.name.rpartition(" ")[0]
    _, schedule, _ = asked_schedule(name, collective, run.world_size, root, None)
    settings = {"clock": "time", "times": "trace"}
    replace_file(file, player_page(schedule, trace=trace, settings=settings))


def _read(written: Path) -> dict[str, Any]:
    """Read a trace that is drawn, and remove it."""
    trace: dict[str, Any] = read_json_file(written)
    written.unlink()
    return trace


class _Target(NamedTuple):
    """The file, and the numbers of runs before the trace and in it."""

    path: str
    warmup: int
    times: int


def _algorithm(collective: str, text: str, world_size: int) -> tuple[str, tuple[UserModule, ...]]:
    names, modules = measuring.contenders(collective, text, world_size)
    if len(names) != 1 or names[0] == NATIVE:
        raise click.BadParameter("one algorithm of ringcoll's, or auto", param_hint="--algorithm")
    return names[0], modules


def _trace_trainer(
    ctx: click.Context,
    name: str,
    text: str,
    world_size: int,
    target: _Target,
    file: Path,
    *,
    as_json: bool,
) -> None:
    refused = dict(_OF_COLLECTIVES)
    if not find_trainer(name)[0].takes_algorithm:
        refused["algorithm"] = "--algorithm"
    for param, option in refused.items():
        if ctx.get_parameter_source(param) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"the trainer {name} cannot use {option}")
    algorithm, modules = _algorithm("all_reduce", text, world_size)
    task = usual_task([name])
    check_fit(TrainingRequest((Contender(name, algorithm),), task), world_size)
    request = TrainerTraceRequest(name, task, Gradients(algorithm), *target, modules=modules)
    summary = measuring.on_ranks(
        trace_training_on_rank, request, world_size=world_size, backend="ringcoll"
    )
    if not summary:
        return
    if file.suffix.lower() in PICTURES:
        write_picture(file, overlap_picture(_read(Path(target.path))))
    if as_json:
        print_json(
            {"environment": environment(world_size), "file": str(file.absolute()), **summary}
        )
        return
    click.echo(
        f"{name} trains a {task.model} with {task.optimizer} on {world_size} ranks over "
        f"{summary['transport']}, {target.times} steps after {target.warmup}"
    )
    print_text(*oversubscribed(world_size), "")
    columns = ("rank", "phase", "times", "total", *_PARTS, "beside", "peak memory")
    print_table(columns, _phase_rows(summary["phases"]), left=2)
    print_text("", *summary["findings"], "", *_notes(str(file.absolute()), summary))


def _phase_rows(ranks: list[dict[str, dict[str, Any]]]) -> Iterator[tuple[str, ...]]:
    """A line for each rank and phase."""
    for rank, phases in enumerate(ranks):
        for name, times in phases.items():
            total, peak = times["total_s"], times["peak_nbytes"]
            yield (
                str(rank),
                name,
                str(times["times"]),
                time_in_words(total),
                *(
                    f"{time_in_words(times[f'{part}_s'])} "
                    f"{100 * times[f'{part}_s'] / total if total else 0:3.0f}%"
                    for part in _PARTS
                ),
                time_in_words(times["beside_s"]),
                "?" if peak is None else f"{peak / (1 << 20):.1f} MiB",
            )


def _print(
    request: TraceRequest, summary: dict[str, Any], world_size: int, *, as_json: bool
) -> None:
    if as_json:
        print_json({"environment": environment(world_size), "file": request.path, **summary})
        return
    size = as_size(request.workload.nbytes)
    click.echo(
        f"{request.workload.collective} of {size} on {world_size} ranks over "
        f"{summary['transport']}, {request.times} times after {request.warmup}"
    )
    print_text(*oversubscribed(world_size), "")
    columns = ("rank", "operations", "total", *_SHARES, "sent", "received", "messages")
    print_table(columns, _rows(summary["ranks"]), left=2)
    click.echo()
    print_text(*_notes(request.path, summary))


def _rows(ranks: list[dict[str, dict[str, Any]]]) -> Iterator[tuple[str, ...]]:
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
                    f"{time_in_words(shares[f'{name}_s'])} {100 * shares[f'{name}_share']:3.0f}%"
                    for name in _SHARES
                ),
                as_size(shares["sent_bytes"]),
                as_size(shares["received_bytes"]),
                str(shares["sent_messages"]),
            )


def _notes(path: str, summary: dict[str, Any]) -> Iterator[str]:
    worst = max(summary["clocks"], key=lambda clock: float(clock["uncertainty_us"]))
    yield (
        f"Clocks of the ranks are known to {worst['uncertainty_us']:.3g} us or better"
        f" (rank {worst['rank']})."
    )
    is_picture = Path(path).suffix.lower() in PICTURES
    yield f"Wrote {path}{'' if is_picture else ': open it in https://ui.perfetto.dev or chrome://tracing'}."
