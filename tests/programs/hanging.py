"""One rank of a program that hangs, or ends, in a given way, and prints a line before.

Run as ``python -m tests.programs.hanging CASE RANK WORLD_SIZE PORT``.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import ringcoll
from ringcoll.errors import RingcollError


def load_batch() -> None:
    """The user's code, which never comes back."""
    time.sleep(600)


def say(text: str) -> None:
    """Tell the test."""
    print(text, flush=True)  # noqa: T201


def main(case: str, rank: int, world_size: int, port: int) -> None:
    """Meet, and hang."""
    torch.set_num_threads(1)
    limit = timedelta(seconds=600)
    store = dist.TCPStore("127.0.0.1", port, None, False, timeout=limit)
    dist.init_process_group(
        "ringcoll", store=store, rank=rank, world_size=world_size, timeout=limit
    )
    tensor = torch.ones(12)
    ringcoll.all_reduce(tensor, algorithm="ring")
    say("met")
    if case in ("user code", "stopped") and rank == 2:
        load_batch()
    elif case == "two groups":
        pair = dist.new_group([0, 1])
        if rank < 2:
            ringcoll.all_reduce(tensor, group=pair, algorithm="ring")
        if rank == 1:
            ringcoll.barrier(pair)
    elif case == "queue":
        for _ in range(1 if rank == 2 else 5):
            ringcoll.all_reduce(tensor, algorithm="ring", async_op=True)
        load_batch()
    elif case == "time limit":
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=3), dist.group.WORLD)
        with contextlib.suppress(RingcollError):
            if rank != 2:
                dist.all_reduce(tensor)
        say("failed")
        if rank == 2:
            sys.stdin.readline()
        os._exit(0)
    elif case == "fork":
        if os.fork() == 0:
            say(f"child {os.getpid()}")
            load_batch()
        load_batch()
    elif case == "end":
        from tests.programs.listeners import listening

        sys.stdin.readline()
        dist.destroy_process_group()
        time.sleep(0.2)
        say(str(listening()))
        return
    ringcoll.all_reduce(tensor, algorithm="ring")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
