"""Last calls of a program, of which rank 0 returns with one element, and rank 1 waits for four."""

from __future__ import annotations

import logging
import os
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import ringcoll
from ringcoll.errors import RingcollError

NAMES = ("broadcast", "reduce", "gather", "scatter")


def call(name: str, rank: int, group: Any = None) -> None:
    """Make a call in which rank 0 sends to rank 1, and waits for nobody."""
    x = torch.ones(4 if rank else 1)
    rows = [x.clone(), x.clone()]
    match name:
        case "broadcast":
            ringcoll.broadcast(x, group=group, group_src=0)
        case "reduce":
            ringcoll.reduce(x, group=group, group_dst=1)
        case "gather":
            ringcoll.gather(x, rows if rank else None, group=group, group_dst=1)
        case "scatter":
            ringcoll.scatter(x, None if rank else rows, group=group, group_src=0)


def check(name: str, text: str) -> None:
    """Check what a rank is told that waits."""
    numel = (1, 4) if name in ("broadcast", "reduce") else ("1 x 2", "4 x 2")
    dtype = "sum, float32" if name == "reduce" else "float32"
    assert ": the ranks disagree on call 2 of the group: rank 0 called " in text, text
    for rank in range(2):
        assert f"rank {rank} called {name}({dtype}, {numel[rank]} elements, root " in text, text


def on_rank(store: dist.Store, rank: int, world_size: int, transport: str, name: str) -> None:
    """Make the call as the last one of a process."""
    os.environ["RINGCOLL_TRANSPORT"] = transport
    limit = timedelta(seconds=20)
    dist.init_process_group(
        "ringcoll", store=store, rank=rank, world_size=world_size, timeout=limit
    )
    ringcoll.barrier()
    try:
        call(name, rank)
    finally:
        dist.destroy_process_group()


def subgroup(store: dist.Store, rank: int, world_size: int) -> Any:
    """Rank 1 waits in vain for rank 2 in a group of the two; what it logs, and its error."""
    os.environ["RINGCOLL_HANG_NOTICE"] = "0.4"
    dist.init_process_group("ringcoll", store=store, rank=rank, world_size=world_size)
    group = dist.new_group([1, 2], timeout=timedelta(seconds=20), group_desc="pair")
    if rank == 0:
        return None
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ringcoll").addHandler(handler)
    ringcoll.barrier(group)
    try:
        if rank == 2:
            time.sleep(2.0)
        ringcoll.all_reduce(torch.ones(3), group=group, timeout=timedelta(seconds=1.2))
    except RingcollError as error:
        return [line for line in lines if "has waited" in line], str(error)
    return None
