"""Networks that are not here: ``ringcoll simulate``, ``ringcoll plot``, and what others share.

Options ask for a network, by a name with numbers or by a file. Algorithms are simulated on it.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from ringcoll.algorithms import Algorithm, on_hosts
from ringcoll.bench import as_size, time_in_words
from ringcoll.cli import options
from ringcoll.cli.app import command
from ringcoll.cli.output import PICTURES, echo, print_json, print_table, progress, write_picture
from ringcoll.cost import in_number
from ringcoll.errors import ArgumentError
from ringcoll.formats import topology_in
from ringcoll.machine import is_schedule_file, json_text, read_file, replace_file
from ringcoll.pictures import crossings, curves_picture, player_page, time_picture
from ringcoll.search import registered_times
from ringcoll.simulation import FORMS, PRESETS, Topology, ranks_named, simulate, topology_named

NETWORKS = {"Topologies": FORMS, "Topologies of real machines": PRESETS}  # for pages of help
_NUMBERS = ("bandwidth", "latency_s", "across_bandwidth", "across_latency_s")  # of a link
_COSTS = ("alpha_s", "gamma_s_per_byte")  # of a rank
_BEGINS = {".txt": r"\w+\s*(--|->)", ".xml": "<system"}  # by the ending
_SHOWN = 5  # links
_PER_RANK = re.compile(r"(\d{1,9})=(\d+(?:\.\d+)?(?:e-?\d+)?)", re.ASCII)


def _number(name: str, unit: float, about: str) -> options.Decorator:
    """An option for a number in a unit, which is read in units of SI."""

    def in_si(ctx: click.Context, param: click.Parameter, number: float | None) -> float | None:
        return None if number is None else number * unit

    return click.option(*name.split(), type=float, metavar="NUMBER", callback=in_si, help=about)


network_options = options.joined(
    click.option("--topology", "text", metavar="NAME", help="The network, as below."),
    click.option("--graph", type=click.Path(dir_okay=False, path_type=Path),
                 help="A file with the network: a link a line, such as '0 -- 1 50 0.5', which are "
                 "two nodes, GB/s and microseconds; or what NCCL writes to NCCL_TOPO_DUMP_FILE."),
    _number("--bandwidth bandwidth", 1e9, "GB/s of a link; 10."),
    _number("--latency latency_s", 1e-6, "Microseconds of a link; 1."),
    _number("--across-bandwidth across_bandwidth", 1e9, "GB/s of a card between hosts, a tenth of "
            "--bandwidth; or of a cable between the groups of a dragonfly, --bandwidth."),
    _number("--across-latency across_latency_s", 1e-6, "Microseconds between hosts, ten times "
            "--latency; or between groups, --latency."),
    _number("--alpha alpha_s", 1e-6, "Microseconds until the bytes of a message begin to move; 0."),
    _number("--gamma gamma_s_per_byte", 1e-9, "Nanoseconds to reduce a byte; 0."),
)  # fmt: skip
"""The options for a network, which `asked_network` reads."""
network_ranks_option = options.ranks_option(
    "Number of ranks; that of a file or of the network, or 4."
)


def asked_network(
    asked: dict[str, Any], *names: str | None, usual: str = "", usual_ranks: int = 4
) -> tuple[int, Topology | None]:
    """The number of ranks, and the network, or ``usual``, or ``None``, by `network_options`.

    If the user states no number of ranks, a file among the names does, or the network.
    """
    graph, text = asked["graph"], asked["text"] or usual
    numbers = {name: asked[name] for name in _NUMBERS if asked[name] is not None}
    costs = {name: asked[name] for name in _COSTS if asked[name] is not None}
    if (graph and (asked["text"] or numbers)) or ((numbers or costs) and not (text or graph)):
        raise click.UsageError("give either --topology or --graph; numbers go with --topology")
    ranks = asked["ranks"] or options.ranks_in_files(*names)
    if graph is None:
        ranks = ranks or ranks_named(text) or usual_ranks
        return ranks, replace(topology_named(text, ranks, **numbers), **costs) if text else None
    topology = network_in(graph)
    if ranks not in (None, topology.world_size):
        raise ArgumentError(
            f"{graph} has {in_number(topology.world_size, 'rank')}",
            expected=topology.world_size,
            got=ranks,
        )
    return topology.world_size, replace(topology, **costs)


def needed_network(asked: dict[str, Any], *names: str, **usual: Any) -> Topology:
    """The network of `asked_network`; without one, the user is told to name one."""
    _, topology = asked_network(asked, *names, **usual)
    if topology is None:
        raise click.UsageError("give either --topology or --graph")
    return topology


def is_network_file(path: str) -> bool:
    """Whether a file begins as a network does, and no schedule; what cannot be read does not."""
    begins = _BEGINS.get(Path(path).suffix.lower())
    try:
        text = read_file(Path(path).expanduser()) if begins else ""
    except (OSError, RuntimeError):
        return False
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return bool(begins and re.match(begins, next(filter(None, lines), "")))


def network_in(path: Path) -> Topology:
    """Read the network in a file; an `ArgumentError` names the file, and the line."""
    try:
        return topology_in(read_file(path), name=path.stem)
    except OSError as error:
        raise ArgumentError(f"{path} cannot be read: {error}") from None
    except ArgumentError as error:
        reason = f"{path}: {error.message}"
        raise ArgumentError(reason, expected=error.expected, got=error.got) from None


def simulated(
    topology: Topology | None, nbytes: int, entries: list[Algorithm]
) -> tuple[dict[str, Any], list[str]]:
    """How long algorithms take on a network, as data and in lines; nothing without a network."""
    if topology is None or not entries:
        return {}, []
    times = registered_times(entries[0].collective, topology, nbytes, entries=entries)
    lines = ["", f"simulated on {topology.name}, each in its best number of segments:"]
    lines += [f"{time.seconds * 1e6:12.1f} us  {time.algorithm}" for time in times]
    return {"network": topology.name, "simulated": [time._asdict() for time in times]}, lines


# --- simulate ---------------------------------------------------------------------------


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
    pairs = [tuple(map(_node, text.split("-"))) for text in texts]
    for text, ends in zip(texts, pairs, strict=True):
        if len(ends) != 2:
            raise click.BadParameter(f"{text!r} is not two ends of a link, such as 0-1")
    return pairs


def _node(text: str) -> int | str:
    text = text.strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else text


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
    terms=NETWORKS,
)
@options.algorithm_argument
@options.collective_after_algorithm
@network_ranks_option
@network_options
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
    topology = needed_network(network, algorithm, usual="crossbar")
    hosts = on_hosts(topology.world_size, num_hosts or 2)
    for first, second in fail:
        topology = topology.without(first, second)
    schedule = entry.schedule(topology.world_size, root or 0, hosts)
    with (
        options.saying_what_would_do(entry, schedule, num_hosts),
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
    rows = [
        (
            load.link.name,
            as_size(round(load.nbytes)),
            "-" if load.share is None else f"{load.share:.0%}",
        )
        for load in run.loads()
    ]
    print_table(("link", "bytes", "used"), rows[:_SHOWN], left=1)
    if len(rows) > _SHOWN:
        echo(f"and {len(rows) - _SHOWN} further links")
    if topology.source:
        echo(f"\nNumbers: {topology.source}.")
    if file is not None:
        echo(f"\nWrote {file}{opened}.")


# --- plot -------------------------------------------------------------------------------


@command(
    examples="""
        ringcoll plot crossover -k 16,1024 -o crossover.svg
        ringcoll plot crossover -k 1024 --topology fat_tree:32:2 -b 64K -e 1G -o crossover.svg
        ringcoll plot crossover --graph cluster.txt --algorithms ring,best.txt
        ringcoll plot crossover all_gather --algorithms ring,bruck,star.py:star -k 8 -o gather.png
    """,
    terms=NETWORKS,
)
@click.argument("figure", type=options.OneOf(["crossover"]))
@options.usual_collective
@click.option("--algorithms", "names", default="ring,tree", show_default=True, metavar="NAMES",
              shell_complete=options.complete_algorithms,
              help="Names from `ringcoll list`, algorithms of yours such as star.py:star, or files "
              "such as best.txt.")  # fmt: skip
@click.option("-k", "--ranks", "--world-size", "sizes_of_world", type=options.world_sizes,
              metavar="NUMBERS", help="Numbers of ranks, such as 16,1024; a curve for each. "
              "Without it that of a file or of the network, or 16.")  # fmt: skip
@network_options
@options.sizes_options("1K", "256M", factor=2)
@options.file_option("-o", "--output", "output", default="crossover.svg", show_default=True,
                     callback=options.new_file(*PICTURES),
                     help="The file: .svg, .html, .png or .pdf.")  # fmt: skip
@options.json_option
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

    crossover: simulated times of some algorithms over the size, on a network that is not here, with
    the sizes marked at which another algorithm becomes the fastest.
    """
    words = [name.strip() for name in names.split(",")]
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
