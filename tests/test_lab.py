"""docs/lab.md does what it says: its programs run, and print what stands below them.

Commands are tested as those of all pages.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from tests.cases.algorithms import registered_meanwhile
from tests.cases.pages import ROOT, blocks, write_files

PAGE = ROOT / "docs" / "lab.md"
PROGRAM = "# train.py, started by: torchrun "


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A folder with the page's files, as the current one."""
    write_files(PAGE, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "grid", raising=False)  # of a test of another page
    with registered_meanwhile():
        yield tmp_path
    sys.modules.pop("grid", None)


def test_programs_print_what_the_page_says(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, object] = {}
    page, checked = blocks(PAGE), 0
    for block, after in pairwise(page):
        if block.language == "python" and not block.file_name:
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
