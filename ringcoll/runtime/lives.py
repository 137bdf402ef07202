"""Which ranks of a group have ended: those on this host are processes that can be looked at.

Transports hear of most deaths by themselves. They do not hear of all: before the ranks are connected
nobody does, and gloo does not in the middle of a long message. A process is known by its number and the
time of its start, as numbers are given away again.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from ringcoll.system.machine import place
from ringcoll.system.stores import read_json

__all__ = ["Lives", "Process", "tell"]

_KEY = "ringcoll/process/{}"


def _state(pid: int) -> tuple[str, str]:
    """State of a process, and the time of its start. Raises ``OSError`` if there is no such process."""
    # The name before the last parenthesis may hold anything.
    *_, rest = (
        Path(f"/proc/{pid:d}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")
    )
    fields = rest.split()
    return fields[0], fields[19]


class Process(NamedTuple):
    """A process: number, time of its start, and `place`."""

    pid: int
    start: str
    place: str

    @classmethod
    def own(cls) -> Process:
        """The process that asks; without a start where ``/proc`` does not show processes."""
        try:
            start = _state(os.getpid())[1]
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
            state, start = _state(self.pid)
        except OSError:
            return True
        return start != self.start or state in "ZX"  # a zombie only waits to be reaped


def tell(store: dist.Store, rank: int, process: Process | None = None) -> None:
    """Tell the ranks of a group, through the group's store, which process a rank is; by default, this."""
    with contextlib.suppress(RuntimeError):  # there is no store any more
        store.set(_KEY.format(rank), json.dumps(process or Process.own()))


class Lives:
    """The processes of a group's ranks, each of which has called `tell`."""

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self._store = store
        self._unknown = set(range(world_size)) - {rank}
        self._processes: dict[int, Process] = {}  # of ranks on this host

    def ended(self) -> set[int]:
        """The ranks on this host whose process has ended, of those that have told their process."""
        with contextlib.suppress(RuntimeError):
            for peer in tuple(self._unknown):
                if self._store.check([_KEY.format(peer)]):
                    self._unknown.discard(peer)
                    process = Process.of(read_json(self._store, _KEY.format(peer)))
                    if process is not None and process.is_here:
                        self._processes[peer] = process
        return {peer for peer, process in self._processes.items() if process.has_ended()}
