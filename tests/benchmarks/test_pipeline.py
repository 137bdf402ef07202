"""The script that measures pipelines: a short run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import results
from tests.programs.started import run_program
from tests.programs.warm import ProgramWithWarmRanks

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "pipeline.py"


@pytest.mark.processes
@pytest.mark.slow
def test_a_short_run(tmp_path: Path) -> None:
    path = tmp_path / "pipeline.json"
    words = ("--seconds", "0", "-m", "3", "--layers", "4", "--width", "8", "--batch", "6")
    command = [sys.executable, str(SCRIPT), *words, "--json", str(path)]
    run_program(*command, by=ProgramWithWarmRanks).check_returncode()
    (table,) = results.read(path).tables
    rows = {row[0]: row for row in table.rows}
    assert [*rows] == ["gpipe", "1f1b", "torch 1F1B"]
    assert rows["1f1b"][5:8] == [0.25, 2, 2], "idle, by formula; activations"
    for name in ("gpipe", "1f1b"):
        assert 0 < rows[name][4] < 1
        assert rows[name][6] == rows[name][7], "as many activations as the schedule says"
