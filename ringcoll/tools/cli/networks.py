"""Options that ask for a network, by a name with numbers or by a file; and times on it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from ringcoll.errors import ArgumentError
from ringcoll.lab import search
from ringcoll.lab.formats import topology_in
from ringcoll.lab.simulation import FORMS, PRESETS, Topology, ranks_named, topology_named
from ringcoll.runtime.machine import read_file
from ringcoll.schedules.algorithms import Algorithm
from ringcoll.schedules.cost import in_number
from ringcoll.tools.cli import options
from ringcoll.tools.cli.output import print_text

NETWORKS = {"Topologies": FORMS, "Topologies of real machines": PRESETS}  # for pages of help
_NUMBERS = ("bandwidth", "latency_s", "across_bandwidth", "across_latency_s")  # of a link
_COSTS = ("alpha_s", "gamma_s_per_byte")  # of a rank
_FIRST_LINES = {".txt": r"\w+\s*(--|->)", ".xml": "<system"}  # by the ending


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
    begins = _FIRST_LINES.get(Path(path).suffix.lower())
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
    times = search.registered_times(entries[0].collective, topology, nbytes, entries=entries)
    lines = ["", f"simulated on {topology.name}, each in its best number of segments:"]
    lines += [f"{time.seconds * 1e6:12.1f} us  {time.algorithm}" for time in times]
    return {"network": topology.name, "simulated": [time._asdict() for time in times]}, lines


def print_left_out(names: Sequence[str]) -> None:
    """Print which algorithms were not simulated."""
    if names:
        print_text("", f"not simulated, as they have too many messages: {', '.join(names)}")
