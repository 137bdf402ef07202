"""The script of the conformance suite of faults: its tables, and that the page has all its rows."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.programs.deaths import ENDINGS, Told
from tests.programs.disagreements import KINDS, Met
from tests.programs.mortal import Ended

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(FOLDER)
    return import_module("faults")


def rows(text: str) -> list[list[str]]:
    return [
        re.split(r" \| ", line.strip("| "))
        for line in text.splitlines()
        if line.startswith("|") and not line.startswith("| ---")
    ]


def test_the_page_has_a_row_for_each_kind_and_ending(script: Any):
    _, rest = script.PAGE.read_text(encoding="utf-8").split(script.BEGIN)
    text, _ = rest.split(script.END)
    found = [row[:2] for row in rows(text)]
    wanted = [[name, str(len(kinds))] for name, kinds in script.rows_of_kinds().items()]
    heads = [row[0] for row in found]
    assert found[1 : 1 + len(wanted)] == wanted, "run: python benchmarks/faults.py --page"
    assert heads[2 + len(wanted) :] == [*ENDINGS], "run: python benchmarks/faults.py --page"
    for word in script.PROBLEMS:
        assert not re.search(rf"\d {word}", text), word


def test_what_a_cell_says(script: Any):
    assert script.outcome(["right", "next"], ["MismatchError"], [0.4]) == "`MismatchError` 0.4 s"
    assert script.outcome(["right"], [""], []) == "right results"
    assert script.outcome(["silent", "right", "silent"], ["", ""], []) == "2 silent"


def test_the_tables_of_what_was_met(script: Any, capsys: pytest.CaptureFixture[str]):
    kind, ending = "operator: reduce, max", "killed while the group is idle"
    mismatch = Met("MismatchError", "rank 1 called reduce", True, 0.4)
    told = Told("PeerLostError", "lost rank 1 in all_reduce", True, 10.5, 1)
    met = {"threads": {kind: [mismatch] * 3}, "gloo": {kind: [mismatch, None, mismatch]}}
    ended = {"gloo": {ending: [told, Ended(-9, 10.0), told]}}
    page = script.put(
        f"before\n{script.BEGIN}\nold\n{script.END}\nafter", script.section(met, ended)
    )
    assert page.startswith("before\n")
    assert page.endswith("\nafter")
    assert "old" not in page
    found = {row[0]: row[1:] for row in rows(page)}
    number = str(len(script.rows_of_kinds()["operator"]))
    assert found["operator"] == [number, "`MismatchError` 0.4 s", "1 hangs or crashes"]
    assert found["root"][1:] == ["-", "-"]
    assert found[ending] == ["`PeerLostError` 0.5 s"]
    first, second = script.summary(met, ended)
    assert first.cells()[0][:3] == ["threads", "1", "1"]
    assert first.cells()[1][:3] == ["gloo", "1", "0"]
    assert second.cells()[0][:3] == ["gloo", "1", "1"]
    script.report_wrong(met, ended)
    assert capsys.readouterr().out.startswith(f"gloo: {kind}: hangs or crashes")


def test_threads_are_tried(script: Any):
    name = "operator: all_reduce, max"
    assert script.available()[:2] == ["threads", "shared"]
    (met,) = script.disagree("threads", [name]).values()
    assert (
        script.outcome(
            [script.disagreements.judge(KINDS[name], met)], [item.error for item in met], [0.4]
        )
        == "`MismatchError` 0.4 s"
    )
