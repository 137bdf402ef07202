"""Which algorithms a test runs, and on how many ranks each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import count, islice
from typing import Any

import pytest

from ringcoll.schedules.algorithms import Algorithm, algorithms, unregister

__all__ = ["EVERY", "each_on", "name_of", "registered_meanwhile", "worlds_of"]

EVERY = tuple(algorithms())


@contextmanager
def registered_meanwhile() -> Iterator[set[tuple[str, str]]]:
    """Take away what is registered within; collective and name of each, at the end."""
    before, added = {(entry.collective, entry.name) for entry in algorithms()}, set[Any]()
    try:
        yield added
    finally:
        added |= {(entry.collective, entry.name) for entry in algorithms()} - before
        for collective, name in added:
            unregister(collective, name)


def name_of(entry: Algorithm) -> str:
    """The name of a test of an algorithm."""
    return f"{entry.collective}-{entry.name}"


def worlds_of(entry: Algorithm, *world_sizes: int) -> list[int]:
    """The numbers of ranks for which an algorithm is defined, of those that are wanted.

    Two of them are above 1, if two are wanted: an algorithm for powers of three
    also gets 3 and 9 where neither is in the list.
    """
    fitting = [k for k in world_sizes if not entry.restriction(k)]
    wanted = min(2, sum(k > 1 for k in world_sizes))
    missing = max(0, wanted - sum(k > 1 for k in fitting))
    others = (k for k in count(2) if k not in fitting and not entry.restriction(k))
    return [*fitting, *islice(others, missing)]


def each_on(*world_sizes: int, entries: Iterable[Algorithm] = EVERY) -> list[Any]:
    """Parameters of a test: each algorithm with each number of ranks that `worlds_of` has."""
    return [
        pytest.param(entry, world_size, id=f"{name_of(entry)}-{world_size}")
        for entry in entries
        for world_size in worlds_of(entry, *world_sizes)
    ]
