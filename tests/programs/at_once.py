"""Asynchronous calls over shared memory that begin where they are made."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist

import ringcoll
from ringcoll.runtime.collectives import communicator
from ringcoll.runtime.launch import report
from tests.programs.faults import catch

__all__ = [
    "ends_there",
    "forked_off",
    "handed_over",
    "in_another_order",
    "interrupted",
    "loses_a_rank",
]


def _started(group: Any, moment_s: float) -> Any:
    """The end of a group whose ranks have met, with a moment of its own."""
    ringcoll.all_reduce(torch.ones(1), group=group)
    member = communicator(group, torch.device("cpu"))
    member._moment_s = moment_s
    return member


def _mine(numel: int) -> torch.Tensor:
    return torch.arange(numel) * (dist.get_rank() + 1)


def ends_there(numel: int) -> list[tuple[bool, bool, int]]:
    """Both ranks are in the call: whether the work is over when it returns, and right; the queue's threads."""
    member = _started(dist.group.WORLD, 30.0)
    found = []
    for _ in range(5):
        tensor = _mine(numel)
        work: Any = ringcoll.all_reduce(tensor, async_op=True)
        is_over = work.is_completed()
        work.wait()
        found.append((is_over, torch.equal(tensor, torch.arange(numel) * 3)))
    return [(*each, len(member._queue.threads)) for each in found]


def handed_over(numel: int, with_callback: bool) -> tuple[bool, list[int], bool, bool]:
    """Rank 1 is late: whether the work was over on return, what was queued; whether both calls were right."""
    member = _started(dist.group.WORLD, 0.001)
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(0.3)
    first, second = _mine(numel), _mine(5)
    work: Any = ringcoll.all_reduce(first, async_op=True)
    is_over = work.is_completed()
    snapshot = member.snapshot()
    queued = [call["number"] - member.num_issued for call in snapshot["queued"]]
    if with_callback:  # nobody waits: a thread of the queue has to finish it
        done = work.get_future().then(lambda future: future.value()[0].clone())
        result = done.wait()
    else:
        work.wait()
        result = first
    ringcoll.all_reduce(second)
    rights = [torch.equal(result, torch.arange(numel) * 3), second.tolist() == [0, 3, 6, 9, 12]]
    return is_over, queued, rights[0], rights[1]


def in_another_order() -> list[list[float]]:
    """The ranks begin calls of two groups in opposite orders."""
    rank = dist.get_rank()
    groups = [dist.new_group(backend="ringcoll") for _ in range(2)]
    for group in groups:
        _started(group, 0.01)
    tensors = [torch.full((3,), 1.0 + rank), torch.full((3,), 10.0 + rank)]
    works: list[Any] = [None, None]
    for index in (0, 1) if rank == 0 else (1, 0):
        works[index] = ringcoll.all_reduce(tensors[index], group=groups[index], async_op=True)
    for work in works:
        work.wait()
    return [tensor.tolist() for tensor in tensors]


def loses_a_rank(moment_s: float) -> None:
    """Rank 1 dies while rank 0's call runs, where it was made or in the queue: where the error is raised."""
    member = _started(dist.group.WORLD, moment_s)
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    work: Any = ringcoll.all_reduce(torch.ones(100_000), async_op=True)
    error = catch(work.wait)
    later = catch(lambda: ringcoll.all_reduce(torch.ones(3)))
    report((error.kind, error.text, later.kind, member._under_way is None, member.progress.current))


def forked_off() -> tuple[str, list[int]]:
    """Rank 1 is late: what a process that rank 0 forks off meanwhile meets as it waits; rank 0's own result."""
    _started(dist.group.WORLD, 0.001)
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(0.5)
    tensor, told = _mine(4), ""
    work: Any = ringcoll.all_reduce(tensor, async_op=True)
    if dist.get_rank() == 0:
        reads, writes = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writes, catch(work.wait).kind.encode())
            os._exit(0)
        os.close(writes)
        told = os.read(reads, 100).decode()
        os.close(reads)
        os.waitpid(child, 0)
    work.wait()
    return told, tensor.tolist()


def interrupted() -> tuple[str, str]:
    """An interrupt while the call runs where it was made, on rank 0; what rank 1, which waits, is told."""
    _started(dist.group.WORLD, 30.0)
    if dist.get_rank() == 1:
        time.sleep(1.0)
        return catch(lambda: ringcoll.all_reduce(torch.ones(3), algorithm="ring")).kind, ""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        ringcoll.all_reduce(torch.ones(3), async_op=True, algorithm="ring")
    except KeyboardInterrupt:
        return "KeyboardInterrupt", catch(lambda: ringcoll.all_reduce(torch.ones(3))).kind
    finally:
        signal.signal(signal.SIGALRM, before)
    return "nothing", ""
