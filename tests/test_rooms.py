"""The folders import one another in one direction; the pure ones import nothing but arithmetic."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from pathlib import Path

import pytest

import ringcoll

PACKAGE = Path(ringcoll.__file__).parent
# Each room may import from those before it, and from itself.
ROOMS = (
    "errors",
    "_version",
    "schedule",
    "algorithms",
    "cost",
    "simulation",
    "search",
    "formats",
    "pictures",
    "machine",
    "reduction",
    "transport",
    "operation",
    "watch",
    "group",
    "collectives",
    "backend",
    "tracing",
    "training",
    "resilient",
    "launch",
    "testing",
    "bench",
    "cli",
)
PURE = (
    "errors",
    "_version",
    "schedule",
    "algorithms",
    "cost",
    "simulation",
    "search",
    "formats",
    "pictures",
)
AT_THE_TOP = {"__init__.py", "__init__.pyi", "__main__.py", "_version.py", "errors.py", "py.typed"}
# Without torch, too: `import ringcoll` reads the first, `ringcoll --help` the others.
WITHOUT_TORCH = (
    "ringcoll.training.backend.registration",
    "ringcoll.runtime.transport.catalogue",
    "ringcoll.training.pipeline.pipeline_schedule",
    "ringcoll.tools.testing.plugin",
)
FILES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))
# No operating system, no clock, no chance: what a schedule is depends on its arguments only.
ALLOWED = {
    "__future__",
    "array",
    "collections",
    "contextlib",
    "dataclasses",
    "enum",
    "fractions",
    "functools",
    "gc",  # the verifier allocates millions of objects without a cycle
    "heapq",
    "inspect",
    "itertools",
    "json",
    "lazy_loader",  # finds what a door names
    "math",
    "operator",
    "re",
    "statistics",
    "typing",
    "xml",
}
# What single rooms need besides: signs of markup, an image within a page; chance that a seed decides, and a solver and a reader that are imported late.
ALSO_ALLOWED = {
    "pictures": {"base64", "html"},
    "search": {"ortools", "random"},
}
# And single files: the page of the package that plays, with its packed data; the face of the package, which hands pictures out.
ALLOWED_IN_FILES = {
    "pictures/player.py": {"importlib", "zlib"},
    "schedule/ir.py": {"sys"},
    "cost/table.py": {"hashlib"},
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
    root = PACKAGE.parent
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
    )


def module_of(file: Path) -> str:
    parts = ["ringcoll", *file.with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    """The room that a module of the library belongs to; ``""`` for the root itself."""
    return module.removeprefix("ringcoll").removeprefix(".").split(".")[0]


def imports_of(source: str) -> set[str]:
    """All that a file imports, also inside functions and for types only."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert not node.level, "absolute imports only"
            assert node.module is not None
            modules.add(node.module)
            if node.module == "ringcoll":  # rooms, or public names that the root fetches
                modules |= {f"ringcoll.{alias.name}" for alias in node.names}
    return modules


def later_than(room: str, source: str) -> set[str]:
    """What a file of a room imports of rooms that come after it, or of the root."""
    wrong = set()
    for module in imports_of(source):
        if module.partition(".")[0] != "ringcoll":
            continue
        other = room_of(module)
        if other not in ROOMS or ROOMS.index(other) > ROOMS.index(room):
            wrong.add(module)
    return wrong


def test_nothing_else_stands_at_the_top() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir()} - {"__pycache__"}
    assert folders == set(ROOMS) - {"errors", "_version"}
    assert {path.name for path in PACKAGE.iterdir() if path.is_file()} == AT_THE_TOP


