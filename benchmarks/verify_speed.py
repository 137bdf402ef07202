"""Time of proofs.

Wanted: every algorithm for every world size up to 64 in under 40 s; ring all-reduce on
1024 ranks under 60 s and 2 GiB.
"""

from __future__ import annotations

import multiprocessing
import resource
import sys
import time

from common import Table, environment, introduce, parser, write

from ringcoll.errors import UnsupportedWorldSizeError
from ringcoll.schedules import verify
from ringcoll.schedules.algorithms import algorithms, find


def all_up_to(largest: int) -> list[tuple[str, str, int, float]]:
    """Prove every algorithm for all world sizes for which it is defined."""
    rows = []
    for entry in algorithms():
        start, proved = time.perf_counter(), 0
        for world_size in range(1, largest + 1):
            try:
                verify(entry.schedule(world_size))
            except UnsupportedWorldSizeError:
                continue
            proved += 1
        rows.append((entry.collective, entry.name, proved, time.perf_counter() - start))
    return rows


def ring(world_size: int) -> tuple[float, int]:
    """Prove ring all-reduce in a fresh process: seconds, and peak of the memory in bytes."""
    entry = find("all_reduce", "ring")
    start = time.perf_counter()
    verify(entry.schedule(world_size))
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return seconds, peak if sys.platform == "darwin" else 1024 * peak


def main() -> None:
    """Run, print, write."""
    arguments = parser(__doc__)
    arguments.add_argument("--largest", type=int, default=64)
    arguments.add_argument("--ring", type=int, default=1024, help="ranks of the big proof")
    options = arguments.parse_args()
    facts = environment(1)
    introduce(facts)
    rows = all_up_to(options.largest)
    total = sum(seconds for *_, seconds in rows)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        seconds, peak = pool.apply(ring, (options.ring,))
    tables = [
        Table(
            {"proof": "text", "time": "seconds", "peak memory": "bytes"},
            [
                (f"{len(rows)} algorithms, every k up to {options.largest}", total, None),
                (f"ring all_reduce, k = {options.ring}", seconds, peak),
            ],
        ),
        Table(
            {"collective": "text", "algorithm": "text", "world sizes": "count", "time": "seconds"},
            rows,
        ),
    ]
    for table in tables:
        table.show()
    write(options.json, __doc__, facts, tables)


if __name__ == "__main__":
    main()
