"""Hypothesis profiles, and the pools of real processes that test modules share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, settings

from ringcoll.launch import Ranks
from tests.support.ranks import join

# Importing it has an effect, which collecting doctests must not have.
collect_ignore = ["support/wrong_for_good.py"]

# `pytest --hypothesis-profile thorough` tries ten times as much; see `tests.support.effort`.
_CHECKS = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)
settings.register_profile("usual", max_examples=100, deadline=None, suppress_health_check=_CHECKS)
settings.register_profile("thorough", settings.get_profile("usual"), max_examples=1000)
settings.load_profile("usual")


class _Pools:
    """Ranks that are started once, and again where a test has ended them."""

    def __init__(self) -> None:
        self._open: dict[tuple[int, str, str | None], Ranks] = {}

    def __call__(
        self, world_size: int, backend: str = "gloo", transport: str | None = None
    ) -> Ranks:
        key = world_size, backend, transport
        ranks = self._open.get(key)
        if ranks is None or not all(process.is_alive() for process in ranks.processes):
            ranks = Ranks(world_size, backend=backend, timeout_s=60.0)
            self._open[key] = ranks
            ranks.run(join, transport)
        return ranks

    def close(self) -> None:
        for ranks in self._open.values():
            ranks.close()


# Of a module: groups that tests leave behind keep threads that wake up 100 times a second.
@pytest.fixture(scope="module")
def pool() -> Iterator[Callable[..., Ranks]]:
    """Gives a pool of real processes: so many, on a backend, with a transport."""
    pools = _Pools()
    yield pools
    pools.close()
