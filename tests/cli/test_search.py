"""``ringcoll search``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ringcoll.lab.search import bounds
from ringcoll.schedules import Schedule, verify
from ringcoll.schedules.algorithms import algorithms
from tests.cli.conftest import Run


def test_the_table(run: Run) -> None:
    result = run("search", "all-gather", "--topology", "dgx1", "--more-steps", "0")
    assert result.exit_code == 0
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines[:4] == [
        "schedule steps rounds chunks rounds per chunk segments us",
        "lower bound 2 7/6",
        "exact_2_3_2 2 3 2 3/2 1 14.664",
        "direct 1 27.772",
    ]
    assert "proved impossible" not in result.stdout


def test_a_graph_of_a_file(run: Run, tmp_path: Path) -> None:
    graph, text = tmp_path / "three.txt", tmp_path / "best.txt"
    graph.write_text("0 -- 1 50 1\n1 -- 2 10 1\n2 -> 0 10 1\n")
    words = ("search", "all_reduce", "--graph", str(graph), "--chunks", "3", "-o", str(text))
    data = json.loads(run(*words, "--json").stdout)
    assert (data["topology"], data["world_size"], data["least_steps"]) == ("three", 3, 4)
    assert data["unknown"] == []
    fastest = min(data["schedules"], key=lambda row: row["seconds"])
    assert fastest["seconds"] < data["registered"][0]["seconds"]
    schedule = Schedule.from_text(text.read_text())
    assert schedule.algorithm == fastest["schedule"]
    verify(schedule)
    shown = run(*words)
    assert f"Wrote {text}: the text of {schedule.algorithm}." in shown.stdout
    assert run("verify", "--schedule", str(text)).exit_code == 0


@pytest.mark.slow
def test_what_is_faster_than_what_is_written_is_said(run: Run, tmp_path: Path) -> None:
    words = ("search", "all_reduce", "--topology", "crossbar", "-k", "4", "--size", "64M")
    result = run(*words, "--method", "greedy", "--chunks", "1", "-o", str(tmp_path / "found.txt"))
    assert "which is registered, is faster at this size" in " ".join(result.stdout.split())
    torus = ("search", "broadcast", "--topology", "torus:4x4", "--size", "64M")
    trees = run(*torus, "--method", "trees", "--chunks", "4", "-o", str(tmp_path / "found.txt"))
    assert "segments, which `ringcoll fit` stores" in " ".join(trees.stdout.split())


def test_what_is_not_decided_is_said(run: Run) -> None:
    words = ("--topology", "torus:4x4", "--chunks", "4", "--more-steps", "0", "--effort", "0.001")
    result = run("search", "all_gather", *words)
    assert result.exit_code == 0
    assert "not decided with this --effort (steps/rounds/chunks): 4/15/4" in result.stdout


def test_algorithms_that_are_left_out_are_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "MOST_MESSAGES", 8)
    words = ("search", "all_gather", "--topology", "ring", "--method", "greedy", "--chunks", "1")
    data = json.loads(run(*words, "--json").stdout)
    assert {"ring", "direct"} <= {*data["left_out"]}
    simulated = {row["algorithm"] for row in data["registered"]}
    assert simulated.isdisjoint(data["left_out"])
    assert simulated | {*data["left_out"]} == {entry.name for entry in algorithms("all_gather", 4)}
    said = f"too many messages: {', '.join(data['left_out'])}\n"
    assert run(*words).stdout.endswith(said)


@pytest.mark.parametrize(
    "words, said",
    [
        ("all_gather", "give either --topology or --graph"),
        ("all_gather --topology ring --graph {bad}", "give either --topology or --graph"),
        ("all_gather --topology star", "not a topology"),
        ("all_gather --topology dgx1 -k 4", "dgx1 has 8 ranks"),
        ("all_gather --graph {bad}", "line 2: the line is no link"),
        ("all_gather --graph {good} -k 3", "has 2 ranks"),
        ("all_gather --graph {binary}", "cannot be read"),
        ("barrier --topology ring", "not searched for"),
        ("all_gather --topology ring --root 1", "the collective has no root"),
        ("all_to_all --topology ring --method greedy", "every rank wants every chunk"),
    ],
)
def test_bad_calls_are_one_line(run: Run, tmp_path: Path, words: str, said: str) -> None:
    files = {name: tmp_path / name for name in ("good", "bad", "binary")}
    files["good"].write_text("0 -- 1 5 0")
    files["bad"].write_text("0 -- 1 5 0\n0 -- 1")
    files["binary"].write_bytes(b"\xff\xfe")
    result = run("search", *(word.format(**files) for word in words.split()))
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr
