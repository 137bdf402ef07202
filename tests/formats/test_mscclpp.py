"""Execution plans of MSCCL++: what is written is right in any order of ranks, plain plans are proved."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from ringcoll.errors import ScheduleError
from ringcoll.lab.formats import from_mscclpp, to_mscclpp
from ringcoll.schedules import tally_of, verify
from ringcoll.schedules.algorithms import Algorithm, find, schedule_of
from tests.cases.algorithms import EVERY, name_of, worlds_of
from tests.cases.foreign import run_mscclpp

NAMES = {"all_reduce": "allreduce", "all_gather": "allgather",
         "reduce_scatter": "reducescatter", "all_to_all": "alltoall"}  # fmt: skip
HELD = [entry for entry in EVERY if entry.collective in NAMES]
TOO_LONG = {("optcc", 3), ("optcc", 4), ("r2ccl", 4)}
every_algorithm = pytest.mark.parametrize("entry", HELD, ids=name_of)


@every_algorithm
def test_there_and_back_and_in_any_order(entry: Algorithm) -> None:
    for world_size in worlds_of(entry, 1, 2, 3, 4):
        before = entry.schedule(world_size)
        if (entry.name, world_size) in TOO_LONG:
            with pytest.raises(ScheduleError, match="MAX_OPERATION"):
                to_mscclpp(before)
            continue
        text = to_mscclpp(before)
        run_mscclpp(text, entry.collective, world_size)
        after = from_mscclpp(text)
        verify(after)
        assert after.algorithm == entry.name
        assert tally_of(after).sent == tally_of(before).sent


@pytest.mark.parametrize("name", ["ring", "direct", "recursive_doubling"])
def test_the_structure_is_that_of_the_plans_of_mscclpp(name: str) -> None:
    plan = json.loads(to_mscclpp(schedule_of("all_reduce", name, 4)))
    assert list(plan) == [
        *("name", "collective", "protocol", "inplace", "reuse_resources", "gpus"),
        *("num_threads_per_block", "use_double_scratch_buffer", "buffer_alignment"),
        *("min_message_size", "max_message_size"),
    ]
    for number, gpu in enumerate(plan["gpus"]):
        assert list(gpu) == [
            *("id", "input_chunks", "output_chunks", "scratch_chunks", "threadblocks", "channels"),
            *("remote_buffers", "semaphores"),
        ]
        assert gpu["id"] == number
        (channel,), (block,) = gpu["channels"], gpu["threadblocks"]
        assert list(channel) == ["channel_type", "connected_to"]
        assert list(block) == ["id", "ops", "channels", "remote_buffer_refs"]
        assert block["channels"][0]["channel_ids"] == [*range(len(channel["connected_to"]))]
        assert len(block["ops"]) <= 64
        keys = {
            "nop": {"name"},
            "signal": {"name", "channel_ids", "channel_type"},
            "wait": {"name", "channel_ids", "channel_type"},
            "put": {"name", "src_buff", "dst_buff", "channel_type"},
            "copy": {"name", "src_buff", "dst_buff"},
            "re": {"name", "src_buff", "dst_buff", "reduce_op"},
        }
        for operation in block["ops"]:
            assert set(operation) == keys[operation["name"].removeprefix("rlx")]
            for run in operation.get("src_buff", []):
                assert set(run) == {"type", "index", "size"}
                assert run["type"] in "ios"


@pytest.mark.parametrize("name", ["ring", "direct"])
def test_threads_wait_for_each_other_where_one_needs_the_data_of_another(name: str) -> None:
    """A ``nop`` is a barrier of the threads of a block; so is no other operation."""
    for gpu in json.loads(to_mscclpp(schedule_of("all_reduce", name, 4)))["gpus"]:
        read: set[tuple[str, int]] = set()
        written: set[tuple[str, int]] = set()
        has_waited = has_put = False
        for operation in gpu["threadblocks"][0]["ops"]:
            if operation["name"] == "nop":
                read, written, has_waited, has_put = set(), set(), False, False
                continue
            runs = [
                {(run["type"], run["index"] + i) for run in operation.get(side, ())
                 if "type" in run for i in range(run["size"])}
                for side in ("src_buff", "dst_buff")
            ]  # fmt: skip
            assert not runs[0] & written
            assert not runs[1] & (read | written)
            assert not (has_waited and (runs[0] or runs[1]))
            assert not (has_put and operation["name"] == "signal")
            read, written = read | runs[0], written | runs[1]
            has_waited = has_waited or operation["name"].endswith("wait")
            has_put = has_put or operation["name"] == "put"


def test_limits_are_errors_that_say_so() -> None:
    with pytest.raises(ScheduleError, match=r"runs at most 64 \(MAX_OPERATION\)"):
        to_mscclpp(schedule_of("all_reduce", "ring", 8))
    with pytest.raises(ScheduleError, match=r"19 peers, .* 16 channels \(MAX_CHANNEL\)"):
        to_mscclpp(schedule_of("all_gather", "direct", 20))
    with pytest.raises(
        ScheduleError, match=r"plans of MSCCL\+\+ are for all_reduce, .*not for gather"
    ):
        to_mscclpp(schedule_of("gather", "linear", 2))


# --- plans by hand -----------------------------------------------------------------------


def run(letter: str | int, index: int, size: int = 1) -> dict[str, Any]:
    key = "type" if isinstance(letter, str) else "buffer_id"
    return {key: letter, "index": index, "size": size}


def operation(name: str, sources: list[Any], targets: list[Any]) -> dict[str, Any]:
    return {"name": name, "src_buff": sources, "dst_buff": targets, "channel_type": "memory"}


SIGNAL, WAIT = (
    {"name": name, "channel_ids": [0], "channel_type": "memory"} for name in ("signal", "wait")
)


def plan(*blocks: list[dict[str, Any]], collective: str = "allreduce", chunks: int = 2) -> Any:
    """In-place plan of two ranks, with the peer's input as buffer 0 and its scratch as 1."""
    return {
        "name": "by hand",
        "collective": collective,
        "protocol": "Simple",
        "inplace": True,
        "gpus": [
            {
                "id": rank,
                "input_chunks": chunks, "output_chunks": chunks, "scratch_chunks": 9,
                "threadblocks": [{
                    "id": 0, "ops": operations,
                    "channels": [{"channel_type": "memory", "channel_ids": [0]}],
                    "remote_buffer_refs": [
                        {"access_channel_type": "memory", "remote_buffer_ids": [0, 1]}
                    ],
                }],
                "channels": [{"channel_type": "memory", "connected_to": [1 - rank]}],
                "remote_buffers": [
                    {"rank": 1 - rank, "type": letter, "access_channel_types": ["memory"]}
                    for letter in "is"
                ],
            }
            for rank, operations in enumerate(blocks)
        ],
    }  # fmt: skip


