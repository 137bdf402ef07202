"""``ringcoll plot``: the figure of crossovers; `pareto` draws the Pareto front."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ringcoll.lab.pictures import crossings, curves_picture
from ringcoll.lab.simulation import simulate
from ringcoll.runtime.user_files import is_schedule_file
from ringcoll.schedules.algorithms import on_hosts
from ringcoll.tools.bench import as_size, time_in_words
from ringcoll.tools.cli import options
from ringcoll.tools.cli.app import command
from ringcoll.tools.cli.networks import NETWORKS, asked_network, needed_network, network_options
from ringcoll.tools.cli.output import PICTURES, echo, print_json, progress, write_picture
from ringcoll.tools.cli.pareto import print_front

_FIGURE_OPTIONS = {
    "crossover": {"names": "--algorithms", "maxbytes": "-e", "stepfactor": "-f"},
    "pareto": {"num_hosts": "--hosts", "most_ports": "--ports"},
}
"""The options that belong to one figure."""


def _default_size(ctx: click.Context, param: click.Parameter, figure: str) -> str:
    """Set the size that is usual for a figure."""
    if figure == "pareto":
        ctx.default_map = {"minbytes": "1M"}
    return figure


def _figure_file(ctx: click.Context, param: click.Parameter, path: Path | None) -> Path | None:
    """Make sure that the figure can be written."""
    if ctx.params["figure"] == "pareto":
        return options.new_picture(ctx, param, path)
    return options.new_file(*PICTURES)(ctx, param, path or Path("crossover.svg"))


@command(
    examples="""
        ringcoll plot crossover -k 16,1024 -o crossover.svg
        ringcoll plot crossover -k 1024 --topology fat_tree:32:2 -b 64K -e 1G -o crossover.svg
        ringcoll plot crossover --graph cluster.txt --algorithms ring,best.txt
        ringcoll plot crossover all_gather --algorithms ring,bruck,star.py:star -k 8 -o gather.png
        ringcoll plot pareto -k 24 --ports 1
        ringcoll plot pareto all_gather -k 16 -o front.png
        ringcoll plot pareto all_reduce --graph cluster.txt -b 64M
    """,
    terms=NETWORKS,
)
@click.argument(
    "figure", type=options.OneOf(list(_FIGURE_OPTIONS)), is_eager=True, callback=_default_size
)
@options.usual_collective
@click.option("--algorithms", "names", default="ring,tree", show_default=True, metavar="NAMES",
              shell_complete=options.complete_algorithms,
              help="Names from `ringcoll list`, algorithms of yours such as star.py:star, or files "
              "such as best.txt.")  # fmt: skip
@click.option("-k", "--ranks", "--world-size", "sizes_of_world", type=options.world_sizes,
              metavar="NUMBERS", help="Numbers of ranks, such as 16,1024; a curve for each. "
              "Without it that of a file or of the network, or 16. Pareto takes one; "
              "4.")  # fmt: skip
@network_options
@options.sizes_options("1K", "256M", factor=2)
@options.hosts_option
@click.option(
    "--ports", "most_ports", type=click.IntRange(min=1), metavar="MESSAGES",
    help="Only algorithms in which a rank sends, and receives, at most so many messages at once.",
)  # fmt: skip
@options.file_option("-o", "--output", "output", callback=_figure_file,
                     help="The file: .svg, .html, .png or .pdf; crossover.svg. pareto draws only "
                     "into a file that is named, and needs ringcoll[plot] for that.")  # fmt: skip
@options.json_option
@click.pass_context
def plot(
    ctx: click.Context,
    /,
    figure: str,
    collective: str,
    names: str,
    sizes_of_world: tuple[int, ...] | None,
    minbytes: int,
    maxbytes: int,
    stepfactor: int,
    num_hosts: int | None,
    most_ports: int | None,
    output: Path | None,
    as_json: bool,
    **network: Any,
) -> None:
    """Draw FIGURE for COLLECTIVE (all_reduce).

    crossover: simulated times of some algorithms over the size, on a network that is not here, with
    the sizes marked at which another algorithm becomes the fastest.

    pareto: the algorithms that no other algorithm beats in every way, also as a table.
    An algorithm dominates another if it needs no more rounds, no more traffic and no more
    reduced data, and less of at least one of them. Those that no algorithm dominates are the
    Pareto front: which of them is fastest depends on the machine and on the size of the data.

    Costs are counted on the proved schedule of every registered algorithm, in one segment, root
    0, in units of the whole data; see `ringcoll verify`. At once is the most messages that a
    rank sends, or receives, in one step. A round of many messages takes longer than a round of
    one, which the front does not see; --ports 1 compares algorithms of one message a round.
    With a network, the same algorithms are simulated on it, with --bytes (1M) of data.
    """
    for other, only in _FIGURE_OPTIONS.items():
        for name in (options.typed(ctx) & only.keys()) if other != figure else ():
            raise click.UsageError(f"{only[name]} is for {other}, and says nothing about {figure}")
    if figure == "pareto":
        if sizes_of_world is not None and len(sizes_of_world) > 1:
            raise click.UsageError("pareto is drawn for one number of ranks")
        asked = network | {"ranks": sizes_of_world[0] if sizes_of_world else None}
        print_front(collective, *asked_network(asked), minbytes, num_hosts=num_hosts,
                    most_ports=most_ports, picture=output, as_json=as_json)  # fmt: skip
        return
    assert output is not None
    words = options.names_in(names, "--algorithms")
    entries = {word: options.named_algorithms(word, collective)[0][0] for word in words}
    worlds = [
        needed_network(network | {"ranks": size}, *words, usual="crossbar", usual_ranks=16)
        for size in sizes_of_world or [None]
    ]
    sizes = options.sizes_between(max(1, minbytes), maxbytes, stepfactor)
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
    ranks = " and ".join(str(topology.world_size) for topology in worlds)
    title = f"{collective} on {ranks} ranks, {where}"
    picture = curves_picture(title, *families, size_in_words=as_size, time_in_words=time_in_words)
    write_picture(output, picture)
    crossed = [crossings(curves) for curves in families]
    if as_json:
        print_json(
            {
                "title": title,
                "curves": {name: curve for curves in families for name, curve in curves.items()},
                "crossings": [crossing._asdict() for family in crossed for crossing in family],
                "picture": str(output.resolve()),
            }
        )
        return
    for curves, family in zip(families, crossed, strict=True):
        for crossing in family:
            echo(crossing.in_words(as_size))
        if not family:
            fastest = min(curves, key=lambda name: curves[name][0][1])
            echo(f"{fastest} is the fastest at every size")
    echo(output.resolve())
