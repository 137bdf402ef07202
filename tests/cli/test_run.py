"""`ringcoll run`: scripts on real processes, of which some fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
from ringcoll import resilient
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
    command = [sys.executable, "-m", "ringcoll.cli", "run", *words[:before], str(script)]
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


def begun(path: Path, code: str) -> subprocess.Popen[str]:
    """A run of one rank, whose output comes through a pipe."""
    path.write_text(code)
    words = [sys.executable, "-m", "ringcoll.cli", "run", "-k", "1", str(path)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_who_ends_the_command_ends_the_ranks(tmp_path: Path) -> None:
    code = "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(90)"
    with begun(tmp_path / "sleeps.py", code) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline().rpartition(" ")[2])
        process.terminate()
        assert process.wait(60) == 143
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_nobody_waits_where_the_output_has_no_reader(tmp_path: Path) -> None:
    with begun(tmp_path / "talks.py", "while True: print('word ' * 100)") as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(60) == 2
        assert process.stderr is not None
        assert process.stderr.read() == "Error: the output: Broken pipe\n"
