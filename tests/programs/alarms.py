"""Functions for ranks: a signal comes while a rank waits."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

import ringcoll

__all__ = ["agrees", "waits"]

_AFTER_S, _LATE_S = 0.1, 0.5


def waits(transport: str) -> dict[str, float]:
    """Seconds from a signal to its function on rank 0, in each way to wait for rank 1, which comes later."""
    os.environ["RINGCOLL_TRANSPORT"] = transport
    group = dist.new_group(backend=dist.get_backend())
    rank, delays = dist.get_rank(), dict[str, float]()
    heard: list[float] = []

    def hear(number: int, frame: FrameType | None) -> None:
        heard.append(time.monotonic())

    short, long = torch.ones(4), torch.ones(1 << 18)

    def message(start: Callable[..., Any], other: Callable[..., Any]) -> Callable[[], object]:
        return lambda: start(long, 1, group=group) if rank == 0 else other(long, 0, group=group)

    ways: dict[str, Callable[[], object]] = {
        "meeting": lambda: ringcoll.barrier(group),
        "short": lambda: ringcoll.all_reduce(short, group=group),
        "long": lambda: ringcoll.all_reduce(long, group=group),
        "async": lambda: wait(ringcoll.all_reduce(short, group=group, async_op=True)),
        "limit": lambda: wait(
            ringcoll.all_reduce(short, group=group, async_op=True), timedelta(seconds=60)
        ),
        "monitored": lambda: ringcoll.monitored_barrier(group),
    }
    if dist.get_backend() == "ringcoll":
        ways |= {
            "torch": lambda: dist.all_reduce(short, group=group),
            "recv": message(dist.recv, dist.send),
            "send": message(dist.send, dist.recv),
            "irecv": lambda: wait(message(dist.irecv, dist.isend)()),
        }
    before = signal.signal(signal.SIGALRM, hear)
    try:
        for name, way in ways.items():
            heard.clear()
            if rank == 0:
                signal.setitimer(signal.ITIMER_REAL, _AFTER_S)
            else:
                time.sleep(_LATE_S)
            begin = time.monotonic()
            way()
            if rank == 0:
                (at,) = heard
                delays[name] = at - begin - _AFTER_S
    finally:
        signal.signal(signal.SIGALRM, before)
        del os.environ["RINGCOLL_TRANSPORT"]
    return delays


def agrees(transport: str) -> dict[str, list[float]]:
    """A function for a signal calls a collective while rank 0 waits in another: the results of both, in each way."""
    os.environ["RINGCOLL_TRANSPORT"] = transport
    group = dist.new_group(backend=dist.get_backend())
    rank, flag = dist.get_rank(), torch.zeros(1)

    def agree(*_: object) -> None:
        flag.fill_(rank + 1)
        ringcoll.all_reduce(flag, group=group)

    tensor, long = torch.ones(4), torch.ones(1 << 18)
    prepared = ringcoll.all_reduce.plan(tensor, group=group)
    ways: dict[str, Callable[[], object]] = {
        "meeting": lambda: ringcoll.all_reduce(tensor, group=group),
        "short": lambda: ringcoll.all_reduce(tensor, group=group),
        "long": lambda: ringcoll.all_reduce(long, group=group, algorithm="ring"),
        "prepared": prepared,
        "barrier": lambda: ringcoll.barrier(group),
        "async": lambda: wait(ringcoll.all_reduce(tensor, group=group, async_op=True)),
        "several": lambda: ringcoll.all_reduce_coalesced([tensor, long], group=group),
    }
    if dist.get_backend() == "ringcoll":
        ways["torch"] = lambda: dist.all_reduce(tensor, group=group)
    found: dict[str, list[float]] = {}
    before = signal.signal(signal.SIGALRM, agree)
    try:
        for name, way in ways.items():
            tensor.fill_(rank + 1)
            long.fill_(rank + 1)
            if rank == 0:
                signal.setitimer(signal.ITIMER_REAL, _AFTER_S)
                way()
            else:
                time.sleep(_LATE_S)
                way()
                agree()
            found[name] = [flag.item(), tensor[0].item(), long[-1].item()]
    finally:
        signal.signal(signal.SIGALRM, before)
        del os.environ["RINGCOLL_TRANSPORT"]
    return found


def wait(work: Any, *arguments: Any) -> None:
    """Wait for a work, with or without a limit of the wait."""
    assert work is not None
    work.wait(*arguments)
