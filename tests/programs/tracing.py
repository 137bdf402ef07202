"""What ranks do in traces between processes."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ringcoll
from ringcoll.errors import RingcollError
from ringcoll.runtime.launch import report
from tests.programs.ranks import fresh_group, replace_native

__all__ = ["dies", "rings", "skewed", "trains", "without_native"]


def rings(path: str, transport: str, times: int, numel: int) -> list[Any]:
    """All-reduce on a ring, some of it asynchronous; returns the sums that came out."""
    group = fresh_group()
    ringcoll.use(group, transport=transport)
    found = []
    with ringcoll.trace(path, group) as recording:
        for number in range(times):
            tensor = torch.full((numel,), dist.get_rank() + number)
            work = ringcoll.all_reduce(
                tensor, group=group, algorithm="ring", async_op=bool(number % 2)
            )
            if work is not None:
                work.wait()
            found.append(int(tensor[-1]))
    assert recording.transport == transport
    ringcoll.barrier(group)
    return found


def skewed(path: str, skews_ns: list[int]) -> None:
    """A trace in which the clock of each rank is wrong by a known amount."""
    group = fresh_group()
    skew = skews_ns[dist.get_rank()]
    with ringcoll.trace(path, group, clock=lambda: time.monotonic_ns() + skew):
        for _ in range(10):
            ringcoll.all_reduce(torch.ones(1000), group=group, algorithm="ring")


def trains(path: str) -> bool:
    """torch's DDP on the backend, and torch's own functions; whether gradients are the same."""
    model = DistributedDataParallel(nn.Linear(20, 10))
    with ringcoll.trace(path):
        work = dist.all_reduce(torch.ones(5), async_op=True)
        model(torch.full((3, 20), float(dist.get_rank()))).sum().backward()
        assert work is not None
        work.wait()
    (weight, _) = model.parameters()
    assert weight.grad is not None
    wanted = 3 * sum(range(dist.get_world_size())) / dist.get_world_size()
    return bool((weight.grad == wanted).all())


def without_native(path: str) -> None:
    """A trace while every native collective is replaced by a function that raises."""
    group = fresh_group()
    restore = replace_native()
    try:
        with ringcoll.trace(path, group):
            ringcoll.all_reduce(torch.ones(10), group=group)
    finally:
        restore()


def dies(path: str, dying: int) -> None:
    """A rank ends its process in the block; the others report the error that they get."""
    group = fresh_group()
    try:
        with ringcoll.trace(path, group):
            ringcoll.all_reduce(torch.ones(10), group=group)
            if dist.get_rank() == dying:
                os._exit(3)
            ringcoll.all_reduce(torch.ones(10), group=group)
    except RingcollError as error:
        report((dist.get_rank(), type(error).__name__))
        raise
