"""The best algorithm, and the algorithm that ``"auto"`` chooses, against native gloo.

All algorithms run a few times at each size. Then the fastest algorithm, the algorithm that
``"auto"`` chooses, and native (torch's own collective over gloo) are timed side by side, in
place where that is possible, and their results are checked. *Best* and *auto* times native's
speed: native's time over theirs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from statistics import geometric_mean
from typing import Any

from common import Table, environment, introduce, parser, write

from ringcoll.runtime import TRANSPORT_VARIABLES, Ranks
from ringcoll.schedules import contract
from ringcoll.schedules.algorithms import algorithms
from ringcoll.tools.bench import BenchRequest, Result, parse_size, speed_against
from ringcoll.tools.bench import on_rank as measure_on_rank

SIZES = tuple(4**power for power in range(1, 14))  # 4 B to 64 MiB
COLLECTIVES = "all_reduce,reduce_scatter,all_gather,broadcast,all_to_all"


COLUMNS = {
    "size": "bytes",
    "native": "seconds",
    "native spread": "share",
    "best": "text",
    "best time": "seconds",
    "best spread": "share",
    "best: times native's speed": "ratio",
    "auto: times native's speed": "ratio",
    "auto / best": "ratio",
    "wrong elements": "count",
    "rounds": "count",
}


def row(auto: Result, native: Result, best: Result) -> tuple[Any, ...]:
    """Compare the contenders at one size: values for `COLUMNS`."""
    assert auto.timed is not None
    assert native.timed is not None
    assert best.timed is not None
    return (
        native.nbytes,
        native.timed.summary.p50_s,
        native.timed.summary.spread,
        best.contender,
        best.timed.summary.p50_s,
        best.timed.summary.spread,
        speed_against(best, native),
        speed_against(auto, native),
        auto.timed.summary.p50_s / best.timed.summary.p50_s,
        sum(result.wrong or 0 for result in (auto, native, best)),
        native.timed.summary.samples,
    )


def measure(
    collective: str, world_size: int, sizes: Sequence[int], seconds: float
) -> list[tuple[Any, ...]]:
    """Measure some sizes of a collective on so many ranks."""
    names = [entry.name for entry in algorithms(collective, world_size)]
    sizes = [nbytes for nbytes in sizes if nbytes >= 4 * world_size]
    request = BenchRequest(
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
    arguments.add_argument("--sizes", help="4 B to 64 MiB by default")
    arguments.add_argument("--transport", default="gloo", choices=("gloo", "ucx"))
    arguments.add_argument("--seconds", type=float, default=10.0, help="for each size")
    options = arguments.parse_args()
    os.environ[TRANSPORT_VARIABLES["cpu"]] = options.transport
    sizes = [parse_size(text) for text in options.sizes.split(",")] if options.sizes else SIZES
    worlds = [int(number) for number in options.ranks.split(",")]
    facts = environment(max(worlds), options.transport)
    introduce(facts)
    tables = []
    for collective in options.collectives.split(","):
        for world_size in worlds:
            rows = measure(collective, world_size, sizes, options.seconds)
            speeds, ratios = [row[-4] for row in rows], [row[-3] for row in rows]
            near = sum(ratio <= 1.1 for ratio in ratios)
            caption = (
                f"{collective}, {world_size} ranks. auto: {geometric_mean(speeds):.2f} times "
                f"native's speed (geometric mean), {min(speeds):.2f} at least; within 10 % of the "
                f"best algorithm at {near} of {len(rows)} sizes."
            )
            tables.append(Table(COLUMNS, rows, caption))
            tables[-1].show()
    title = f"Best algorithm, auto and native gloo: {options.collectives} over {options.transport}"
    write(options.json, __doc__, facts, tables, title=title.replace(",", ", "))


if __name__ == "__main__":
    main()
