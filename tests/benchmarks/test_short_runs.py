"""The scripts behind benchmarks/RESULTS.md: a short run of each that no other test runs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import results
from tests.programs.started import run_program
from tests.programs.warm import ProgramWithWarmRanks

FOLDER = Path(__file__).parents[2] / "benchmarks"
RUNS = {
    "backend": "-k 2 --seconds 0.2 --pending 200",
    "choice": "-k 2 --collectives all_reduce,reduce --sizes 4,64K --seconds 0.2",
    "memory": "-k 2 --nbytes 1M",
    "odd_calls": "--calls 12",
    "overlap": "--layers 4 --width 32 --seconds 0.2",
    "peers": "-k 2 --sizes 4,64K --algorithms persistent,shared_tensors --cycles 1 --seconds 0.5",
    "reproducible": "-k 2 --seconds 0.2",
    "sharded": "--layers 2 --width 32 --bucket-bytes 4K --seconds 0.3",
    "tensor": "--layers 2 --width 32 --seconds 0.2",
    "verify_messages": "--seconds 0.2",
    "versus_native": "-k 2 --sizes 64,64K --seconds 0.1",
}


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("script", RUNS)
def test_a_short_run(script: str, tmp_path: Path):
    path = tmp_path / "record.json"
    command = [sys.executable, str(FOLDER / f"{script}.py"), *RUNS[script].split()]
    by = subprocess.Popen if script == "memory" else ProgramWithWarmRanks  # once as users start it
    run_program(*command, "--json", str(path), by=by).check_returncode()
    record = results.read(path)
    assert record.tables
    for table in record.tables:
        assert table.rows, table.caption
        numbers = [
            (column, cell)
            for row in table.rows
            for column, cell in zip(table.columns, row, strict=True)
            if isinstance(cell, int | float)
        ]
        assert numbers, table.caption
        # A process that gives memory back meanwhile grows by less than nothing.
        below = [(column, cell) for column, cell in numbers if cell < 0]
        assert all(column.startswith("growth") for column, _ in below), (table.caption, below)


@pytest.mark.processes
def test_without_the_sources_of_deepspeed(tmp_path: Path):
    command = [sys.executable, str(FOLDER / "deepspeed_peer.py"), "--csrc", str(tmp_path)]
    found = subprocess.run(command, timeout=110, capture_output=True, text=True, check=False)
    assert found.returncode == 1
    assert found.stderr.strip().endswith("make bench-deepspeed installs them")


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.skipif(shutil.which("tc") is None, reason="tc is not installed")
def test_a_short_run_over_slow_links():
    words = ("--hosts", "2", "--per-host", "1", "--nbytes", "64K", "--repetitions", "2")
    command = [sys.executable, str(FOLDER / "hosts.py"), *words]
    found = subprocess.run(command, check=True, timeout=110, capture_output=True, text=True)
    assert "hierarchical" in found.stdout
