"""``ringcoll search``: the best schedules on a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ringcoll.lab.search import (
    METHODS,
    SearchedFront,
    fastest_times,
    registered_times,
    synthesize,
)
from ringcoll.runtime.machine import replace_file
from ringcoll.schedules import verify
from ringcoll.schedules.algorithms import algorithms
from ringcoll.tools.cli import networks, options
from ringcoll.tools.cli.app import command
from ringcoll.tools.cli.output import echo, print_json, print_table, print_text, progress

_SHOWN_ALGORITHMS = 3  # algorithms shown beside the schedules


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
@networks.network_ranks_option
@networks.network_options
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
    _print_front(front, rows, others[:_SHOWN_ALGORITHMS])
    networks.print_left_out(left_out)
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


def _us(row: dict[str, Any]) -> str:
    return f"{row['seconds'] * 1e6:.5g}"
