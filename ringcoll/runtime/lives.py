"""Which ranks of a group have ended: those on this host are processes that can be looked at.

Transports hear of most deaths by themselves. They do not hear of all: before the ranks are connected
nobody does, and gloo does not in the middle of a long message. A process is known by its number and the
time of its start, as numbers are given away again.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import torch.distributed as dist

from ringcoll.system.machine import place

__all__ = ["Lives", "tell"]

_KEY = "ringcoll/process/{}"


def _state(pid: int) -> tuple[str, str]:
    """State of a process, and the time of its start. Raises ``OSError`` if there is no such process."""
    # The name before the last parenthesis may hold anything.
    *_, rest = (
        Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")
    )
    fields = rest.split()
    return fields[0], fields[19]


def tell(store: dist.Store, rank: int) -> None:
    """Tell the other ranks of a group, through the group's store, which process a rank is."""
    with contextlib.suppress(OSError, RuntimeError):  # no such files here; or no store any more
        store.set(_KEY.format(rank), f"{os.getpid()} {_state(os.getpid())[1]} {place()}")


class Lives:
    """The processes of a group's ranks, each of which has called `tell`."""

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self._store = store
        self._unknown = set(range(world_size)) - {rank}
        self._processes: dict[int, tuple[int, str]] = {}  # of ranks on this host

    def ended(self) -> set[int]:
        """The ranks on this host whose process has ended, of those that have told their process."""
        with contextlib.suppress(RuntimeError):
            for peer in tuple(self._unknown):
                if self._store.check([_KEY.format(peer)]):
                    self._unknown.discard(peer)
                    pid, start, where = self._store.get(_KEY.format(peer)).decode().split(" ", 2)
                    if where == place() and int(pid) != os.getpid():
                        self._processes[peer] = int(pid), start
        return {peer for peer, process in self._processes.items() if not _lives(*process)}


def _lives(pid: int, start: str) -> bool:
    try:
        state, began = _state(pid)
    except OSError:
        return False
    return began == start and state not in "ZX"  # a zombie only waits to be reaped
