"""``ringcoll simulate``: an algorithm on a network that is not here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click

from ringcoll.lab.pictures import player_page, time_picture
from ringcoll.lab.simulation import simulate
from ringcoll.runtime.machine import json_text, replace_file
from ringcoll.schedules.algorithms import on_hosts
from ringcoll.tools.bench import as_size
from ringcoll.tools.cli import networks, options
from ringcoll.tools.cli.app import command
from ringcoll.tools.cli.output import (
    PICTURES,
    echo,
    print_json,
    print_table,
    progress,
    write_picture,
)

_MOST_LINKS = 5
_RANK = re.compile(r"\d{1,9}", re.ASCII)
_PER_RANK = re.compile(r"(\d{1,9})=(\d+(?:\.\d+)?(?:e-?\d+)?)", re.ASCII)


def _of_ranks(
    ctx: click.Context, param: click.Parameter, texts: tuple[str, ...]
) -> dict[int, float]:
    numbers = {}
    for text in texts:
        match = _PER_RANK.fullmatch(text)
        if match is None:
            raise click.BadParameter(f"{text!r} is not a rank and a number, such as 3=2")
        numbers[int(match[1])] = float(match[2])
    return numbers


def _ends(
    ctx: click.Context, param: click.Parameter, texts: tuple[str, ...]
) -> list[tuple[int | str, ...]]:
    pairs = []
    for text in texts:
        ends = [end.strip() for end in text.split("-")]
        if len(ends) != 2:
            raise click.BadParameter(f"{text!r} is not two ends of a link, such as 0-1")
        pairs.append(tuple(int(end) if _RANK.fullmatch(end) else end for end in ends))
    return pairs


@command(
    "simulate",
    examples="""
        ringcoll simulate ring -k 16 --topology torus:4x4 --size 1M
        ringcoll simulate rabenseifner -k 32 --topology dgx_h100 --size 64M
        ringcoll simulate chain broadcast -k 8 --size 16M --segments 64
        ringcoll simulate tree -k 16 --topology fat_tree:4:2 --slow 3=2
        ringcoll simulate hierarchical -k 8 --topology hosts:4 --hosts 2
        ringcoll simulate circulant -k 72 --topology dragonfly:2:4:2
        ringcoll simulate ring -k 8 --topology ring --fail 0-1 --json
        ringcoll simulate best.txt --graph cluster.txt
    """,
    terms=networks.NETWORKS,
)
@options.algorithm_argument
@options.collective_after_algorithm
@networks.network_ranks_option
@networks.network_options
@options.bytes_option("--size")
@click.option("--segments", type=click.IntRange(min=1), default=1, show_default=True,
              help="Pieces of a chunk that are pipelined.")  # fmt: skip
@options.root_option
@options.hosts_option
@click.option("--slow", multiple=True, metavar="RANK=FACTOR", callback=_of_ranks,
              help="A rank that is slower by a factor.")  # fmt: skip
@click.option("--late", multiple=True, metavar="RANK=TIME", callback=_of_ranks,
              help="A rank that begins late, by so many microseconds.")  # fmt: skip
@click.option("--fail", multiple=True, metavar="A-B", callback=_ends,
              help="A link that has failed, such as 0-1 or 'leaf 0-core'.")  # fmt: skip
@options.file_option("-o", "--output", "file",
                     help="Draw ranks over time into this .svg, .png or .pdf; .html is a page that "
                     "plays the run; any other file gets a trace for Perfetto, as `ringcoll trace` "
                     "writes it.")  # fmt: skip
@options.json_option
def simulate_command(
    algorithm: str,
    collective: str,
    nbytes: int,
    segments: int,
    root: int | None,
    num_hosts: int | None,
    slow: dict[int, float],
    late: dict[int, float],
    fail: list[tuple[int | str, int | str]],
    file: Path | None,
    as_json: bool,
    **network: Any,
) -> None:
    """Say how long ALGORITHM takes for COLLECTIVE (all_reduce) on a network that is not here.

    No ranks are started: every step of every rank is simulated, with links that messages
    share, of a crossbar if no network is named. The table has the fullest links, with the share
    of their capacity that was used. The critical path says who waits for whom.
    """
    options.check_root(collective, root)
    (entry, *_), _ = options.named_algorithms(algorithm, collective)
    topology = networks.needed_network(network, algorithm, usual="crossbar")
    hosts = on_hosts(topology.world_size, num_hosts or 2)
    for first, second in fail:
        topology = topology.without(first, second)
    schedule = entry.schedule(topology.world_size, root or 0, hosts)
    with (
        options.ranks_that_would_do(entry, schedule, num_hosts),
        progress(1, f"simulating {entry.name}"),
    ):
        run = simulate(
            schedule,
            nbytes,
            topology,
            segments=segments,
            slowness=slow,
            late={rank: time * 1e-6 for rank, time in late.items()},
            trace=file is not None,
        )
    opened = ""
    if file is not None and file.suffix.lower() == ".html":
        replace_file(file, player_page(run, settings={"clock": "time", "times": "trace"}))
    elif file is not None and file.suffix.lower() in PICTURES:
        write_picture(file, time_picture(run))
    elif file is not None:
        replace_file(file, json_text(run.picture()))
        opened = ": open it in https://ui.perfetto.dev or chrome://tracing"
    if as_json:
        print_json(run.as_json())
        return
    echo(f"{run}\n")
    loads = run.loads()
    rows = [
        (load.link.name, as_size(round(load.nbytes)),
         "-" if load.share is None else f"{load.share:.0%}")
        for load in loads[:_MOST_LINKS]
    ]  # fmt: skip
    print_table(("link", "bytes", "used"), rows, left=1)
    if len(loads) > _MOST_LINKS:
        echo(f"and {len(loads) - _MOST_LINKS} further links")
    if topology.source:
        echo(f"\nNumbers: {topology.source}.")
    if file is not None:
        echo(f"\nWrote {file}{opened}.")
