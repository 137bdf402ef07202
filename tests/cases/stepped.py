"""The programs of all ranks in one thread, in an order that a random generator picks.

That scheduler is *adversarial*: a message is read from the sender's memory, and written to the
receiver's, as late as the generator likes, and until then the receiver's memory holds garbage. Half
of the hubs lend their messages, and a rank keeps a loan until nobody else can go on. So a schedule or
an executor that relies on luck fails. There is no thread: thousands of cases run in a second.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import NamedTuple

import torch

from ringcoll.errors import CollectiveTimeoutError, TransportError
from ringcoll.runtime.operation import BoundInstruction, Posting, Reading, Wait
from ringcoll.runtime.transport import Handle, Hub, LocalTransport, Message
from ringcoll.runtime.transport.local import Half


class RandomHub(Hub):
    """A hub whose messages move only when `move_one` picks them."""

    def __init__(self, world_size: int, random: Random) -> None:
        super().__init__(world_size)
        self.random = random
        self.lends = random.random() < 0.5
        self.lenders: dict[Half, Half] = {}  # from a lent receive to its send
        self.num_lent = 0
        self._matched: list[tuple[Half, Half]] = []

    def transports(self) -> list[LocalTransport]:
        return [
            LendingTransport(self, rank) if self.lends else LocalTransport(self, rank)
            for rank in range(self.world_size)
        ]

    def post(self, rank: int, receives: Sequence[Message], sends: Sequence[Message]) -> list[Half]:
        for message in receives:
            message.tensor.view(torch.uint8).fill_(self.random.randrange(256))
        return super().post(rank, receives, sends)

    def transfer(self, receive: Half, send: Half) -> None:
        self._matched.append((receive, send))

    def move_one(self) -> bool:
        """Move one matched message, if there is one."""
        if not self._matched:
            return False
        receive, send = self._matched.pop(self.random.randrange(len(self._matched)))
        if receive.message.lent:
            self.lenders[receive] = send
            receive.done = True
        else:
            super().transfer(receive, send)
        return True


class LendingTransport(LocalTransport):
    """Lent messages are read in the sender's memory, and the send ends with the loan."""

    lends_from = 1
    hub: RandomHub

    def view(self, handle: Handle, dtype: torch.dtype) -> torch.Tensor | None:
        assert isinstance(handle, Half)
        tensor = self.hub.lenders[handle].message.tensor
        assert tensor.dtype is dtype
        return tensor if self.hub.random.random() < 0.5 else None

    def read(self, handle: Handle, start: int, into: torch.Tensor) -> None:
        assert isinstance(handle, Half)
        tensor = self.hub.lenders[handle].message.tensor
        into.copy_(tensor[start : start + into.numel()])

    def release(self, handle: Handle) -> None:
        assert isinstance(handle, Half)
        self.hub.num_lent += 1
        self.hub.lenders.pop(handle).done = True


class Waiting(NamedTuple):
    """A message that has to be waited for: its handle, and what it is; or work that can wait."""

    handle: Handle
    wait: Wait | None


def steps(program: Sequence[BoundInstruction], tag: int) -> Iterator[Waiting]:
    """Run a program up to each wait; to be resumed when the message that it yields is there."""
    handles: list[Handle] = []
    for item in program:
        if isinstance(item, Wait):
            yield Waiting(handles[item.message], item)
        elif isinstance(item, Posting):
            handles += item.post(tag)
        elif isinstance(item, Reading):
            yield Waiting(None, None)
            item.run([handles[number] for number in item.messages])
        else:
            item()


def run_together(
    hub: RandomHub, executions: Sequence[Iterator[Waiting]], limit_s: float = 60.0
) -> None:
    """Run the programs of all ranks in this thread, in an order that ``hub.random`` picks.

    ``executions`` are the `steps` of each rank's program.

    Raises
    ------
    TransportError
        No rank can go on: a deadlock. The message says what each rank waits for.
    CollectiveTimeoutError
        The limit was exceeded.
    """
    deadline = time.monotonic() + limit_s
    waiting: dict[int, Waiting | None] = dict.fromkeys(range(len(executions)))
    while waiting:
        if time.monotonic() > deadline:
            raise CollectiveTimeoutError(f"not finished within {limit_s:g} s")
        ready = [
            rank
            for rank, item in waiting.items()
            if item is None or (isinstance(item.handle, Half) and item.handle.done)
        ]
        if not ready and not hub.move_one():  # nobody can go on who has no loan
            ready = [rank for rank, item in waiting.items() if item is not None and not item.wait]
            if not ready:
                raise TransportError(f"deadlock: {_stuck(waiting)}")
        if ready and (hub.random.random() < 0.5 or not hub.move_one()):  # a coin
            rank = hub.random.choice(ready)
            try:
                waiting[rank] = next(executions[rank])
            except StopIteration:
                del waiting[rank]


def _stuck(waiting: Mapping[int, Waiting | None]) -> str:
    """What each rank waits for."""
    return "; ".join(
        f"rank {rank} waits for rank {item.wait.peer} in step {item.wait.step}"
        for rank, item in waiting.items()
        if item is not None and item.wait is not None
    )
