"""A stand-in for torch's NCCL group: groups of messages that run in order, in one process.

As with NCCL, tags are ignored: the i-th send to a peer meets the i-th receive from it. A
group starts when the one before it is complete, and completes when all its messages have
met; a message can only move while the groups of both its ends are running. So an order
that two ranks see differently hangs, or gives wrong data.

Nothing raises an error: a message that meets none, or one of another length, occupies its rank for
ever. `abort` ends that for its own rank, with garbage in the memory of what has not come, and without a
word to those who wait. The first use of a group waits on the host until all ranks have come, and
nothing ends that wait.

Here the host waits for messages, as nothing is enqueued; `tests.fakes.fake_streams` has streams.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from datetime import timedelta

import torch
from torch import Tensor

__all__ = ["FakeGroup", "FakeWork", "World"]

LIMIT_S = 60.0  # of a wait that nothing ends: then the test has failed
MOST_IN_A_GROUP = 256
GARBAGE = 0xA5


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

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for all messages of the group."""
        assert self.finished.wait(LIMIT_S), "NCCL hangs, and nobody aborts it"
        return True

    def is_completed(self) -> bool:
        """Whether all messages of the group are over."""
        return self.finished.is_set()


@dataclass
class World:
    """All ranks; carries the messages."""

    size: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    running: list[list[FakeWork]] = field(default_factory=list)
    aborted: set[int] = field(default_factory=set)
    group_sizes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.running = [[] for _ in range(self.size)]
        self._here: set[int] = set()
        self._all_here = threading.Event()

    def connect(self, rank: int) -> None:
        """Wait until all ranks have come."""
        with self.lock:
            self._here.add(rank)
            if len(self._here) == self.size:
                self._all_here.set()
        assert self._all_here.wait(LIMIT_S), "NCCL connects for ever"

    def start(self, rank: int, work: FakeWork) -> None:
        """Queue a group of a rank, and move what can be moved."""
        with self.lock:
            self.group_sizes.append(len(work.operations))
            self.running[rank].append(work)
            if rank in self.aborted:
                self._clear(rank)
            ranks = {rank}
            while ranks:
                ranks = self._advance(ranks.pop()) | ranks

    def abort(self, rank: int) -> None:
        """End the groups of a rank, and all that follow."""
        with self.lock:
            self.aborted.add(rank)
            self._clear(rank)

    def _clear(self, rank: int) -> None:
        while self.running[rank]:
            for item in self.running[rank][0].operations:
                if not (item.done or item.is_send):
                    item.tensor.view(torch.uint8).fill_(GARBAGE)
            self._finish(rank)

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
                        break  # neither is ever over
                    receive.tensor.copy_(send.tensor)
                    one.done = two.done = True
            if all(item.done for item in theirs.operations):
                self._finish(peer)
                started.add(peer)
        if self.running[rank][:1] == [work] and all(item.done for item in work.operations):
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
        self._world.connect(self._rank)

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
        self.calls.append(f"{'send' if is_send else 'recv'} {peer}")
        if tensor.numel():
            self._open.append(_Operation(is_send, peer, tensor))

    def _end_coalescing(self) -> FakeWork | None:
        assert self._open is not None
        work, self._open = FakeWork(self._open), None
        self.calls.append("end")
        assert len(work.operations) < MOST_IN_A_GROUP
        if not work.operations:
            return None  # no message has made it ask for a communicator
        self._start(work)
        return work

    def _start(self, work: FakeWork) -> None:
        self._world.start(self._rank, work)

    def abort(self) -> None:
        self.calls.append("abort")
        self._world.abort(self._rank)

    def shutdown(self) -> None:
        self.calls.append("shutdown")
