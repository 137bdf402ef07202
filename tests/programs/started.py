"""Programs that tests start, and end with all processes that the programs have started.

A program has a session of its own, whose processes can be found when the program has ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["of_session", "run_program", "started"]


def of_session(session: int) -> list[int]:
    """The processes of a session that have not ended, from /proc."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text(encoding="utf-8").rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] not in "ZX":
            found.append(int(status.parent.name))
    return found


@contextlib.contextmanager
def started(
    *command: str, by: type[subprocess.Popen[Any]] = subprocess.Popen, **options: Any
) -> Iterator[subprocess.Popen[str]]:
    """Start a program, which is killed at the end of the block with all that it has started.

    Parameters
    ----------
    *command
        The program and its arguments.
    by
        What starts it; `warm.WarmProgram` takes less time. Ranks of a `warm.ProgramWithWarmRanks` are
        not in its session, and end by themselves.
    **options
        For `subprocess.Popen`.
    """
    with by(command, text=True, start_new_session=True, **options) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def run_program(
    *command: str, timeout_s: float = 100.0, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, as `subprocess.run`; its output is captured."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with started(*command, **pipes, **options) as process:
        output, errors = process.communicate(timeout=timeout_s)
    return subprocess.CompletedProcess(command, process.returncode, output, errors)
