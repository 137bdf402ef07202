"""Stragglers: ranks that are slow on purpose."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ringcoll.training.arguments import require


@contextmanager
def slowed(
    factor: float,
    *,
    least_s: float = 0.0,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], object] = time.sleep,
) -> Iterator[None]:
    """Make a block last longer, by sleeping at its end.

    ::

        with slowed(2.0 if rank == 3 else 1.0, least_s=0.01):
            loss(model(inputs), targets).backward()

    Parameters
    ----------
    factor
        Time of the block over the time that it takes by itself, at least 1.
    least_s
        Time, in seconds, that the block takes by itself at least. With a time far above the time of
        computing, ranks that share a core are as fast as ranks with a core each.
    clock, sleep
        Clock, and how to wait, in seconds.
    """
    for argument, value, least in (("factor", factor, 1), ("least_s", least_s, 0)):
        message = "a block cannot last shorter than it does"
        require(value >= least, argument, message, f"at least {least}", value)
    begin_s = clock()
    yield
    took_s = clock() - begin_s
    remaining_s = factor * max(took_s, least_s) - took_s
    if remaining_s > 0:
        sleep(remaining_s)
