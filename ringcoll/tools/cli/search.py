"""The best schedules on a network, ``ringcoll search``, and for ``"auto"``, ``ringcoll fit``."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from ringcoll.errors import TooLargeError
from ringcoll.lab.search import (
    METHODS,
    SIZES,
    Fit,
    FitRange,
    SearchedFront,
    fastest_times,
    fit,
    registered_times,
    synthesize,
)
from ringcoll.runtime.machine import replace_file
from ringcoll.schedules import verify
from ringcoll.schedules.algorithms import algorithms
from ringcoll.tools.bench import time_in_words
from ringcoll.tools.cli import networks, options
from ringcoll.tools.cli.app import command
from ringcoll.tools.cli.output import echo, print_json, print_table, print_text, progress

_REGISTERED = 3  # algorithms shown beside the schedules
_on_network = options.joined(networks.network_ranks_option, networks.network_options)


@command(
    "search",
    examples="""
        ringcoll search all_gather --topology dgx1
        ringcoll search all_reduce --topology torus:4x4 --chunks 1 -o best.txt
        ringcoll search broadcast --topology torus:4x4 --method trees --chunks 4
    """,
    terms={"Methods": METHODS, **networks.NETWORKS},
)
@options.collective_argument
@_on_network
@click.option("--method", type=options.OneOf(list(METHODS)), default="exact", show_default=True,
              help="How to search, as below.")  # fmt: skip
@click.option("--chunks", "most_chunks", type=click.IntRange(1, 1 << 10), default=2,
              show_default=True, help="Most chunks of a block.")  # fmt: skip
@click.option("--more-steps", type=click.IntRange(0, 1 << 10), default=2, show_default=True,
              help="Steps beyond the fewest, for the exact search.")  # fmt: skip
@click.option("--effort", type=options.FiniteRange(min=0, min_open=True), default=2.0,
              show_default=True,
              help="Work of the solver on one question; 1 is some seconds.")  # fmt: skip
@options.seed_option("Seed of what is drawn.")
@options.root_option
@options.bytes_option("--size")
@options.file_option("-o", "--output", "file", help="Write the fastest schedule as text.")
@options.json_option
def search(
    collective: str,
    method: str,
    most_chunks: int,
    more_steps: int,
    effort: float,
    seed: int,
    root: int | None,
    nbytes: int,
    file: Path | None,
    as_json: bool,
    **network: Any,
) -> None:
    """Search for schedules of COLLECTIVE that suit a network, and simulate them on it.

    A round is the time of one chunk on the slowest link between two ranks. Each schedule is
    proved. Its time is simulated in its best number of segments, as the times of the registered
    algorithms are. Schedules with fewer steps suit small data, those with fewer rounds per chunk
    large data. The exact search needs ringcoll[search].
    """
    topology = networks.needed_network(network)
    entries = list(algorithms(collective, topology.world_size))
    with progress(1 + len(entries), f"search {method}") as advance:
        front = synthesize(
            collective, topology, method=method, root=root or 0, most_chunks=most_chunks,
            more_steps=more_steps, effort=effort, seed=seed, nbytes=nbytes,
        )  # fmt: skip
        for point in front.points:
            verify(point.schedule)
        times = fastest_times([point.schedule for point in front.points], topology, nbytes)
        registered = registered_times(collective, topology, nbytes, root or 0, advance)
    if file is not None and times:
        fastest = min(range(len(times)), key=lambda index: times[index].seconds)
        replace_file(file, front.points[fastest].schedule.to_text())
    rows = [
        {
            "schedule": time.algorithm,
            **point.shape._asdict(),
            "rounds_per_chunk": point.shape.rounds_per_chunk,
            "segments": time.segments,
            "seconds": time.seconds,
        }
        for point, time in zip(front.points, times, strict=True)
    ]
    others = [time._asdict() for time in registered]
    simulated_names = {time.algorithm for time in registered}
    left_out = [entry.name for entry in entries if entry.name not in simulated_names]
    if as_json:
        facts = {
            "collective": front.collective,
            "topology": front.topology.name,
            "world_size": front.topology.world_size,
            "nbytes": nbytes,
            "least_steps": front.least_steps,
            "least_rounds_per_chunk": front.least_rounds_per_chunk,
            "impossible": [shape._asdict() for shape in front.impossible],
            "unknown": [shape._asdict() for shape in front.unknown],
        }
        print_json(facts | {"schedules": rows, "registered": others, "left_out": left_out})
        return
    _print_front(front, rows, others[:_REGISTERED])
    _print_left_out(left_out)
    if file is not None and times:
        written = times[fastest]
        echo(f"\nWrote {file}: the text of {written.algorithm}.")
        if written.segments > 1:
            print_text(
                f"Its time is that of {written.segments} segments, which `ringcoll fit` stores."
            )
        if registered and registered[0].seconds < written.seconds:
            print_text(f"{registered[0].algorithm}, which is registered, is faster at this size.")


def _print_front(
    front: SearchedFront, rows: list[dict[str, Any]], others: list[dict[str, Any]]
) -> None:
    least_rounds = str(front.least_rounds_per_chunk)
    print_table(
        ("schedule", "steps", "rounds", "chunks", "rounds per chunk", "segments", "us"),
        [
            ("lower bound", str(front.least_steps), "", "", least_rounds, "", ""),
            *([*map(str, list(row.values())[:6]), _us(row)] for row in rows),
            *((row["algorithm"], "", "", "", "", str(row["segments"]), _us(row)) for row in others),
        ],
        left=1,
    )  # fmt: skip
    for verdict, shapes in (
        ("proved impossible", front.impossible),
        ("not decided with this --effort", front.unknown),
    ):
        if shapes:
            words = ", ".join("/".join(map(str, shape)) for shape in shapes)
            print_text("", f"{verdict} (steps/rounds/chunks): {words}")


def _print_left_out(names: Sequence[str]) -> None:
    if names:
        print_text("", f"not simulated, as they have too many messages: {', '.join(names)}")


def _us(row: dict[str, Any]) -> str:
    return f"{row['seconds'] * 1e6:.5g}"


# --- fit --------------------------------------------------------------------------------


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
@_on_network
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
        from ringcoll.runtime.machine import read_fit, write_fit  # they import torch

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
    _print_left_out(fitted.left_out)
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
