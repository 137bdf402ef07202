"""Modules of a user: what a reference to an algorithm may be, and what is said if it is wrong."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ringcoll.errors import ScheduleError, UnknownAlgorithmError
from ringcoll.runtime.user_files import UserModule, algorithms_named, is_reference

ROOT = Path(__file__).parents[2]

NOTHING = (
    "from ringcoll.schedules.algorithms import register\n\ndef idle(rank, world_size):\n    yield\n"
)


@pytest.fixture(autouse=True)
def own_path(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.chdir(tmp_path)


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_what_a_reference_is():
    assert is_reference("star:star")
    assert is_reference("some/star.py:star")
    assert not is_reference("ring")


@pytest.mark.parametrize(
    "reference, message",
    [
        ("nowhere:star", "there is no module 'nowhere': neither {folder}/nowhere.py nor elsewhere"),
        ("no.where:star", "there is no module 'no.where': neither {folder}/no/where.py nor"),
        ("nowhere.py:star", "'nowhere.py:star': there is no file {folder}/nowhere.py"),
        ("sub/nowhere.py:star", "'sub/nowhere.py:star': there is no file {folder}/sub/nowhere.py"),
    ],
)
def test_a_module_that_is_not_there_names_the_file(tmp_path, reference, message):
    with pytest.raises(UnknownAlgorithmError, match=re.escape(message.format(folder=tmp_path))):
        algorithms_named(reference)


def test_a_file_without_algorithms_and_a_function_that_is_not_registered(tmp_path):
    file = write(tmp_path / "bare_algorithm.py", NOTHING)
    with pytest.raises(UnknownAlgorithmError) as caught:
        algorithms_named("bare_algorithm.py:star")
    assert str(caught.value) == f"{file} has no algorithm 'star'; it holds: no algorithm"
    with pytest.raises(UnknownAlgorithmError, match=r'write @register\("all_reduce", "idle"\)'):
        algorithms_named("bare_algorithm:idle")


def test_a_file_with_the_name_of_another_module(tmp_path):
    file = write(tmp_path / "random.py", NOTHING)
    with pytest.raises(UnknownAlgorithmError, match=f"give {re.escape(str(file))} another name"):
        algorithms_named("random.py:idle")


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("raising_algorithm", "x = 1\ny = 1 / 0\n", ":2: ZeroDivisionError: division by zero"),
        ("misspelled_algorithm", "x = 1\ny = (\n", ":2: SyntaxError: '(' was never closed"),
        ("lacking_algorithm", "import no_such_package\n", ":1: ModuleNotFoundError: No module"),
    ],
)
def test_an_error_of_the_module_is_shown_with_its_line(tmp_path, name, text, message):
    file = write(tmp_path / f"{name}.py", text)
    with pytest.raises(ScheduleError, match=re.escape(f"{file}{message}")):
        algorithms_named(f"{name}.py:star")


PROGRAM = """
from ringcoll.schedules.algorithms import register, Cost
from neighbour import double

@register("all_reduce", "first", cost=Cost(lambda k: 0, lambda k: 0))
@register("broadcast", "second", cost=Cost(lambda k: 0, lambda k: 0))
def both(rank, world_size, root=0):
    yield from ()
"""

CHECK = """
import sys
from ringcoll.runtime.user_files.algorithms import algorithms_named
for reference in sys.argv[1:]:
    module, entries = algorithms_named(reference)
    again, _ = algorithms_named(reference)
    print(*module, *(f"{entry.collective}:{entry.name}" for entry in entries), again == module)
"""


@pytest.mark.processes
def test_names_of_algorithms_and_of_functions_and_neighbours(tmp_path):
    folder = tmp_path / "sub"
    folder.mkdir()
    write(folder / "neighbour.py", "double = 2\n")
    write(folder / "own.py", PROGRAM)
    done = subprocess.run(
        [sys.executable, "-c", CHECK, "sub/own.py:first", "sub/own.py:both", "own:second"],
        cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.splitlines() == [
        f"own {folder} all_reduce:first True",
        f"own {folder} broadcast:second all_reduce:first True",
        f"own {tmp_path} broadcast:second True",
    ], done.stderr


def test_a_rank_loads_the_module_once_more_without_harm(tmp_path):
    write(tmp_path / "harmless_module.py", "loaded = True\n")
    module = UserModule("harmless_module", str(tmp_path))
    assert module.load() is module.load()
