"""All-reduce over hosts with slow links: hierarchical against ring and tree.

The hosts are name spaces of this machine that share nothing, on one switch. The kernel limits
the rate of each host's link (``tbf``), in each direction; nothing adds latency. The script
needs root, ``ip`` and ``tc``.

Ranks of one host are neighbours in the ring ("in a row"), or neighbours in the ring are on
different hosts ("in turn"). Beside each measured ratio stands the ratio that the cost model
with links of hosts predicts for the same rate.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median, quantiles
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for tests.programs

from common import Table, environment, introduce, parser, write

from ringcoll.schedules.algorithms import on_hosts, schedule_of
from ringcoll.schedules.cost import LinkCosts, seconds_on_hosts
from ringcoll.tools.bench import as_size, parse_size
from tests.fakes.hosts import HostRanks, Hosts, reason_why_not_slow
from tests.programs import several_hosts

ALGORITHMS = ("hierarchical", "ring", "binomial_tree")

# Inside a host, over gloo: some 60 us a message and 0.5 ns a byte (`ringcoll.runtime.transport.catalogue`).
INSIDE = LinkCosts(alpha_s=60e-6, beta_s_per_byte=0.5e-9)


def measure(
    transport: str, where: tuple[int, ...], nbytes: int, mbit_per_s: float, repetitions: int
) -> list[dict[str, Any]]:
    """Time each algorithm: medians and spreads of the slowest rank's times."""
    schedules = [schedule_of("all_reduce", name, len(where), hosts=where) for name in ALGORITHMS]
    texts = [schedule.to_text() for schedule in schedules]
    with (
        Hosts(max(where) + 1, mbit_per_s=mbit_per_s) as hosts,
        HostRanks(hosts, where, timeout_s=600.0) as pool,
    ):
        ranks = pool.run(several_hosts.time_all_reduce, transport, texts, nbytes // 4, repetitions)
    across = LinkCosts(alpha_s=INSIDE.alpha_s, beta_s_per_byte=8e-6 / mbit_per_s)
    results = []
    for index, schedule in enumerate(schedules):
        times = [max(turn) for turn in zip(*(rank[index] for rank in ranks), strict=True)]
        low, middle, high = quantiles(times, n=4)
        results.append(
            {
                "algorithm": ALGORITHMS[index],
                "where": where,
                "nbytes": nbytes,
                "seconds": median(times),
                "spread": (high - low) / middle,
                "model_s": seconds_on_hosts(schedule, nbytes, where, inside=INSIDE, across=across),
            }
        )
    return results


def _row(layout: str, result: dict[str, Any], first: dict[str, Any]) -> tuple[object, ...]:
    return (
        result["algorithm"],
        layout,
        result["seconds"],
        result["spread"],
        result["seconds"] / first["seconds"],
        result["model_s"] / first["model_s"],
    )


def main() -> None:
    """Measure and print."""
    options = parser(__doc__)
    options.add_argument("--hosts", type=int, default=2)
    options.add_argument("--per-host", type=int, default=2)
    options.add_argument("--nbytes", type=parse_size, default=1 << 20)
    options.add_argument("--mbit", type=float, default=200.0, help="rate of a host's link")
    options.add_argument("--repetitions", type=int, default=15)
    options.add_argument("--transport", choices=("gloo", "ucx"), default="gloo")
    arguments = options.parse_args()
    if reason := reason_why_not_slow():
        sys.exit(reason)
    world_size = arguments.hosts * arguments.per_host
    facts = environment(world_size, arguments.transport)
    introduce(facts)
    caption = (
        f"{arguments.hosts} hosts of {arguments.per_host} ranks, links of {arguments.mbit:g} "
        f"Mbit/s, {as_size(arguments.nbytes)} of float32 over {arguments.transport}."
    )
    layouts = {
        "in a row": on_hosts(world_size, arguments.hosts),
        "in turn": tuple(range(arguments.hosts)) * arguments.per_host,
    }
    rows = []
    for name, where in layouts.items():
        results = measure(
            arguments.transport, where, arguments.nbytes, arguments.mbit, arguments.repetitions
        )
        rows += [_row(name, result, results[0]) for result in results]
    columns = {
        "algorithm": "text",
        "ranks": "text",
        "median": "seconds",
        "spread": "share",
        "/ hierarchical": "ratio",
        "/ hierarchical, by the model": "ratio",
    }
    table = Table(columns, rows, caption)
    table.show()
    write(arguments.json, __doc__, facts, [table])


if __name__ == "__main__":
    main()
