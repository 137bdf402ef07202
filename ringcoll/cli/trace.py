"""``ringcoll trace``: where the time of a collective goes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from ringcoll.bench import DTYPES, OPS
from ringcoll.bench.contenders import Workload
from ringcoll.bench.environment import environment, oversubscribed
from ringcoll.bench.traced import TraceRequest, on_rank
from ringcoll.bench.units import as_size, time_in_words
from ringcoll.cli import measuring
from ringcoll.cli.command import command
from ringcoll.cli.output import print_json, print_table, print_text
from ringcoll.cli.parameters import collective_name, json_option, new_file
from ringcoll.schedule.contracts import contract

__all__ = ["trace"]

_SHARES = ("waiting", "moving", "reducing", "python")

_EXAMPLES = """
  ringcoll trace all_reduce -k 4 -b 1M --algorithm ring
  ringcoll trace all_reduce -k 2 -b 4 --transport ucx -o short.json
  ringcoll trace broadcast --algorithm chain --segment-bytes 64K
  torchrun --nproc-per-node 4 -m ringcoll.cli trace all_gather
"""


@command(examples=_EXAMPLES)
@click.argument("collective", type=collective_name)
@measuring.ranks_option(4)
@click.option("-b", "--bytes", "nbytes", type=measuring.nbytes_of, default="1M", show_default=True,
              help="Size of the vector, or of all blocks of a rank.")  # fmt: skip
@click.option("--algorithm", default="auto", show_default=True, metavar="NAME",
              help="A name from `ringcoll list`, auto, or an algorithm of your own, such as "
              "star.py:star.")  # fmt: skip
@measuring.transport
@click.option("-o", "--output", "file", type=click.Path(dir_okay=False, path_type=Path),
              default="trace.json", show_default=True, callback=new_file(),
              help="The file to write.")  # fmt: skip
@click.option("-n", "--iters", type=click.IntRange(min=1), default=5, show_default=True,
              help="Times that the operation runs in the trace.")  # fmt: skip
@click.option("-w", "--warmup_iters", type=click.IntRange(min=0), default=2, show_default=True,
              help="Times that it runs before.")  # fmt: skip
@click.option("--op", type=click.Choice(list(OPS)), default="sum", show_default=True,
              metavar="OP", help=f"One of {', '.join(OPS)}.")  # fmt: skip
@click.option("-d", "--datatype", "dtype", type=click.Choice(list(DTYPES)), default="float",
              show_default=True, metavar="TYPE", help=f"One of {', '.join(DTYPES)}.")  # fmt: skip
@click.option("-r", "--root", type=click.IntRange(min=0), help="Root of a rooted collective; 0.")
@click.option("--segment-bytes", type=measuring.nbytes_of,
              help="Size of the pieces in which chunks are pipelined.")  # fmt: skip
@json_option
def trace(
    collective: str,
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
    """Draw where the time of COLLECTIVE goes, on real processes.

    The file has every send, receive, wait, reduction and copy of all ranks on one clock,
    with an arrow for each message; https://ui.perfetto.dev and chrome://tracing open it.

    The table has, for each rank, the time from the beginning to the end of the
    operations, and its shares: waiting for messages, moving (posting messages, and
    copies), reducing, and Python, which is all the rest.
    """
    world_size = measuring.ranks_to_use(ranks, 4)
    rules = contract(collective)
    if root is not None and not rules.rooted:
        raise click.UsageError(f"{collective} has no root")
    if (root or 0) >= world_size:
        raise click.BadParameter(f"rank {root} is not one of {world_size}", param_hint="--root")
    names, modules = measuring.contenders(collective, algorithm, world_size)
    if len(names) != 1 or names[0] == measuring.NATIVE:
        raise click.BadParameter("one algorithm of ringcoll's, or auto", param_hint="--algorithm")
    workload = Workload(
        collective,
        nbytes,
        dtype,
        op if rules.reduces else "none",
        (root or 0) if rules.rooted else -1,
    )
    request = TraceRequest(
        workload,
        names[0],
        str(file.absolute()),
        segment_bytes=segment_bytes,
        transport=transport,
        warmup=warmup_iters,
        times=iters,
        modules=modules,
    )
    summary = measuring.on_ranks(on_rank, request, world_size=world_size, backend="gloo")
    if summary:  # under torchrun rank 0 has it, and prints
        _print(request, summary, world_size, as_json=as_json)


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
    if warning := oversubscribed(world_size):
        click.echo(warning)
    click.echo()
    columns = ("rank", "operations", "total", *_SHARES, "sent", "received", "messages")
    print_table(columns, _rows(summary["ranks"]), left=2)
    click.echo()
    print_text(*_notes(request, summary))


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


def _notes(request: TraceRequest, summary: dict[str, Any]) -> Iterator[str]:
    worst = max(summary["clocks"], key=lambda clock: float(clock["uncertainty_us"]))
    yield (
        f"Clocks of the ranks are known to {worst['uncertainty_us']:.3g} us or better"
        f" (rank {worst['rank']})."
    )
    yield f"Wrote {request.path}: open it in https://ui.perfetto.dev or chrome://tracing."
