"""The pages of examples, one for each room that programs import: they run, and no public name is left out.

The pages of its rooms count for a wing.
"""

from __future__ import annotations

import doctest
import importlib
import re
from collections.abc import Iterable
from inspect import isclass, ismodule
from pathlib import Path
from types import ModuleType

import pytest

from tests.cases.pages import ROOT, blocks
from tests.test_rooms import DOORS

FOLDER = ROOT / "docs" / "rooms"
ROOMS = [
    "ringcoll" if page.stem == "ringcoll" else f"ringcoll.{page.stem}"
    for page in sorted(FOLDER.glob("*.md"))
]
FOR_PACKAGE = {
    *("schedules.ir", "runtime", "training.backend", "tools.cli"),
    *(f"runtime.{room}" for room in ("machine", "process", "rendezvous", "user_files", "tensors")),
    *(f"runtime.{room}" for room in ("transport", "operation", "watch", "group")),
}
"""Rooms whose doors are for the other rooms: programs do not import them."""
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def page_of(room: str) -> Path:
    return FOLDER / f"{room.removeprefix('ringcoll.')}.md"


def examples(text: str) -> list[doctest.Example]:
    return doctest.DocTestParser().get_examples(text)


def used(text: str) -> set[str]:
    """The words of the lines that do something; an import alone uses nothing."""
    lines = (example.source for example in examples(text))
    return {
        word
        for line in lines
        if not re.match(r"(from|import) ", line)
        for word in re.findall(r"\w+", line)
    }


def without_example(room: ModuleType, page: str) -> list[str]:
    """The public names that neither the page uses nor an example of their own."""
    known = used(page)

    def has_example(name: str) -> bool:
        value = getattr(room, name)
        own: Iterable[object] = (value, *vars(value).values()) if isclass(value) else (value,)
        return name in known or any(used(getattr(one, "__doc__", None) or "") for one in own)

    names = (name for name in room.__all__ if hasattr(room, name))
    return sorted(
        name for name in names if not ismodule(getattr(room, name)) and not has_example(name)
    )


@pytest.mark.parametrize("room", ROOMS)
def test_public_names_have_examples(room: str) -> None:
    page = page_of(room)
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"# {room}\n")
    in_wing = (other.read_text(encoding="utf-8") for other in FOLDER.glob(f"{page.stem}.*.md"))
    left_out = without_example(importlib.import_module(room), "\n\n".join([text, *in_wing]))
    assert left_out == []


def test_every_room_for_programs_has_a_page() -> None:
    pages = {page.stem for page in FOLDER.glob("*.md")}
    assert pages == DOORS.keys() - FOR_PACKAGE | {"ringcoll"}


def test_an_import_is_no_example() -> None:
    room = ModuleType("room")
    room.__all__ = ["ring", "tree", "star"]  # type: ignore[attr-defined]
    room.ring, room.tree, room.star = (lambda: 1), (lambda: 1), (lambda: 1)  # type: ignore[attr-defined]
    text = ">>> from room import ring, star\n>>> star()\n1\n\nThe word tree in prose."
    assert without_example(room, text) == ["ring", "tree"]


WITH_PROCESSES = {
    "ringcoll.tools.bench",
    "ringcoll.runtime.collectives",
    "ringcoll.runtime.launch",
    "ringcoll.training.resilient",
    "ringcoll.training",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "room",
    [
        pytest.param(room, marks=[pytest.mark.processes] * (room in WITH_PROCESSES))
        for room in ROOMS
    ],
)
def test_the_examples_run(room: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)  # where they may write files
    page = page_of(room)
    text = "\n".join(block.text for block in blocks(page) if block.language == "pycon")
    assert not faults(text, page.name)


def faults(text: str, name: str) -> str:
    """What differs from what the examples of a text say."""
    found: list[str] = []
    test = doctest.DocTest(examples(text), {"__name__": name}, name, None, 0, text)
    doctest.DocTestRunner(optionflags=OPTIONS).run(test, out=found.append)
    return "".join(found)


def test_an_example_that_is_wrong() -> None:
    assert "Expected:\n    3\nGot:\n    2" in faults(">>> 1 + 1\n3\n", "page")
