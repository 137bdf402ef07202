"""Compares calls through the store, on transports without tags: there no message tells them apart."""

from __future__ import annotations

import time

import torch.distributed as dist

from ringcoll.errors import CollectiveTimeoutError, MismatchError, PeerLostError
from ringcoll.runtime.monitor import Monitor
from ringcoll.system.stores import appears

__all__ = ["CallComparison"]


class CallComparison:
    """What a rank has compared with the others.

    Parameters
    ----------
    store
        Seen by all ranks of the group.
    monitor
        Knows when the group is broken.
    """

    def __init__(self, store: dist.Store, monitor: Monitor) -> None:
        self._store, self._monitor = store, monitor
        self.known: set[str] = set()
        self._count = 0

    def compare(self, description: str, timeout_s: float, *, capturing: bool) -> None:
        """Compare a call with those of all other ranks: each kind once, or each for debugging.

        Raises
        ------
        MismatchError
            A rank has called something else.
        PeerLostError, CollectiveTimeoutError
            A rank did not come.
        """
        each = dist.get_debug_level() == dist.DebugLevel.DETAIL and not capturing
        if description in self.known and not each:
            return
        self.known.add(description)
        before, self._count = self._count, self._count + 1
        rank = self._monitor.rank
        keys = [f"call/{self._count}/{peer}" for peer in range(self._monitor.world_size)]
        self._store.set(keys[rank], description)
        deadline = time.monotonic() + timeout_s
        for peer, key in enumerate(keys):
            if not appears(self._store, [key], deadline, lambda: self._monitor.error is not None):
                if self._monitor.error is not None:
                    raise PeerLostError(f"rank {rank} gave up rank {peer}", peer=peer)
                raise CollectiveTimeoutError(
                    f"rank {rank} waited {timeout_s:g} s for rank {peer}", peer=peer
                )
            theirs = self._store.get(key).decode()
            if theirs != description:
                raise MismatchError(
                    f"rank {rank} called {description}, rank {peer} called {theirs}",
                    peer=peer,
                    mine=description,
                    theirs=theirs,
                )
        self._store.delete_key(f"call/{before}/{rank}")  # all ranks have come further
