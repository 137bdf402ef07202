"""A cluster that is measured and fitted, and uses the fit.

Three hosts of two ranks: name spaces of this machine, joined by a switch. The kernel limits each host's link (``tbf``), in each
direction: 1000, 1000 and 200 Mbit/s. The script needs root, ``ip`` and ``tc``.

1. ``probe`` measures all pairs; what it finds of the links stands beside the rate that was set.
2. ``fit`` finds a schedule for each size. Groups without and with the fit all-reduce in turns; beside the medians stands the lower bound
   that is computed from the measured links, and what the simulator said.

Wanted: links within 15 % in under 20 s; the fitted 16 MiB within 1.15 of the bound, and 1.5 times as fast as without a fit where neighbours
in rank order are on different hosts; never slower; simulated within 25 % of measured.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for tests.programs

from common import Table, environment, introduce, parser, write

from ringcoll.lab.search import fit, least_time
from ringcoll.lab.simulation import topology_of
from ringcoll.runtime.user_files import write_fit
from ringcoll.tools.bench import parse_size
from tests.fakes.hosts import HostRanks, Hosts, reason_why_not_slow
from tests.programs import fitted

RATES = (1000.0, 1000.0, 200.0)
PLACES = {"in turn": (0, 1, 2, 0, 1, 2), "in a row": (0, 0, 1, 1, 2, 2)}
SIZES = "4K,16K,64K,256K,1M,4M,16M"


def placed(where: tuple[int, ...], sizes: list[int], repetitions: int) -> dict[str, Any]:
    """Measure, fit, and time with ranks on such hosts."""
    with (
        tempfile.TemporaryDirectory() as directory,
        Hosts(3, mbit_per_s=dict(enumerate(RATES))) as hosts,
        HostRanks(hosts, where, timeout_s=600.0) as pool,
    ):
        measured, probe_s = pool.run(fitted.probed, 15.0)[0]
        topology = topology_of(measured)
        begin = time.perf_counter()
        best = fit("all_reduce", topology)
        fit_s = time.perf_counter() - begin
        file = Path(directory) / "cluster.fit"
        write_fit(file, best.fitted("2026-01-01T00:00:00"))
        ranks = pool.run(fitted.time_both, str(file), sizes, repetitions)
    bound = least_time("all_reduce", topology)
    rows = []
    for number, nbytes in enumerate(sizes):
        each = [
            [max(turn) for turn in zip(*(rank[number][1][kind] for rank in ranks), strict=True)]
            for kind in (0, 1)
        ]
        usual, fast = map(median, each)
        low, _, high = quantiles(each[1], n=4)
        (fitted_range,) = [each for each in best.ranges if nbytes in each.nbytes]
        winner = fitted_range.winner
        rows.append(
            {
                "nbytes": nbytes,
                "auto": usual,
                "fitted": fast,
                "spread": (high - low) / fast,
                "bound": bound.seconds(nbytes),
                "algorithm": "left to auto" if fitted_range.is_left else winner.algorithm,
                "simulated": winner.seconds if fitted_range.size == nbytes else None,
            }
        )
    links = {link.name: float(link.bandwidth) for link in topology.links}
    return {"links": links, "probe_s": probe_s, "fit_s": fit_s, "rows": rows}


def main() -> None:
    """Measure and print."""
    arguments = parser(__doc__)
    arguments.add_argument("--sizes", default=SIZES)
    arguments.add_argument("--repetitions", type=int, default=9)
    options = arguments.parse_args()
    if reason := reason_why_not_slow():
        sys.exit(reason)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
    facts = environment(6, "shared, UCX between hosts")
    introduce(facts)
    sizes = [parse_size(size) for size in options.sizes.split(",")]
    link_rows, time_rows = [], []
    for words, where in PLACES.items():
        result = placed(where, sizes, options.repetitions)
        for host, mbit_per_s in enumerate(RATES):
            for name in (f"card{host} -> net", f"net -> card{host}"):
                found = result["links"][name]
                link_rows.append((words, name, mbit_per_s / 8e3, found / 1e9, found * 8e-6 / mbit_per_s,
                                  result["probe_s"], result["fit_s"]))  # fmt: skip
        for row in result["rows"]:
            simulated = row["simulated"] and row["simulated"] / row["fitted"]
            time_rows.append((words, row["nbytes"], row["algorithm"], row["auto"], row["fitted"], row["spread"],
                              row["auto"] / row["fitted"], row["fitted"] / row["bound"], simulated or 0.0))  # fmt: skip
    tables = [
        Table(
            {"ranks": "text", "link": "text", "set, GB/s": "number", "measured, GB/s": "number",
             "measured / set": "ratio", "probe": "seconds", "fit": "seconds"},
            link_rows, "What probe finds of the links; a part of what is set is headers.",
        ),
        Table(
            {"ranks": "text", "size": "bytes", "algorithm": "text", "auto": "seconds", "fitted": "seconds",
             "spread": "share", "auto / fitted": "ratio", "fitted / bound": "ratio",
             "simulated / fitted": "ratio"},
            time_rows, "All-reduce of float32 without and with a fit; medians of the slowest ranks.",
        ),
    ]  # fmt: skip
    for table in tables:
        table.show()
    write(options.json, __doc__, facts, tables)


if __name__ == "__main__":
    main()
