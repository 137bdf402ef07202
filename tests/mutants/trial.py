"""Run the tests of a file, with the file changed in memory only.

Each run is a fork of a process that has imported everything but the library: torch takes seconds.
"""

from __future__ import annotations

import importlib.machinery
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from types import CodeType
from typing import IO, NamedTuple, NoReturn
from unittest import mock

import pytest

__all__ = ["End", "Outcome", "preload", "trial"]

_POLL_S = 0.01
_MEMORY = 12 << 30  # bytes; a mutant may never stop to allocate
_OPTIONS = [
    "-x",
    "-q",
    "--no-header",
    "--tb=no",
    "--hypothesis-profile=mutants",
    "-mnot processes",
    "-pno:cacheprovider",
    "-pno:xdist",
    "--assert=plain",  # pytest would read a file that it rewrites by itself
]


class End(Enum):
    """How a run of the tests ended."""

    PASSED = "passed"
    FAILED = "failed"
    TIMED_OUT = "timed out"


class Outcome(NamedTuple):
    """The end of a run, the test that failed, if one did, the time in seconds, and what was printed."""

    end: End
    by: str
    took_s: float
    printed: str


def preload() -> None:
    """Import what takes long, and nothing that a mutant could be in."""
    # A fork has no threads but its own, and would wait for those of OpenMP.
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    sys.dont_write_bytecode = True
    # Torch would import ringcoll, where that is installed.
    with mock.patch.dict(os.environ, TORCH_DEVICE_BACKEND_AUTOLOAD="0"):
        for name in ("torch", "torch.distributed", "numpy", "hypothesis", "click", "rich.console"):
            __import__(name)
    assert not any(name.partition(".")[0] == "ringcoll" for name in sys.modules)


class _Reporter:
    """A plugin of pytest: tests that have failed before come first; the failed one is written down."""

    def __init__(self, first: Sequence[str], report: IO[str]) -> None:
        self._rank = {name: number for number, name in enumerate(first)}
        self._report = report

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: self._rank.get(item.nodeid, len(self._rank)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._report.write(report.nodeid)
            self._report.flush()


def trial(
    file: Path, source: str | None, tests: Sequence[str], limit_s: float, first: Sequence[str] = ()
) -> Outcome:
    """Run tests with a file changed.

    Parameters
    ----------
    file
        The file.
    source
        Its text in this run; ``None`` for the text that it has.
    tests
        Arguments of pytest.
    limit_s
        Time limit in seconds, after which the run is ended.
    first
        Tests that are run before all others.
    """
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as report, tempfile.TemporaryFile("w+") as printed:
        process = os.fork()
        if process == 0:
            _child(file, source, tests, first, report, printed)
        try:
            status = _wait(process, began + limit_s)
        finally:
            _end_group(process)
        report.seek(0)
        printed.seek(0)
        return Outcome(
            _end(status), report.read(), time.monotonic() - began, printed.read()[-3000:]
        )


def _child(
    file: Path,
    source: str | None,
    tests: Sequence[str],
    first: Sequence[str],
    report: IO[str],
    printed: IO[str],
) -> NoReturn:
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY))
        os.dup2(printed.fileno(), 1)
        os.dup2(printed.fileno(), 2)
        if source is not None:
            _change(file, source)
        status = int(pytest.main([*_OPTIONS, *tests], plugins=[_Reporter(first, report)]))
        sys.stdout.flush()
    except BaseException as error:  # noqa: BLE001  # the fork must not go on as its parent
        os.write(1, repr(error).encode())
        status = int(pytest.ExitCode.INTERNAL_ERROR)
    os._exit(status)


def _change(file: Path, source: str) -> None:
    """Let every import of a file get another source."""
    loader = importlib.machinery.SourceFileLoader
    original = loader.get_code
    changed = file.resolve()

    def get_code(self: importlib.machinery.SourceFileLoader, fullname: str) -> CodeType | None:
        if Path(self.path).resolve() == changed:
            return compile(source, self.path, "exec", dont_inherit=True)
        return original(self, fullname)

    loader.get_code = get_code  # type: ignore[method-assign, assignment]


def _wait(process: int, deadline: float) -> int | None:
    """The exit status of a child; ``None`` if it did not end in time."""
    while time.monotonic() < deadline:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(_POLL_S)
    return None


def _end_group(process: int) -> None:
    """End a child and what it started."""
    try:
        os.killpg(process, signal.SIGKILL)
        os.waitpid(process, 0)
    except (ProcessLookupError, ChildProcessError):
        pass


def _end(status: int | None) -> End:
    if status is None:
        return End.TIMED_OUT
    return End.PASSED if status == pytest.ExitCode.OK else End.FAILED
