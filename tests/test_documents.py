"""What the pages name exists: links, modules, commands with their options, variables, targets."""

from __future__ import annotations

import ast
import doctest
import os
import re
import shlex
from importlib import import_module
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner

from ringcoll import __version__
from ringcoll.runtime.machine import settings
from ringcoll.tools.cli import cli
from tests.cases.algorithms import registered_meanwhile
from tests.cases.pages import PAGES, ROOT, anchors, blocks, links, spans, write_files

# What it says of earlier versions stays as it was.
CURRENT = tuple(page for page in PAGES if page.name != "CHANGELOG.md")


def by_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


every_page = pytest.mark.parametrize("page", PAGES, ids=by_name)
every_current_page = pytest.mark.parametrize("page", CURRENT, ids=by_name)


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        if link.startswith(
            ("https://", "api/")
        ):  # the site writes the latter, and checks its links
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def words(page: Path) -> str:
    return "\n".join([*spans(page), *(block.text for block in blocks(page))])


@every_current_page
def test_modules_and_their_names_exist(page: Path) -> None:
    for dotted in set(re.findall(r"\bringcoll(?:\.[A-Za-z]\w*)+", words(page))):
        if (ROOT / dotted).suffix in (".ipynb", ".json", ".md"):
            continue
        names = dotted.split(".")[1:]
        value = import_module("ringcoll")
        for index, name in enumerate(names):
            if not hasattr(value, name):
                import_module(".".join(["ringcoll", *names[: index + 1]]))
            value = getattr(value, name)


@every_current_page
def test_paths_exist(page: Path) -> None:
    for path in set(
        re.findall(r"(?<![/\w])(?:ringcoll|docs|tests|benchmarks)/[\w./-]+", words(page))
    ):
        assert (ROOT / path.rstrip(".")).exists(), path


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "docs/training.md"])
def test_files_of_the_package_exist(name: str) -> None:
    """These pages leave out the folder that all their files are in."""
    folders = [ROOT, ROOT / "ringcoll", ROOT / "ringcoll/training"]
    for path in set(re.findall(r"`([\w/]+\.pyi?)`", (ROOT / name).read_text(encoding="utf-8"))):
        if path not in {"__init__.py", "__init__.pyi"}:
            assert any((folder / path).exists() for folder in folders), path


def test_the_one_test_of_the_page_is_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    ((file, word),) = re.findall(r"(tests/\S+\.py) -k (\w+)", text)
    assert re.search(rf"def test_\w*{word}", (ROOT / file).read_text(encoding="utf-8"))


@every_current_page
def test_python_compiles(page: Path) -> None:
    for block in blocks(page):
        if block.language == "python":
            ast.parse(block.text)
        else:
            assert not re.search(r"^(import|from) \w", block.text, re.MULTILINE), block.text


def commands(page: Path) -> list[list[str]]:
    """Each call of the command line on a page, in words."""
    lines = [*spans(page), *(line for block in blocks(page) for line in block.text.splitlines())]
    calls = [
        re.match(r"(?:\$ )?(?:RINGCOLL_\w+=\S+ )?ringcoll ([a-z]+(?: .*)?)$", line)
        for line in lines
    ]
    return [shlex.split(call[1], comments=True) for call in calls if call]


@every_current_page
def test_commands_exist_and_take_their_options(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # for ``--device cuda``
    for name, *arguments in commands(page):
        command = cli.get_command(click.Context(cli), name)
        assert command is not None, name
        if arguments:  # a mere name stands for the command
            command.make_context(name, arguments)


@pytest.mark.slow
@every_current_page
def test_printed_output_is_what_the_command_prints(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(page, tmp_path)
    monkeypatch.chdir(tmp_path)
    with registered_meanwhile():
        check_output(page, monkeypatch)


def check_output(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the commands of a page whose output stands below them."""
    same = doctest.OutputChecker().check_output
    for block in blocks(page):
        shown = re.match(r"\$ (?:(RINGCOLL_\w+)=(\S+) )?ringcoll (.*)\n((?s:.+))", block.text)
        if shown is None:
            continue
        variable, value, call, expected = shown.groups()
        for name in [name for name in os.environ if name.startswith("RINGCOLL_")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("RINGCOLL_TUNING", "off")
        if variable:
            monkeypatch.setenv(variable, shlex.split(value)[0])
        printed = CliRunner().invoke(cli, shlex.split(call)).output
        assert same(expected, printed, doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE), printed


@every_current_page
def test_make_has_the_targets(page: Path) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    used = re.findall(r"^make ([a-z-]+)", words(page), re.MULTILINE)
    assert set(used) <= set(targets)


def test_every_variable_is_documented_and_no_other() -> None:
    source = Path(settings.__file__).read_text(encoding="utf-8")
    known = set(re.findall(r"\bRINGCOLL_[A-Z_]+\b", source))
    named = {page: set(re.findall(r"\bRINGCOLL_[A-Z_]+\b", page.read_text())) for page in CURRENT}
    assert named[ROOT / "docs" / "choice.md"] == known
    for page, names in named.items():
        assert names <= known, page


def test_the_citation_has_the_version_and_the_license() -> None:
    lines = (ROOT / "CITATION.cff").read_text(encoding="utf-8").splitlines()
    assert f"version: {__version__}" in lines
    assert "license: BSD-3-Clause" in lines
    assert "BSD 3-Clause" in (ROOT / "LICENSE").read_text(encoding="utf-8")