def both(half: Callable[[int], list[dict[str, Any]]]) -> Any:
    return plan(half(0), half(1))


def reads_and_sends(own: int) -> list[dict[str, Any]]:
    """Both ranks are there; each reads the other's chunk, reduces, and sends the sum to the other."""
    rres = operation("rres", [run("i", own), run(0, own)], [run("i", own), run(0, own)])
    return [SIGNAL, WAIT, rres, {"name": "nop"}, SIGNAL, WAIT]


def gets_and_sends(own: int) -> list[dict[str, Any]]:
    return [
        SIGNAL, WAIT,
        operation("get", [run(0, own)], [run("s", 0)]),
        operation("res", [run("i", own), run("s", 0)], [run("i", own), run(0, own)]),
        SIGNAL, WAIT,
    ]  # fmt: skip


def puts_and_reduces(own: int) -> list[dict[str, Any]]:
    return [
        operation("put", [run("i", 0, 2)], [run(1, 0, 2)]), {"name": "flush"}, SIGNAL, WAIT,
        operation("re", [run("i", 0, 2), run("s", 0, 2)], [run("i", 0, 2)]),
    ]  # fmt: skip


@pytest.mark.parametrize("half", [reads_and_sends, gets_and_sends, puts_and_reduces])
def test_a_plan_written_by_hand_is_proved(half: Callable[[int], list[dict[str, Any]]]) -> None:
    schedule = from_mscclpp(json.dumps(both(half)))
    proof = verify(schedule)
    assert (schedule.algorithm, schedule.num_chunks) == ("by_hand", 2)
    assert proof.sent_max == 1


