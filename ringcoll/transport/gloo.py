"""Point-to-point messages over torch's gloo, for CPU tensors.

The transport makes a process group of its own over the store of the user's group,
so that the library's messages and the user's never meet.

Facts it rests on (torch 2.13.0): a receive buffer of the wrong length aborts the
process or is filled in part, so tags must tell calls apart; a wait cannot be polled,
and neither ``abort()`` nor another thread wakes it, but shutting down the group's
connected sockets does, within milliseconds, on both sides (the listening socket must
be left alone: closing it aborts the process).
"""

from __future__ import annotations

import os
import socket
import stat
import threading
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ringcoll.errors import CollectiveTimeoutError, PeerLostError
from ringcoll.transport.base import Handle, Message

__all__ = ["GlooTransport"]

# Which descriptors a group opens is found by comparing before and after.
_creation = threading.Lock()


def _sockets() -> dict[int, int]:
    """The process's sockets: descriptor to inode."""
    found = {}
    opened = Path("/proc/self/fd")
    for entry in opened.iterdir() if opened.exists() else ():
        try:
            status = os.fstat(int(entry.name))
        except OSError:
            continue  # closed meanwhile
        if stat.S_ISSOCK(status.st_mode):
            found[int(entry.name)] = status.st_ino
    return found


class GlooTransport:
    """Messages over a private group of gloo.

    Parameters
    ----------
    store
        Seen by all ranks of the group, and used by nobody else: a ``PrefixStore``.
    rank, world_size
        This rank, and the number of ranks.
    timeout_s
        Time limit for connecting.
    """

    name = "gloo"
    ordered = False

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout_s: float) -> None:
        self.rank, self.world_size = rank, world_size
        with _creation:
            before = _sockets()
            self._group: Any = dist.ProcessGroupGloo(
                store, rank, world_size, timedelta(seconds=timeout_s)
            )
            self._own = dict(_sockets().items() - before.items())

    def post(self, receives: Sequence[Message], sends: Sequence[Message]) -> list[Handle]:
        """Start messages; see `Transport.post`."""
        group = self._group
        handles: list[Handle] = [group.recv([tensor], peer, tag) for peer, tensor, tag in receives]
        handles += [group.send([tensor], peer, tag) for peer, tensor, tag in sends]
        return handles

    def wait(self, handle: Handle, timeout_s: float) -> None:
        """Wait for one message; see `Transport.wait`."""
        try:
            handle.wait(timedelta(seconds=timeout_s))  # type: ignore[attr-defined]
        except RuntimeError as error:
            text = str(error)
            if "imed out" in text or "imeout" in text:
                raise CollectiveTimeoutError(text) from error
            raise PeerLostError(text) from error

    def abort(self) -> None:
        """Shut the connections down: whoever waits on them, here or there, wakes up."""
        for descriptor, inode in self._own.items():
            try:
                # The number may have been given to another file since.
                if os.fstat(descriptor).st_ino != inode:
                    continue
                with socket.socket(fileno=os.dup(descriptor)) as connection:
                    connection.getpeername()  # fails for the listening socket
                    connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
        self._own = {}

    def close(self) -> None:
        """Drop the group and its connections."""
        self._own = {}
        self._group = None
