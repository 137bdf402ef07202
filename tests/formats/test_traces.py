"""GOAL and Chakra: the text is of the grammar, the bytes are of protobuf, and both say what is sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from ringcoll.algorithms import Algorithm, schedule_of
from ringcoll.errors import ScheduleError
from ringcoll.formats import to_chakra, to_goal
from ringcoll.schedule import Schedule, chunks_of_data, contract, count
from tests.cases.algorithms import EVERY, name_of, worlds_of
from tests.cases.foreign import run_goal

every_algorithm = pytest.mark.parametrize("entry", EVERY, ids=name_of)
UNIT = 24  # bytes of a chunk


def nbytes_of(schedule: Schedule) -> int:
    return UNIT * chunks_of_data(schedule)


def counted(schedule: Schedule) -> tuple[list[int], list[int]]:
    """Chunks sent, and reduced, by rank."""
    steps = [map(count, schedule.steps(rank)) for rank in range(schedule.world_size)]
    rows = [[*step] for step in steps]
    return [sum(step[2] for step in row) for row in rows], [sum(s[4] for s in row) for row in rows]


@every_algorithm
def test_a_goal_text_says_what_is_sent_and_reduced(entry: Algorithm) -> None:
    for world_size in worlds_of(entry, 1, 2, 5):
        schedule = entry.schedule(world_size)
        sent, calc = run_goal(to_goal(schedule, nbytes_of(schedule), gamma_ns_per_byte=0.5))
        chunks_sent, reduced = counted(schedule)
        assert [sent[rank] for rank in range(world_size)] == [UNIT * n for n in chunks_sent]
        assert [calc[rank] for rank in range(world_size)] == [UNIT // 2 * n for n in reduced]


def test_chunks_are_as_long_as_in_memory() -> None:
    text = to_goal(schedule_of("all_gather", "ring", 3), 9)
    assert text.count(" 3b ") == 12
    text = to_goal(schedule_of("all_reduce", "ring", 3), 10)
    assert (text.count(" 4b "), text.count(" 3b ")) == (8, 16)


def test_a_step_begins_when_the_step_before_has_ended() -> None:
    """Of many messages, each requires one thing, and one thing requires all of them."""
    text = to_goal(schedule_of("all_gather", "direct", 12), 12)
    assert text.count(" requires ") == 12 * 22
    text = to_goal(schedule_of("all_reduce", "ring", 12), 12)
    assert text.count(" requires ") == 12 * (22 * 2 + 21 * 2)


# --- Chakra ------------------------------------------------------------------------------


def varint(data: bytes, start: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[start]
        value |= (byte & 0x7F) << shift
        start, shift = start + 1, shift + 7
        if not byte & 0x80:
            return value, start


def fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Fields of a message: protobuf.dev, "Encoding"."""
    start = 0
    while start < len(data):
        tag, start = varint(data, start)
        value, start = varint(data, start)
        if tag & 7 == 2:
            assert start + value <= len(data)
            yield tag >> 3, data[start : start + value]
            start += value
        else:
            assert tag & 7 == 0
            yield tag >> 3, value


def messages(data: bytes) -> Iterator[bytes]:
    start = 0
    while start < len(data):
        length, start = varint(data, start)
        assert start + length <= len(data)
        yield data[start : start + length]
        start += length


KINDS = {7: "int32", 9: "int64", 27: "bool"}


def node_of(data: bytes) -> dict[str, Any]:
    names = {1: "id", 2: "name", 3: "type", 5: "data_deps", 7: "duration_micros"}
    node: dict[str, Any] = {"id": 0, "duration_micros": 0, "data_deps": [], "attr": {}}
    for number, value in fields(data):
        if number == 10:
            assert isinstance(value, bytes)
            (_, name), (kind, content) = fields(value)
            assert isinstance(name, bytes)
            node["attr"][name.decode()] = (KINDS[kind], content)
        elif number == 5:
            assert isinstance(value, bytes)
            start = 0
            while start < len(value):
                item, start = varint(value, start)
                node["data_deps"].append(item)
        else:
            node[names[number]] = value
    return node


def trace(data: bytes) -> list[dict[str, Any]]:
    header, *nodes = messages(data)
    assert [*fields(header)] == [(1, b"0.0.4")]
    return [*map(node_of, nodes)]


@every_algorithm
def test_a_chakra_trace_says_what_is_sent_and_reduced(entry: Algorithm) -> None:
    for world_size in worlds_of(entry, 1, 2, 5):
        schedule = entry.schedule(world_size)
        traces = [*map(trace, to_chakra(schedule, nbytes_of(schedule), gamma_us_per_byte=0.5))]
        chunks_sent, reduced = counted(schedule)
        sends: Counter[Any] = Counter()
        receives: Counter[Any] = Counter()
        for rank, nodes in enumerate(traces):
            assert [node["id"] for node in nodes] == [*range(len(nodes))]
            assert all(max(node["data_deps"], default=-1) < node["id"] for node in nodes)
            sent = 0
            for node in nodes:
                attributes = node["attr"]
                assert attributes.pop("is_cpu_op") == ("bool", 0)
                if node["type"] == 4:
                    assert not attributes
                    continue
                kinds = {name: kind for name, (kind, _) in attributes.items()}
                assert kinds == {
                    "comm_type": "int64", "comm_size": "int64", "comm_src": "int32",
                    "comm_dst": "int32", "comm_tag": "int32",
                }  # fmt: skip
                facts = {name: value for name, (_, value) in attributes.items()}
                assert facts.pop("comm_type") == node["type"]
                (sends if node["type"] == 5 else receives)[tuple(facts.items())] += 1
                assert facts["comm_src" if node["type"] == 5 else "comm_dst"] == rank
                sent += facts["comm_size"] if node["type"] == 5 else 0
            assert sent == UNIT * chunks_sent[rank]
            assert sum(node["duration_micros"] for node in nodes) == UNIT // 2 * reduced[rank]
        assert sends == receives
        assert set(sends.values()) <= {1}, "a tag is used once between two ranks"


def test_a_long_trace_has_long_numbers() -> None:
    (first, *_) = to_chakra(schedule_of("all_reduce", "ring", 40), 40 << 30)
    nodes = trace(first)
    assert {node["attr"]["comm_size"][1] for node in nodes if node["type"] == 5} == {1 << 30}
    assert nodes[-1]["id"] == len(nodes) - 1 == 233


@pytest.mark.parametrize("write", [to_goal, to_chakra])
@pytest.mark.parametrize("collective", ["all_gather", "all_to_all", "scatter"])
def test_blocks_of_equal_length(write: Any, collective: str) -> None:
    entry = next(entry for entry in EVERY if entry.collective == collective)
    schedule = entry.schedule(3)
    assert contract(collective).num_blocks(3) > 1
    write(schedule, 9)
    for wrong in (10, -3):
        with pytest.raises(ScheduleError, match=f"cannot divide {wrong} bytes into blocks"):
            write(schedule, wrong)


def test_a_cost_below_zero() -> None:
    schedule = schedule_of("all_reduce", "ring", 2)
    for wrong in (-1.0, float("nan")):
        with pytest.raises(ScheduleError, match="gamma_ns_per_byte must be at least 0"):
            to_goal(schedule, 8, gamma_ns_per_byte=wrong)
        with pytest.raises(ScheduleError, match="gamma_us_per_byte must be at least 0"):
            to_chakra(schedule, 8, gamma_us_per_byte=wrong)
