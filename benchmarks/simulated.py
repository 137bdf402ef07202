"""Simulated times against measured ones.

Real processes first measure what a message, a byte and a reduced byte cost, as `ringcoll tune` does, and
then all-reduces with every algorithm and a prepared operation. The same schedules are simulated on a crossbar with those
costs, those of data of such a size: the costs *crowded*, of ranks that all send at once, for schedules in which more than half of the ranks
send in a round, otherwise those of two ranks *alone*. The error of an algorithm is the median over the sizes of what the
simulation is off, as a share of the measured time.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from common import Table, environment, introduce, parser, write

import ringcoll
from ringcoll.lab.simulation import crossbar
from ringcoll.runtime import Ranks
from ringcoll.schedules import Schedule, chunks_of_data, tally_of
from ringcoll.schedules.algorithms import algorithms, schedule_of
from ringcoll.schedules.cost import Parameters, segment_count
from ringcoll.tools.bench import Meeting, Summary, alternate, costs_on_rank, parse_size, summarize

LIMIT = 0.25
"""The median error that an algorithm may have, where ranks do not exceed cores."""

SIZES = "64K,256K,1M,4M,16M"


def names(ranks: int) -> list[str]:
    """The all-reduces that are defined for so many ranks of one host."""
    return [entry.name for entry in algorithms("all_reduce", ranks) if not entry.needs_hosts]


def repeated(operation: Any, times: int) -> None:
    """Run a prepared operation."""
    for _ in range(times):
        operation()


def on_rank(
    transport: str, sizes: list[int], algorithm_names: list[str], seconds: float
) -> tuple[Parameters, dict[int, list[Summary]]]:
    """Measure the costs, and all algorithms at each size, which take turns."""
    costs = costs_on_rank(transport)
    meeting, summaries = Meeting(), {}
    for nbytes in sizes:
        tensor = torch.zeros(nbytes // 4)
        operations = [
            partial(repeated, ringcoll.all_reduce.plan(tensor, algorithm=name))
            for name in algorithm_names
        ]
        samples = alternate(meeting, operations, warmup=2, least=5, most=2000, seconds=seconds)
        summaries[nbytes] = [summarize(times_s) for times_s in samples.times_s]
    meeting.close()
    return costs, summaries


def simulated_s(schedule: Schedule, nbytes: int, costs: Parameters) -> float:
    """Simulate a schedule with measured costs."""
    tally = tally_of(schedule)
    crowded = 2 * sum(tally.sends) > tally.rounds * schedule.world_size
    costs = costs.at(nbytes)  # of data that are in caches, or beyond them
    link = costs.crowded if crowded else costs.alone
    chunk = nbytes // chunks_of_data(schedule)
    network = crossbar(
        schedule.world_size,
        bandwidth=1 / link.beta_s_per_byte,
        alpha_s=link.alpha_s,
        overhead_s=costs.overhead_s,
        gamma_s_per_byte=link.gamma_s_per_byte,
    )
    segments = segment_count(
        schedule, chunk, None, max(chunk // 4, 1), slice_bytes=costs.slice_bytes
    )
    return float(ringcoll.simulate(schedule, nbytes, network, segments=segments).seconds)


def main() -> None:
    """Run, print, write."""
    arguments = parser(__doc__)
    arguments.add_argument("-k", "--ranks", type=int, default=2)
    arguments.add_argument("--transport", default="shared")
    arguments.add_argument("--sizes", default=SIZES)
    arguments.add_argument("--seconds", type=float, default=10.0, help="for each size")
    options = arguments.parse_args()
    facts = environment(options.ranks, options.transport)
    introduce(facts)
    sizes = [parse_size(size) for size in options.sizes.split(",")]
    every = names(options.ranks)
    with Ranks(options.ranks, timeout_s=600.0) as ranks:
        costs, summaries = ranks.run(on_rank, options.transport, sizes, every, options.seconds)[0]
    rows, errors = [], []
    for number, name in enumerate(every):
        schedule = schedule_of("all_reduce", name, options.ranks)
        of_sizes = []
        for nbytes in sizes:
            measured = summaries[nbytes][number]
            simulated = simulated_s(schedule, nbytes, costs)
            of_sizes.append(abs(simulated / measured.p50_s - 1))
            rows.append(
                (
                    name,
                    nbytes,
                    measured.p50_s,
                    measured.spread,
                    simulated,
                    simulated / measured.p50_s,
                )
            )
        errors.append((name, median(of_sizes), median(of_sizes) <= LIMIT))
    caption = f"All-reduce, prepared, {options.ranks} ranks; costs of a message, a byte and a reduced byte: "
    pairs = [("alone", costs.alone), ("crowded", costs.crowded)]
    caption += "; ".join(
        f"{kind} {link.alpha_s * 1e6:.3g} us, {link.beta_s_per_byte * 1e9:.3g} ns, "
        f"{link.gamma_s_per_byte * 1e9:.3g} ns"
        for kind, link in pairs
    )
    kinds = ("text", "bytes", "seconds", "share", "seconds", "ratio")
    titles = ("algorithm", "bytes", "measured", "spread", "simulated", "simulated / measured")
    by_algorithm = {"algorithm": "text", "median error": "share", f"at most {LIMIT:.0%}": "text"}
    tables = [
        Table(dict(zip(titles, kinds, strict=True)), rows, f"{caption}."),
        Table(
            by_algorithm,
            [(name, error, "yes" if good else "no") for name, error, good in errors],
            "Median error over the sizes.",
        ),
    ]
    for table in tables:
        table.show()
    write(options.json, __doc__, facts, tables)


if __name__ == "__main__":
    main()
