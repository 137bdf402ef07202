"""How long proofs take.

Wanted: every algorithm for every world size up to 64 in under 40 s; ring all-reduce on
1024 ranks under 60 s and 2 GiB.
"""

from __future__ import annotations

import multiprocessing
import resource
import sys
import time

from common import environment, introduce, parser, table, write

from ringcoll.algorithms import algorithms
from ringcoll.bench.units import as_size
from ringcoll.errors import UnsupportedWorldSizeError
from ringcoll.verify import verify


def all_up_to(largest: int) -> list[dict[str, object]]:
    """Prove every algorithm for all world sizes it is defined for."""
    found: list[dict[str, object]] = []
    for entry in algorithms():
        start, proved = time.perf_counter(), 0
        for world_size in range(1, largest + 1):
            try:
                verify(entry.schedule(world_size))
            except UnsupportedWorldSizeError:
                continue
            proved += 1
        found.append(
            {
                "collective": entry.collective,
                "algorithm": entry.name,
                "proved": proved,
                "seconds": time.perf_counter() - start,
            }
        )
    return found


def one(world_size: int) -> tuple[float, int]:
    """Seconds, and peak of the memory in bytes, of one big proof; in a fresh process."""
    (entry,) = (one for one in algorithms("all_reduce") if one.name == "ring")
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
    found = all_up_to(options.largest)
    table(
        ("collective", "algorithm", "sizes", "s"),
        [(*list(row.values())[:3], f"{row['seconds']:.2f}") for row in found],
    )
    total = sum(float(str(row["seconds"])) for row in found)
    print(f"\n{len(found)} algorithms, k up to {options.largest}: {total:.1f} s")
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        seconds, peak = pool.apply(one, (options.ring,))
    print(f"ring all_reduce, k = {options.ring}: {seconds:.1f} s, peak {as_size(peak)}")
    big = {"world_size": options.ring, "seconds": seconds, "peak_nbytes": peak}
    write(options.json, facts, {"all": found, "total_s": total, "ring": big})


if __name__ == "__main__":
    main()
