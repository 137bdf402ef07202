"""A stand-in for torch's NCCL group: groups of messages that run in order, in one process.

As with NCCL, tags are ignored: the i-th send to a peer meets the i-th receive from it. A
group starts when the one before it is complete, and completes when all its messages have
met; a message can only move while the groups of both its ends are running. So an order
that two ranks see differently hangs, or gives wrong data.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from datetime import timedelta

import torch
from torch import Tensor

__all__ = ["AbortableGroup", "FakeGroup", "FakeWork", "World"]

LIMIT_S = 10.0
MOST_IN_A_GROUP = 256


@dataclass
class _Operation:
    is_send: bool
    peer: int
    tensor: Tensor
    done: bool = False


class FakeWork:
    """What ends a group."""

    def __init__(self, operations: list[_Operation]) -> None:
        self.operations, self.finished = operations, threading.Event()
        self.error = ""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for all messages of the group."""
        if not self.finished.wait(LIMIT_S):
            raise RuntimeError("NCCL hangs")
        if self.error:
            raise RuntimeError(self.error)
        return True


@dataclass
class World:
    """All ranks; carries the messages."""

    size: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    running: list[list[FakeWork]] = field(default_factory=list)
    group_sizes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.running = [[] for _ in range(self.size)]

    def start(self, rank: int, work: FakeWork) -> None:
        """Queue a group of a rank, and move what can be moved."""
        with self.lock:
            self.group_sizes.append(len(work.operations))
            self.running[rank].append(work)
            ranks = {rank}
            while ranks:
                ranks = self._advance(ranks.pop()) | ranks

    def _advance(self, rank: int) -> set[int]:
        """Move the messages of a rank's running group; returns whose next group starts."""
        if not self.running[rank]:
            return set()
        started = set()
        work = self.running[rank][0]
        for peer in {item.peer for item in work.operations if not item.done}:
            theirs = self.running[peer][0] if self.running[peer] else None
            if theirs is None:
                continue
            for mine, other in ((True, False), (False, True)):
                ours = [
                    o for o in work.operations if (o.is_send, o.peer, o.done) == (mine, peer, False)
                ]
                its = [
                    o
                    for o in theirs.operations
                    if (o.is_send, o.peer, o.done) == (other, rank, False)
                ]
                for one, two in zip(ours, its, strict=False):
                    send, receive = (one, two) if mine else (two, one)
                    if send.tensor.numel() != receive.tensor.numel():
                        work.error = theirs.error = "lengths differ"
                    else:
                        receive.tensor.copy_(send.tensor)
                    one.done = two.done = True
            if all(item.done for item in theirs.operations):
                self._finish(peer)
                started.add(peer)
        if all(item.done for item in work.operations):
            self._finish(rank)
            started.add(rank)
        return started

    def _finish(self, rank: int) -> None:
        self.running[rank].pop(0).finished.set()


class FakeGroup:
    """One rank's end, with the methods of ``ProcessGroupNCCL`` that the transport uses."""

    def __init__(self, world: World, rank: int) -> None:
        self._world, self._rank = world, rank
        self._open: list[_Operation] | None = None
        self.calls: list[str] = []

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._world.size

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.calls.append("connect")

    def _start_coalescing(self) -> None:
        assert self._open is None, "groups do not nest"
        self._open = []
        self.calls.append("start")

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> None:
        self._add(True, tensors, peer)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> None:
        self._add(False, tensors, peer)

    def _add(self, is_send: bool, tensors: list[Tensor], peer: int) -> None:
        assert self._open is not None, "outside of a group"
        (tensor,) = tensors
        assert tensor.is_contiguous()
        self._open.append(_Operation(is_send, peer, tensor))
        self.calls.append(f"{'send' if is_send else 'recv'} {peer}")

    def _end_coalescing(self) -> FakeWork:
        assert self._open is not None
        work, self._open = FakeWork(self._open), None
        self.calls.append("end")
        assert len(work.operations) < MOST_IN_A_GROUP
        self._world.start(self._rank, work)
        return work

    def abort(self) -> None:
        self.calls.append("abort")

    def shutdown(self) -> None:
        self.calls.append("shutdown")


class AbortableGroup(FakeGroup):
    """A group whose `abort` ends what its own rank waits for, as NCCL's does; the others wait on."""

    def abort(self) -> None:
        super().abort()
        with self._world.lock:
            for work in self._world.running[self._rank]:
                work.error = "NCCL communicator was aborted"
                work.finished.set()
