"""What ranks on several hosts do that fit their algorithms to the network; see benchmarks/fit.py."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import ringcoll
from ringcoll.collectives import close, communicator, measurements
from ringcoll.simulation import Measurements

__all__ = ["Slowed", "probed", "slowed", "time_both"]


def probed(budget_s: float) -> tuple[Measurements, float]:
    """The measurements, and the seconds that they took."""
    begin = time.perf_counter()
    found = measurements(None, budget_s)
    return found, time.perf_counter() - begin


def time_both(file: str, sizes: Sequence[int], repetitions: int) -> list[Any]:
    """Seconds of all-reduces of each size without and with a fit, in turns, and what runs with it."""
    groups = [dist.new_group(timeout=timedelta(seconds=120)) for _ in range(2)]
    ringcoll.use(groups[1], fit=file)
    results = []
    for nbytes in sizes:
        tensor = torch.empty(nbytes // 4)
        times: list[list[float]] = [[], []]
        for repetition in range(repetitions + 1):
            for group, own in zip(groups, times, strict=True):
                tensor.fill_(dist.get_rank() + 1.0)
                ringcoll.barrier(group)
                begin = time.perf_counter()
                ringcoll.all_reduce(tensor, group=group)
                seconds = time.perf_counter() - begin
                ranks = dist.get_world_size()
                assert tensor[0].item() == tensor[-1].item() == ranks * (ranks + 1) / 2
                if repetition:
                    own.append(seconds)
        chosen = [
            str(ringcoll.explain("all_reduce", nbytes, group)).splitlines()[:2] for group in groups
        ]
        results.append((nbytes, times, chosen))
    for group in groups:
        close(group)
    return results


class Slowed(NamedTuple):
    """Seconds from the beginning to the end of each operation, the network before and after, and what was refitted."""

    ends_s: list[float]
    reasons: list[str]
    right: bool


def slowed(file: str, nbytes: int, seconds: float) -> Slowed:
    """All-reduce for some seconds in a group that refits; meanwhile a link becomes slow."""
    group = dist.new_group(timeout=timedelta(seconds=120))
    ringcoll.use(group, fit=file, refit=True)
    tensor, begin = torch.empty(nbytes // 4), time.monotonic()
    ends, reasons, right = [], [], True
    go_on = torch.ones(1)
    while go_on.item():
        tensor.fill_(dist.get_rank() + 1.0)
        ringcoll.all_reduce(tensor, group=group)
        ranks = dist.get_world_size()
        right &= tensor[0].item() == tensor[-1].item() == ranks * (ranks + 1) / 2
        ends.append(time.monotonic())
        reasons.append(str(ringcoll.explain("all_reduce", nbytes, group)).splitlines()[1])
        go_on[0] = float(ends[-1] - begin < seconds)
        ringcoll.broadcast(go_on, src=0, group=group)
    close(group)
    return Slowed(ends, reasons, right)


def time_choices(choices: Sequence[tuple[str, int | None]], nbytes: int, repetitions: int) -> Any:
    """Seconds of all-reduces by schedules, as texts, or names, each in segments of so many bytes."""
    from ringcoll.schedule import Schedule

    group = dist.new_group(timeout=timedelta(seconds=120))
    tensor = torch.ones(nbytes // 4)
    out = []
    ringcoll.all_reduce(tensor, group=group)
    for text, segment in choices:
        algorithm = Schedule.from_text(text) if text.startswith("schedule ") else text
        times = []
        for _ in range(repetitions + 1):
            ringcoll.barrier(group)
            begin = time.perf_counter()
            ringcoll.all_reduce(tensor, group=group, algorithm=algorithm, segment_bytes=segment)
            times.append(time.perf_counter() - begin)
        out.append(times[1:])
    close(group)
    return out


def swaps(nbytes: int, repetitions: int, transport: str) -> Any:
    """Seconds in which rank 0 sends to rank 2, rank 2 to rank 0, and both at once."""
    from ringcoll.transport import Message

    group = dist.new_group(timeout=timedelta(seconds=120))
    ringcoll.use(group, transport=transport)
    ringcoll.barrier(group)
    member = communicator(group, torch.device("cpu"))
    t = member.transport
    out = torch.ones(nbytes, dtype=torch.uint8)
    into = torch.ones(nbytes, dtype=torch.uint8)
    rank = dist.get_rank()
    peer = {0: 2, 2: 0}.get(rank)
    results = []
    for mode in ("02", "20", "both"):
        times = []
        for _ in range(repetitions):
            ringcoll.barrier(group)
            begin = time.perf_counter()
            if peer is not None:
                sends = [Message(peer, out, 77)] if mode == "both" or mode[0] == str(rank) else []
                receives = (
                    [Message(peer, into, 77)] if mode == "both" or mode[1] == str(rank) else []
                )
                for handle in t.post(receives, sends):
                    t.wait(handle, 60)
            ringcoll.barrier(group)
            times.append(time.perf_counter() - begin)
        results.append((mode, times))
    close(group)
    return results
