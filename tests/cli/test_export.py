"""``ringcoll export``, and files wherever an algorithm is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ringcoll.lab.formats import from_msccl, from_mscclpp, to_msccl
from ringcoll.schedules import Schedule
from ringcoll.schedules.algorithms import schedule_of
from tests.cli.conftest import Run


@pytest.fixture
def ring(run: Run, own_folder: Path) -> str:
    result = run("export", "ring", "-k", "3", "-o", "ring.xml")
    assert result.stdout.startswith("Wrote ring all_reduce on 3 ranks to ring.xml, ")
    return "ring.xml"


def test_each_format_is_printed(run: Run) -> None:
    schedule = schedule_of("broadcast", "binomial_tree", 5, 3)
    words = ("export", "tree", "-c", "broadcast", "-k", "5", "--root", "3", "--format")
    assert run(*words, "msccl").stdout == to_msccl(schedule)
    assert run(*words, "text").stdout == schedule.to_text()
    assert from_mscclpp(run("export", "ring", "--format", "mscclpp").stdout).world_size == 4


def test_as_json(run: Run, tmp_path: Path) -> None:
    printed = json.loads(run("export", "ring", "-k", "2", "--json").stdout)
    assert from_msccl(printed["text"]).world_size == printed["world_size"] == 2
    path = str(tmp_path / "x.txt")
    printed = json.loads(run("export", "ring", "--format", "text", "-o", path, "--json").stdout)
    assert (printed["files"], printed["text"], printed["format"]) == ([path], None, "text")
    assert Schedule.from_text(Path(path).read_text(encoding="utf-8")).world_size == 4


def test_a_wrong_algorithm_is_not_written(run: Run, short_ring: None) -> None:
    result = run("export", "short_ring")
    assert result.exit_code == 2
    assert "ends wrong" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "words, said",
    [
        ("ring --format goal", "'goal' is not one of 'msccl', 'mscclpp', 'text'"),
        ("ring --format text --max-steps 3", "--max-steps is for msccl, not for text"),
        ("ring -k 40", "more than 64 steps"),
        ("ring -k 40 --format mscclpp", "MAX_OPERATION"),
        ("dissemination -c barrier", "MSCCL has no barrier"),
        ("ring --root 1", "all_reduce has no root"),
        ("missing.xml", "missing.xml: cannot be read"),
        ("ring -o /no/where/x.xml", "there is no folder"),
    ],
)
def test_bad_calls_are_one_line(run: Run, words: str, said: str) -> None:
    result = run("export", *words.split())
    assert result.exit_code == 2
    assert said in result.stderr
    assert "Traceback" not in result.stderr


# --- files as algorithms -----------------------------------------------------------------


def test_a_file_is_proved(run: Run, ring: str) -> None:
    for words in (("verify", ring), ("verify", "--schedule", ring)):
        result = run(*words)
        assert result.exit_code == 0
        assert "1 proved, 0 wrong" in result.stdout
    printed = json.loads(run("verify", ring, "--json").stdout)["results"][0]
    assert (printed["collective"], printed["proved"], printed["at"]["rounds"]) == (
        "all_reduce", [3], 4
    )  # fmt: skip
    assert run("verify", ring, "--world-sizes", "3").exit_code == 2


def test_a_file_is_drawn_ordered_simulated_and_written_again(run: Run, ring: str) -> None:
    shown = run("show", ring, "all_reduce")
    assert shown.stdout.startswith("ring all_reduce on 3 ranks\nRead from ring.xml.\n")
    assert "chunk 1: (x0 + x2) + x1" in run("verify", ring, "--order").stdout
    printed = json.loads(run("simulate", ring, "--topology", "ring", "--json").stdout)
    own = json.loads(run("simulate", "ring", "-k", "3", "--topology", "ring", "--json").stdout)
    assert printed["seconds"] == pytest.approx(own["seconds"], rel=1e-9)
    assert from_msccl(run("export", ring).stdout).world_size == 3


@pytest.mark.parametrize(
    "words, said",
    [
        ("show ring.xml all_gather", "'ring.xml' is for all_reduce, and not for all_gather"),
        ("show ring.xml all_reduce -k 4", "ring.xml holds a schedule for 3 ranks"),
        ("bench all_reduce -k 2 --algorithms ring.xml", "ring.xml holds a schedule for 3 ranks"),
        (
            "bench all_gather -k 3 --algorithms ring.xml",
            "is for all_reduce, and not for all_gather",
        ),
        (
            "tune -k 3 --output t.json --algorithms ring.xml",
            "a tuning file names no files; RINGCOLL_ALGORITHM=",
        ),
        ("show other.xml all_reduce", "other.xml: cannot be read"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(run: Run, ring: str, words: str, said: str) -> None:
    result = run(*words.split())
    assert result.exit_code == 2
    assert said in result.stderr


def test_a_wrong_file_is_drawn(run: Run, ring: str) -> None:
    text = Path(ring).read_text(encoding="utf-8").replace('type="rrc"', 'type="r"')
    Path(ring).write_text(text, encoding="utf-8")
    result = run("verify", ring)
    assert result.exit_code == 1
    assert "ends wrong" in result.stdout


@pytest.mark.processes
def test_a_file_is_measured_on_processes(run: Run, ring: str) -> None:
    assert run("export", "ring", "-k", "2", "-o", ring).exit_code == 0
    words = ("-k", "2", "-b", "1000", "-e", "1000", "-n", "2", "--json")
    printed = json.loads(run("bench", "all_reduce", "--algorithms", ring, *words).stdout)
    assert str(Path(ring).absolute()) in json.dumps(printed)
    assert "ring.xml" in json.dumps(printed["results"])
    assert printed["out_of_bounds"]["count"] == 0
