"""What all tests rely on: processes start where a marker says so, and end with their test."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from ringcoll.runtime.launch import Ranks
from tests.programs.started import of_session, started

# It starts another one, which the end of the first alone would not end.
PROGRAM = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
print("both", flush=True)
time.sleep(100)
"""


@pytest.mark.parametrize(
    "start", [lambda: subprocess.Popen([sys.executable, "-c", ""]), lambda: Ranks(1)]
)
def test_processes_start_only_where_a_marker_says_so(start):
    with pytest.raises(AssertionError, match=r"test_processes_start.*needs the marker processes"):
        start()


@pytest.mark.processes
def test_a_test_that_fails_leaves_no_process():
    def failing() -> None:
        with started(sys.executable, "-c", PROGRAM, stdout=subprocess.PIPE) as process:
            sessions.append(process.pid)
            assert process.stdout is not None
            assert process.stdout.readline() == "both\n"
            raise LookupError

    sessions: list[int] = []
    with pytest.raises(LookupError):
        failing()
    deadline = time.monotonic() + 10
    while of_session(*sessions):
        assert time.monotonic() < deadline
        time.sleep(0.05)
