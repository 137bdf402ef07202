"""The skeleton of an algorithm."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ringcoll.schedules import CONTRACTS
from ringcoll.schedules.algorithms import find

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("collective", [name for name in CONTRACTS if not name.endswith("scan")])
def test_every_skeleton_is_right_and_costs_what_it_says(run, own_folder, collective):
    assert run("new", collective, "own").exit_code == 0
    result = run("verify", "own.py:own", "--world-sizes", "1-9", "--json")
    assert result.exit_code == 0
    (found,) = json.loads(result.stdout)["results"]
    assert (found["collective"], found["proved"]) == (collective, list(range(1, 10)))
    cost = find(collective, "own").cost
    assert cost is not None
    assert cost.rounds(9) == found["at"]["rounds"]
    assert float(cost.traffic(9)) == found["at"]["traffic"]


def test_a_prefix_has_no_skeleton(run, own_folder):
    result = run("new", "scan", "own")
    assert result.exit_code == 2
    assert "scan has no skeleton" in result.stderr
    assert not list(own_folder.iterdir())


@pytest.mark.processes
def test_its_test_passes_as_written_and_fails_if_a_step_is_missing(run, star):
    def tested():
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_star.py"],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip

    done = tested()
    assert (done.returncode, "8 passed" in done.stdout) == (0, True), done.stdout
    text = Path(star).read_text(encoding="utf-8")
    Path(star).write_text(text.replace("    yield Step(recv(0, out(0)))\n", ""), encoding="utf-8")
    assert tested().returncode == 1


def test_as_data(run, own_folder):
    found = json.loads(run("new", "broadcast", "own", "--json").stdout)
    assert found == {"files": [str(own_folder / "own.py"), str(own_folder / "test_own.py")]}


@pytest.mark.parametrize("file", ["own.py", "test_own.py"])
def test_nothing_is_overwritten(run, own_folder, file):
    Path(file).write_text("mine", encoding="utf-8")
    result = run("new", "all_reduce", "own")
    assert result.exit_code == 2
    assert f"{file} exists" in result.stderr
    assert [path.name for path in own_folder.iterdir()] == [file]
    assert Path(file).read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize(
    "name, message",
    [
        ("my-star", "cannot be the name of a Python function"),
        ("class", "cannot be the name of a Python function"),
        ("ring", "all_reduce already has an algorithm 'ring'"),
        ("tree", "all_reduce already has an algorithm 'tree'"),
        ("random", "there is a Python module 'random'"),
    ],
)
def test_names_that_cannot_be(run, own_folder, name, message):
    result = run("new", "all_reduce", name)
    assert result.exit_code == 2
    assert message in result.stderr
    assert not list(own_folder.iterdir())
