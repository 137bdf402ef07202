"""Programs that mpiexec starts: they end, and their failures are errors."""

from __future__ import annotations

import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.programs.started import started

pytestmark = pytest.mark.processes
FOLDER = Path(__file__).parents[2] / "benchmarks"
NOTED = "import pathlib, os, sys, time; pathlib.Path(sys.argv[1], str(os.getpid())).touch(); time.sleep(60)"


@pytest.fixture
def mpiexec(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(FOLDER)
    return import_module("mpiexec")


def runs(process: int) -> bool:
    """Whether a process is there, and no zombie that nobody has waited for yet."""
    try:
        status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    except OSError:
        return False
    return "State:\tZ" not in status


def test_a_program_that_does_not_end_is_ended(mpiexec: Any, tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    command = mpiexec.beside()
    if command is None:
        pytest.skip("no MPI library is installed in this environment")
    with pytest.raises(TimeoutError, match="not done after 4 s"):
        mpiexec.run(command, 2, [sys.executable, "-c", NOTED, str(tmp_path)], timeout_s=4)
    ranks = [int(path.name) for path in tmp_path.iterdir()]
    assert len(ranks) == 2
    deadline = time.monotonic() + 10
    while any(map(runs, ranks)):
        assert time.monotonic() < deadline, ranks
        time.sleep(0.1)


def test_a_program_ends_with_the_one_that_has_started_it(mpiexec: Any, tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    command = mpiexec.beside()
    if command is None:
        pytest.skip("no MPI library is installed in this environment")
    code = f"import sys; sys.path.insert(0, {str(FOLDER)!r}); import mpiexec; "
    code += "mpiexec.run(mpiexec.beside(), 2, [sys.executable, *sys.argv[1:]], timeout_s=60)"
    with started(sys.executable, "-c", code, "-c", NOTED, str(tmp_path)) as process:
        deadline = time.monotonic() + 60
        while len(ranks := [int(path.name) for path in tmp_path.iterdir()]) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.kill()
    while any(map(runs, ranks)):
        assert time.monotonic() < deadline, ranks
        time.sleep(0.1)


def test_a_program_that_fails_is_an_error(mpiexec: Any) -> None:
    command = mpiexec.beside()
    if command is None:
        pytest.skip("no MPI library is installed in this environment")
    with pytest.raises(mpiexec.MpiexecError, match="pigeons"):
        mpiexec.run(command, 2, [sys.executable, "-c", "raise SystemExit('pigeons')"], timeout_s=60)
