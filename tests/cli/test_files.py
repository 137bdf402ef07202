"""Files that cannot be written, and files that cannot be read: one sentence, and nothing is left over."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ringcoll.runtime.machine import json_text
from ringcoll.tools.bench import plot
from ringcoll.tools.cli.output import print_json
from tests.cli.conftest import Run

WRITERS = (
    "export ring -k 2 -o {}",
    "export ring -k 2 --format text -o {} --json",
    "simulate ring -k 2 -o {}",
    "search all_gather --topology ring -k 2 --method greedy -o {}",
)


@contextmanager
def full_disk() -> Iterator[None]:
    """No file of this process can grow beyond a byte."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("words", WRITERS)
def test_a_full_disk(run: Run, tmp_path: Path, words: str) -> None:
    name = str(tmp_path / "file.txt")
    Path(name).write_text("as it was")
    with full_disk():
        result = run(*words.format(name).split())
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"Error: {name}")
    assert result.stderr.endswith(": File too large\n")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["as it was"]


def test_a_full_disk_for_a_new_algorithm(run: Run, own_folder: Path) -> None:
    with full_disk():
        result = run("new", "all_reduce", "star")
    assert (result.exit_code, result.stderr) == (2, "Error: star.py: File too large\n")
    assert not any(own_folder.iterdir())


@pytest.mark.parametrize("words", WRITERS)
@pytest.mark.parametrize(
    "name, said",
    [
        ("", "'.' is a folder"),
        ("a" * 300, "File name too long"),
        ("no/such/folder", "there is no folder"),
        ("folder", "is a directory"),
    ],
)
def test_names_that_cannot_be_written(
    run: Run, own_folder: Path, words: str, name: str, said: str
) -> None:
    (own_folder / "folder").mkdir()
    result = run(*(name if word == "{}" else word for word in words.split()))
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr.splitlines()[-1]


def test_the_longest_name(run: Run, own_folder: Path) -> None:
    name = "ä" * 127
    assert run("export", "ring", "-k", "2", "-o", name).exit_code == 0
    assert [path.name for path in own_folder.iterdir()] == [name]


def test_a_picture_is_replaced_as_a_whole(tmp_path: Path) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    path = tmp_path / "picture.png"
    path.write_text("as it was")
    with full_disk(), pytest.raises(OSError, match="File too large"):
        plot.save(figure, path)
    assert path.read_text() == "as it was"
    plot.save(figure, path)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.processes
@pytest.mark.parametrize("words", ["list all_reduce", "list --json", "show ring all_reduce"])
@pytest.mark.parametrize("ending", ["full", "closed"])
def test_an_output_that_nobody_takes(words: str, ending: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open("/dev/full", "wb") as full:  # noqa: PTH123
        result = subprocess.run(
            [sys.executable, "-m", "ringcoll.tools.cli", *words.split()],
            stdout=full if ending == "full" else writer,
            stderr=subprocess.PIPE,
            check=False,
            text=True,
        )
    os.close(writer)
    reason = "No space left on device" if ending == "full" else "Broken pipe"
    assert (result.returncode, result.stderr) == (2, f"Error: the output: {reason}\n")


READERS = (
    "show {} all_reduce",
    "verify {}",
    "verify --schedule {}",
    "verify {} --order",
    "export {}",
    "simulate {}",
    "search all_gather --graph {}",
    "bench all_reduce -k 2 --algorithms {}",
    "trace all_reduce -k 2 --algorithm {}",
    "tune -k 2 -o {}",
)


@pytest.mark.parametrize("words", READERS)
def test_inputs_that_are_none(run: Run, own_folder: Path, words: str) -> None:
    os.mkfifo("pipe.txt")
    Path("zero.txt").symlink_to("/dev/zero")
    Path("folder.txt").mkdir()
    Path("empty.txt").touch()
    Path("binary.txt").write_bytes(bytes(range(256)) * 100)
    for name in ("pipe", "zero", "folder", "empty", "binary"):
        result = run(*words.format(f"{name}.txt").split())
        last = result.stderr.splitlines()[-1]
        assert (result.exit_code, result.stdout, last[:7]) == (2, "", "Error: "), (name, result)
    assert Path("empty.txt").read_bytes() == b""


def test_json_is_strict(capsys: pytest.CaptureFixture[str]) -> None:
    value = {"a": float("inf"), "b": [1.5, float("nan"), {"c": (-float("inf"), "NaN", None, True)}]}
    expected = {"a": None, "b": [1.5, None, {"c": [None, "NaN", None, True]}]}
    assert json.loads(json_text(value)) == expected
    print_json(value)
    assert json.loads(capsys.readouterr().out) == expected


@pytest.mark.parametrize(
    "words",
    [
        "--bandwidth 1e-317 --size 1T",
        "--slow 0=1e300 --alpha 1e300",
        "--alpha 1e308 --slow 1=1e8",
    ],
)
def test_a_simulation_that_never_ends(run: Run, words: str) -> None:
    result = run("simulate", "ring", "-k", "4", "--json", *words.split())
    assert (result.exit_code, result.stdout) == (2, "")
    assert "the number is out of range" in result.stderr


@pytest.mark.parametrize(
    "words",
    [
        "bench --vs native --seconds inf",
        "train --lr nan",
        "tune --seconds nan",
    ],
)
def test_numbers_are_finite(run: Run, words: str) -> None:
    result = run(*words.split())
    assert result.exit_code == 2
    assert "is not finite" in result.stderr
