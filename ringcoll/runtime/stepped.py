"""The programs of all ranks in one thread, in an order that a random generator picks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ringcoll.errors import CollectiveTimeoutError, TransportError
from ringcoll.runtime.executor import Instruction, Posting
from ringcoll.runtime.plan import Wait
from ringcoll.transport.base import Handle
from ringcoll.transport.local import Half, Hub

__all__ = ["Waiting", "run_together", "steps"]


class Waiting(NamedTuple):
    """A message that has to be waited for: its handle, and what it is."""

    handle: Handle
    wait: Wait


def steps(program: Sequence[Instruction], tag: int) -> Iterator[Waiting]:
    """Run a program up to each wait; to be resumed when the message that it yields is there.

    Parameters
    ----------
    program, tag
        As for `ringcoll.runtime.executor.drive`.
    """
    handles: list[Handle] = []
    for item in program:
        if isinstance(item, Wait):
            yield Waiting(handles[item.message], item)
        elif isinstance(item, Posting):
            handles += item.post(tag)
        else:
            item()


def run_together(hub: Hub, executions: Sequence[Iterator[Waiting]], limit_s: float = 60.0) -> None:
    """Run the programs of all ranks in this thread, in an order that ``hub.random`` picks.

    Parameters
    ----------
    hub
        A hub with a random generator.
    executions
        `steps` of each rank's program.
    limit_s
        Time limit for the whole, in seconds.

    Raises
    ------
    TransportError
        No rank can go on: a deadlock. The message says what each rank waits for.
    CollectiveTimeoutError
        The limit was exceeded.
    """
    assert hub.random is not None
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
        if ready and (hub.random.random() < 0.5 or not hub.move_one()):  # a coin
            rank = hub.random.choice(ready)
            try:
                waiting[rank] = next(executions[rank])
            except StopIteration:
                del waiting[rank]
        elif not ready and not hub.move_one():
            stuck = "; ".join(
                f"rank {rank} waits for rank {item.wait.peer} in step {item.wait.step}"
                for rank, item in waiting.items()
                if item is not None
            )
            raise TransportError(f"deadlock: {stuck}")
