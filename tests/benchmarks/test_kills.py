"""The script that kills ranks: what it judges, and some kills over every transport."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def kills(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(FOLDER)
    return import_module("kills")


@pytest.mark.parametrize(
    "kind,text,typed,seconds,exit_code,wanted",
    [
        ("PeerLostError", "lost rank 1", True, 0.5, 0, "right"),
        ("PeerLostError", "lost rank 1", True, 2.5, 0, "late"),
        ("PeerLostError", "lost rank 2", True, 0.5, 0, "does not name the dead"),
        ("RuntimeError", "lost rank 1", False, 0.5, 0, "error of another kind"),
        ("PeerLostError", "lost rank 1", True, 0.5, None, "does not end"),
        ("PeerLostError", "lost rank 1", True, 0.5, -6, "ends with -6 after its error"),
        (None, "", False, 0.0, -6, "ends with -6"),
        (None, "", False, 0.0, None, "hangs"),
    ],
)
def test_what_is_right(
    kills: Any, kind: str | None, text: str, typed: bool, seconds: float,
    exit_code: int | None, wanted: str,
) -> None:  # fmt: skip
    case = kills.Case("shared", 3, 1, False, 0.1, 0)
    told = None if kind is None else kills.Told(kind, text, typed, 100.0 + seconds, 1)
    assert kills.judge(case, told, exit_code, 100.0) == wanted
    if told is not None and wanted == "right":
        assert (
            kills.judge(case, replace(told, peer=2), exit_code, 100.0) == "does not name the dead"
        )


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shared", "ucx", "gloo"])
@pytest.mark.parametrize("delay_s,store_dies", [(0.0, False), (0.03, True), (0.3, False)])
def test_survivors_name_the_dead(
    kills: Any, transport: str, delay_s: float, store_dies: bool
) -> None:
    if transport == "ucx" and find_spec("ucxx") is None:
        pytest.skip("ucxx is not installed")
    case = kills.Case(transport, 3, 0 if store_dies else 1, store_dies, delay_s, 7)
    for word, seconds, told in kills.run(case):
        assert word in ("right", "late"), (word, seconds, told)  # the machine may be busy
