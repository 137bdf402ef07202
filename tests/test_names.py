"""A class name occurs once in the package, whether it is public or private."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest

import ringcoll

PACKAGE = Path(ringcoll.__file__).parent


def repeated(package: Path) -> dict[str, list[str]]:
    """The classes whose name occurs several times, and the places where each is defined."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path.relative_to(package)}:{node.lineno}")
    return {name: where for name, where in places.items() if len(where) > 1}


def test_a_class_name_occurs_once() -> None:
    assert repeated(PACKAGE) == {}, "rename all but one"


@pytest.mark.parametrize(
    "first, second, names",
    [
        ("class Ring: ...", "class Ring: ...", {"Ring"}),
        ("class Ring: ...", "class _Ring: ...", set()),
        ("class Ring:\n    class Slot: ...", "def make():\n    class Slot: ...", {"Slot"}),
        ("Ring = 1", "class Ring: ...", set()),
    ],
)
def test_a_repeated_name_is_found(tmp_path: Path, first: str, second: str, names: set[str]) -> None:
    (tmp_path / "first.py").write_text(first)
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "second.py").write_text(second)
    assert repeated(tmp_path).keys() == names
