"""Hypothesis profiles, and the ranks that the tests of a module share."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from ringcoll.runtime.launch import PRELOADED, Ranks
from tests.cases.algorithms import registered_meanwhile
from tests.halves import changed, is_left_out
from tests.programs.ranks import join

# Importing it has an effect, which collecting doctests must not have.
collect_ignore = [
    "cases/three_all_reduces.py",
    "fakes/registers_wrong_algorithm.py",
    "mutants/changes.py",
    "mutants/operators.py",
    "programs/late.py",
]

# What was measured for this user must not choose here; ranks inherit it.
os.environ["RINGCOLL_TUNING"] = "off"
# torch's stores look up the names of those who connect, which may take as long (resolv.conf(5)).
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

PRELOADED.append("torch._dynamo")  # 0.8 s of a processor for each rank that has an optimizer

# `pytest --hypothesis-profile thorough` tries ten times as much; see `tests.cases.effort`.
_CHECKS = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)
settings.register_profile("usual", max_examples=100, deadline=None, suppress_health_check=_CHECKS)
settings.register_profile("thorough", settings.get_profile("usual"), max_examples=1000)
# Once for each mutant, always the same (`make mutants`).
settings.register_profile(
    "mutants", settings.get_profile("usual"), max_examples=25, derandomize=True, database=None
)
settings.load_profile("usual")


# --- tests that need a GPU ------------------------------------------------------------


@cache
def _num_gpus() -> int:
    return torch.cuda.device_count()


_OF_A_GPU = ("for", "a GPU")  # a report's property; it comes from xdist's workers, too


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the choice of a half."""
    parser.addoption(
        "--half", choices=("all", "touched"), default="all", help="see tests/halves.py"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Note which tests are for a GPU, mark examples that start processes, and choose the half.

    Of several workers each takes the next file when it has run the last: long files come first, so
    that no worker is left with one at the end.
    """
    for item in items:
        if isinstance(item, pytest.DoctestItem) and "Ranks(" in (item.dtest.docstring or ""):
            item.add_marker("processes")
        if item.get_closest_marker("gpu"):
            item.user_properties.append(_OF_A_GPU)
    if config.getoption("half") == "touched":
        names = changed()
        left_out = [item for item in items if is_left_out(item.nodeid, names)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not is_left_out(item.nodeid, names)]
    if hasattr(config, "workerinput"):
        dear = Counter(
            item.path
            for item in items
            if item.get_closest_marker("slow") or item.get_closest_marker("processes")
        )
        number = Counter(item.path for item in items)
        items.sort(key=lambda item: (-dear[item.path], -number[item.path], item.path))


# Longer than any test may take. Python that hangs in C hears no signal, and pytest-timeout is deaf with it.
_HANGS_S = 400


def pytest_runtest_logstart() -> None:
    """End a worker that hangs, so that the others report it."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        faulthandler.dump_traceback_later(_HANGS_S, exit=True)


def pytest_runtest_logfinish() -> None:
    """Let a worker that waits for the others live."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        faulthandler.cancel_dump_traceback_later()


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


@pytest.fixture(autouse=True)
def no_algorithm_is_left() -> Iterator[None]:
    """Fail the test that leaves an algorithm behind, and not a later one that counts them."""
    with registered_meanwhile() as left:
        yield
    # A process keeps the schedules of the fits that it has read.
    lasting = [name for _, name in left if not name.startswith("fitted_")]
    assert not lasting, "the test has left algorithms in the registry"


@pytest.fixture(scope="session")
def compiled() -> None:
    """Kernels in CuPy's cache: some hundreds, at some tenths of a second each."""
    from tests.programs.gpu_kernels import compile_all

    assert compile_all() > 500


# What can be run on the CPU, is: so tests for a GPU are themselves tested without a GPU.
@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Where the tensors are."""
    if request.param == "cuda":
        request.getfixturevalue("compiled")
    return str(request.param)


# --- processes --------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Let only tests that are marked so start processes that run Python."""
    if item.get_closest_marker("processes"):
        return (yield)

    def refuse(*_: object) -> None:
        raise AssertionError(f"{item.nodeid} starts processes: it needs the marker processes")

    def start(self: subprocess.Popen[Any], args: Any, *rest: Any, **options: Any) -> None:
        if sys.executable in args:
            refuse()
        popen(self, args, *rest, **options)

    popen = subprocess.Popen.__init__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BaseProcess, "start", refuse)
        patch.setattr(subprocess.Popen, "__init__", start)
        return (yield)


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """SIGINT and SIGQUIT reach this process and the programs that it starts.

    Whoever runs the tests may ignore them, as a shell does for jobs in the background; programs
    inherit that.
    """
    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler),
        signal.SIGQUIT: signal.signal(signal.SIGQUIT, signal.SIG_DFL),
    }
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


# --- ranks ----------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def no_ranks_are_left() -> Iterator[None]:
    """End the ranks of `ringcoll.tools.testing` after a module: others look at all processes of pytest."""
    yield
    if (module := sys.modules.get("ringcoll.tools.testing.pool")) is not None:
        module.POOL.close()


# Of a module: groups that tests leave behind keep threads that wake up 100 times a second.
@pytest.fixture(scope="module")
def pool() -> Iterator[Callable[..., Ranks]]:
    """Gives `Ranks`: so many, on a backend, with transports; once, and again where a test has ended them."""
    kept: dict[tuple[object, ...], Ranks] = {}

    def pool(
        world_size: int,
        backend: str = "gloo",
        transport: str | None = None,
        cuda_transport: str | None = None,
    ) -> Ranks:
        key = world_size, backend, transport, cuda_transport
        if key in kept and not kept[key].alive:
            kept.pop(key).kill()
        if key not in kept:
            kept[key] = Ranks(world_size, backend=backend, timeout_s=60.0)
            kept[key].run(join, transport, cuda_transport)
        return kept[key]

    yield pool
    for ranks in kept.values():
        ranks.close()
