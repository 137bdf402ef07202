"""Stores that outlive their ranks, and ranks that outlive their store."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ringcoll.runtime.launch import Ranks
from tests.programs import restarts
from tests.programs.started import run_program, started
from tests.programs.warm import WarmProgram

pytestmark = pytest.mark.processes


@pytest.mark.slow
@pytest.mark.parametrize("kind,programs", [("tcp", 2), ("file", 2), ("torchrun", 1)])
def test_each_life_trains_on(kind: str, programs: int):
    command = [sys.executable, "-m", "tests.programs.restarts", kind, "45", str(programs), "2"]
    result = run_program(*command)
    assert result.stdout == f"0 of {programs} programs failed\n", result.stderr[-4000:]


def test_groups_outlive_the_rank_that_holds_the_store(tmp_path: Path):
    command = sys.executable, "-m", "tests.programs.leaving"
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(
                started(*command, str(rank), str(tmp_path), by=WarmProgram, **pipes)
            )
            for rank in range(3)
        ]
        outputs = [rank.communicate(timeout=100) for rank in ranks]
    assert [output for output, _ in outputs] == ["", *2 * ["[30.0, 30.0] 7.0\n"]], outputs


def test_groups_of_one_store_and_name():
    with Ranks(3, backend="ringcoll", timeout_s=60.0) as ranks:
        assert ranks.run(restarts.again_and_again) == 3 * [[3.0, 6.0, 9.0]]
