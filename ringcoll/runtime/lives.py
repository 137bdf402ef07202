"""Which ranks of a group have ended: those on this host are processes that can be looked at.

Transports hear of most deaths by themselves. They do not hear of all: before the ranks are connected
nobody does, and gloo does not in the middle of a long message. A process is known by its number and the
time of its start, as numbers are given away again.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any, NamedTuple

import torch.distributed as dist

from ringcoll.system.machine import place, process_state
from ringcoll.system.stores import read_json

__all__ = ["Lives", "Process", "tell"]

_KEY = "ringcoll/process/{}"


class Process(NamedTuple):
    """A process: number, time of its start, and `place`."""

    pid: int
    start: str
    place: str

    @classmethod
    def own(cls) -> Process:
        """The process that asks; without a start where ``/proc`` does not show processes."""
        try:
            start = process_state(os.getpid()).start
        except OSError:
            start = ""
        return cls(os.getpid(), start, place())

    @classmethod
    def of(cls, told: Any) -> Process | None:
        """The process that a rank has told, from JSON; ``None`` if no rank tells such a thing."""
        match told:
            case [int(pid), str(start), str(where)]:
                return cls(pid, start, where)
        return None

    @property
    def is_here(self) -> bool:
        """Whether it is another process of this host."""
        return self.place == place() and self.pid != os.getpid()

    def has_ended(self) -> bool:
        """Whether it has surely ended; of a process on another host, nothing is known."""
        if not self.start or not self.is_here:
            return False
        try:
            now = process_state(self.pid)
        except OSError:
            return True
        return now.start != self.start or now.state in "ZX"  # a zombie only waits to be reaped


def tell(store: dist.Store, rank: int, process: Process | None = None) -> None:
    """Tell the ranks of a group, through the group's store, which process a rank is; by default, this."""
    with contextlib.suppress(RuntimeError):  # there is no store any more
        store.set(_KEY.format(rank), json.dumps(process or Process.own()))


class Lives:
    """The processes of a group's ranks, each of which has called `tell`.

    ``processes`` are those of other ranks on this host, ``elsewhere`` the ranks on other hosts; both as
    `ended` has seen them.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self._store = store
        self._unknown = set(range(world_size)) - {rank}
        self.processes: dict[int, Process] = {}
        self.elsewhere: set[int] = set()

    def ended(self) -> set[int]:
        """The ranks on this host whose process has ended, of those that have told their process."""
        with contextlib.suppress(RuntimeError):
            for peer in tuple(self._unknown):
                if self._store.check([_KEY.format(peer)]):
                    self._unknown.discard(peer)
                    process = Process.of(read_json(self._store, _KEY.format(peer)))
                    if process is not None and process.is_here:
                        self.processes[peer] = process
                    elif process is not None and process.place != place():
                        self.elsewhere.add(peer)
        return {peer for peer, process in tuple(self.processes.items()) if process.has_ended()}
