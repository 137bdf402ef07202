"""The script that trains out of lock-step: a short run of all of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import results

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "out_of_step.py"


@pytest.mark.processes
@pytest.mark.slow
def test_a_short_run(tmp_path: Path) -> None:
    path, picture = tmp_path / "out.json", tmp_path / "out.svg"
    small = ("-k", "3", "--slower", "2", "--steps", "8", "--step-ms", "1", "--runs", "1")
    words = (
        *small,
        "--wandering",
        "--target",
        "2.3",
        "--json",
        str(path),
        "--picture",
        str(picture),
    )
    subprocess.run([sys.executable, SCRIPT, *words], check=True, timeout=100, capture_output=True)
    record = results.read(path)
    (table,) = record.tables
    assert len({row[0] for row in table.rows}) == len(table.rows) == 7
    for _, slower, seconds, _, steps, nbytes, lowest, reached in table.rows:
        assert slower == 2
        assert lowest <= 2.3
        assert reached == 1
        assert seconds > 0
        assert steps in (4, 8)
        assert nbytes > 0
    assert picture.read_text().count("<svg") == 1


@pytest.mark.processes
def test_an_unknown_way_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, "--ways", "lock-step,telepathy"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 2
    assert "--ways: expected some of lock-step, gossip ring" in done.stderr
