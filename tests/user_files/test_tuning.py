"""The file of ``ringcoll tune``: it comes back as it was, and others are told apart."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ringcoll.errors import TuningFileError
from ringcoll.runtime.machine import settings
from ringcoll.runtime.transport import costs_of
from ringcoll.runtime.user_files import tuning
from ringcoll.runtime.user_files.tuning import (
    Tuned,
    find_table,
    read_fit,
    read_tables,
    update_tables,
)
from ringcoll.schedules.cost import Table, crowded_parameters, parse_rules


def table(world_size: int = 4, transport: str = "gloo", rules: str = "all_reduce:0-3:direct"):
    return Table(
        transport=transport,
        world_size=world_size,
        parameters=crowded_parameters(costs_of(transport), world_size),
        tuned=parse_rules(rules),
        forced=parse_rules("ring"),
        source="measured",
    )


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "not" / "there" / "tuning.json"
    update_tables(path, Tuned.now(table(), torch="2.13"))
    (found,) = read_tables(path)
    assert found.table.to_json() == replace(table(), forced=(), source=str(path)).to_json()
    assert found.facts["torch"] == "2.13"
    assert found.facts["machine"] == tuning.machine()
    assert list(path.parent.iterdir()) == [path]


def test_one_table_is_replaced_and_others_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    for one in (table(2), table(4), table(4, "ucx"), table(4, rules="all_reduce:0-9:ring")):
        update_tables(path, Tuned.now(one))
    found = {one.key: str(one.table.tuned[0]) for one in read_tables(path)}
    assert found == {
        ("gloo", 2, 1, "cpu"): "all_reduce:0-3:direct",
        ("ucx", 4, 1, "cpu"): "all_reduce:0-3:direct",
        ("gloo", 4, 1, "cpu"): "all_reduce:0-9:ring",
    }
    assert find_table(path, "gloo", 4, 1, asked=True) is not None
    assert find_table(path, "gloo", 3, 1, asked=True) is None
    assert find_table(path, "gloo", 4, 2, asked=True) is None


def test_what_was_measured_with_cpu_tensors_is_not_for_cuda_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside each other in one file; that of CUDA tensors is for the same kind of GPU only."""
    name = "H200"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    path = tmp_path / "tuning.json"
    update_tables(path, Tuned.now(table()))
    assert find_table(path, "gloo", 4, 1, asked=True, device="cuda") is None
    update_tables(path, Tuned.now(replace(table(rules="ring"), device="cuda")))
    for device, rule in (("cpu", "all_reduce:0-3:direct"), ("cuda", "*:*:ring")):
        found = find_table(path, "gloo", 4, 1, asked=False, device=device)
        assert found is not None
        assert (found.device, str(found.tuned[0])) == (device, rule)
        assert found.origin == f"{path}, measured with {device.upper()} tensors"
    assert [entry.facts["machine"].get("gpu") for entry in read_tables(path)] == [None, "H200"]
    name = "H100"
    assert find_table(path, "gloo", 4, 1, asked=False, device="cuda") is None
    assert find_table(path, "gloo", 4, 1, asked=False) is not None


def test_a_file_without_devices_is_of_cpu_tensors(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    old = document(path)
    del old["tables"][0]["device"]
    path.write_text(json.dumps(old))
    (found,) = read_tables(path)
    assert found.table.device == "cpu"
    assert found.key == ("gloo", 4, 1, "cpu")


def test_a_write_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tuning.json"
    update_tables(path, Tuned.now(table(2)))
    before = path.read_bytes()

    def fail(handle: int) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(TuningFileError, match="cannot be written: the disk is full") as caught:
        update_tables(path, Tuned.now(table(4)))
    assert caught.value.path == str(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def document(path: Path) -> dict[str, Any]:
    update_tables(path, Tuned.now(table()))
    found: dict[str, Any] = json.loads(path.read_text())
    return found


BROKEN: dict[str, Callable[[dict[str, Any]], str | bytes]] = {
    "not JSON": lambda found: "{",
    "not UTF-8": lambda found: b"\xff\xfe",
    "a list": lambda found: "[]",
    "another program's": lambda found: '{"format": "theirs"}',
    "of another version": lambda found: json.dumps(found | {"version": 2}),
    "without tables": lambda found: json.dumps(found | {"tables": None}),
    "an odd table": lambda found: json.dumps(found | {"tables": [3]}),
    "an odd rule": lambda found: json.dumps(
        found | {"tables": [found["tables"][0] | {"tuned": "all_reduce:5-4:ring"}]}
    ),
    "an odd cost": lambda found: json.dumps(
        found | {"tables": [found["tables"][0] | {"parameters": {"alpha_s": "x"}}]}
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_what_is_wrong_is_named_if_asked_for(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "tuning.json"
    content = BROKEN[kind](document(path))
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(TuningFileError) as caught:
        find_table(path, "gloo", 4, 1, asked=True)
    assert caught.value.path == str(path)
    assert str(caught.value).startswith(f"{path}: ")
    # And only warned of where it just lies there.
    assert find_table(path, "gloo", 4, 1, asked=False) is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert str(path) in record.getMessage()
    # Nor is it overwritten.
    with pytest.raises(TuningFileError):
        update_tables(path, Tuned.now(table()))


def test_a_file_that_is_not_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "tuning.json"
    assert find_table(path, "gloo", 4, 1, asked=False) is None
    assert not caplog.records
    with pytest.raises(TuningFileError, match="cannot be read"):
        find_table(path, "gloo", 4, 1, asked=True)


def test_another_machines_file_is_used_only_if_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    found = document(path)
    found["tables"][0]["facts"]["machine"]["cores"] = 96
    path.write_text(json.dumps(found))
    assert find_table(path, "gloo", 4, 1, asked=False) is None
    assert find_table(path, "gloo", 4, 1, asked=True) is not None


def test_rules_for_algorithms_of_another_program_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    found = document(path)
    found["tables"][0]["tuned"] = "all_reduce:*:theirs"
    path.write_text(json.dumps(found))
    read_again = find_table(path, "gloo", 4, 1, asked=True)
    assert read_again is not None
    assert [str(rule) for rule in read_again.tuned] == ["all_reduce:*:theirs"]


def test_a_group_takes_the_tuning_file_then_its_own_then_that_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RINGCOLL_TUNING", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    where = ("gloo", 4, 1, "cpu")
    assert tuning.known_table(*where) is None
    kept, tuned = settings.measured_file(), settings.tuning_file()[0]
    assert kept is not None
    assert tuned is not None
    own = table(rules="all_reduce:0-2:direct")
    tuning.remember(kept, table(rules="all_reduce:0-5:direct"))

    def found(measured: Table | None) -> list[str]:
        known = tuning.known_table(*where, measured)
        return [] if known is None else [str(rule) for rule in known.tuned]

    assert found(None) == ["all_reduce:0-5:direct"]
    assert found(own) == ["all_reduce:0-2:direct"]
    update_tables(tuned, Tuned.now(table(rules="all_reduce:0-3:direct")))
    assert found(own) == ["all_reduce:0-3:direct"]
    monkeypatch.setenv("RINGCOLL_TUNING", "off")
    assert found(None) == []


@pytest.mark.parametrize("text", ["[" * 200_000, '{"format":' * 100_000, "\0", "", "{", "\ud800"])
def test_a_file_that_is_no_json_is_told(tmp_path: Path, text: str) -> None:
    """However deep it is: it may come from anyone."""
    path = tmp_path / "fit.json"
    path.write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(TuningFileError, match="cannot be read"):
        read_fit(path)
