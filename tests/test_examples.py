"""Each program in examples/ does what it says, started by the command in its docstring."""

from __future__ import annotations

import ast
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cases.pages import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PROGRAMS = {"torchrun": "torch.distributed.run", "ringcoll": "ringcoll"}

pytestmark = pytest.mark.processes


def command(name: str, **values: str) -> list[str]:
    """The command in the docstring of an example, with values for its capital letters."""
    text = ast.get_docstring(ast.parse((ROOT / "examples" / name).read_text(encoding="utf-8")))
    assert text is not None
    (line,) = (line for line in text.splitlines() if line.endswith(f" examples/{name}"))
    program, *words = shlex.split(line)
    return [sys.executable, "-m", PROGRAMS[program], *(values.get(word, word) for word in words)]


def start(words: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        words,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def printed(*processes: subprocess.Popen[str]) -> str:
    """What they print, if all of them end well."""
    text = ""
    try:
        for process in processes:
            out, err = process.communicate(timeout=100)
            assert process.returncode == 0, err
            text += out
    finally:
        for process in processes:
            process.kill()
    return text


def test_the_page_names_every_example() -> None:
    page = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    assert {*re.findall(r"^- \[(\w+\.py)\]\(\1\): ", page, re.MULTILINE)} == {
        path.name for path in EXAMPLES
    }


@pytest.mark.parametrize("name", ["plain_ddp.py", "fsdp2.py"])
def test_training(name: str) -> None:
    losses = re.findall(r"^step (\d+): loss ([\d.]+)$", printed(start(command(name))), re.MULTILINE)
    assert [int(step) for step, _ in losses] == [0, 25, 50]
    assert float(losses[-1][1]) < 0.5 * float(losses[0][1])


def test_an_algorithm_of_ones_own() -> None:
    assert (
        printed(start(command("own_algorithm.py"))) == "proved: 2 rounds\nsum: [0.0, 10.0, 20.0]\n"
    )
    file = "examples/own_algorithm.py:star"
    grid = printed(start([sys.executable, "-m", "ringcoll", "show", file, "all_reduce"]))
    assert grid.startswith("star all_reduce on 4 ranks\nStar all-reduce: rank 0 adds up")


def test_going_on_without_the_dead() -> None:
    process = start(command("resilient.py"))
    out, err = process.communicate(timeout=100)
    lines = re.findall(r"step (\d+): (\d) ranks, loss ([\d.]+)", out)
    assert [(int(step), int(ranks)) for step, ranks, _ in lines] == [(0, 3), (25, 2), (50, 2)], err
    assert float(lines[-1][2]) < 0.5 * float(lines[0][2])


def test_two_hosts() -> None:
    """Two agents of torchrun on this host, each with its own number."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    values = {"FIRST_HOST": "127.0.0.1", "29500": port}
    agents = [start(command("several_hosts.py", N=number, **values)) for number in ("0", "1")]
    assert sorted(printed(*agents).splitlines()) == [
        f"rank {rank} of 4, number {rank % 2} on its host: sum 6, highest rank 3"
        for rank in range(4)
    ]


def test_an_example_that_fails_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text("raise SystemExit(3)")
    with pytest.raises(AssertionError):
        printed(start([sys.executable, str(tmp_path / "wrong.py")]))
