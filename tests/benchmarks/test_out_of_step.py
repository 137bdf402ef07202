"""The script that trains out of lock-step: a short run of all of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import results
from tests.fakes.hosts import reason_why_not_slow
from tests.programs.started import run_program
from tests.programs.warm import ProgramWithWarmRanks

SCRIPT = str(Path(__file__).parents[2] / "benchmarks" / "out_of_step.py")


WAYS = "lock-step,gossip ring,local SGD,server sync,server async"
SMALL = ("--slower", "2", "--steps", "8", "--step-ms", "1", "--runs", "1", "--target", "2.3")


def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return run_program(
        sys.executable,
        SCRIPT,
        *words,
        by=ProgramWithWarmRanks,
        env=os.environ | variables,
        timeout_s=200.0,
    )


@pytest.mark.processes
@pytest.mark.slow
def test_a_short_run(tmp_path: Path) -> None:
    path, picture = tmp_path / "out.json", tmp_path / "out.svg"
    files = ("--json", str(path), "--picture", str(picture))
    done = run("-k", "3", *SMALL, "--ways", WAYS, "--wandering", *files)
    assert done.returncode == 0, done.stderr
    (table,) = results.read(path).tables
    assert [row[0] for row in table.rows] == WAYS.split(",")
    for _, slow, seconds, _, steps, nbytes, lowest, reached in table.rows:
        assert slow == "2 x slower"
        assert lowest <= 2.3
        assert reached == 1
        assert seconds > 0
        assert steps in (4, 8)
        assert nbytes > 0
    assert picture.read_text().count("<svg") == 1


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.skipif(bool(reason_why_not_slow()), reason=reason_why_not_slow())
def test_a_slow_link_and_a_rank_that_leaves(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    words = ("--throttle", "50", "--leaves", "2", "--ways", "server async")
    done = run("-k", "3", *SMALL, *words, "--json", str(path))
    assert done.returncode == 0, done.stderr
    trained, left = results.read(path).tables
    assert [row[1] for row in trained.rows] == ["2 x slower", "link of 50 Mbit/s"]
    assert all(row[-1] == 1 for row in trained.rows), "all have reached the target"
    assert [row[:3] for row in left.rows] == [
        ["server async", "dies", "PeerLostError: 0, 1"],
        ["server async", "dies, is forgotten", "goes on: 0, 1"],
        ["server async", "says so", "goes on: 0, 1"],
    ]
    for _, how, others, first_s, last_s in left.rows:
        assert (first_s is None) == (last_s is None) == ("goes on" in others), how


@pytest.mark.processes
def test_what_cannot_be_measured_is_refused() -> None:
    done = run("--ways", "lock-step,telepathy")
    assert done.returncode == 2
    assert "--ways: expected some of lock-step, gossip ring" in done.stderr
    done = run("--throttle", "10", PATH="")  # where there are no programs
    assert done.returncode == 1
    assert re.match(r"--throttle: (there is no command ip|making .* root|only Linux)", done.stderr)
