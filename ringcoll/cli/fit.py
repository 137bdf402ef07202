"""``ringcoll fit``: the fastest schedule on a network for each range of sizes, for ``"auto"`` to use."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import reduce
from pathlib import Path
from typing import Any

import click

from ringcoll.algorithms import algorithms
from ringcoll.bench import parse_size
from ringcoll.cli.command import command
from ringcoll.cli.networks import NETWORKS, needed_network, network_options, network_ranks_option
from ringcoll.cli.output import print_json, print_table, print_text, progress
from ringcoll.cli.parameters import collective_name, file_option, json_option
from ringcoll.machine import read_fit, write_fit
from ringcoll.search import SIZES, Fit, FitRange, fit

_EXAMPLES = """
  ringcoll fit all_reduce --graph cluster.txt -o cluster.fit
  ringcoll fit all_reduce all_gather reduce_scatter --topology dgx1
  RINGCOLL_TUNING=cluster.fit torchrun ... train.py
"""


@command("fit", examples=_EXAMPLES, terms=NETWORKS)
@click.argument("collectives", type=collective_name, nargs=-1, required=True)
@network_ranks_option
@network_options
@click.option("--sizes", metavar="SIZES", help="Bytes of the data at which schedules are simulated, such as 4K,1M; "
              "1K to 64M.")  # fmt: skip
@click.option("--seed", type=click.IntRange(0, (1 << 31) - 1), default=0, show_default=True,
              help="Seed of the searches.")  # fmt: skip
@file_option("-o", "--output", "file", help="Write what was fitted, for RINGCOLL_TUNING or Options(fit=...); "
             "fits of other collectives to the same network stay in the file.")  # fmt: skip
@json_option
def fit_command(
    collectives: tuple[str, ...],
    sizes: str | None,
    seed: int,
    file: Path | None,
    as_json: bool,
    **network: Any,
) -> None:
    """Find the fastest schedules of COLLECTIVES on a network, by the simulator, and prove them.

    Registered algorithms take part in rank order and in the order in which neighbours are near, and so do
    hierarchies over the hosts and what the searches find. Beside each time stands a lower bound that no
    schedule is below. With -o the winners are written; a group of as many ranks on such hosts then uses them.
    """
    topology = needed_network(network)
    asked = None if sizes is None else [parse_size(size) for size in sizes.split(",")]
    fits = []
    for collective in dict.fromkeys(collectives):
        total = len(asked or SIZES) * 2 * len(list(algorithms(collective, topology.world_size)))
        with progress(total, f"fit {collective}") as advance:
            fits.append(fit(collective, topology, sizes=asked, seed=seed, advance=advance))
    better = [found for found in fits if not found.is_left]
    if file is not None and better:
        date = datetime.now(UTC).isoformat(timespec="seconds")
        fitted = better[0].fitted(date, read_fit(file) if file.exists() else None)
        write_fit(file, reduce(lambda so_far, found: found.fitted(date, so_far), better, fitted))
    if as_json:
        print_json({"network": topology.name, "fits": [_document(found) for found in fits]})
        return
    for found in fits:
        _print(found)
    if file is not None:
        click.echo(f"\nWrote {file}." if better else f"\n{file} is not written.")


def _document(found: Fit) -> dict[str, Any]:
    return {
        "collective": found.collective,
        "world_size": found.topology.world_size,
        "ranges": [
            {
                "from": one.nbytes.first,
                "to": one.nbytes.end,
                "size": one.size,
                **one.winner._asdict(),
                "segment_bytes": one.segment_bytes,
                "least_s": one.least_s,
                "registered": one.plain._asdict(),
                "reason": one.reason,
            }
            for one in found.ranges
        ],
        "left_out": found.left_out,
    }


def _print(found: Fit) -> None:
    click.echo(
        f"\n{found.collective} on {found.topology.name}, {found.topology.world_size} ranks\n"
    )
    columns = (
        "bytes",
        "algorithm",
        "segments",
        "us",
        "bound us",
        "ratio",
        "best in rank order",
        "us",
        "faster",
    )
    print_table(columns, [_row(one) for one in found.ranges], left=2)
    if found.left_out:
        print_text(f"\nnot simulated, as they have too many messages: {', '.join(found.left_out)}")
    if found.is_left:
        print_text(
            '\nno schedule is clearly faster than the registered algorithms in rank order: "auto" chooses'
        )


def _row(one: FitRange) -> tuple[str, ...]:
    def us(seconds: float) -> str:
        return f"{seconds * 1e6:.5g}"

    return (
        str(one.nbytes),
        one.winner.algorithm,
        str(one.winner.segments),
        us(one.winner.seconds),
        us(one.least_s),
        f"{one.winner.seconds / one.least_s:.2f}" if one.least_s else "-",
        one.plain.algorithm,
        us(one.plain.seconds),
        f"{one.plain.seconds / one.winner.seconds:.2f}x",
    )
