"""Hypothesis profiles, and the pools of real processes that test modules share."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, settings

from ringcoll.launch import Ranks
from tests.support.ranks import join

# Importing it has an effect, which collecting doctests must not have.
collect_ignore = ["support/wrong_for_good.py"]

# What was measured for this user must not choose here; ranks inherit it.
os.environ["RINGCOLL_TUNING"] = "off"

# `pytest --hypothesis-profile thorough` tries ten times as much; see `tests.support.effort`.
_CHECKS = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)
settings.register_profile("usual", max_examples=100, deadline=None, suppress_health_check=_CHECKS)
settings.register_profile("thorough", settings.get_profile("usual"), max_examples=1000)
settings.load_profile("usual")


# --- tests that need a GPU ------------------------------------------------------------


@cache
def _num_gpus() -> int:
    return torch.cuda.device_count()


_OF_A_GPU = ("for", "a GPU")  # a report's property; it comes from xdist's workers, too


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Note which tests are for a GPU; a folder may have the marker's name, too."""
    for item in items:
        if item.get_closest_marker("gpu"):
            item.user_properties.append(_OF_A_GPU)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what there are too few GPUs for; CUDA is asked now, not when tests are collected."""
    marker = item.get_closest_marker("gpu")
    needed = 0 if marker is None else int(marker.kwargs.get("count", 1))
    if needed and _num_gpus() < needed:
        pytest.skip("no CUDA device" if not _num_gpus() else f"fewer than {needed} CUDA devices")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many tests for a GPU were skipped, and why."""
    reasons = Counter(
        str(report.longrepr[2]).removeprefix("Skipped: ")
        for report in terminalreporter.getreports("skipped")
        if _OF_A_GPU in map(tuple, report.user_properties) and isinstance(report.longrepr, tuple)
    )
    for reason, number in reasons.items():
        tests = "test was" if number == 1 else "tests were"
        terminalreporter.write_line(f"gpu: {number} {tests} not run: {reason}")


# --- ranks ----------------------------------------------------------------------------


class _Pools:
    """Ranks that are started once, and again where a test has ended them."""

    def __init__(self) -> None:
        self._open: dict[tuple[int, str, str | None, str | None], Ranks] = {}

    def __call__(
        self,
        world_size: int,
        backend: str = "gloo",
        transport: str | None = None,
        cuda_transport: str | None = None,
    ) -> Ranks:
        key = world_size, backend, transport, cuda_transport
        ranks = self._open.get(key)
        if ranks is None or not all(process.is_alive() for process in ranks.processes):
            ranks = Ranks(world_size, backend=backend, timeout_s=60.0)
            self._open[key] = ranks
            ranks.run(join, transport, cuda_transport)
        return ranks

    def close(self) -> None:
        for ranks in self._open.values():
            ranks.close()


# Of a module: groups that tests leave behind keep threads that wake up 100 times a second.
@pytest.fixture(scope="module")
def pool() -> Iterator[Callable[..., Ranks]]:
    """Gives a pool of real processes: so many, on a backend, with transports."""
    pools = _Pools()
    yield pools
    pools.close()
