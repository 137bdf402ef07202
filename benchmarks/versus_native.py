"""The best ringcoll algorithm, and the one that is chosen, against torch's own over gloo.

All algorithms run a few times at each size; the fastest, what ``"auto"`` chooses, and
native are then timed side by side, in place where that is possible, the results checked.
``times native`` is how many times as fast they are; ``auto / best`` the time of what was
chosen over that of the fastest.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from statistics import geometric_mean
from typing import Any

from common import environment, introduce, parser, table, write

from ringcoll import select
from ringcoll.algorithms import algorithms
from ringcoll.bench import Request, Result
from ringcoll.bench import on_rank as measure_on_rank
from ringcoll.bench.findings import speed_against
from ringcoll.bench.units import as_size
from ringcoll.contracts import contract
from ringcoll.launch import Ranks

SIZES = tuple(4**power for power in range(1, 14))  # 4 B to 64 MiB
COLLECTIVES = "all_reduce,reduce_scatter,all_gather,broadcast,all_to_all"


def row(auto: Result, native: Result, best: Result) -> dict[str, Any]:
    """One size: who is how fast."""
    assert auto.timed is not None
    assert native.timed is not None
    assert best.timed is not None
    return {
        "collective": native.workload.collective,
        "world_size": native.world_size,
        "nbytes": native.nbytes,
        "native_s": native.timed.summary.p50_s,
        "native_spread": native.timed.summary.spread,
        "best": best.contender,
        "best_s": best.timed.summary.p50_s,
        "best_spread": best.timed.summary.spread,
        "best_against_native": speed_against(best, native),
        "auto_against_native": speed_against(auto, native),
        "auto_over_best": auto.timed.summary.p50_s / best.timed.summary.p50_s,
        "wrong": sum(one.wrong or 0 for one in (auto, native, best)),
        "rounds": native.timed.summary.samples,
    }


def measure(collective: str, world_size: int, seconds: float) -> list[dict[str, Any]]:
    """All sizes of a collective on one number of ranks."""
    names = [entry.name for entry in algorithms(collective) if not entry.restriction(world_size)]
    sizes = [nbytes for nbytes in SIZES if nbytes >= 4 * world_size]
    request = Request(
        collective,
        ("auto", "native"),
        tuple(sizes),
        scouts=tuple(names),
        modes=(contract(collective).in_place,),
        timed_modes=(contract(collective).in_place,),
        warmup=2,
        least=7,
        most=300,
        seconds=seconds * len(sizes),
    )
    with Ranks(world_size, timeout_s=600.0) as ranks:
        results = ranks.run(measure_on_rank, request, timeout_s=86400.0)[0]
    triples = zip(results[::3], results[1::3], results[2::3], strict=True)
    return [row(*triple) for triple in triples]


def main() -> None:
    """Run, print, write."""
    arguments = parser(__doc__)
    arguments.add_argument("-k", "--ranks", default="2,4")
    arguments.add_argument("--collectives", default="all_reduce", help=f"of {COLLECTIVES}")
    arguments.add_argument("--transport", default="gloo", choices=("gloo", "ucx"))
    arguments.add_argument("--seconds", type=float, default=10.0, help="for each size")
    options = arguments.parse_args()
    os.environ[select.TRANSPORT_VARIABLE] = options.transport
    worlds = [int(number) for number in options.ranks.split(",")]
    facts = environment(max(worlds)) | {"transport": options.transport}
    introduce(facts)
    found = []
    for collective in options.collectives.split(","):
        for world_size in worlds:
            rows = measure(collective, world_size, options.seconds)
            show(rows)
            found += rows
    write(options.json, facts, found)


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print a table of one collective, and what it comes to."""
    columns = ("collective", "k", "size", "native (us)", "spread", "best", "best (us)", "spread",
               "times native", "auto", "auto / best", "#wrong", "rounds")  # fmt: skip
    table(
        columns,
        [
            (
                one["collective"],
                one["world_size"],
                as_size(one["nbytes"]),
                f"{one['native_s'] * 1e6:.1f}",
                f"{100 * one['native_spread']:.0f}%",
                one["best"],
                f"{one['best_s'] * 1e6:.1f}",
                f"{100 * one['best_spread']:.0f}%",
                f"{one['best_against_native']:.2f}",
                f"{one['auto_against_native']:.2f}",
                f"{one['auto_over_best']:.2f}",
                one["wrong"],
                one["rounds"],
            )
            for one in rows
        ],
    )
    speeds = [one["auto_against_native"] for one in rows]
    near = sum(one["auto_over_best"] <= 1.1 for one in rows)
    print(
        f"auto: {geometric_mean(speeds):.2f} times native's speed (geometric mean), "
        f"{min(speeds):.2f} at least; within 10 % of the best at {near} of {len(rows)} sizes\n",
        flush=True,
    )


if __name__ == "__main__":
    main()
