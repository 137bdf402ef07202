"""``ringcoll plot``: figures of what the library computes, for a slide or a paper."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ringcoll.algorithms import on_hosts
from ringcoll.bench import as_size, time_in_words
from ringcoll.cli.command import command
from ringcoll.cli.measuring import chosen, sizes_options
from ringcoll.cli.networks import NETWORKS, needed_network, network_options
from ringcoll.cli.output import print_json, progress
from ringcoll.cli.parameters import (
    collective_name,
    complete_algorithms,
    file_option,
    json_option,
    named_algorithms,
    new_file,
    world_sizes,
)
from ringcoll.cli.picture_files import PICTURES, write_picture
from ringcoll.machine import is_schedule_file
from ringcoll.pictures import crossings, curves_picture
from ringcoll.simulation import simulate

_EXAMPLES = """
  ringcoll plot crossover -k 16,1024 -o crossover.svg
  ringcoll plot crossover -k 1024 --topology fat_tree:32:2 -b 64K -e 1G -o crossover.svg
  ringcoll plot crossover --graph cluster.txt --algorithms ring,best.txt
  ringcoll plot crossover all_gather --algorithms ring,bruck,star.py:star -k 8 -o gather.png
"""


@command(examples=_EXAMPLES, terms=NETWORKS)
@click.argument("figure", type=click.Choice(["crossover"]))
@click.argument("collective", type=collective_name, default="all_reduce")
@click.option("--algorithms", "names", default="ring,tree", show_default=True, metavar="NAMES",
              shell_complete=complete_algorithms,
              help="Names from `ringcoll list`, algorithms of yours such as star.py:star, or files such as best.txt.")  # fmt: skip
@click.option("-k", "--ranks", "--world-size", "sizes_of_world", type=world_sizes, metavar="NUMBERS",
              help="Numbers of ranks, such as 16,1024; a curve for each. Without it that of a file or of the "
              "network, or 16.")  # fmt: skip
@network_options
@sizes_options("1K", "256M", factor=2)
@file_option("-o", "--output", "output", default="crossover.svg", show_default=True,
             callback=new_file(*PICTURES), help="The file: .svg, .html, .png or .pdf.")  # fmt: skip
@json_option
def plot(
    figure: str,
    collective: str,
    names: str,
    sizes_of_world: tuple[int, ...] | None,
    minbytes: int,
    maxbytes: int,
    stepfactor: int,
    output: Path,
    as_json: bool,
    **network: Any,
) -> None:
    """Draw FIGURE for COLLECTIVE (all_reduce).

    crossover: simulated times of some algorithms over the size, on a network that is not here, with the sizes marked
    at which another algorithm becomes the fastest.
    """
    asked = [name.strip() for name in names.split(",")]
    entries = {name: named_algorithms(name, collective)[0][0] for name in asked}
    worlds = [
        needed_network(network | {"ranks": size}, *asked, usual="crossbar", usual_ranks=16)
        for size in sizes_of_world or [None]
    ]
    sizes = chosen(max(1, minbytes), maxbytes, stepfactor, 0)
    families: list[dict[str, list[tuple[float, float]]]] = []
    with progress(len(worlds) * len(entries) * len(sizes), "simulating") as advance:
        for topology in worlds:
            world_size = topology.world_size
            families.append({})
            for word, entry in entries.items():
                schedule = entry.schedule(world_size, 0, on_hosts(world_size, min(2, world_size)))
                name = word if is_schedule_file(word) else entry.name
                name += f" ({world_size})" * (len(worlds) > 1)
                curve = families[-1].setdefault(name, [])
                for nbytes in sizes:
                    seconds = float(simulate(schedule, nbytes, topology).seconds)
                    curve.append((float(nbytes), seconds))
                    advance(f"{name}, {as_size(nbytes)}")
    where = network["graph"] or network["text"] or "crossbar"
    title = f"{collective} on {' and '.join(str(topology.world_size) for topology in worlds)} ranks, {where}"
    picture = curves_picture(title, *families, size_in_words=as_size, time_in_words=time_in_words)
    write_picture(output, picture)
    crossed = [crossings(curves) for curves in families]
    if as_json:
        print_json({"title": title, "curves": {name: curve for curves in families for name, curve in curves.items()},
                    "crossings": [crossing._asdict() for family in crossed for crossing in family],
                    "picture": str(output.resolve())})  # fmt: skip
        return
    for curves, family in zip(families, crossed, strict=True):
        for crossing in family:
            click.echo(crossing.in_words(as_size))
        if not family:
            fastest = min(curves, key=lambda name: curves[name][0][1])
            click.echo(f"{fastest} is the fastest at every size")
    click.echo(output.resolve())
