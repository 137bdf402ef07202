"""How long a resilient group takes to go on after a death, and what it costs while nobody dies.

Ranks on one host train a perceptron of 25 MiB with torch's DistributedDataParallel on
`ringcoll.training.resilient`. One rank is killed at a random moment, every other time the one that
leads, and with it the store at which the ranks have met. Measured is the time from the kill to the end of
the survivors' first step without it, and its parts. Then, in one run and taking turns: a step on an
ordinary group and on a resilient group.
"""

from __future__ import annotations

import os
import random
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

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
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ringcoll
from ringcoll.runtime import Ranks, serve_store
from ringcoll.training import resilient

_LIMIT = timedelta(seconds=60)
_STEPS_AFTER = 5
_MOST_S = 1.0  # from the first step to the kill
_NUM_STEPS = 20


def perceptron() -> nn.Module:
    """A model with 25 MiB of gradients."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1024, 3120), nn.ReLU(), nn.Linear(3120, 1024), nn.ReLU())


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A step of training."""
    optimizer.zero_grad()
    model(torch.randn(8, 1024)).square().mean().backward()
    optimizer.step()


def on_rank(rank: int, world_size: int, port: int, transport: str, parent: Connection) -> None:
    """Train until a rank is lost and some steps more; tell when each step ended, and the change."""
    torch.set_num_threads(1)
    store = meeting_place(rank, LOOPBACK, port, _LIMIT, at_rank_0=LOOPBACK)
    dist.init_process_group(
        "ringcoll", store=store, rank=rank, world_size=world_size, timeout=_LIMIT
    )
    group = resilient.start(transport=transport)
    model = perceptron()
    wrapped = resilient.data_parallel(model, group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    group.admit()
    group.send_state(model, optimizer)
    ends: list[float] = []
    left = _STEPS_AFTER
    while left:
        step_of(wrapped, optimizer)
        ends.append(time.monotonic())
        if len(ends) == 2:
            parent.send(os.getpid())
        left -= bool(group.changes)
    parent.send((ends, group.changes))
    group.close()


def run(world_size: int, victim: int, transport: str, delay_s: float) -> list[tuple[Any, ...]]:
    """Kill a rank; for each survivor: seconds to the first step, to agree, to form, and of a step."""
    store = serve_store()
    with Processes(__name__) as processes:
        ranks, ends = zip(
            *(
                processes.start(on_rank, rank, world_size, store.port, transport)
                for rank in range(world_size)
            ),
            strict=True,
        )
        for end in ends:
            end.recv()
        time.sleep(delay_s)
        ranks[victim].kill()
        killed_s = time.monotonic()
        found = []
        for rank in set(range(world_size)) - {victim}:
            if not ends[rank].poll(60):
                raise TimeoutError(f"rank {rank} did not go on without rank {victim}")
            times, (change,) = ends[rank].recv()
            first_s = next(end for end in times[-_STEPS_AFTER:] if end > killed_s)
            step_s = median(
                after - before for before, after in zip(times[-4:], times[-3:], strict=False)
            )
            found.append((first_s - killed_s, change.agreed_s, change.formed_s, step_s))
        return found


def steps(transport: str) -> tuple[list[float], list[float]]:
    """Seconds of steps on the default group and on a resilient group, taking turns."""
    ringcoll.use(transport=transport)
    group = resilient.start(transport=transport)
    model = perceptron()
    plain, lasting = DistributedDataParallel(model), resilient.data_parallel(model, group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(_NUM_STEPS + 3):
        for wrapped, into in zip((plain, lasting), times, strict=True):
            dist.barrier()
            begin_s = time.perf_counter()
            step_of(wrapped, optimizer)
            if number >= 3:
                into.append(time.perf_counter() - begin_s)
    group.close()
    return times


def main() -> None:
    """Run, print, write."""
    arguments = parser(__doc__)
    arguments.add_argument("--kills", type=int, default=10, help="a transport and number of ranks")
    arguments.add_argument("--ranks", default="2,4")
    arguments.add_argument("--transports", default="shared,ucx,gloo")
    arguments.add_argument("--seed", type=int, default=0)
    options = arguments.parse_args()
    names = options.transports.split(",")
    sizes = [int(size) for size in options.ranks.split(",")]
    facts = environment(max(sizes), options.transports)
    introduce(facts)
    choose = random.Random(options.seed)
    after, beside = [], []
    for name in names:
        for size in sizes:
            found = []
            for number in range(options.kills):
                victim = 0 if number % 2 else choose.randrange(1, size)
                found += run(size, victim, name, choose.random() * _MOST_S)
            first, agreed, formed, step = zip(*found, strict=True)
            after.append(
                (
                    name,
                    size,
                    len(found),
                    median(first),
                    max(first),
                    *map(median, (agreed, formed, step)),
                )
            )
            with Ranks(size, backend="ringcoll") as ranks:
                plain, lasting = (
                    sorted(map(max, zip(*column, strict=True)))
                    for column in zip(*ranks.run(steps, name), strict=True)
                )
            ratio = median(lasting) / median(plain)
            spread = (plain[-1] - plain[0]) / median(plain)
            beside.append((name, size, median(plain), median(lasting), ratio, spread))
    kinds = {"transport": "text", "ranks": "count", "survivors": "count"}
    seconds = ("median", "slowest", "of it: agreed", "of it: formed", "a step after")
    first_table = Table(
        kinds | dict.fromkeys(seconds, "seconds"),
        after,
        "From a rank's death to the end of the survivors' first step without it.",
    )
    second_table = Table(
        {"transport": "text", "ranks": "count", "ordinary group": "seconds"}
        | {"resilient group": "seconds", "ratio": "ratio", "spread": "share"},
        beside,
        "A step of DDP on both groups, while nobody dies: medians, each of the slowest rank.",
    )
    first_table.show()
    second_table.show()
    write(options.json, __doc__, facts, [first_table, second_table])


if __name__ == "__main__":
    main()
