"""Functions for ranks: an interrupt comes between two steps of Python, anywhere in a call of the library."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

import ringcoll
from ringcoll.errors import RingcollError
from ringcoll.runtime.collectives import communicator

__all__ = ["everywhere", "messages"]

_PACKAGE = str(Path(ringcoll.__file__).parent) + os.sep
_LIMIT_S = 6.0


class Interrupt(BaseException):
    """What a function for a signal raises."""


class _At:
    """Raises at a step of this thread in the library: at each opcode a trace function is called."""

    def __init__(self, at: int) -> None:
        self.left, self.where = at, ""

    def __call__(self, frame: FrameType, event: str, _: object) -> Any:
        if not frame.f_code.co_filename.startswith(_PACKAGE):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            self.left -= 1
            if self.left == 0:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_lasti}"
                sys.settrace(None)
                raise Interrupt
        return self


def _calls(group: Any) -> dict[str, Callable[[torch.Tensor], Callable[[], object]]]:
    def asynchronous(tensor: torch.Tensor) -> Callable[[], object]:
        def call() -> None:
            work: Any = ringcoll.all_reduce(tensor, group=group, async_op=True)
            work.wait()

        return call

    return {
        "blocking": lambda tensor: lambda: ringcoll.all_reduce(tensor, group=group),
        "prepared": lambda tensor: ringcoll.all_reduce.plan(tensor, group=group),
        "asynchronous": asynchronous,
    }


def _outcome(call: Callable[[], object]) -> str:
    try:
        call()
    except Interrupt:
        return "interrupted"
    except RingcollError as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def everywhere(
    kind: str, transport: str, numel: int, steps: tuple[int, int, int], late_s: float
) -> dict[str, Any]:
    """Interrupt rank 0 at steps (from, to, each) of a call; rank 1 is late. What was wrong, and all ends."""
    os.environ["RINGCOLL_TRANSPORT"] = transport
    rank, size = dist.get_rank(), dist.get_world_size()
    right = torch.arange(numel) * (size * (size + 1) // 2)
    wrong, ends = list[str](), dict[str, int]()
    group: Any = None
    for at in range(*steps):
        if group is None:
            group = dist.new_group(backend="ringcoll", timeout=timedelta(seconds=_LIMIT_S))
            ringcoll.all_reduce(torch.ones(1), group=group)
            calls, member = _calls(group), communicator(group, torch.device("cpu"))
            calls[kind](torch.arange(numel))()
        tensor, later = (torch.arange(numel) * (rank + 1) for _ in range(2))
        call, following = calls[kind](tensor), calls[kind](later)
        if rank:
            time.sleep(late_s)
        begin_s, interrupt = time.monotonic(), _At(at)
        before = member.num_issued
        if rank == 0:
            sys.settrace(interrupt)
        try:
            outcome = _outcome(call)
        finally:
            sys.settrace(None)
        if outcome == "interrupted" and member.num_issued == before:
            outcome = _outcome(call)  # it had not begun: nobody knows of it
        outcomes = [outcome, _outcome(following)]
        took_s = time.monotonic() - begin_s
        for got, told in zip((tensor, later), outcomes, strict=True):
            if told == "done" and not torch.equal(got, right):
                wrong.append(f"{at} {interrupt.where}: {got[:4]}, {outcomes}")
            if told.endswith("failure: ") or "failure: None" in told:
                wrong.append(f"{at} {interrupt.where}: no reason: {outcomes}")
        if took_s > _LIMIT_S / 2:
            wrong.append(f"{at} {interrupt.where}: {took_s:.1f} s, {outcomes}")
        key = " then ".join(each.partition(":")[0] for each in outcomes)
        ends[key] = ends.get(key, 0) + 1
        abouts: list[Any] = [None] * size
        dist.all_gather_object(abouts, (outcomes, interrupt.where))
        if any(told != "done" for outcomes, _ in abouts for told in outcomes):
            dist.destroy_process_group(group)
            group = None
        if not abouts[0][1]:
            break
    return {"wrong": wrong, "ends": ends, "steps": at}


def messages(sends: bool, steps: tuple[int, int, int]) -> dict[str, Any]:
    """Interrupt rank 0 at steps (from, to, each) of a send, or of a receive: what comes afterwards.

    The message comes, or has not begun; the next one comes in any case, after it.
    """
    rank, wrong, at = dist.get_rank(), list[str](), 0
    group: Any = dist.new_group(backend="ringcoll", timeout=timedelta(seconds=_LIMIT_S))
    call = dist.send if sends else dist.recv
    for at in range(*steps):
        interrupt = _At(at)
        first, second = (torch.full((3,), float(2 * at + part)) for part in range(2))
        if rank == 0:
            tensor = first.clone() if sends else torch.zeros(3)
            sys.settrace(interrupt)
            try:
                call(tensor, 1, group)
            except Interrupt:
                pass
            finally:
                sys.settrace(None)
        if sends is (rank == 0):
            for tensor in (second,) if sends else (first, second):
                dist.send(tensor, 1 - rank, group)
        else:
            got = torch.zeros(3)
            dist.recv(got, 1 - rank, group)
            if torch.equal(got, first):
                dist.recv(got, 1 - rank, group)
            if not torch.equal(got, second):
                wrong.append(f"{at} {interrupt.where}: {got.tolist()} instead of {second.tolist()}")
        places: list[Any] = [None] * 2
        dist.all_gather_object(places, interrupt.where)
        if not places[0]:
            break
    return {"wrong": wrong, "steps": at}
