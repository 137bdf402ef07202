"""Time and memory of simulations of many ranks.

All-reduces of 1 MiB on a crossbar, each in a process of its own: schedules of 65,536 ranks; the ring on 4,096
ranks with every message on its own, and by symmetry; every all-reduce on 1,024 ranks; and the engine of
events with more and more messages, whose time for a message should stay the same.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time

from common import Table, environment, introduce, parser, write

from ringcoll.lab.simulation import crossbar, simulate
from ringcoll.schedules.algorithms import algorithms, find

LARGE = [(name, 1 << 16, "auto") for name in
         ("recursive_doubling", "double_tree", "circulant", "swing", "bine_tree", "ring")]  # fmt: skip
RINGS = [("ring", 4096, "steps"), ("ring", 4096, "symmetry")]
GROWING = [
    *(("ring", ranks, "events") for ranks in (64, 128, 256, 512)),
    *(("recursive_doubling", 1 << lg, "events") for lg in (10, 12, 14, 16)),
]
COLUMNS = {
    "algorithm": "text",
    "ranks": "count",
    "engine": "text",
    "messages": "count",
    "time": "seconds",
    "time / message": "seconds",
    "memory": "bytes",
}


def simulated(name: str, ranks: int, engine: str) -> list[object]:
    """Simulate in this process: the engine, messages, seconds, and the most memory in bytes."""
    schedule, network = find("all_reduce", name).schedule(ranks), crossbar(ranks, bandwidth=1e10)
    begin = time.perf_counter()
    run = simulate(schedule, 1 << 20, network, engine=engine)
    seconds = time.perf_counter() - begin
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # KiB on Linux
    return [run.engine, run.num_messages, seconds, seconds / run.num_messages, memory]


def row(name: str, ranks: int, engine: str) -> tuple[object, ...]:
    """Simulate in a process of its own."""
    command = [sys.executable, __file__, "--only", name, str(ranks), engine]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return name, ranks, *json.loads(done.stdout)


def main() -> None:
    """Run, print, write."""
    arguments = parser(__doc__)
    arguments.add_argument("--only", nargs=3, metavar=("ALGORITHM", "RANKS", "ENGINE"))
    arguments.add_argument("--most", type=int, default=1 << 16, help="ranks of a simulation")
    options = arguments.parse_args()
    if options.only:
        name, ranks, engine = options.only
        print(json.dumps(simulated(name, int(ranks), engine)))
        return
    facts = environment(1)
    introduce(facts)
    every = [(entry.name, 1024, "auto") for entry in algorithms("all_reduce", 1024)]
    cases = {"Many ranks.": LARGE, "The ring.": RINGS, "Every all-reduce.": every,
             "More and more messages.": GROWING}  # fmt: skip
    tables = []
    for caption, points in cases.items():
        rows = [row(*point) for point in points if point[1] <= options.most]
        if rows:
            tables.append(Table(COLUMNS, rows, caption))
            tables[-1].show()
    write(options.json, __doc__, facts, tables)


if __name__ == "__main__":
    main()
