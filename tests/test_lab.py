"""docs/lab.md does what it says: its programs run, and its commands print what stands below them."""

from __future__ import annotations

import contextlib
import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner

from ringcoll.algorithms import unregister
from ringcoll.cli.app import cli
from ringcoll.errors import UnknownAlgorithmError
from tests.cases.pages import ROOT, Block, blocks

PAGE = ROOT / "docs" / "lab.md"
NAMES = {"first_try": "first", "grid": "grid"}
PROGRAM = "# train.py, started by: torchrun "


def is_file(block: Block) -> bool:
    return bool(re.match(r"# \w+\.py\b", block.text))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A folder with the page's files, as the current one."""
    for block in blocks(PAGE):
        if is_file(block):
            name = block.text.split(",")[0].split()[1]
            (tmp_path / name).write_text(block.text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name, module in NAMES.items():
        sys.modules.pop(module, None)
        with contextlib.suppress(UnknownAlgorithmError):
            unregister("all_reduce", name)


def without_times(text: str) -> list[str]:
    """The lines of an output, without how long a proof has taken."""
    lines = re.sub(r"(in )?\d+\.\d( s)?$", "TIME", text.rstrip(), flags=re.MULTILINE).split("\n")
    return [line.rstrip() for line in lines]


def printed_below(page: Path) -> list[tuple[str, str]]:
    """The page's commands whose output stands below them."""
    consoles = [block.text for block in blocks(page) if block.language == "console"]
    pairs = [text.removeprefix("$ ").partition("\n") for text in consoles]
    return [(command, output) for command, _, output in pairs if output]


@pytest.mark.parametrize("command,output", printed_below(PAGE))
def test_commands_print_what_the_page_says(folder: Path, command: str, output: str) -> None:
    result = CliRunner().invoke(cli, shlex.split(command)[1:])
    assert result.exit_code == ("WRONG" in output), result.output
    assert without_times(result.output) == without_times(output)


def test_the_page_has_commands() -> None:
    assert len(printed_below(PAGE)) == 3


def test_programs_print_what_the_page_says(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, object] = {}
    page, checked = blocks(PAGE), 0
    for block, after in pairwise(page):
        if block.language == "python" and not is_file(block):
            exec(compile(block.text, str(PAGE), "exec"), names)
            assert after.language == "text"
            assert capsys.readouterr().out == after.text
            checked += 1
    assert checked == 2


@pytest.mark.processes
def test_the_training_runs(folder: Path) -> None:
    page = blocks(PAGE)
    (index,) = (i for i, block in enumerate(page) if block.text.startswith(PROGRAM))
    command, _, _ = page[index].text.removeprefix(PROGRAM).partition("\n")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *shlex.split(command)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == page[index + 1].text
