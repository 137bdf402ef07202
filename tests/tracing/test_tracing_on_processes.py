"""Traces between processes: over the transports, on the backend, with wrong clocks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ringcoll import testing
from ringcoll.runtime.launch import RankError, Ranks
from ringcoll.schedules import verify
from ringcoll.schedules.algorithms import schedule_of
from tests.cases.pictures import check, check_schedule
from tests.programs import tracing

pytestmark = pytest.mark.processes


def checked(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text())
    check(document)
    return document


def numbers(document: dict[str, Any]) -> list[int]:
    """Of the operations of rank 0."""
    return [
        event["args"]["number"]
        for event in document["traceEvents"]
        if event.get("cat") == "operation" and event["pid"] == 0
    ]


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("transport", ["gloo", "ucx"])
def test_all_messages_of_a_ring(pool, tmp_path, transport: str, world_size: int):
    path = tmp_path / "trace.json"
    found = pool(world_size).run(tracing.rings, str(path), transport, 4, 1001)
    sums = [sum(rank + number for rank in range(world_size)) for number in range(4)]
    assert found == [sums] * world_size
    document = checked(path)
    assert document["otherData"]["transport"] == transport
    assert len(numbers(document)) == 4
    schedule = schedule_of("all_reduce", "ring", world_size)
    wanted = verify(schedule).messages_mean * world_size
    for number in numbers(document):
        assert check_schedule(document, number, schedule, 1001, 8) == wanted


@pytest.mark.parametrize("world_size", [2, 4])
def test_wrong_clocks_are_found_out(pool, tmp_path, world_size: int):
    path = tmp_path / "trace.json"
    skews = [0, 5 * 10**9, -(10**7), 123][:world_size]
    pool(world_size).run(tracing.skewed, str(path), skews)
    clocks = checked(path)["otherData"]["clocks"]
    assert len(clocks) == world_size
    for clock, skew in zip(clocks, skews, strict=True):
        assert abs(clock["offset_us"] + skew / 1000) <= clock["uncertainty_us"] + 1e-3
        assert clock["uncertainty_us"] < 1e5
        assert (clock["rate"], clock["slack_us"]) == (0, 0)


def test_on_the_backend_under_ddp(tmp_path):
    path = tmp_path / "trace.json"
    assert testing.ranks(2).run(tracing.trains, str(path)) == [True, True]
    assert len(numbers(checked(path))) == 2


def test_no_native_collective_is_called(pool, tmp_path):
    path = tmp_path / "trace.json"
    pool(2).run(tracing.without_native, str(path))
    assert len(numbers(checked(path))) == 1


def test_a_rank_that_dies_in_the_block(tmp_path):
    reports: list[tuple[int, str]] = []
    with Ranks(3, timeout_s=60.0) as ranks, pytest.raises(RankError):
        ranks.run(tracing.dies, str(tmp_path / "trace.json"), 1, on_report=reports.append)
    assert sorted(reports) == [(0, "PeerLostError"), (2, "PeerLostError")]
    assert list(tmp_path.iterdir()) == []
