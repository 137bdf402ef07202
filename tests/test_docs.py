"""The pages about the algorithms are what the registry and the docstrings say."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from ringcoll.schedules import CONTRACTS
from ringcoll.schedules.algorithms import algorithms

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_algorithms", DOCS / "build_algorithms.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module", params=CONTRACTS)
def page(request: pytest.FixtureRequest) -> tuple[str, str]:
    """A collective, and its page."""
    path = DOCS / "algorithms" / f"{request.param}.md"
    return request.param, path.read_text(encoding="utf-8")


def run(script: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["build_algorithms.py", *arguments])
    status = script.main()
    assert isinstance(status, int)
    return status


def test_the_page_is_up_to_date(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(script, monkeypatch, "--check") == 0


@pytest.mark.slow
def test_a_page_that_is_out_of_date(
    script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(script, "DOCS", tmp_path)
    assert run(script, monkeypatch, "--check") == 1
    assert "is out of date" in capsys.readouterr().err
    assert run(script, monkeypatch) == 0
    assert run(script, monkeypatch, "--check") == 0
    for name in ("algorithms.md", "algorithms/barrier.md"):
        with (tmp_path / name).open("a", encoding="utf-8") as page:
            page.write("one word more\n")
        assert run(script, monkeypatch, "--check") == 1
        assert f"{name} is out of date" in capsys.readouterr().err
        assert run(script, monkeypatch) == 0


def test_every_algorithm_has_its_section(page: tuple[str, str]) -> None:
    collective, text = page
    headings = re.findall(r"^## (\w+): (\w+)$", text, re.MULTILINE)
    assert sorted(headings) == sorted((collective, entry.name) for entry in algorithms(collective))
    assert text.startswith(f"# {collective}\n")
    assert f"[{collective}](algorithms/{collective}.md)" in (DOCS / "algorithms.md").read_text(
        "utf-8"
    )


def test_every_link_leads_somewhere(page: tuple[str, str]) -> None:
    collective, text = page
    anchors = {
        re.sub(r"[^\w -]", "", title).lower().replace(" ", "-")
        for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    }
    links = re.findall(r"\]\(#([^)]+)\)", text)
    assert len(links) == len(tuple(algorithms(collective)))
    assert set(links) <= anchors


def test_nothing_of_the_docstrings_is_left_in_their_own_markup(page: tuple[str, str]) -> None:
    _, text = page
    assert ">>>" not in text
    assert "::" not in text
    assert "\n===" not in text
    assert text.count("```") % 2 == 0
