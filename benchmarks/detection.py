"""What it costs, while nothing goes wrong, that deaths and disagreements are seen.

Small all-reduces on two groups of the same ranks, taking turns in one run: on one, the monitor works as
always; on the other, it notes nothing and has no thread. Operations are prepared, and follow each other
without a pause.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from common import Table, environment, introduce, parser, write

import ringcoll
from ringcoll.runtime import Ranks
from ringcoll.runtime.collectives import StoreGroup
from ringcoll.runtime.launch import rendezvous

_IN_A_TURN = 500


class Nothing:
    """A monitor that notes nothing."""

    awake = True
    error = current = wait = failed = None
    last = (-1, None)
    meets = False

    def begin_run(self, before: object) -> None:
        """Note nothing."""

    def forget(self) -> None:
        """Nothing was noted."""

    def leave(self, limit_s: float) -> None:
        """Nobody is told."""

    def close(self) -> None:
        """There is no thread."""


def on_rank(turns: int, transport: str, numel: int) -> tuple[list[float], list[float]]:
    """Seconds of an all-reduce in each turn, with and without the monitor."""
    store, rank, world_size = rendezvous()
    groups, calls = [], []
    for name in ("with", "without"):
        own = dist.PrefixStore(f"detection/{name}/{transport}/{numel}", store)
        group = StoreGroup(own, rank, world_size, 60.0, transport)
        calls.append(ringcoll.all_reduce.plan(torch.ones(numel), group=group))
        for _ in range(20):
            calls[-1]()
        groups.append(group)
    member: Any = groups[1].communicator
    member.monitor.close()
    member.monitor = Nothing()
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(2 * turns):
        which = (turn + turn // 2) % 2  # neither is always the first of a pair
        call = calls[which]
        ringcoll.barrier(groups[0])
        begin_s = time.perf_counter()
        for _ in range(_IN_A_TURN):
            call()
        times[which].append((time.perf_counter() - begin_s) / _IN_A_TURN)
    for group in groups:
        group.close()
    return times


def main() -> None:
    """Run, print, write."""
    arguments = parser(__doc__)
    arguments.add_argument("--turns", type=int, default=60)
    arguments.add_argument("--transports", default="shared,ucx,gloo")
    options = arguments.parse_args()
    facts = environment(2, options.transports)
    introduce(facts)
    rows = []
    for name in options.transports.split(","):
        with Ranks(2, backend=None) as ranks:
            found = ranks.run(on_rank, options.turns, name, 1, timeout_s=600)
        on, off = (
            [max(pair) for pair in zip(*column, strict=True)] for column in zip(*found, strict=True)
        )
        pairs = sorted(first / second for first, second in zip(on, off, strict=True))
        quarter = len(pairs) // 4
        spread = pairs[-1 - quarter] - pairs[quarter]
        rows.append((name, median(on), median(off), median(pairs), spread))
    table = Table(
        {"transport": "text", "with": "seconds", "without": "seconds", "ratio": "ratio"}
        | {"quartiles apart": "ratio"},
        rows,
        "All-reduce of 4 bytes on 2 ranks: medians of the turns, and of the ratios of pairs of turns.",
    )
    table.show()
    write(options.json, __doc__, facts, [table])


if __name__ == "__main__":
    main()
