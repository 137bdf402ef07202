"""Traces of ranks that are threads: the picture, the numbers, and what is left behind."""

from __future__ import annotations

import copy
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ringcoll
from ringcoll import LocalGroup, run_threads
from ringcoll.errors import ArgumentError, GroupBrokenError, RingcollError, TraceError
from ringcoll.schedules import contract, verify
from ringcoll.schedules.algorithms import schedule_of
from ringcoll.tools.tracing import Recording, Span, TracedOperation
from ringcoll.tools.tracing.summary import shares
from tests.cases import pictures
from tests.cases.algorithms import each_on
from tests.cases.calls import Case, prepare, verdict
from tests.cases.effort import effort
from tests.cases.pictures import PictureError, check, check_schedule
from tests.cases.strategies import cases


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def traced(
    path: Path, world_size: int, body: Callable[[LocalGroup], object], **options: Any
) -> dict[str, Any]:
    """Run something on all ranks in a trace, check the picture, and return it."""

    def main(group: LocalGroup) -> None:
        with ringcoll.trace(path, group, **options):
            body(group)

    run_threads(main, world_size, timeout_s=20)
    document = read(path)
    check(document)
    return document


def operations(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [one for one in document["traceEvents"] if one.get("cat") == "operation"]


def reduce_ones(group: LocalGroup, numel: int = 100, **options: Any) -> torch.Tensor:
    tensor = torch.ones(numel)
    work = ringcoll.all_reduce(tensor, group=group, **options)
    if work is not None:
        work.wait()
    assert set(tensor.tolist()) == {float(group.size())}
    return tensor


def fail_after_one(group: LocalGroup, failing: int | None = None) -> None:
    reduce_ones(group)
    if failing in (None, group.rank()):
        raise LookupError("my own")


# --- the picture ----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("entry, world_size", each_on(1, 2, 5))
def test_every_message_of_a_schedule_is_there_once(tmp_path, entry, world_size):
    collective, algorithm = entry.collective, entry.name
    rules = contract(collective)
    root = world_size - 1 if rules.rooted else 0
    hosts = (0,) * world_size if entry.needs_hosts else None
    schedule = schedule_of(collective, algorithm, world_size, root, hosts)
    block = 1 if collective == "barrier" else 2 * schedule.num_chunks + 1
    case = Case(collective, algorithm, lengths=(block,), root=root)

    def body(group: LocalGroup) -> None:
        prepared = prepare(case, group.rank(), world_size)
        prepared.start(ringcoll, group)
        assert not verdict(prepared, group.rank(), world_size)

    document = traced(tmp_path / "trace.json", world_size, body)
    ones = operations(document)
    assert len(ones) == world_size
    (number,) = {one["args"]["number"] for one in ones}
    itemsize = 1 if collective == "barrier" else case.dtype.itemsize
    total = check_schedule(document, number, schedule, block, itemsize)
    assert total == verify(schedule).messages_mean * world_size
    assert {one["args"]["algorithm"] for one in ones} == {algorithm}


@pytest.mark.slow
@effort(60)
@given(drawn=st.sampled_from([1, 2, 3, 4, 7]).flatmap(lambda k: st.tuples(cases(k), st.just(k))))
def test_every_function_gives_the_same_in_a_trace(tmp_path_factory, drawn: tuple[Case, int]):
    case, world_size = drawn

    def body(group: LocalGroup) -> None:
        prepared = prepare(case, group.rank(), world_size)
        work = prepared.start(ringcoll, group)
        assert work is None or work.wait()
        assert not verdict(prepared, group.rank(), world_size)

    document = traced(tmp_path_factory.mktemp("drawn") / "trace.json", world_size, body)
    assert len(operations(document)) == world_size


def test_segments_are_messages_of_their_own(tmp_path):
    def body(group: LocalGroup) -> None:
        reduce_ones(group, 64, algorithm="binary_tree", segment_bytes=64)

    document = traced(tmp_path / "trace.json", 3, body)
    assert {one["args"]["segments"] for one in operations(document)} == {4}
    (found,) = pictures.messages(document, "send").values()
    assert {nbytes for *_, nbytes, _ in found} == {64}
    proof = verify(schedule_of("all_reduce", "binary_tree", 3))
    assert found.total() == 4 * 3 * proof.messages_mean


def test_asynchronous_and_coalesced_operations(tmp_path):
    def body(group: LocalGroup) -> None:
        works = [
            ringcoll.all_reduce(torch.ones(10 + n), group=group, async_op=True) for n in range(5)
        ]
        ringcoll.all_reduce_coalesced([torch.ones(3), torch.ones(4).double()], group=group)
        # These are not waited for before the block ends, and belong to it all the same.
        assert all(work is not None for work in works)

    document = traced(tmp_path / "trace.json", 3, body)
    numbers = sorted(one["args"]["number"] for one in operations(document) if one["pid"] == 1)
    assert len(numbers) == 7
    assert numbers == list(range(numbers[0], numbers[0] + 7))


def test_copies_reductions_and_narrow_messages(tmp_path):
    def body(group: LocalGroup) -> None:
        wide = torch.ones(40, 2)[:, 0]
        ringcoll.all_reduce(wide, group=group, algorithm="ring", wire_dtype=torch.bfloat16)
        assert set(wide.tolist()) == {2.0}

    document = traced(tmp_path / "trace.json", 2, body)
    (one, _) = operations(document)
    assert one["args"]["sent_bytes"] == 2 * 20 * 2  # two messages of half the vector, in 16 bits
    names = [event["cat"] for event in document["traceEvents"] if event["ph"] == "X"]
    assert names.count("reduce") == 2
    assert names.count("copy") == 2 * 2  # there and back


def test_operators_of_the_users_own_and_averages_are_right(tmp_path):
    def body(group: LocalGroup) -> None:
        own = torch.tensor([float(group.rank() + 1)] * 9)
        ringcoll.all_reduce(own, "avg", group)
        assert set(own.tolist()) == {2.0}
        most = torch.tensor([group.rank()] * 9)
        ringcoll.all_reduce(most, torch.maximum, group)
        assert set(most.tolist()) == {2}

    assert len(operations(traced(tmp_path / "trace.json", 3, body))) == 6


def test_more_operations_than_are_kept(tmp_path):
    def body(group: LocalGroup) -> None:
        for _ in range(5):
            reduce_ones(group)

    document = traced(tmp_path / "trace.json", 2, body, max_operations=2)
    assert len(operations(document)) == 4
    assert document["otherData"]["operations_left_out"] == 3


def test_nothing_at_all(tmp_path):
    assert operations(traced(tmp_path / "trace.json", 2, lambda group: None)) == []


def test_what_the_block_is_told(tmp_path):
    def main(group: LocalGroup) -> Recording:
        with ringcoll.trace(tmp_path / "trace.json", group) as recording:
            reduce_ones(group, algorithm="ring")
            assert recording.summary == []
        return recording

    first, second = run_threads(main, 2)
    assert second.summary == []
    assert len(first.summary) == 2
    for calls in first.summary:
        assert set(calls) == {"all_reduce(sum, float32, 100 elements, algorithm ring)", "total"}
        total = calls["total"]
        assert (total.operations, total.sent_messages) == (1, 2)
        assert total.sent_bytes == total.received_bytes == 400
        assert sum(map(total.share, ("waiting", "moving", "reducing", "python"))) == pytest.approx(
            1
        )
    assert first.clocks[0]["uncertainty_us"] == 0
    assert first.clocks[1]["uncertainty_us"] > 0


def test_a_rank_that_others_wait_for_shows(tmp_path):
    def body(group: LocalGroup) -> None:
        reduce_ones(group)
        if group.rank() == 1:
            time.sleep(0.2)
        reduce_ones(group, algorithm="ring")

    document = traced(tmp_path / "trace.json", 3, body)
    waited = [calls["total"]["waiting_s"] for calls in document["otherData"]["summary"]]
    assert waited[0] > 0.15
    assert waited[2] > 0.15
    assert waited[1] < min(waited[0], waited[2])


# --- one clock ------------------------------------------------------------------------


@pytest.mark.parametrize("skew_ns", [0, 10**6, -3 * 10**12, 2**60])
def test_a_clock_that_is_wrong_is_put_right(tmp_path, skew_ns: int):
    path = tmp_path / "trace.json"

    def main(group: LocalGroup) -> None:
        skew = skew_ns if group.rank() == 2 else 0
        with ringcoll.trace(path, group, clock=lambda: time.perf_counter_ns() + skew):
            for _ in range(5):
                reduce_ones(group, algorithm="ring")

    run_threads(main, 4)
    document = read(path)
    check(document)  # among other things, that nothing arrives before it is sent
    for clock in document["otherData"]["clocks"]:
        true = -skew_ns / 1000 if clock["rank"] == 2 else 0
        error = abs(clock["offset_us"] - true)
        assert error <= clock["uncertainty_us"] + abs(true) * 1e-15, clock
        assert (clock["slack_us"], clock["rate"]) == (0, 0)


def test_a_clock_at_another_rate(tmp_path):
    path = tmp_path / "trace.json"
    start = time.perf_counter_ns()

    def main(group: LocalGroup) -> None:
        rate = 1.01 if group.rank() == 1 else 1
        clock = lambda: start + round((time.perf_counter_ns() - start) * rate)  # noqa: E731
        with ringcoll.trace(path, group, clock=clock):
            for _ in range(3):
                reduce_ones(group, algorithm="ring")
                time.sleep(0.2)

    run_threads(main, 3)
    document = read(path)
    clocks = document["otherData"]["clocks"]
    assert clocks[1]["rate"] == pytest.approx(1 / 1.01 - 1, rel=0.2)
    assert clocks[0]["rate"] == clocks[2]["rate"] == 0


# --- off, and after errors ------------------------------------------------------------


def is_traced(group: LocalGroup) -> bool:
    return group.communicator.tracer is not None


def test_nothing_is_noted_when_it_is_off(tmp_path, monkeypatch):
    def fail(*arguments: object) -> None:
        raise AssertionError("something of the trace was called")

    def main(group: LocalGroup) -> None:
        with ringcoll.trace(tmp_path / "trace.json", group):
            assert is_traced(group)
        assert not is_traced(group)
        barrier.wait()
        for name in ("begin", "traced", "end", "attach"):
            monkeypatch.setattr(f"ringcoll.tools.tracing.recorder.Tracer.{name}", fail)
        barrier.wait()
        reduce_ones(group)
        reduce_ones(group, async_op=True)

    barrier = threading.Barrier(2)
    run_threads(main, 2)


def test_the_check_for_off_would_notice(tmp_path, monkeypatch):
    def fail(*arguments: object) -> None:
        raise AssertionError("something of the trace was called")

    def main(group: LocalGroup) -> None:
        with ringcoll.trace(tmp_path / "trace.json", group):
            reduce_ones(group)

    monkeypatch.setattr("ringcoll.tools.tracing.recorder.Tracer.begin", fail)
    with pytest.raises(AssertionError, match="something of the trace"):
        run_threads(main, 1)


def test_a_group_is_traced_once_at_a_time(tmp_path):
    def main(group: LocalGroup) -> None:
        with ringcoll.trace(tmp_path / "trace.json", group):
            with (
                pytest.raises(ArgumentError, match="being traced already"),
                ringcoll.trace(tmp_path / "other.json", group),
            ):
                pass
            reduce_ones(group)

    run_threads(main, 2)
    assert [one.name for one in tmp_path.iterdir()] == ["trace.json"]


def test_an_exception_on_all_ranks_leaves_the_group_usable_and_no_file(tmp_path):
    def main(group: LocalGroup) -> None:
        for _ in range(2):
            with (
                pytest.raises(LookupError, match="my own"),
                ringcoll.trace(tmp_path / "trace.json", group),
            ):
                fail_after_one(group)
            reduce_ones(group)
            assert not is_traced(group)
        with ringcoll.trace(tmp_path / "whole.json", group):
            reduce_ones(group)

    run_threads(main, 3)
    assert [one.name for one in tmp_path.iterdir()] == ["whole.json"]
    check(read(tmp_path / "whole.json"))


@pytest.mark.parametrize("failing", [0, 1])
def test_an_exception_on_one_rank_is_told_to_the_others(tmp_path, failing: int):
    path = tmp_path / "trace.json"
    path.write_text("from before")

    def main(group: LocalGroup) -> None:
        error = LookupError if group.rank() == failing else TraceError
        begin = time.monotonic()
        with pytest.raises(error, match="my own") as caught, ringcoll.trace(path, group):
            fail_after_one(group, failing)
        assert time.monotonic() - begin < 5
        if group.rank() != failing:
            assert f"in the block rank {failing} raised LookupError" in str(caught.value)
        reduce_ones(group)

    run_threads(main, 3)
    assert path.read_text() == "from before"
    assert list(tmp_path.iterdir()) == [path]


def test_an_operation_that_fails(tmp_path):
    def main(group: LocalGroup) -> None:
        with pytest.raises(RingcollError), ringcoll.trace(tmp_path / "trace.json", group):
            ringcoll.all_reduce(torch.ones(5 + group.rank()), group=group)
        with pytest.raises(GroupBrokenError):
            reduce_ones(group)

    run_threads(main, 2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_rank_that_does_not_leave_the_block_is_named(tmp_path):
    def main(group: LocalGroup) -> None:
        if group.rank() == 1:
            recorded = ringcoll.trace(tmp_path / "trace.json", group)
            recorded.__enter__()
            left.wait(20)
            return
        with (
            pytest.raises(TraceError, match="rank 1 has not left"),
            ringcoll.trace(tmp_path / "trace.json", group),
        ):
            pass
        left.set()

    left = threading.Event()
    run_threads(main, 2, timeout_s=2)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written(tmp_path):
    def main(group: LocalGroup) -> None:
        with (
            pytest.raises(TraceError, match="no trace"),
            ringcoll.trace(tmp_path / "no folder" / "trace.json", group),
        ):
            reduce_ones(group)
        reduce_ones(group)

    run_threads(main, 2)


def test_a_file_that_is_written_halfway_is_not_seen(tmp_path, monkeypatch):
    real = Path.write_bytes

    def break_off(path: Path, data: bytes) -> int:
        real(path, data[: len(data) // 2])
        raise OSError("the disk is full")

    monkeypatch.setattr(Path, "write_bytes", break_off)

    def main(group: LocalGroup) -> None:
        with (
            pytest.raises(TraceError, match=r"no trace: (.*the disk is full|rank 0)"),
            ringcoll.trace(tmp_path / "trace.json", group),
        ):
            reduce_ones(group)

    run_threads(main, 2)
    assert list(tmp_path.iterdir()) == []


# --- the checker notices --------------------------------------------------------------


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> dict[str, Any]:
    def body(group: LocalGroup) -> None:
        for _ in range(2):
            reduce_ones(group, algorithm="ring")

    return traced(tmp_path_factory.mktemp("good") / "trace.json", 3, body)


def first(document: dict[str, Any], phase: str, category: str = "") -> dict[str, Any]:
    return next(
        one
        for one in document["traceEvents"]
        if one["ph"] == phase and category in one.get("cat", "")
    )


def drop(phase: str, category: str = "") -> Callable[[dict[str, Any]], None]:
    def spoil(document: dict[str, Any]) -> None:
        document["traceEvents"].remove(first(document, phase, category))

    return spoil


def twice(phase: str, category: str = "") -> Callable[[dict[str, Any]], None]:
    def spoil(document: dict[str, Any]) -> None:
        events, one = document["traceEvents"], first(document, phase, category)
        events.insert(events.index(one), dict(one))

    return spoil


def change(phase: str, category: str = "", **values: Any) -> Callable[[dict[str, Any]], None]:
    def spoil(document: dict[str, Any]) -> None:
        one = first(document, phase, category)
        for name, value in values.items():
            place = one if name in one else one["args"]
            place[name] = value

    return spoil


def unsum(document: dict[str, Any]) -> None:
    document["otherData"]["summary"][1]["total"]["waiting_s"] += 1e-3


def arrive_early(document: dict[str, Any]) -> None:
    events = document["traceEvents"]
    arrival = first(document, "f")
    arrival["ts"] -= 1e5
    events.sort(key=lambda one: one.get("ts", -1e9))


SPOILT = {
    "no end": drop("e"),
    "no begin": drop("b"),
    "begins twice": twice("b"),
    "arrow without an end": drop("f"),
    "arrow without a beginning": drop("s"),
    "two arrows": twice("s"),
    "a post is missing": drop("X", "post"),
    "a wait is missing": drop("X", "wait"),
    "an operation twice": twice("X", "operation"),
    "another peer": change("b", "send", peer=7),
    "another step": change("b", "receive", step=9),
    "another length": change("b", "send", bytes=1),
    "not complete": change("b", "send", complete=False),
    "negative": change("X", "wait", dur=-1.0),
    "too long": change("X", "post", dur=1e6),
    "out of order": change("X", "operation", ts=1e9),
    "arrives early": arrive_early,
    "parts": change("X", "operation", python_s=1.0),
    "summary": unsum,
    "phase": change("X", "wait", ph="B"),
    "no name": drop("M"),
}


def test_the_checker_accepts_what_is_right(good):
    check(good)


@pytest.mark.parametrize("name", SPOILT)
def test_the_checker_notices(good, name: str):
    spoilt = copy.deepcopy(good)
    SPOILT[name](spoilt)
    with pytest.raises(PictureError):
        check(spoilt)


def test_another_schedule_is_noticed(good):
    number = operations(good)[0]["args"]["number"]
    ring = schedule_of("all_reduce", "ring", 3)
    assert check_schedule(good, number, ring, 100, 4) == 12
    for schedule, block in ((ring, 103), (schedule_of("all_reduce", "direct", 3), 100)):
        with pytest.raises(PictureError, match="not the schedule's"):
            check_schedule(good, number, schedule, block, 4)


def test_the_parts_of_an_operations_time():
    spans = [Span("wait", 0, 10, 0), Span("post", 10, 30, 0)]
    spans += [Span("copy", 30, 70, 0), Span("reduce", 70, 150, 0)]
    share = shares([TracedOperation(0, "", "", "", 1, begin=0, end=200, spans=spans)])
    parts = (share.waiting_s, share.moving_s, share.reducing_s, share.python_s)
    assert parts == pytest.approx((10e-9, 60e-9, 80e-9, 50e-9))
