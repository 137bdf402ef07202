"""The site: it is built without a warning, has its four doors and every public name, and asks for nothing elsewhere."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from ringcoll.schedules.algorithms import algorithms
from ringcoll.tools.cli import cli
from tests.cases.pages import README, ROOT
from tests.test_rooms import DOORS

GLOSSARY = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
ROOMS = [
    "ringcoll",
    *(f"ringcoll.{room}" for room in DOORS),
]
# Special words of `ringcoll --help`, of its commands, and of the README, which stands in the glossary under this name.
HELP = (
    "algorithm", "all-reduce", "collective", "rank", "transport", "trainer", "chunk", "segment", "step", "round",
    "Pareto front", "topology", "schedule", "auto", "bus bandwidth", "native", "world size", "tree", "ring",
)  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-W",
        "--keep-going",
        "-q",
        "-c",
        "docs/site",
        "-d",
        str(folder / "trees"),
    ]
    built = subprocess.run(
        [*command, ".", str(folder / "html")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert (built.returncode, built.stderr) == (0, "")
    return folder / "html"


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(600)
class TestBuilt:
    def test_four_doors(self, site: Path) -> None:
        page = (site / "docs/site/index.html").read_text(encoding="utf-8")
        assert re.findall(r"<h2>(\w+)<", page) == [
            "Learn",
            "Train",
            "Invent",
            "Reference",
        ]
        assert "docs/site/index.html" in (site / "index.html").read_text(encoding="utf-8")

    def test_every_public_name_and_command(self, site: Path) -> None:
        for room in ROOMS:
            page = (site / f"docs/site/api/{room}.html").read_text(encoding="utf-8")
            door = importlib.import_module(room)
            missing = [
                name
                for name in door.__all__
                if hasattr(door, name) and not re.search(rf"\b{name}\b", page)
            ]
            assert not missing, room
        commands = (site / "docs/site/api/commands.html").read_text(encoding="utf-8")
        assert all(f"ringcoll {name}" in commands for name in cli.list_commands(click.Context(cli)))

    def test_every_algorithm_has_its_player(self, site: Path) -> None:
        for entry in algorithms():
            path = f"players/{entry.collective}-{entry.name}.html"
            assert (site / path).read_text(encoding="utf-8").startswith("<!doctype html>")
            assert f"../../{path}" in (site / f"docs/algorithms/{entry.collective}.html").read_text(
                encoding="utf-8"
            )

    def test_it_asks_for_nothing_elsewhere(self, site: Path) -> None:
        for page in site.rglob("*.html"):
            loaded = re.findall(
                r'<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)="(https?:[^"]*)"',
                page.read_text("utf-8"),
            )
            assert not loaded, page

    def test_the_search_knows_the_words(self, site: Path) -> None:
        index = (site / "searchindex.js").read_text(encoding="utf-8")
        assert all(word in index for word in ("all_reduc", "lectur", "glossari"))


def entries() -> set[str]:
    return {term.lower() for term in re.findall(r"^\*\*(.+?)\*\*", GLOSSARY, re.MULTILINE)}


def test_the_glossary_has_the_special_words_of_the_readme_and_of_help() -> None:
    emphasized = {
        word.lower().removesuffix("s")
        for word in re.findall(r"(?<![*\w])\*([A-Za-z][\w -]*)\*(?!\*)", README.read_text("utf-8"))
    }
    assert emphasized  # the README marks the words that it explains
    words = emphasized | {word.lower() for word in HELP}
    assert not sorted(words - entries())


def test_the_words_of_the_glossary_of_schedules_are_there() -> None:
    text = importlib.import_module("ringcoll.schedules").__doc__ or ""
    words = re.findall(r"^([a-z]+)$", text.partition("Words that mean")[2], re.MULTILINE)
    assert len(words) == 9
    assert not sorted(set(words) - entries())
