"""The pure modules import one another in one direction, and nothing but arithmetic."""

from __future__ import annotations

import ast
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import ringcoll
import ringcoll.algorithms

# In the order in which they may import one another.
ROOMS = (
    "errors",
    "schedule",
    "contracts",
    "compose",
    "algorithms",
    "draw",
    "verify",
    "cost",
    "choice.rules",
    "choice.predict",
    "choice.table",
)
MODULES = sorted(
    {f"ringcoll.{room}" for room in ROOMS}
    | {
        f"ringcoll.algorithms.{module.name}"
        for module in pkgutil.iter_modules(ringcoll.algorithms.__path__)
    }
)
# No operating system, no clock, no chance: what a schedule is depends on its arguments only.
ALLOWED = {
    "__future__",
    "collections",
    "dataclasses",
    "enum",
    "fractions",
    "functools",
    "gc",  # the verifier allocates millions of objects without a cycle
    "inspect",
    "itertools",
    "json",
    "math",
    "re",
    "typing",
}
BLOCKED = ("torch", "numpy", "cupy")

IMPORT_WITH_BLOCK = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked}:
            raise ImportError(f"{{name}} is blocked")
        return None

sys.meta_path.insert(0, Block())
import {module}
print(*sorted({{name.partition(".")[0] for name in sys.modules}} & set({blocked})))
"""


def python(code: str) -> subprocess.CompletedProcess[str]:
    root = Path(ringcoll.__file__).parent.parent
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
    )


def test_the_block_blocks() -> None:
    result = python(IMPORT_WITH_BLOCK.format(blocked=BLOCKED, module="torch"))
    assert "torch is blocked" in result.stderr


def test_every_pure_module_imports_without_torch() -> None:
    result = python(IMPORT_WITH_BLOCK.format(blocked=BLOCKED, module=", ".join(MODULES)))
    assert result.returncode == 0, result.stderr
    assert not result.stdout.strip()


@pytest.mark.parametrize("module", ["ringcoll.verify", "ringcoll.cost"])
def test_importing_a_pure_module_does_not_import_torch(module: str) -> None:
    result = python(f"import sys, {module}; print('torch' in sys.modules)")
    assert result.stdout == "False\n", result.stderr


def imports_of(module: str) -> set[str]:
    path = Path(ringcoll.__file__).parent.joinpath(*module.split(".")[1:])
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert not node.level, "absolute imports only"
            assert node.module is not None
            found.add(node.module)
    return found


def room_of(module: str) -> str:
    """The room that a module of the library is, or belongs to."""
    name = module.removeprefix("ringcoll.")
    return name if name in ROOMS else name.split(".")[0]


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_one_way(module: str) -> None:
    room = room_of(module)
    for imported in imports_of(module):
        package = imported.partition(".")[0]
        if package != "ringcoll":
            assert package in ALLOWED
            continue
        other = room_of(imported)
        assert other in ROOMS
        assert other == room == "algorithms" or ROOMS.index(other) < ROOMS.index(room)


@pytest.mark.parametrize("module", MODULES)
def test_nothing_is_read_or_written(module: str) -> None:
    path = Path(ringcoll.__file__).parent.joinpath(*module.split(".")[1:])
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    called = {
        node.func.id
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert not called & {"open", "print", "input", "exec", "eval", "__import__"}
