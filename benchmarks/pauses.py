"""Whether at most one group goes on when ranks are stopped for up to three time limits, and one dies.

Ranks on one host call `ringcoll.all_reduce` on `ringcoll.training.resilient`, each with a power of two, so that the sum says
who had a part in it. Some of them are stopped (SIGSTOP) at random moments for up to three limits, in every other
run one is killed in that moment, and the others end when they have done all their calls. *Beside* are runs in
which two sums of one call have no rank in common, or two members of an epoch differ in who is in it. *Late* are
errors that come, after a rank was let go on, later than the limit if others went on without it, or otherwise than
the limits of its call and of the change after it.
"""

from __future__ import annotations

import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from common import (
    LOOPBACK,
    Processes,
    Table,
    environment,
    introduce,
    meeting_place,
    parser,
    write,
)

import ringcoll
from ringcoll.errors import RingcollError
from ringcoll.runtime import serve_store
from ringcoll.training import resilient

_NUM_CALLS = 60
_PAUSE_S = 0.02  # between two calls
_SLACK_S = 1.0  # on a busy machine
_ENOUGH_S = 60.0


class Seen(NamedTuple):
    """What a rank tells: epoch and sum of each call; the error, begin of its call, and when it came."""

    calls: list[tuple[int, int]]
    error: str
    begun_s: float
    ended_s: float


def on_rank(rank: int, world_size: int, port: int, limit_s: float, parent: Connection) -> None:
    """Call again and again, and tell what came out."""
    torch.set_num_threads(1)
    store = meeting_place(rank, LOOPBACK, port, timedelta(seconds=60), at_rank_0=LOOPBACK)
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
    group = resilient.start()
    group._timeout_s = group.communicator.timeout_s = limit_s
    ringcoll.barrier(group)
    parent.send(os.getpid())
    calls: list[tuple[int, int]] = []
    error, begun_s = "", 0.0
    try:
        for _ in range(_NUM_CALLS):
            x = torch.tensor([1 << rank])
            begun_s = time.monotonic()
            ringcoll.all_reduce(x, group=group)
            calls.append((group.epoch, int(x)))
            time.sleep(_PAUSE_S)
    except RingcollError as raised:
        error = f"{type(raised).__name__}: {raised}"
    parent.send(Seen(calls, error, begun_s, time.monotonic()))
    group.close()


class Outcome(NamedTuple):
    """A run: ranks that went on, that raised, groups beside each other, and how late errors were."""

    on: int
    raised: int
    beside: str
    late: str
    after_s: list[float]


def run(world_size: int, limit_s: float, seed: int) -> Outcome:
    """Stop ranks, and see what the others and they do."""
    choose = random.Random(seed)
    store = serve_store()
    with Processes(__name__) as processes:
        started = [
            processes.start(on_rank, rank, world_size, store.port, limit_s)
            for rank in range(world_size)
        ]
        ranks, ends = zip(*started, strict=True)
        for end in ends:
            end.recv()
        time.sleep(choose.random() * 0.5)
        stopped = choose.sample(range(world_size), choose.randrange(1, world_size))
        dead = choose.choice(range(world_size)) if seed % 2 else None
        first_s = time.monotonic()
        until = {rank: first_s + 3 * limit_s * choose.random() for rank in stopped if rank != dead}
        for rank in until:
            time.sleep(choose.random() * 0.05)
            os.kill(ranks[rank].pid, signal.SIGSTOP)
        if dead is not None:
            ranks[dead].kill()
        for rank in sorted(until, key=lambda rank: until[rank]):
            time.sleep(max(0.0, until[rank] - time.monotonic()))
            until[rank] = time.monotonic()
            os.kill(ranks[rank].pid, signal.SIGCONT)
        seen: dict[int, Seen] = {}
        for rank, end in enumerate(ends):
            if rank != dead:
                if not end.poll(_ENOUGH_S):
                    raise TimeoutError(f"seed {seed}: rank {rank} has not ended")
                seen[rank] = end.recv()
    late, after = "", []
    for rank, (_, error, begun_s, ended_s) in seen.items():
        if error:
            begin_s = max(begun_s, until.get(rank, 0.0))
            after.append(ended_s - begin_s)
            most_s = limit_s if "went on without" in error else 2 * limit_s
            if ended_s - begin_s > most_s + _SLACK_S:
                late += f"seed {seed}: rank {rank}, {ended_s - begin_s:.1f} s: {error}; "
    went_on = [rank for rank, told in seen.items() if not told.error]
    return Outcome(len(went_on), len(seen) - len(went_on), beside(seed, seen), late, after)


def beside(seed: int, seen: dict[int, Seen]) -> str:
    """What shows two groups beside each other; empty if nothing does."""
    for number in range(_NUM_CALLS):
        sums = [told.calls[number] for told in seen.values() if number < len(told.calls)]
        by_epoch: dict[int, int] = {}
        for epoch, total in sums:
            if by_epoch.setdefault(epoch, total) != total or not all(
                total & each for _, each in sums
            ):
                return f"seed {seed}: sums of call {number} are {sums}"
    return ""


def main() -> None:
    """Run, print, write."""
    arguments = parser(__doc__)
    arguments.add_argument("--runs", type=int, default=200)
    arguments.add_argument("--ranks", type=int, default=4)
    arguments.add_argument("--limit", type=float, default=2.0, help="time limit in seconds")
    arguments.add_argument("--together", type=int, default=4, help="runs at the same time")
    arguments.add_argument("--seed", type=int, default=0, help="the first run's")
    options = arguments.parse_args()
    facts = environment(options.ranks)
    introduce(facts)
    with ThreadPoolExecutor(options.together) as threads:
        seeds = range(options.seed, options.seed + options.runs)
        found = [*threads.map(lambda seed: run(options.ranks, options.limit, seed), seeds)]
    for outcome in found:
        for fault in (outcome.beside, outcome.late):
            if fault:
                print(fault)
    after = [time_s for outcome in found for time_s in outcome.after_s] or [0.0]
    row: list[Any] = [options.ranks, len(found), sum(outcome.on for outcome in found)]
    row += [sum(outcome.raised for outcome in found)]
    row += [sum(bool(outcome.beside) for outcome in found)]
    row += [sum(bool(outcome.late) for outcome in found), median(after), max(after)]
    counts = ("ranks", "runs", "went on", "raised", "groups beside", "late errors")
    table = Table(
        dict.fromkeys(counts, "count") | {"error after": "seconds", "slowest": "seconds"},
        [row],
        f"Ranks that are stopped for up to three limits of {options.limit:g} s.",
    )
    table.show()
    write(options.json, __doc__, facts, [table])


if __name__ == "__main__":
    main()
