"""``ringcoll plot pareto``: the algorithms that no other beats in every way."""

from __future__ import annotations

from pathlib import Path

import click

from ringcoll.errors import TooLargeError, UnsupportedWorldSizeError
from ringcoll.lab.simulation import Topology
from ringcoll.schedules import Counts, verify
from ringcoll.schedules.algorithms import algorithms, on_hosts
from ringcoll.schedules.cost import dominators, in_number, lower_bound
from ringcoll.tools.cli import networks
from ringcoll.tools.cli.output import amount, echo, print_json, print_table, print_text, progress


def print_front(
    collective: str,
    world_size: int,
    topology: Topology | None,
    nbytes: int,
    *,
    num_hosts: int | None,
    most_ports: int | None,
    picture: Path | None,
    as_json: bool,
) -> None:
    """Print the Pareto front, and simulated times on a network; draw it, if there is a file."""
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
                proof = verify(entry.schedule(world_size, hosts=hosts))
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
        from ringcoll.tools.bench import draw_front, save

        title = f"{collective} on {in_number(world_size, 'rank')}"
        save(draw_front(costs, dominated_by, bound, title), picture)
    least = Counts(bound.rounds, bound.traffic, bound.reduced)
    ranked = sorted(costs, key=lambda name: costs[name])
    data, lines = networks.simulated(
        topology, nbytes, [entry for entry in entries if entry.name in costs]
    )
    if as_json:
        rows = [
            {"algorithm": name, **costs[name]._asdict(), "ports": ports[name]}
            | {"on_front": not dominated_by[name], "dominated_by": dominated_by[name]}
            for name in ranked
        ]
        facts = {"collective": collective, "world_size": world_size}
        facts |= {"at_least": least._asdict() | {"ports": all_ports}, "algorithms": rows}
        print_json(facts | {"left_out": left_out} | data)
        return
    standing = {
        name: f"dominated by {', '.join(others)}" if others else "on the front"
        for name, others in dominated_by.items()
    }
    print_table(
        ("algorithm", "Pareto front", "rounds", "traffic", "reduced", "at once"),
        [
            ("lower bound", "", *_cells(least), str(all_ports)),
            *((name, standing[name], *_cells(costs[name]), str(ports[name])) for name in ranked),
        ],
        left=2,
    )
    if left_out:
        echo()
    for reason in left_out.values():
        print_text(f"not shown: {reason}")
    echo("".join(f"{line}\n" for line in lines), nl=False)


def _cells(cost: Counts) -> tuple[str, str, str]:
    return str(cost.rounds), amount(cost.traffic), amount(cost.reduced)
