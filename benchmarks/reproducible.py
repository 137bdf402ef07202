"""Cost of reproducible results: all-reduce of float32, plain and at both levels.

The same ranks call `all_reduce` plainly, with ``reproducible=True`` and with
``reproducible="any_world_size"``, over shared memory and over gloo. The three take turns in one run, from the
same random numbers into the same memory. At the first level the cost is the choice: `auto` is limited to
algorithms that add from left to right. At the second level exact sums are added to it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from calls import timed
from common import Table, environment, introduce, parser, write

import ringcoll
from ringcoll.runtime import Ranks
from ringcoll.tools.bench import Meeting

TRANSPORTS = ("shared", "gloo")
SIZES = (4, 64 << 10, 1 << 20, 16 << 20)
LEVELS: tuple[Any, ...] = (False, True, "any_world_size")

Row = tuple[object, ...]


def on_rank(transport: str, seconds: float) -> list[Row]:
    """Time all-reduces of each size at each level: rows of a table."""
    group = dist.new_group()
    ringcoll.use(group, transport=transport)
    ringcoll.barrier(group)  # it measures the costs by which algorithms are chosen
    meeting, rows = Meeting(), []
    random = torch.Generator().manual_seed(dist.get_rank())
    for nbytes in SIZES:
        tensor = torch.randn(nbytes // 4, generator=random)
        out = torch.empty_like(tensor)
        operations = [
            ringcoll.all_reduce.plan(tensor, group=group, out=out, reproducible=level)
            for level in LEVELS
        ]
        plain, *levels = timed(meeting, operations, seconds)
        row: Row = (transport, nbytes, plain.p50_s, plain.spread)
        for level in levels:
            row += (level.p50_s, level.spread, level.p50_s / plain.p50_s)
        rows.append(row)
    meeting.close()
    ringcoll.close(group)
    return rows


def main() -> None:
    """Run, print, write."""
    arguments = parser(__doc__)
    arguments.add_argument("--seconds", type=float, default=5.0, help="for each comparison")
    arguments.add_argument("-k", type=int, default=4, help="number of ranks")
    options = arguments.parse_args()
    facts = environment(options.k)
    introduce(facts)
    rows: list[Row] = []
    for transport in TRANSPORTS:
        with Ranks(options.k, timeout_s=600.0) as ranks:
            rows += ranks.run(on_rank, transport, options.seconds)[0]
    columns = {"transport": "text", "bytes": "bytes", "plain": "seconds", "plain: spread": "share"}
    for level in map(str, LEVELS[1:]):
        columns |= {level: "seconds", f"{level}: spread": "share", f"{level} / plain": "ratio"}
    table = Table(columns, rows, f"All-reduce of float32, prepared, {options.k} ranks.")
    table.show()
    write(options.json, __doc__, facts, [table])


if __name__ == "__main__":
    main()
