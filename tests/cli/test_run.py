"""`ringcoll run`: scripts on real processes, of which some fail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ringcoll.runtime.machine import process_state

pytestmark = pytest.mark.processes

_FAILS = """
import os, sys, time
rank = os.environ["RANK"]
print("here", rank, os.environ["WORLD_SIZE"], *sys.argv[1:])
if rank == "1":
    sys.exit(3)
time.sleep(float(sys.argv[2]))
print("end", rank, end="")
"""
_TRAINS = """
import os, signal, torch, torch.distributed as dist, ringcoll
from ringcoll.training import resilient
dist.init_process_group("ringcoll")
group = resilient.start()
for step in range(3):
    if step == 1 and os.environ["RANK"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    x = torch.tensor([1 << int(os.environ["RANK"])])
    ringcoll.all_reduce(x, group=group)
    print("step", step, "sum", x.item())
group.close()
"""


def run(path: Path, code: str, *words: str) -> subprocess.CompletedProcess[str]:
    """The command with a script of some text."""
    script = path / "script.py"
    script.write_text(code)
    before = words.index("--") if "--" in words else len(words)
    command = [sys.executable, "-m", "ringcoll.tools.cli", "run", *words[:before], str(script)]
    return subprocess.run(
        [*command, *words[before + 1 :]], capture_output=True, text=True, timeout=100, check=False
    )


def test_if_one_rank_fails_the_others_are_ended(tmp_path: Path) -> None:
    done = run(tmp_path, _FAILS, "-k", "3", "--", "--for", "60")
    assert done.returncode == 3
    assert "[rank 1] here 1 3 --for 60\n" in done.stdout
    assert "end" not in done.stdout
    assert "ringcoll: rank 1 has ended with exit status 3" in done.stderr


def test_with_resilient_the_others_go_on(tmp_path: Path) -> None:
    done = run(tmp_path, _FAILS, "--resilient", "-k", "3", "--", "--for", "1")
    assert done.returncode == 0
    assert {"[rank 0] end 0", "[rank 2] end 2"} <= {*done.stdout.splitlines()}
    assert "ringcoll: rank 1 has ended with exit status 3" in done.stderr


@pytest.mark.slow
def test_a_resilient_group_goes_on_without_the_first_rank(tmp_path: Path) -> None:
    done = run(tmp_path, _TRAINS, "--resilient", "-k", "3")
    assert done.returncode == 0, done.stderr
    assert "ringcoll: rank 0 has ended by signal 9" in done.stderr
    for rank in (1, 2):
        for step, total in enumerate((7, 6, 6)):
            assert f"[rank {rank}] step {step} sum {total}\n" in done.stdout


def begun(path: Path, code: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    """A run of one rank, whose output comes through a pipe."""
    path.write_text(code)
    words = [sys.executable, "-m", "ringcoll.tools.cli", "run", "-k", "1", str(path), *arguments]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(words, **pipes, **options)


_STAYS = """
import os, signal, subprocess, sys, time
sleeping = subprocess.Popen(["sleep", "90"])
if "ignoring" in sys.argv:
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
print(os.getpid(), sleeping.pid, flush=True)
if "stopped" in sys.argv:
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(90)
"""


def gone(*pids: int) -> bool:
    """Whether processes end within a time limit; those that nobody has waited for have ended."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if not any(map(is_there, pids)):
            return True
        time.sleep(0.05)
    return False


def is_there(pid: int) -> bool:
    with suppress(OSError):
        return process_state(pid).state not in "ZX"
    return False


@pytest.mark.parametrize(
    "name, how",
    [
        ("SIGHUP", ""),
        ("SIGKILL", ""),
        pytest.param("SIGINT", "", marks=pytest.mark.slow),
        pytest.param("SIGTERM", "", marks=pytest.mark.slow),
        pytest.param("SIGQUIT", "ignoring", marks=pytest.mark.slow),
        pytest.param("SIGTERM", "ignoring", marks=pytest.mark.slow),
        pytest.param("SIGHUP", "stopped", marks=pytest.mark.slow),
        pytest.param("SIGKILL", "stopped", marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("ctrl_c")
def test_a_signal_to_the_command_ends_the_ranks(tmp_path: Path, name: str, how: str) -> None:
    """And, but for one that no program hears, the processes that the ranks have started."""
    number = getattr(signal, name)
    with begun(tmp_path / "stays.py", _STAYS, how) as process:
        assert process.stdout is not None
        rank, sleeping = map(int, process.stdout.readline().split()[2:])
        process.send_signal(number)
        if name == "SIGQUIT":
            process.send_signal(number)  # after a second one no rank is waited for
        assert process.wait(60) == (-number if name == "SIGKILL" else 128 + number)
        assert gone(rank)
        if name == "SIGKILL":
            os.kill(sleeping, signal.SIGKILL)
        assert gone(sleeping)


@pytest.mark.slow
def test_what_is_ignored_below_nohup_stays_ignored(tmp_path: Path) -> None:
    code = "import os, signal\nfor _ in range(2): os.kill(os.getppid(), signal.SIGHUP)\n"
    code += "print(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN)"
    ignore = partial(signal.signal, signal.SIGHUP, signal.SIG_IGN)
    with begun(tmp_path / "hangs_up.py", code, preexec_fn=ignore) as process:
        output, _ = process.communicate(timeout=60)
        assert (process.returncode, output) == (0, "[rank 0] True\n")


@pytest.mark.slow
def test_a_command_that_is_paused_pauses_its_ranks(tmp_path: Path) -> None:
    with begun(tmp_path / "stays.py", _STAYS) as process:
        assert process.stdout is not None
        pids = [process.pid, *map(int, process.stdout.readline().split()[2:])]
        for number, letters in ((signal.SIGTSTP, "T"), (signal.SIGCONT, "SR")):
            process.send_signal(number)
            deadline = time.monotonic() + 30
            while not all(process_state(pid).state in letters for pid in pids):
                assert time.monotonic() < deadline
                time.sleep(0.05)
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM


_LEAVES = """
import subprocess, sys
print("x" * 50_000 + "\\n" + "y" * 10_000, flush=True)
subprocess.Popen(sys.argv[1:])
"""


@pytest.mark.parametrize("left", [["sleep", "60"], ["yes"]], ids=["silent", "talks"])
def test_nobody_waits_for_processes_that_ranks_have_left(tmp_path: Path, left: list[str]) -> None:
    """They hold the ranks' output open; what the ranks have written is there."""
    begin = time.monotonic()
    done = run(tmp_path, _LEAVES, "-k", "2", "--", *left)
    assert time.monotonic() - begin < 40
    assert done.returncode == 0
    for rank in range(2):
        lines = [line for line in done.stdout.splitlines() if line.startswith(f"[rank {rank}] ")]
        assert lines[:2] == [f"[rank {rank}] " + "x" * 50_000, f"[rank {rank}] " + "y" * 10_000]


def test_nobody_waits_where_the_output_has_no_reader(tmp_path: Path) -> None:
    with begun(tmp_path / "talks.py", "while True: print('word ' * 100)") as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(60) == 2
        assert process.stderr is not None
        assert process.stderr.read() == "Error: the output: Broken pipe\n"
