"""Simulated times against SimGrid's, on the same networks.

SimGrid (Debian's package ``python3-simgrid``) simulates flows on links as `ringcoll.lab.simulation` does, by another
program and other people. It gets the same links, routes and steps; its models of TCP are switched off.
In both a sender is busy for 10 us before the bytes of a message move (`alpha_s`), and reductions cost nothing.
Links have no latency, of which SimGrid has another idea: its sender waits until the last byte has
*arrived*, and flows with a longer latency get less of a full link (see ``--latency``).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # it need not be installed

from benchmarks.common import Table, environment, introduce, parser, write
from ringcoll.lab.simulation import Topology, crossbar, fat_tree, simulate, wave_of
from ringcoll.schedules import Schedule, chunks_of_data
from ringcoll.schedules.algorithms import find

ALGORITHMS = ("ring", "recursive_doubling", "rabenseifner", "binomial_tree", "circulant")
SIZES = (64 << 10, 1 << 20, 16 << 20)
LIMIT = 0.10
"""The most by which the two may differ."""

PEER = Path(__file__).with_name("simgrid_peer.py")


def networks(ranks: int, latency_s: float) -> list[Topology]:
    """A switch that never is full, and a fat tree of which a quarter is below each leaf."""
    costs: Any = {"bandwidth": 1.25e9, "latency_s": latency_s, "alpha_s": 10e-6}
    leaf = max(ranks // 4, 1)
    return [
        crossbar(ranks, **costs),
        fat_tree(ranks, ranks_per_leaf=leaf, oversubscription=2, **costs),
    ]


def steps_of(schedule: Schedule, rank: int, nbytes: int) -> Iterator[list[Any]]:
    """The messages of a rank's steps: those that it sends, and the senders of the others."""
    unit = nbytes / chunks_of_data(schedule)
    for number, step in enumerate(schedule.program(rank)):
        wave = wave_of(number, step)
        sends = [[peer, round(chunks * unit)] for peer, chunks, _ in wave.sends]
        yield [sends, [peer for peer, *_ in wave.receives]]


def by_simgrid(python: str, schedule: Schedule, nbytes: int, network: Topology) -> dict[str, Any]:
    """Let SimGrid run a schedule; return its version, and the seconds."""
    programs = [list(steps_of(schedule, rank, nbytes)) for rank in range(schedule.world_size)]
    pairs = {
        (rank, peer)
        for rank, steps in enumerate(programs)
        for sends, _ in steps
        for peer, _ in sends
    }
    request = {
        "alpha_s": float(network.alpha_s),
        "capacities": [float(link.capacity or 0) for link in network.links],
        "latencies": [float(link.latency_s) for link in network.links],
        "routes": [[*pair, network.route(*pair)] for pair in sorted(pairs)],
        "programs": programs,
    }
    command = [python, "-P", str(PEER)]
    text = json.dumps(request)
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{python} cannot run SimGrid: {done.stderr.strip().splitlines()[-1]}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def main() -> None:
    """Run, print, write."""
    arguments = parser(__doc__)
    arguments.add_argument("-k", "--ranks", type=int, default=16)
    arguments.add_argument("--python", default="/usr/bin/python3", help="the Python with SimGrid")
    arguments.add_argument("--latency", type=float, default=0.0, help="microseconds of a link")
    options = arguments.parse_args()
    facts = environment(1)
    introduce(facts)
    rows, worst, version = [], 0.0, ""
    for network in networks(options.ranks, options.latency * 1e-6):
        for name in ALGORITHMS:
            schedule = find("all_reduce", name).schedule(options.ranks)
            for nbytes in SIZES:
                own = float(simulate(schedule, nbytes, network).seconds)
                peer = by_simgrid(options.python, schedule, nbytes, network)
                version, ratio = peer["version"], own / peer["seconds"]
                worst = max(worst, abs(ratio - 1))
                rows.append((name, network.name, nbytes, own, peer["seconds"], ratio))
    columns = {
        "algorithm": "text",
        "network": "text",
        "bytes": "bytes",
        "ringcoll": "seconds",
        "SimGrid": "seconds",
        "/ SimGrid": "number",
    }
    caption = (
        f"All-reduce on {options.ranks} simulated ranks, links of 10 Gb/s; "
        f"SimGrid {version}. The largest difference is {worst:.2%}."
    )
    table = Table(columns, rows, caption)
    table.show()
    write(options.json, __doc__, facts, [table])
    if worst > LIMIT:
        raise SystemExit(f"the largest difference is {worst:.1%}, more than {LIMIT:.0%}")


if __name__ == "__main__":
    main()
