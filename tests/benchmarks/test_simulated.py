"""The scripts that hold simulated times against others: a short run of each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import results, simgrid
from ringcoll.schedules.algorithms import schedule_of
from tests.programs.started import run_program
from tests.programs.warm import ProgramWithWarmRanks

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.processes
@pytest.mark.slow
def test_against_measured_times(tmp_path: Path) -> None:
    path = tmp_path / "simulated.json"
    words = ("--seconds", "0", "--sizes", "64K,256K")
    command = [sys.executable, str(FOLDER / "simulated.py"), *words, "--json", str(path)]
    run_program(*command, by=ProgramWithWarmRanks).check_returncode()
    times, errors = results.read(path).tables
    algorithm_names = [row[0] for row in errors.rows]
    assert {"ring", "recursive_doubling", "binomial_tree"} <= {*algorithm_names}
    assert [row[:2] for row in times.rows] == [
        [name, nbytes] for name in algorithm_names for nbytes in (64 << 10, 256 << 10)
    ]
    for _, _, measured, _, simulated, ratio in times.rows:
        assert ratio == simulated / measured > 0
    for (_, error, good), row, other in zip(
        errors.rows, times.rows[::2], times.rows[1::2], strict=True
    ):
        assert error == pytest.approx((abs(row[5] - 1) + abs(other[5] - 1)) / 2)
        assert good == ("yes" if error <= 0.25 else "no")


def test_simgrid_gets_the_steps() -> None:
    steps = [*simgrid.steps_of(schedule_of("all_reduce", "ring", 4), 1, 400)]
    assert steps == [[[[2, 100]], [0]]] * 6


def test_the_record_of_simgrid_is_within_the_limit() -> None:
    (table,) = results.read(FOLDER / "records" / "simgrid.json").tables
    assert len({row[0] for row in table.rows}) >= 3
    assert len({row[1] for row in table.rows}) == 2
    assert all(abs(row[-1] - 1) <= simgrid.LIMIT for row in table.rows)


@pytest.mark.processes
def test_a_python_without_simgrid_is_told() -> None:
    command = [sys.executable, str(FOLDER / "simgrid.py"), "--python", sys.executable, "-k", "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "cannot run SimGrid: ModuleNotFoundError" in done.stderr


@pytest.mark.processes
@pytest.mark.slow
def test_scale(tmp_path: Path) -> None:
    path = tmp_path / "scale.json"
    command = [sys.executable, str(FOLDER / "simulation_scale.py"), "--most", "128"]
    run_program(
        *command, "--json", str(path), by=ProgramWithWarmRanks, timeout_s=60.0
    ).check_returncode()
    (table,) = results.read(path).tables
    assert [row[:4] for row in table.rows] == [
        ["ring", ranks, "events", ranks * 2 * (ranks - 1)] for ranks in (64, 128)
    ]
    assert all(row[4] > 0 < row[6] for row in table.rows)
