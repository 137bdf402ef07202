"""``ringcoll fit``: the fastest schedules on a network by size, for ``"auto"``."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from ringcoll.errors import TooLargeError
from ringcoll.lab.search import SIZES, Fit, FitRange, fit
from ringcoll.schedules.algorithms import algorithms
from ringcoll.tools.bench import time_in_words
from ringcoll.tools.cli import networks, options
from ringcoll.tools.cli.app import command
from ringcoll.tools.cli.output import echo, print_json, print_table, print_text, progress


@command(
    "fit",
    examples="""
        ringcoll fit all_reduce --graph cluster.txt -o cluster.fit
        ringcoll fit all_reduce all_gather reduce_scatter --topology dgx1
        RINGCOLL_TUNING=cluster.fit torchrun ... train.py
    """,
    terms=networks.NETWORKS,
)
@click.argument("collectives", type=options.collective_name, nargs=-1, required=True)
@networks.network_ranks_option
@networks.network_options
@click.option("--sizes", metavar="SIZES",
              help="Bytes of the data at which schedules are simulated, such as 4K,1M; 1K to "
              "64M.")  # fmt: skip
@options.seed_option("Seed of the searches.")
@options.file_option("-o", "--output", "file",
                     help="Write what was fitted, for RINGCOLL_TUNING or Options(fit=...); fits of "
                     "other collectives to the same network stay in the file.")  # fmt: skip
@options.json_option
def fit_command(
    collectives: tuple[str, ...],
    sizes: str | None,
    seed: int,
    file: Path | None,
    as_json: bool,
    **network: Any,
) -> None:
    """Find the fastest schedules of COLLECTIVES on a network, by the simulator, and prove them.

    Registered algorithms take part in rank order and in the order in which neighbours are near, and
    so do hierarchies over the hosts and what the searches find. Beside each time stands a lower
    bound that no schedule is below. With -o the winners are written; a group of as many ranks on
    such hosts then uses them.
    """
    topology = networks.needed_network(network)
    asked = None if sizes is None else [options.nbytes_of(size) for size in sizes.split(",")]
    fits, too_large = [], None
    for collective in dict.fromkeys(collectives):
        total = len(asked or SIZES) * 2 * len(list(algorithms(collective, topology.world_size)))
        with progress(total, f"fit {collective}") as advance:
            try:
                fits.append(fit(collective, topology, sizes=asked, seed=seed, advance=advance))
            except TooLargeError as error:
                too_large = error
                if len(collectives) > 1:
                    echo(f"{collective} is not fitted: {error}", err=True)
    if too_large and not fits:
        raise too_large
    better = [fitted for fitted in fits if not fitted.is_left]
    if file is not None and better:
        from ringcoll.runtime.user_files import read_fit, write_fit  # they import torch

        date = datetime.now(UTC).isoformat(timespec="seconds")
        content = read_fit(file) if file.is_file() else None
        for fitted in better:
            content = fitted.fitted(date, content)
        assert content is not None
        write_fit(file, content)
    if as_json:
        data = [
            {
                "collective": fitted.collective,
                "world_size": topology.world_size,
                "ranges": [*map(_range_as_data, fitted.ranges)],
                "left_out": fitted.left_out,
            }
            for fitted in fits
        ]
        print_json({"network": topology.name, "fits": data})
        return
    for fitted in fits:
        _print_fit(fitted)
    if file is not None:
        echo(f"\nWrote {file}." if better else f"\n{file} is not written.")


def _range_as_data(fit_range: FitRange) -> dict[str, Any]:
    return {
        "from": fit_range.nbytes.first,
        "to": fit_range.nbytes.end,
        "size": fit_range.size,
        **fit_range.winner._asdict(),
        "segment_bytes": fit_range.segment_bytes,
        "least_s": fit_range.least_s,
        "registered": fit_range.plain._asdict(),
        "reason": fit_range.reason,
    }


def _print_fit(fitted: Fit) -> None:
    world_size = fitted.topology.world_size
    echo(f"\n{fitted.collective} on {fitted.topology.name}, {world_size} ranks\n")
    columns = ("bytes", "algorithm", "segments", "time", "bound", "ratio",
               "best in rank order", "time", "faster")  # fmt: skip
    print_table(columns, map(_range_row, fitted.ranges), left=2)
    networks.print_left_out(fitted.left_out)
    if fitted.is_left:
        print_text(
            "\nno schedule is clearly faster than the registered algorithms in rank order: "
            '"auto" chooses'
        )


def _range_row(fit_range: FitRange) -> tuple[str, ...]:
    winner, plain, least_s = fit_range.winner, fit_range.plain, fit_range.least_s
    return (
        str(fit_range.nbytes),
        winner.algorithm,
        str(winner.segments),
        time_in_words(winner.seconds),
        time_in_words(least_s),
        f"{fit_range.ratio:.2f}" if least_s else "-",
        plain.algorithm,
        time_in_words(plain.seconds),
        f"{fit_range.gain:.2f}x",
    )
