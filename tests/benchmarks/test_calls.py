"""The script that measures the cost of a call: a short run of all of it."""

from __future__ import annotations

import signal
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks import results
from tests.programs.started import run_program
from tests.programs.warm import ProgramWithWarmRanks

SCRIPT = str(Path(__file__).parents[2] / "benchmarks" / "calls.py")


@pytest.mark.processes
def test_busy_loops_run_and_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(SCRIPT).parent)
    with import_module("calls").busy_loops(2) as loops:
        assert [loop.poll() for loop in loops] == [None, None]
    assert [loop.returncode for loop in loops] == [-signal.SIGKILL] * 2


@pytest.mark.skipif(find_spec("ucxx") is None, reason="ucxx is not installed")
@pytest.mark.processes
@pytest.mark.slow
def test_a_short_run(tmp_path: Path) -> None:
    path = tmp_path / "calls.json"
    words = ("--seconds", "0", "-k", "2", "--busy", "1", "--json", str(path))
    run_program(sys.executable, SCRIPT, *words, by=ProgramWithWarmRanks).check_returncode()
    threads, ucx, by_hand, backend = results.read(path).tables
    assert len(threads.rows) == len(ucx.rows) == 17  # a barrier has one size
    assert [row[0] for row in by_hand.rows][-1] == "by hand"
    assert [row[:3] for row in backend.rows[::3]] == [
        ["20 all-reduces, blocking", 2, loops] for loops in (0, 1)
    ]
    assert len(backend.rows) == 6


@pytest.mark.processes
def test_an_unknown_part_is_refused() -> None:
    done = run_program(sys.executable, SCRIPT, "--parts", "by hand,nothing")
    assert done.returncode == 1
    assert "expected some of functions, by hand, backend, got nothing" in done.stderr
