"""The variables of the environment: where files are, what is logged, who reads them."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ringcoll
from ringcoll.runtime.machine import settings
from ringcoll.runtime.operation.operation import _log_line, log_once
from ringcoll.runtime.transport import costs_of
from ringcoll.schedules.cost import Table, choose, crowded_parameters


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No variables and no file of this user; the library's log is put back."""
    for name in ("ALGORITHM", "DEBUG", "TRANSPORT"):
        monkeypatch.delenv(f"RINGCOLL_{name}", raising=False)
    monkeypatch.setenv("RINGCOLL_TUNING", "off")
    log = logging.getLogger("ringcoll")
    level, handlers = log.level, list(log.handlers)
    yield
    log.setLevel(level)
    log.handlers[:] = handlers


def table(world_size: int, **more: Any) -> Table:
    found = crowded_parameters(costs_of("gloo"), world_size, cores=world_size)
    return Table(transport="gloo", world_size=world_size, parameters=found, **more)


def test_where_the_file_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert settings.tuning_file() == (None, True)
    monkeypatch.setenv("RINGCOLL_TUNING", str(tmp_path / "own.json"))
    assert settings.tuning_file() == (tmp_path / "own.json", True)
    monkeypatch.delenv("RINGCOLL_TUNING")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert settings.tuning_file() == (tmp_path / "ringcoll" / "tuning.json", False)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert settings.tuning_file() == (tmp_path / ".cache" / "ringcoll" / "tuning.json", False)


@pytest.mark.parametrize("level, told", [("info", 1), ("debug", 2), ("", 0)])
def test_each_decision_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, level: str, told: int
) -> None:
    monkeypatch.setenv("RINGCOLL_DEBUG", level)
    settings.log_as_asked()
    _log_line.cache_clear()
    first, second = table(4), table(4, announces=False)
    for _ in range(3):
        for own in (first, second):
            log_once(choose("all_reduce", 12345, 4, own))
    lines = [item.getMessage() for item in caplog.records]
    assert [item.levelname for item in caplog.records] == ["INFO", "DEBUG"][:told]
    for line in lines:
        assert line.startswith("all_reduce of 12345 bytes on 4 ranks over gloo: ")
        assert "the least predicted time" in line


def test_an_unknown_level(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RINGCOLL_DEBUG", "loud")
    settings.log_as_asked()
    assert [item.getMessage() for item in caplog.records] == [
        "RINGCOLL_DEBUG is 'loud', and not info, debug or detail"
    ]


def test_only_one_module_reads_the_librarys_variables() -> None:
    root = Path(ringcoll.__file__).parent
    reading = re.compile(r"os\.environ\.get\(|os\.getenv\(|os\.environ\[[^]]*\](?! =)")
    readers = {
        path.name
        for path in root.rglob("*.py")
        if "RINGCOLL_" in (text := path.read_text(encoding="utf-8")) and reading.search(text)
    }
    assert readers == {"settings.py"}
