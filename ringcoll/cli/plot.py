"""``ringcoll plot``: figures of what the library computes, for a slide or a paper."""

from __future__ import annotations

from pathlib import Path

import click

from ringcoll.algorithms import on_hosts
from ringcoll.bench import as_size, time_in_words
from ringcoll.cli.command import command
from ringcoll.cli.measuring import chosen
from ringcoll.cli.output import print_json, progress
from ringcoll.cli.parameters import (
    collective_name,
    complete_algorithms,
    file_option,
    json_option,
    named_algorithms,
    new_file,
    number_option,
    size_option,
    world_sizes,
)
from ringcoll.cli.picture_files import PICTURES, write_picture
from ringcoll.pictures import crossings, curves_picture
from ringcoll.simulation import FORMS, PRESETS, simulate, topology_named

_EXAMPLES = """
  ringcoll plot crossover -k 16,1024 -o crossover.svg
  ringcoll plot crossover -k 1024 --topology fat_tree:32:2 -b 64K -e 1G -o crossover.svg
  ringcoll plot crossover all_gather --algorithms ring,bruck,star.py:star -k 8 -o gather.png
"""


@command(examples=_EXAMPLES, terms={"Topologies": FORMS, "Topologies of real machines": PRESETS})
@click.argument("figure", type=click.Choice(["crossover"]))
@click.argument("collective", type=collective_name, default="all_reduce")
@click.option("--algorithms", "names", default="ring,tree", show_default=True, metavar="NAMES",
              shell_complete=complete_algorithms,
              help="Names from `ringcoll list`, or algorithms of yours such as star.py:star.")  # fmt: skip
@click.option("-k", "--ranks", "--world-size", "sizes_of_world", type=world_sizes, default="16", show_default=True,
              metavar="NUMBERS", help="Numbers of ranks, such as 16,1024; a curve for each.")  # fmt: skip
@click.option("--topology", "network", default="crossbar", show_default=True,
              help="The network, as below.")  # fmt: skip
@number_option("--bandwidth", 1e9, "GB/s of a link; 10.")
@number_option("--latency", 1e-6, "Microseconds of a link; 1.")
@size_option("-b", "--minbytes", default="1K", help="Smallest size.")
@size_option("-e", "--maxbytes", default="256M", help="Largest size.")
@click.option("-f", "--stepfactor", type=click.IntRange(min=2), default=2, show_default=True,
              help="From one size to the next.")  # fmt: skip
@file_option("-o", "--output", "output", default="crossover.svg", show_default=True,
             callback=new_file(*PICTURES), help="The file: .svg, .html, .png or .pdf.")  # fmt: skip
@json_option
def plot(
    figure: str,
    collective: str,
    names: str,
    sizes_of_world: tuple[int, ...],
    network: str,
    bandwidth: float | None,
    latency: float | None,
    minbytes: int,
    maxbytes: int,
    stepfactor: int,
    output: Path,
    as_json: bool,
) -> None:
    """Draw FIGURE for COLLECTIVE (all_reduce).

    crossover: simulated times of some algorithms over the size, on a network that is not here, with the sizes marked
    at which another algorithm becomes the fastest.
    """
    entries = [named_algorithms(name.strip(), collective)[0][0] for name in names.split(",")]
    worlds = [
        (size, topology_named(network, size, bandwidth=bandwidth, latency_s=latency))
        for size in dict.fromkeys(sizes_of_world)
    ]
    sizes = chosen(max(1, minbytes), maxbytes, stepfactor, 0)
    families: list[dict[str, list[tuple[float, float]]]] = []
    with progress(len(worlds) * len(entries) * len(sizes), "simulating") as advance:
        for world_size, topology in worlds:
            families.append({})
            for entry in entries:
                schedule = entry.schedule(world_size, 0, on_hosts(world_size, min(2, world_size)))
                name = entry.name if len(worlds) == 1 else f"{entry.name} ({world_size})"
                curve = families[-1].setdefault(name, [])
                for nbytes in sizes:
                    seconds = float(simulate(schedule, nbytes, topology).seconds)
                    curve.append((float(nbytes), seconds))
                    advance(f"{name}, {as_size(nbytes)}")
    title = f"{collective} on {' and '.join(str(size) for size, _ in worlds)} ranks, {network}"
    picture = curves_picture(title, *families, size_in_words=as_size, time_in_words=time_in_words)
    write_picture(output, picture)
    found = [crossings(curves) for curves in families]
    if as_json:
        print_json({"title": title, "curves": {name: curve for curves in families for name, curve in curves.items()},
                    "crossings": [one._asdict() for family in found for one in family],
                    "picture": str(output.resolve())})  # fmt: skip
        return
    for curves, family in zip(families, found, strict=True):
        for one in family:
            click.echo(one.in_words(as_size))
        if not family:
            fastest = min(curves, key=lambda name: curves[name][0][1])
            click.echo(f"{fastest} is the fastest at every size")
    click.echo(output.resolve())