def test_the_page_for_contributors_has_the_rooms_in_this_order() -> None:
    text = (PACKAGE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text[: text.index("A call's way")]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == [
        room for room in ROOMS if room != "_version"
    ]


# Commands, and what runs on measured ranks, use the public names as a user does.
USERS = {"bench", "cli"}


@pytest.mark.parametrize(
    "file", [one for one in FILES if str(one) not in {"__init__.py", "__main__.py"}], ids=str
)
def test_imports_point_one_way(file: Path) -> None:
    room = room_of(module_of(file))
    wrong = later_than(room, (PACKAGE / file).read_text(encoding="utf-8"))
    assert wrong <= ({"ringcoll"} if room in USERS else set())


@pytest.mark.parametrize(
    "room, source",
    [
        ("transport", "from ringcoll.runtime.operation.plan import Plan"),
        ("schedule", "from ringcoll import algorithms"),
        ("cost", "def f():\n    import ringcoll.runtime.machine.settings"),
        ("group", "if TYPE_CHECKING:\n    from ringcoll.tools.tracing.recorder import Tracer"),
        ("machine", "from ringcoll import __version__"),
    ],
)
def test_and_the_test_finds_those_that_do_not(room: str, source: str) -> None:
    assert later_than(room, source)


@pytest.mark.parametrize("room", [room for room in ROOMS if room not in {"errors", "_version"}])
def test_every_room_says_what_lives_there(room: str) -> None:
    text = ast.get_docstring(ast.parse((PACKAGE / room / "__init__.py").read_text("utf-8")))
    assert text is not None
    modules = {path.stem for path in (PACKAGE / room).glob("[!_]*.py")}
    assert not {name for name in modules if f"`{name}`" not in text}, "modules it does not name"
    rows = set(re.findall(r"^`(\w+)`  ", text, re.MULTILINE))
    folders = {path.parent.name for path in (PACKAGE / room).glob("*/__init__.py")}
    assert rows <= modules | folders, "rows of modules that are gone"


# --- doors ------------------------------------------------------------------------------


def door(room: str) -> set[str]:
    """What a room's ``__init__.pyi`` names, to be loaded when used; or its ``__init__.py``, at once."""
    stub = PACKAGE / room / "__init__.pyi"
    file = stub if stub.exists() else stub.with_suffix(".py")
    nodes = ast.parse(file.read_text(encoding="utf-8")).body
    return {
        alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names
    }


DOORS = {room: door(room) for room in ROOMS if room not in {"errors", "_version"}}


def past_doors(own: str, source: str) -> set[str]:
    """What a file uses of rooms, other than its own, that their doors do not name."""
    wrong, tree = set(), ast.parse(source)
    modules: dict[str, str] = {}  # of other rooms, by the names that they have in the file
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            named = [(alias.name.split("."), alias) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            named = [([*node.module.split("."), alias.name], alias) for alias in node.names]
        else:
            continue
        for (package, room, *names), alias in (one for one in named if len(one[0]) > 2):
            if package != "ringcoll" or room not in DOORS or room == own:
                continue
            if len(names) > 1 or names[0] not in DOORS[room]:
                wrong.add(".".join([package, room, *names]))
            elif (PACKAGE / room / f"{names[0]}.py").exists():
                modules[alias.asname or alias.name] = f"{package}.{room}"
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr=attr) if name in modules:
                if attr.startswith("_"):
                    wrong.add(f"{modules[name]}.{name}.{attr}")
    return wrong


@pytest.mark.parametrize("file", [one for one in FILES if len(one.parts) > 1], ids=str)
def test_rooms_import_through_doors(file: Path) -> None:
    assert not past_doors(file.parts[0], (PACKAGE / file).read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "source",
    [
        "from ringcoll.schedules.ir import send",
        "from ringcoll.schedules import verify, _symbols",
        "import ringcoll.schedules.ir",
        "def f():\n    import ringcoll.runtime.machine.facts as facts",
        "from ringcoll.runtime.transport import catalogue\ncatalogue._automatic",
    ],
)
def test_and_a_way_past_a_door_is_found(source: str) -> None:
    assert past_doors("cost", source)
    assert not past_doors("cost", "from ringcoll.schedules import send, verify")
    assert not past_doors(
        "cost", "from ringcoll.runtime.transport import catalogue\ncatalogue.names"
    )


@pytest.mark.parametrize("room", DOORS)
def test_a_door_names_what_is_there(room: str) -> None:
    assert not {
        name for name in DOORS[room] if not hasattr(import_module(f"ringcoll.{room}"), name)
    }


ROOT = PACKAGE.parent
MOST_PAST_DOORS = 89  # by tests: faults that are put into other rooms, mostly


def test_scripts_use_doors() -> None:
    scripts = ROOT.glob("benchmarks/**/*.py")
    wrong = {path: past_doors("", path.read_text(encoding="utf-8")) for path in scripts}
    assert not {path: names for path, names in wrong.items() if names}


def test_tests_open_modules_of_their_own_room() -> None:
    """Tests of a room may; what they, and tests of several rooms, need of others has a bound."""
    tests = {path.relative_to(ROOT / "tests"): path for path in ROOT.glob("tests/**/*.py")}
    wrong = [
        f"{short}: {name}"
        for short, path in tests.items()
        for name in sorted(past_doors(short.parts[0], path.read_text(encoding="utf-8")))
    ]
    assert len(wrong) <= MOST_PAST_DOORS, "\n".join(wrong)


# --- circles ----------------------------------------------------------------------------


def graph(sources: dict[str, str]) -> dict[str, set[str]]:
    """The modules that each module imports, also inside functions and for types only."""
    edges: dict[str, set[str]] = {}
    for module, source in sources.items():
        names = set()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            if isinstance(node, ast.ImportFrom):
                home = ".".join(filter(None, [module if node.level else "", node.module]))
                each = [f"{home}.{alias.name}" for alias in node.names]
                names |= {name if name in sources else home for name in each}
        edges[module] = names & sources.keys()
    return edges


def test_no_files_import_each_other_in_a_circle() -> None:
    stubs = {file: (PACKAGE / file).with_suffix(".pyi") for file in FILES}
    sources = {
        module_of(file): (stub if stub.exists() else PACKAGE / file).read_text(encoding="utf-8")
        for file, stub in stubs.items()
    }
    TopologicalSorter(graph(sources)).prepare()


def test_and_a_circle_is_found() -> None:
    first = {"ringcoll.a": "", "ringcoll.a.b": "def f():\n    from ringcoll.a import c"}
    TopologicalSorter(graph({**first, "ringcoll.a.c": "from ringcoll import a"})).prepare()
    with pytest.raises(CycleError):
        TopologicalSorter(graph({**first, "ringcoll.a.c": "import ringcoll.a.b"})).prepare()


# --- the pure rooms ---------------------------------------------------------------------

PURE_FILES = [one for one in FILES if room_of(module_of(one)) in PURE]


@pytest.mark.processes
def test_the_block_blocks() -> None:
    result = python(IMPORT_WITH_BLOCK.format(blocked=BLOCKED, module="torch"))
    assert "torch is blocked" in result.stderr


@pytest.mark.processes
def test_every_pure_module_imports_without_torch() -> None:
    modules = ", ".join([*map(module_of, PURE_FILES), *WITHOUT_TORCH])
    result = python(IMPORT_WITH_BLOCK.format(blocked=BLOCKED, module=modules))
    assert result.returncode == 0, result.stderr
    assert not result.stdout.strip()


@pytest.mark.parametrize("file", PURE_FILES, ids=str)
def test_pure_modules_import_arithmetic_only(file: Path) -> None:
    packages = {
        module.partition(".")[0]
        for module in imports_of((PACKAGE / file).read_text(encoding="utf-8"))
    }
    of_room = ALSO_ALLOWED.get(room_of(module_of(file)), set())
    of_file = ALLOWED_IN_FILES.get(file.as_posix(), set())
    assert packages <= ALLOWED | of_room | of_file | {"ringcoll"}


@pytest.mark.parametrize("file", PURE_FILES, ids=str)
def test_nothing_is_read_or_written(file: Path) -> None:
    called = {
        node.func.id
        for node in ast.walk(ast.parse((PACKAGE / file).read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert not called & {"open", "print", "input", "exec", "eval", "__import__"}
