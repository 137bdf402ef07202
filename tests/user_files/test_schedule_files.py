"""Schedules in files: every format, wherever an algorithm is named, and what is wrong with a file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ringcoll.errors import ScheduleError, UnsupportedWorldSizeError
from ringcoll.lab.formats import to_msccl, to_mscclpp
from ringcoll.runtime.user_files import algorithm_in, as_algorithm, read_schedule
from ringcoll.runtime.user_files import algorithms as user_algorithms
from ringcoll.schedules import Schedule, verify
from ringcoll.schedules.algorithms import schedule_of

FORMATS: dict[str, Callable[[Schedule], str]] = {
    "ring.xml": to_msccl,
    "ring.json": to_mscclpp,
    "ring.txt": Schedule.to_text,
    "RING.XML": to_msccl,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, write in FORMATS.items():
        (tmp_path / name).write_text(write(schedule_of("all_reduce", "ring", 3)), encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_is_read(folder: Path, name: str) -> None:
    schedule = as_algorithm(str(folder / name))
    assert isinstance(schedule, Schedule)
    assert (schedule.algorithm, verify(schedule).sent_max) == (
        "ring", verify(schedule_of("all_reduce", "ring", 3)).sent_max
    )  # fmt: skip
    assert as_algorithm(str(folder / name)) is schedule, "proved once, not in each call"


def test_names_are_left_alone() -> None:
    schedule = schedule_of("all_reduce", "ring", 3)
    assert as_algorithm("ring") == "ring"
    assert as_algorithm(schedule) is schedule


def test_a_file_that_has_changed_is_read_again(folder: Path) -> None:
    path = folder / "ring.xml"
    assert read_schedule(str(path)).world_size == 3
    path.write_text(to_msccl(schedule_of("all_reduce", "ring", 2)), encoding="utf-8")
    os.utime(path, ns=(1, 1))
    assert read_schedule(str(path)).world_size == 2


def test_a_file_that_is_written_anew_with_the_same_times_and_length_is_read_again(
    tmp_path: Path,
) -> None:
    path, text = tmp_path / "one.txt", schedule_of("all_reduce", "ring", 3).to_text()
    for name in ("ring", "gnir", "grin", "ring"):
        path.write_text(text.replace("all_reduce ring", f"all_reduce {name}"), encoding="utf-8")
        os.utime(path, ns=(1, 1))
        first, second = (read_schedule(str(path)) for _ in range(2))
        assert first.algorithm == name
        assert first is second


def test_a_file_that_has_been_there_for_a_while_is_read_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(folder / "ring.xml")
    monkeypatch.setattr(user_algorithms, "_TICK_NS", -10_000_000_000)  # it is settled at once
    schedule = read_schedule(path)
    monkeypatch.setattr(user_algorithms, "read_file", lambda *_: pytest.fail("read anew"))
    assert read_schedule(path) is schedule


def test_an_entry_is_for_one_number_of_ranks_and_one_root(tmp_path: Path) -> None:
    path = tmp_path / "tree.xml"
    path.write_text(to_msccl(schedule_of("broadcast", "binomial_tree", 4, 2)), encoding="utf-8")
    entry = algorithm_in(str(path))
    assert (entry.collective, entry.name, entry.built_in) == ("broadcast", "binomial_tree", False)
    assert verify(entry.schedule(4, 2)).rounds == 2
    with pytest.raises(UnsupportedWorldSizeError, match=r"tree.xml holds a schedule for 4 ranks"):
        entry.schedule(3, 2)
    with pytest.raises(ScheduleError, match=r"is for root 2, not for root 0"):
        verify(entry.schedule(4))


@pytest.mark.parametrize(
    "content, said",
    [
        (b"<algo", r"bad.xml: line 1: no XML"),
        (b"{", r"bad.xml: line 1: no JSON"),
        (b"", r"bad.xml: line 1: expected 'schedule"),
        (b"\xff<", r"bad.xml: cannot be read: it is no text: 'utf-8' codec"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "bad.xml").write_bytes(content)
    with pytest.raises(ScheduleError, match=said):
        read_schedule(str(tmp_path / "bad.xml"))


@pytest.mark.parametrize(
    "path", ["missing.xml", ".xml", "a" * 5000 + ".xml", "~nobody_of_that/x.xml"]
)
def test_a_file_that_is_not_there_is_named(path: str) -> None:
    with pytest.raises(ScheduleError, match="cannot be read"):
        read_schedule(path)


def test_a_mark_of_the_byte_order_is_passed_over(folder: Path) -> None:
    text = (folder / "ring.xml").read_text(encoding="utf-8")
    (folder / "mark.xml").write_text("\ufeff" + text, encoding="utf-8")
    assert read_schedule(str(folder / "mark.xml")).world_size == 3
