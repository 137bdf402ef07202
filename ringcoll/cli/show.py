"""``ringcoll show``: draw one algorithm."""

from __future__ import annotations

from collections.abc import Iterator

import click

from ringcoll.algorithms import find, on_hosts
from ringcoll.cli.output import print_json
from ringcoll.cli.parameters import collective_name, json_option
from ringcoll.cli.report import findings, in_words
from ringcoll.contracts import contract
from ringcoll.draw import grid, primitives
from ringcoll.errors import VerificationError
from ringcoll.schedule import Copy, Recv, RecvReduce, Reduce, Schedule, Send
from ringcoll.verify import Proof
from ringcoll.verify import verify as prove

__all__ = ["show"]

_LEGEND = {
    Send: ">r:c  send chunk c to rank r",
    Recv: "<r:c  receive chunk c from rank r",
    RecvReduce: "+r:c  receive chunk c from rank r and reduce it with the own",
    Copy: "=c    copy chunk c from the input to the output",
    Reduce: "Sc    reduce several shares of chunk c",
}

_EXAMPLES = """\b
Examples:
  ringcoll show ring all_reduce -k 4
  ringcoll show tree broadcast -k 8 --root 3
  ringcoll show hierarchical all_reduce -k 8 --hosts 2
  ringcoll show ring all_reduce -k 4 --primitives --rank 1
  ringcoll show bruck all_gather -k 5 --text > bruck.txt
"""


@click.command(epilog=_EXAMPLES)
@click.argument("algorithm")
@click.argument("collective", type=collective_name)
@click.option(
    "-k", "--world-size", type=click.IntRange(min=1), default=4, show_default=True,
    help="Number of ranks.",
)  # fmt: skip
@click.option(
    "--hosts", "num_hosts", type=click.IntRange(min=1),
    help="Number of hosts, among which the ranks are divided, for an algorithm that needs "
    "to know; 2.",
)  # fmt: skip
@click.option("--root", type=click.IntRange(min=0), help="Root of a rooted collective; 0.")
@click.option(
    "--primitives",
    "as_primitives",
    is_flag=True,
    help="Print the program of one rank in NCCL's vocabulary.",
)
@click.option("--rank", type=click.IntRange(min=0), help="The rank for --primitives; 0.")
@click.option(
    "--text",
    "as_text",
    is_flag=True,
    help="Print the schedule as text, which `ringcoll verify --schedule` reads.",
)
@json_option
def show(
    algorithm: str,
    collective: str,
    world_size: int,
    num_hosts: int | None,
    root: int | None,
    as_primitives: bool,
    rank: int | None,
    as_text: bool,
    as_json: bool,
) -> None:
    """Draw ALGORITHM for COLLECTIVE, step by step and rank by rank.

    The header says what it costs, with the lower bounds behind it, and in which
    order it reduces: that was proved on the schedule, not taken from a formula.
    """
    if as_primitives + as_text + as_json > 1 and not (as_primitives and as_json):
        raise click.UsageError("--text goes with neither --json nor --primitives")
    if rank is not None and not as_primitives:
        raise click.UsageError("--rank goes with --primitives")
    if root is not None and not contract(collective).rooted:
        raise click.UsageError(f"{collective} has no root")
    entry = find(collective, algorithm)
    if num_hosts is not None and not entry.needs_hosts:
        raise click.UsageError(f"{entry.name} {collective} is the same on any number of hosts")
    hosts = on_hosts(world_size, num_hosts or 2)
    schedule = entry.schedule(world_size, root or 0, hosts)
    title = _title(schedule) + (f", {_in_number(max(hosts) + 1, 'host')}" * entry.needs_hosts)
    if as_text:
        click.echo(schedule.to_text(), nl=False)
    elif as_primitives:
        _show_primitives(schedule, rank or 0, title, as_json=as_json)
    else:
        _show_grid(schedule, title, entry.summary, as_json=as_json)


def _in_number(number: int, thing: str) -> str:
    return f"{number} {thing}{'s' if number > 1 else ''}"


def _title(schedule: Schedule) -> str:
    ranks = _in_number(schedule.world_size, "rank")
    root = f", root {schedule.root}" if contract(schedule.collective).rooted else ""
    return f"{schedule.algorithm} {schedule.collective} on {ranks}{root}"


def _show_primitives(schedule: Schedule, rank: int, title: str, *, as_json: bool) -> None:
    words = primitives(schedule, rank)
    if as_json:
        print_json(_header(schedule) | {"rank": rank, "primitives": words})
        return
    click.echo(f"{title}: rank {rank}\n")
    for number, word in enumerate(words):
        click.echo(f"{number:4}  {word}")


def _header(schedule: Schedule) -> dict[str, object]:
    return {
        "collective": schedule.collective,
        "algorithm": schedule.algorithm,
        "world_size": schedule.world_size,
        "root": schedule.root if contract(schedule.collective).rooted else None,
        "num_chunks": schedule.num_chunks,
        "num_slots": schedule.num_slots,
    }


def _show_grid(schedule: Schedule, title: str, summary: str, *, as_json: bool) -> None:
    try:
        proof = prove(schedule)
    except VerificationError as error:
        # `verify` is the command that judges; here a wrong algorithm is drawn, marked.
        if as_json:
            print_json(_header(schedule) | {"ok": False, "error": str(error)})
        else:
            click.echo(f"{title} is wrong\n\n{error}")
        raise click.exceptions.Exit(1) from None
    if as_json:
        ranks = range(schedule.world_size)
        print_json(
            _header(schedule)
            | {"summary": summary, "ok": True}
            | findings(proof)
            | {"steps": [[[*map(str, step)] for step in schedule.steps(rank)] for rank in ranks]}
        )
        return
    click.echo(f"{title}\n{summary}\n")
    for line in in_words(proof):
        click.echo(line)
    click.echo()
    for line in _legend(proof):
        click.echo(line)
    click.echo(f"\n{grid(schedule)}")


def _legend(proof: Proof) -> Iterator[str]:
    """Explain the cells that the grid has."""
    schedule = proof.schedule
    operations = [
        operation
        for rank in range(schedule.world_size)
        for step in schedule.steps(rank)
        for operation in step
    ]
    kinds = set(map(type, operations))
    yield from (text for kind, text in _LEGEND.items() if kind in kinds)
    if any(isinstance(op, RecvReduce | Reduce) and op.final for op in operations):
        yield "!     behind a reduction: it completes the chunk"