def changed(*path: str | int, to: Any, half: Any = reads_and_sends) -> str:
    whole = json.loads(json.dumps(both(half)))
    place = whole
    for key in path[:-1]:
        place = place[key]
    if to is None:
        del place[path[-1]]
    else:
        place[path[-1]] = to
    return json.dumps(whole)


OPS = ("gpus", 0, "threadblocks", 0, "ops")
WRONG = {
    "{": "line 1: no JSON",
    '{\n"a": 1,\n}': "line 3: no JSON",
    "[" * 200_000: "no JSON: maximum recursion depth",
    f'{{"a": {"9" * 5000}}}': "no JSON: Exceeds the limit",
    "[]": "the document: has no 'collective'",
    '{"collective": 3}': "collective: '3' is not a text",
    '{"collective": "allreduce", "gpus": []}': "the document: has no gpus",
    '{"collective": "allreduce", "gpus": {}}': "gpus: is not a list",
    changed("collective", to="sendrecv"): "collective: 'sendrecv' is none of allreduce",
    changed("inplace", to=1): "inplace: '1' is neither true nor false",
    changed("name", to=None): "the document: has no 'name'",
    changed("gpus", 0, "id", to=1): "gpus[0].id: '1' is not a number from 0 to 0",
    changed("gpus", 0, "input_chunks", to=True): "gpus[0].input_chunks: 'True' is not a number",
    changed("gpus", 0, "input_chunks", to=10**17): "gpus[0].input_chunks: num_chunks=100000",
    changed(*OPS, 0, to={"name": "barrier"}): "gpus[0].threadblocks[0].ops[0]: 'barrier' is not",
    changed(*OPS, 0, "tbg_info", to={}): "ops[0]: a group of thread blocks is not plain",
    changed(*OPS, 0, "channel_type", to="switch"): "'switch' is none of memory, port",
    changed(*OPS, 0, "channel_ids", to=[1]): "channel_ids[0]: '1' is not a number from 0 to 0",
    changed(*OPS, 0, to={"name": "nop"}): "rank 0 signals 1 times to rank 1 over a memory channel",
    changed(*OPS, 2, "src_buff", to=[]): "ops[2]: has too few or too many runs",
    changed(*OPS, 2, "src_buff", 0, "type", to="x"): "src_buff[0]: 'x' is none of i, o, s",
    changed(*OPS, 2, "src_buff", 0, "type", to=None): "src_buff[0]: has no 'type'",
    changed(*OPS, 2, "src_buff", 0, "index", to=2): "chunks 2 to 2 are not in the 2 of i",
    changed(*OPS, 2, "src_buff", 0, "size", to=2): "has runs of different sizes",
    changed(*OPS, 2, "src_buff", 0, "size", to=10**9): "the steps name 1000000007 chunks",
    changed(*OPS, 2, "src_buff", 1, "buffer_id", to=2): "buffer_id: '2' is not a number from 0 to 1",
    changed(*OPS, 2, "src_buff", 0, to=run(0, 0)): "the first run of src_buff and of dst_buff is",
    changed(*OPS, 0, "src_buff", to=[run("i", 0)], half=puts_and_reduces): "ops[0]: has runs of different",
    changed("gpus", 0, "remote_buffers", 0, "rank", to=2): "remote_buffers[0].rank: '2' is not",
    json.dumps(plan([WAIT, SIGNAL], [WAIT, SIGNAL])): "ops[0]: this is a deadlock",
}  # fmt: skip


@pytest.mark.parametrize("text, said", WRONG.items(), ids=[*map(str, range(len(WRONG)))])
def test_what_is_malformed_is_named(text: str, said: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(said)):
        from_mscclpp(text)


def test_several_sizes_in_a_list_of_runs() -> None:
    """A read-reduce of several peers' runs is one reduction after the other."""
    own = find("all_reduce", "direct").schedule(2)
    assert verify(from_mscclpp(to_mscclpp(own))).orders == verify(own).orders


def test_a_plan_is_for_messages_of_every_size() -> None:
    plan = json.loads(to_mscclpp(schedule_of("all_reduce", "ring", 4)))
    assert (plan["min_message_size"], plan["max_message_size"]) == (0, 2**64 - 1)
