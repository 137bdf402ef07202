"""The README's Python blocks run as they stand, one after the other."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner

from ringcoll.schedules.algorithms import unregister
from ringcoll.tools.cli import cli
from ringcoll.tools.cli.app import SECTIONS
from tests.cases.pages import README, ROOT, blocks

PROGRAM = "# program.py, started by: torchrun "


def test_the_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {"__name__": "__main__"}
    outputs = []
    try:
        for block, after in pairwise([*blocks(README), *blocks(README)[-1:]]):
            if block.language == "python" and not block.text.startswith(PROGRAM):
                exec(compile(block.text, str(README), "exec"), names)
                printed = capsys.readouterr().out
                assert printed == (after.text if after.language == "text" else "")
                outputs.append(printed)
    finally:
        unregister("all_reduce", "star")
    assert len(outputs) == 2
    assert sum(map(bool, outputs)) == 1  # the grid


@pytest.mark.processes
def test_the_program_runs(tmp_path: Path) -> None:
    (block,) = (block for block in blocks(README) if block.text.startswith(PROGRAM))
    command, _, _ = block.text.removeprefix(PROGRAM).partition("\n")
    (tmp_path / "program.py").write_text(block.text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *shlex.split(command)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # Lines of several ranks may run into each other.
    assert sorted(re.findall(r"rank \d of \d: \[.*?\]", done.stdout)) == [
        f"rank {rank} of 4: [0.0, 10.0, 20.0]" for rank in range(4)
    ]


def test_commands_stand_in_the_groups_of_the_help() -> None:
    text = README.read_text(encoding="utf-8").partition("## Commands\n\n")[2].partition("\n\n")[0]
    groups = {}
    for line in text.splitlines():
        group, _, names = line.removeprefix("- ").partition(": ")
        groups[group] = [name.removeprefix("ringcoll ") for name in re.findall(r"`(.+?)`", names)]
    assert groups == {group.lower(): [*commands] for group, commands in SECTIONS.items()}


def test_it_is_short() -> None:
    """Tables of measurements are in RESULTS.md."""
    text = README.read_text(encoding="utf-8")
    assert "| --- |" not in text
    assert text.count("![") == 4
    assert len(text.splitlines()) <= 150


@pytest.mark.slow
@pytest.mark.parametrize(
    "file, command",
    [
        ("ring.svg", "show ring all_reduce -k 4 --moving -o ring.svg"),
        ("crossover.svg", "plot crossover -k 16,1024 -o crossover.svg"),
    ],
)
def test_pictures_are_what_their_commands_draw(
    file: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = README.read_text(encoding="utf-8")
    assert f"(docs/{file})" in text
    assert f"`ringcoll {command}`" in text
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli, command.split())
    assert result.exit_code == 0, result.output
    assert (tmp_path / file).read_bytes() == (ROOT / "docs" / file).read_bytes()
    sizes = re.findall(r"from ([\d.]+ [KM]iB) on", result.output)
    assert len(sizes) == 2 * (file == "crossover.svg")
    assert all(f"from {size} on" in " ".join(text.split()) for size in sizes)
