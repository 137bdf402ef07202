"""Waits for keys of a store, with a time limit."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch.distributed as dist

__all__ = ["appears"]


def appears(
    store: dist.Store,
    keys: list[str],
    deadline: float,
    given_up: Callable[[], bool] = lambda: False,
) -> bool:
    """Wait until a store has some keys, and return whether it has them.

    The wait looks into the store, with growing pauses between the looks: a wait in the store
    itself would block the store for other threads.

    Parameters
    ----------
    store, keys
        Store, and the keys that have to be in it.
    deadline
        Time at which the wait ends, as ``time.monotonic`` counts.
    given_up
        Function that says whether the wait is in vain.
    """
    pause_s = 0.0005
    while not store.check(keys):
        if given_up() or time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.02)
    return True
