"""Ranks compare calls through the store, before anything is sent.

On transports whose messages have no tags to tell calls apart each kind of call is compared once; on
all transports each call is, if ``RINGCOLL_DEBUG`` is ``detail``.
"""

from __future__ import annotations

import time

import torch.distributed as dist

from ringcoll.errors import CollectiveTimeoutError, PeerLostError
from ringcoll.machine import answered, appears, compares_calls, read_text
from ringcoll.watch.monitor import Monitor
from ringcoll.watch.notices import LEFT

_MOST_KNOWN = 4096


class CallComparison:
    """The calls that a rank has compared with the other ranks."""

    def __init__(self, store: dist.Store, monitor: Monitor) -> None:
        self._store, self._monitor = store, monitor
        self.known: set[str] = set()
        self.compares_each = compares_calls()
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
        is_detailed = self.compares_each or dist.get_debug_level() == dist.DebugLevel.DETAIL
        each = is_detailed and not capturing
        if description in self.known and not each:
            return
        if len(self.known) >= _MOST_KNOWN:  # on all ranks at once
            self.known.clear()
        self.known.add(description)
        self._count += 1
        progress = self._monitor.progress
        site = "" if progress.current is None else progress.site(progress.current[0])
        with progress.meeting():
            answered(
                self._store, timeout_s, lambda: self._with_others(description, site, timeout_s)
            )

    def _with_others(self, description: str, site: str, timeout_s: float) -> None:
        """Compare a call with those that the others write into the store."""
        rank, monitor = self._monitor.rank, self._monitor
        keys = [f"call/{self._count}/{peer}" for peer in range(monitor.world_size)]
        self._store.set(keys[rank], f"{description}\n{site}")
        deadline = time.monotonic() + timeout_s
        for peer, key in enumerate(keys):
            left = LEFT.format(peer)
            given_up = lambda left=left: monitor.error is not None or self._store.check([left])  # noqa: E731
            # A rank may have come, and left afterwards.
            if not (appears(self._store, [key], deadline, given_up) or self._store.check([key])):
                if monitor.error is not None:
                    raise PeerLostError(f"rank {rank} gave up rank {peer}", peer=peer)
                if self._store.check([left]):
                    raise PeerLostError(f"rank {peer} has closed the group", peer=peer)
                raise CollectiveTimeoutError(
                    f"rank {rank} waited {timeout_s:g} s for rank {peer}", peer=peer
                )
            other, _, where = read_text(self._store, key).rpartition("\n")
            if other != description:
                raise monitor.mismatch(description, peer, other, where)
        # All ranks have come to this comparison, so nobody reads the previous one any more.
        self._store.delete_key(f"call/{self._count - 1}/{rank}")
