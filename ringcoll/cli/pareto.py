"""``ringcoll pareto``: which algorithms no other algorithm beats in every way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ringcoll.algorithms import algorithms, on_hosts
from ringcoll.cli.command import command
from ringcoll.cli.networks import (
    NETWORKS,
    asked_network,
    network_options,
    network_ranks_option,
    simulated,
)
from ringcoll.cli.output import amount, print_json, print_table, print_text, progress
from ringcoll.cli.parameters import (
    bytes_option,
    collective_name,
    file_option,
    hosts_option,
    json_option,
    new_picture,
)
from ringcoll.cost import dominators, in_number, lower_bound
from ringcoll.errors import TooLargeError, UnsupportedWorldSizeError
from ringcoll.schedule import Counts
from ringcoll.schedule import verify as prove

_EXAMPLES = """
  ringcoll pareto all_reduce -k 24
  ringcoll pareto all_reduce -k 24 --ports 1
  ringcoll pareto all_gather -k 16 --json
  ringcoll pareto all_reduce -k 24 --plot front.png
  ringcoll pareto all_reduce --graph cluster.txt -b 64M
"""


@command("pareto", examples=_EXAMPLES, terms=NETWORKS)
@click.argument("collective", type=collective_name)
@network_ranks_option
@network_options
@bytes_option("--size")
@hosts_option
@click.option(
    "--ports", "most_ports", type=click.IntRange(min=1), metavar="MESSAGES",
    help="Only algorithms in which a rank sends, and receives, at most so many messages at once.",
)  # fmt: skip
@file_option("--plot", "picture", metavar="FILE", callback=new_picture,
             help="Draw the front, too; needs ringcoll[plot].")  # fmt: skip
@json_option
def pareto(
    collective: str,
    nbytes: int,
    num_hosts: int | None,
    most_ports: int | None,
    picture: Path | None,
    as_json: bool,
    **network: Any,
) -> None:
    """Show which algorithms of COLLECTIVE no other algorithm beats in every way.

    An algorithm dominates another if it needs no more rounds, no more traffic and no more
    reduced data, and less of at least one of them. Those that no algorithm dominates are the
    Pareto front: which of them is fastest depends on the machine and on the size of the data.

    Costs are counted on the proved schedule of every registered algorithm, in one segment, root
    0, in units of the whole data; see `ringcoll verify`. At once is the most messages that a
    rank sends, or receives, in one step. A round of many messages takes longer than a round of
    one, which the front does not see; --ports 1 compares algorithms of one message a round.
    With a network, the same algorithms are simulated on it, with --bytes of data.
    """
    world_size, topology = asked_network(network)
    costs: dict[str, Counts] = {}
    ports: dict[str, int] = {}
    left_out: dict[str, str] = {}
    hosts = on_hosts(world_size, num_hosts or 2)
    entries = list(algorithms(collective))
    if num_hosts is not None and not any(entry.needs_hosts for entry in entries):
        raise click.UsageError(f"{collective} is the same on any number of hosts")
    with progress(len(entries)) as advance:
        for entry in entries:
            advance(entry.name)
            try:
                proof = prove(entry.schedule(world_size, hosts=hosts))
            except (UnsupportedWorldSizeError, TooLargeError) as error:
                left_out[entry.name] = str(error)
                continue
            if most_ports is not None and proof.ports > most_ports:
                left_out[entry.name] = f"{entry.name} sends {proof.ports} messages at once"
                continue
            costs[entry.name] = Counts(proof.rounds, proof.traffic, proof.reduced)
            ports[entry.name] = proof.ports
    dominated_by = dominators(costs)
    all_ports = max([1, *ports.values()])
    bound = lower_bound(collective, world_size, ports=all_ports)
    if picture is not None:
        from ringcoll.bench import draw_front, save

        title = f"{collective} on {in_number(world_size, 'rank')}"
        save(draw_front(costs, dominated_by, bound, title), picture)
    least = Counts(bound.rounds, bound.traffic, bound.reduced)
    ranked = sorted(costs, key=lambda name: costs[name])
    data, lines = simulated(topology, nbytes, [entry for entry in entries if entry.name in costs])
    if as_json:
        rows = [{"algorithm": name, **costs[name]._asdict(), "ports": ports[name],
                 "on_front": not dominated_by[name], "dominated_by": dominated_by[name]}
                for name in ranked]  # fmt: skip
        facts: dict[str, Any] = {"collective": collective, "world_size": world_size}
        facts |= {"at_least": least._asdict() | {"ports": all_ports}, "algorithms": rows}
        print_json(facts | {"left_out": left_out} | data)
        return
    print_table(
        ("algorithm", "Pareto front", "rounds", "traffic", "reduced", "at once"),
        [
            ("lower bound", "", *_cells(least), str(all_ports)),
            *(
                (name, _standing(dominated_by[name]), *_cells(costs[name]), str(ports[name]))
                for name in ranked
            ),
        ],
        left=2,
    )
    if left_out:
        click.echo()
    for reason in left_out.values():
        print_text(f"not shown: {reason}")
    click.echo("".join(f"{line}\n" for line in lines), nl=False)


def _cells(cost: Counts) -> tuple[str, str, str]:
    return str(cost.rounds), amount(cost.traffic), amount(cost.reduced)


def _standing(dominated_by: tuple[str, ...]) -> str:
    return f"dominated by {', '.join(dominated_by)}" if dominated_by else "on the front"
