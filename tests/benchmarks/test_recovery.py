"""The scripts about ranks that die, and what it costs to see that: a short run of each."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from benchmarks import results
from tests.programs.started import run_program
from tests.programs.warm import ProgramWithWarmRanks

FOLDER = Path(__file__).parents[2] / "benchmarks"

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def run(script: str, path: Path, *words: str) -> list[Any]:
    """The tables of a run."""
    command = [sys.executable, str(FOLDER / script), *words, "--json", str(path)]
    run_program(*command, by=ProgramWithWarmRanks).check_returncode()
    return [*results.read(path).tables]


def test_recovery(tmp_path: Path) -> None:
    words = ("--kills", "2", "--ranks", "2", "--transports", "shared")
    after, beside = run("recovery.py", tmp_path / "recovery.json", *words)
    ((name, ranks, survivors, median, slowest, *_),) = after.rows
    assert (name, ranks, survivors) == ("shared", 2, 2)
    assert 0 < median <= slowest
    ((_, _, ordinary, resilient, ratio, _),) = beside.rows
    assert ratio == resilient / ordinary


def test_soak(tmp_path: Path) -> None:
    (table,) = run("soak.py", tmp_path / "soak.json", "--minutes", "0.15", "--every", "2")
    assert " 0 faults, 0 files or segments left over" in table.caption
    *_, last = table.rows
    _, operations, changes, *_ = last
    assert operations > 10
    assert changes >= 2, "one died, and one came"


def test_what_grows_in_a_soak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    soak = import_module("soak")
    names = [*soak.held()]
    flat = [(60.0 * n, 100 * n, n, *(40 + n % 2 for _ in names)) for n in range(11)]
    assert soak.growth(flat) == []
    assert (
        soak.growth([(*row[:3], 400, *row[4:]) if n == 0 else row for n, row in enumerate(flat)])
        == []
    )
    for column, name in enumerate(names, 3):
        grown = [
            (*row[:column], 70, *row[column + 1 :]) if n == 9 else row for n, row in enumerate(flat)
        ]
        assert soak.growth(grown) == [f"{name} has grown from 41 to 70"]


def test_detection(tmp_path: Path) -> None:
    words = ("--turns", "4", "--transports", "shared")
    (table,) = run("detection.py", tmp_path / "detection.json", *words)
    ((name, on, off, ratio, spread),) = table.rows
    assert name == "shared"
    assert min(on, off, ratio) > 0
    assert spread >= 0
