"""Time of searches for schedules.

Published: SCCL's points of an all-gather on a DGX-1, of 2 steps and 3 rounds for 2 chunks, and 3 steps
and 7 rounds for 6 chunks (arXiv 2008.08708); TACOS takes 1.08 s for an all-reduce on 128 NPUs and 2.52
hours for 40,000 (arXiv 2304.05301, on other networks and another processor).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from common import Table, environment, introduce, parser, write

from ringcoll.lab.search import demand_of, greedy_moves, hops_of, solve, synthesize
from ringcoll.lab.simulation import dgx1, torus
from ringcoll.schedules import verify

_SHAPES = ((2, 3, 2), (2, 7, 6), (3, 7, 6))
_TORI = ((4, 4), (8, 8), (8, 16), (16, 16), (16, 32), (32, 32))


def timed(work: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[Any, float]:
    """What a function returns, and its seconds."""
    start = time.perf_counter()
    result = work(*arguments, **options)
    return result, time.perf_counter() - start


def exact() -> list[tuple[Any, ...]]:
    """SCCL's questions of the DGX-1, and its whole front."""
    graph = hops_of(dgx1())
    rows: list[tuple[Any, ...]] = []
    for steps, rounds, chunks in _SHAPES:
        demand = demand_of("all_gather", 8, chunks)
        solved, seconds = timed(solve, graph, demand, steps, rounds)
        rows.append((f"{steps} steps, {rounds} rounds, {chunks} chunks", solved[0].value, seconds))
    front, seconds = timed(synthesize, "all_gather", dgx1(), most_chunks=6)
    points = " and ".join("/".join(map(str, point.shape)) for point in front.points)
    rows.append(("the front, up to 6 chunks", points, seconds))
    return rows


def greedy(largest: int) -> list[tuple[Any, ...]]:
    """All-gathers on tori of more and more ranks; the moves only, with one seed."""
    rows: list[tuple[Any, ...]] = []
    for shape in _TORI:
        grid = torus(shape, bandwidth=1)
        if grid.world_size <= largest:
            graph, demand = hops_of(grid), demand_of("all_gather", grid.world_size)
            moves, seconds = timed(greedy_moves, graph, demand)
            least = -(-(grid.world_size - 1) // 4)
            before = rows[-1][-2] if rows else None
            growth = None if before is None else seconds / before
            rows.append((grid.name, grid.world_size, len(moves), least, seconds, growth))
    return rows


def trees() -> list[tuple[Any, ...]]:
    """Trees that reach the bound."""
    rows: list[tuple[Any, ...]] = []
    for topology, chunks in ((dgx1(), 6), (torus((4, 4), bandwidth=1), 4)):
        front, seconds = timed(
            synthesize, "all_gather", topology, method="trees", most_chunks=chunks
        )
        ratio, least = front.points[-1].shape.rounds_per_chunk, front.least_rounds_per_chunk
        rows.append((topology.name, str(ratio), str(least), seconds))
    return rows


def main() -> None:
    """Run, print, write."""
    arguments = parser(__doc__)
    arguments.add_argument("--largest", type=int, default=1024, help="ranks of the largest torus")
    options = arguments.parse_args()
    facts = environment(1)
    introduce(facts)
    proved = synthesize("all_reduce", torus((8, 8), bandwidth=1), method="greedy", most_chunks=1)
    _, seconds = timed(verify, proved.points[0].schedule)
    tables = [
        Table({"question": "text", "answer": "text", "time": "seconds"}, exact()),
        Table(
            {
                "network": "text",
                "ranks": "count",
                "steps": "count",
                "at least": "count",
                "time": "seconds",
                "times the one before": "ratio",
            },
            greedy(options.largest),
        ),
        Table(
            {"trees": "text", "rounds per chunk": "text", "at least": "text", "time": "seconds"},
            trees(),
        ),
        Table({"proof": "text", "time": "seconds"}, [("greedy all_reduce, torus 8x8", seconds)]),
    ]
    for table in tables:
        table.show()
    write(options.json, __doc__, facts, tables)


if __name__ == "__main__":
    main()
