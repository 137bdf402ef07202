"""Phases in traces of ranks that are threads: whose time it was, for whom a rank waited, and memory."""

from __future__ import annotations

import copy
import json
import threading
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ringcoll
from ringcoll import LocalGroup, run_threads
from ringcoll.errors import ArgumentError
from ringcoll.runtime.group import Communicator
from ringcoll.runtime.transport import Hub
from ringcoll.runtime.watch.phases import PhaseLog, PhaseSpan, ThreadWait
from ringcoll.tools.tracing import (
    MessageEnd,
    PhaseTimes,
    Recording,
    Records,
    Span,
    TracedOperation,
    phase_times,
    summarize_phases,
)
from ringcoll.tools.tracing.block import _take
from ringcoll.tools.tracing.summary import findings
from ringcoll.training import Messages, phase, waiting
from ringcoll.training.messages import Arrivals
from tests.cases.pictures import PictureError, check, messages

LONG_S = 0.2


def traced(
    path: Path, world_size: int, body: Callable[[LocalGroup], object], **options: Any
) -> Recording:
    """Run something on all ranks in a trace, check the picture; the recording of rank 0."""

    def main(group: LocalGroup) -> Recording:
        with ringcoll.trace(path, group, **options) as recording:
            body(group)
        return recording

    recording: Recording = run_threads(main, world_size, timeout_s=20)[0]
    check(json.loads(path.read_text()))
    return recording


# --- notes ----------------------------------------------------------------------------


def ticking() -> PhaseLog:
    """A log whose clock goes on by 10 ns at each look."""
    return PhaseLog(count(10, 10).__next__, 100)


def test_without_a_trace_nothing_is_made():
    assert phase("forward", microbatch=1) is phase("backward") is waiting(3)
    with waiting(None) as awaited:
        awaited.peer = 2  # is forgotten


def test_phases_are_nested_and_only_of_their_thread():
    log = ticking()
    with log.recording():
        with phase("step"):
            with phase("forward", microbatch=2):
                pass
            with pytest.raises(LookupError), phase("backward"):
                raise LookupError
        run_threads(lambda group: phase("elsewhere").__enter__(), 1)
        left_open = phase("open")
        left_open.__enter__()
    with phase("after"):
        pass
    left_open.__exit__(None, None, None)
    found = [(span.name, span.depth, span.begin, span.end) for span in log.phases]
    assert found == [
        ("step", 0, 10, 60),
        ("forward", 1, 20, 30),
        ("backward", 1, 40, 50),
        ("open", 0, 70, 80),
    ]
    assert log.phases[1].about == {"microbatch": 2}


def test_a_wait_for_any_rank_is_for_the_rank_that_has_come():
    log = ticking()
    with log.recording():
        with waiting(4):
            pass
        with waiting(None) as awaited:
            awaited.peer = 7
        with waiting(None):
            pass
    assert log.waits == [ThreadWait(10, 20, 4), ThreadWait(30, 40, 7), ThreadWait(50, 60, -1)]


def test_more_phases_than_are_kept():
    log = PhaseLog(count().__next__, 2)
    with log.recording(), phase("step"):
        for _ in range(3):
            with phase("forward"):
                pass
    assert [span.name for span in log.phases] == ["step", "forward"]
    assert log.left_out == 2


def test_a_peak_belongs_to_all_phases_around_it():
    peaks = iter([900, 5, 30, 8, 20, 7])
    log = PhaseLog(time.perf_counter_ns, 100, peaks.__next__)
    with log.recording(), phase("step"):  # 900 was before it
        with phase("forward"):  # 5 before it, 30 in it
            pass
        with phase("backward"):  # 8 between the two, 20 in it
            pass
    found = {span.name: span.peak_nbytes for span in log.phases}
    assert found == {"step": 30, "forward": 30, "backward": 20}


# --- times ----------------------------------------------------------------------------


def operation(
    begin: int, end: int, *waits: tuple[int, int, int], beside: bool, group: int = 0
) -> TracedOperation:
    """An operation with waits: begin, end and peer of each."""
    return TracedOperation(
        0, "", "", "", 1, begin, end, group=group, is_beside=beside,
        messages=[MessageEnd(False, peer, 0, 0, 0, begin, begin) for *_, peer in waits],
        spans=[Span("wait", *wait[:2], 0, number) for number, wait in enumerate(waits)],
    )  # fmt: skip


def times_of(
    operations: list[TracedOperation], waits: list[ThreadWait], *phases: PhaseSpan
) -> list[PhaseTimes]:
    records = Records(0, 4, "local", operations=operations, waits=waits, phases=list(phases))
    return phase_times(records)


STEP = PhaseSpan("step", {}, 0, 0, 1000)


@pytest.mark.parametrize(
    "operations, waits, expected, waited",
    [
        pytest.param([], [], (1000, 0, 0, 0), {}, id="nothing"),
        pytest.param(
            [operation(100, 400, (150, 250, 1), (300, 350, 2), beside=False)], [],
            (700, 150, 150, 0), {1: 100, 2: 50}, id="an operation of this thread",
        ),
        pytest.param(
            [operation(100, 400, (150, 250, 1), beside=True)], [],
            (1000, 0, 0, 300), {}, id="an operation that nobody waits for",
        ),
        pytest.param(
            [operation(100, 400, (150, 250, 1), (300, 350, 2), beside=True)],
            [ThreadWait(200, 420, -1, 0)],
            (780, 120, 100, 100), {1: 50, 2: 50}, id="an operation that is waited for late",
        ),
        pytest.param(
            [operation(210, 400, (250, 350, 1), beside=False)], [ThreadWait(200, 420, -1, 0)],
            (780, 120, 100, 0), {1: 100}, id="a wait that runs the operation counts once",
        ),
        pytest.param(
            [operation(100, 400, (150, 250, 1), beside=True, group=1)],
            [ThreadWait(100, 300, -1, 0)],
            (800, 200, 0, 100), {}, id="a wait for an operation of another group",
        ),
        pytest.param(
            [
                operation(100, 400, (100, 300, 1), beside=True),
                operation(100, 400, (200, 400, 2), beside=True, group=1),
            ],
            [ThreadWait(100, 400, -1)],
            (700, 0, 300, 0), {1: 200, 2: 100}, id="a wait for operations of any group",
        ),
        pytest.param(
            [operation(100, 400, (150, 250, 1), beside=True)], [ThreadWait(200, 300, 3)],
            (900, 0, 100, 200), {3: 100}, id="a message, beside an operation",
        ),
        pytest.param(
            [operation(100, 800, beside=True)],
            [ThreadWait(0, 150, 1), ThreadWait(200, 300, 1), ThreadWait(400, 450, 1)],
            (700, 0, 300, 500), {1: 300}, id="messages, beside a long operation",
        ),
        pytest.param(
            [], [ThreadWait(900, 1100, 3)], (900, 0, 100, 0), {3: 100}, id="beyond the phase",
        ),
    ],
)  # fmt: skip
def test_each_moment_counts_once(
    operations: list[TracedOperation],
    waits: list[ThreadWait],
    expected: tuple[int, ...],
    waited: dict[int, int],
):
    (times,) = times_of(operations, waits, STEP)
    found = (times.computing_s, times.communicating_s, times.waiting_s, times.beside_s)
    assert [round(seconds * 1e9) for seconds in found] == list(expected)
    assert {peer: round(seconds * 1e9) for peer, seconds in times.waiting_for_s.items()} == waited
    assert times.total_s == pytest.approx(1000e-9)


def test_the_time_of_a_phase_is_without_the_phases_in_it():
    phases = [
        PhaseSpan("step", {}, 0, 0, 1000, peak_nbytes=9),
        PhaseSpan("forward", {}, 1, 100, 300, peak_nbytes=5),
        PhaseSpan("inner", {}, 2, 150, 200),
        PhaseSpan("forward", {}, 1, 300, 400, peak_nbytes=7),
        PhaseSpan("step", {}, 0, 2000, 2500, peak_nbytes=8),
    ]
    waits = [ThreadWait(50, 320, 2), ThreadWait(1100, 2100, 1)]
    records = Records(0, 4, "local", waits=waits, phases=phases)
    found = summarize_phases(records)
    totals = {name: round(times.total_s * 1e9) for name, times in found.items()}
    assert totals == {"step": 1200, "forward": 250, "inner": 50, "total": 1500}
    waited = {name: round(times.waiting_s * 1e9) for name, times in found.items()}
    assert waited == {"step": 150, "forward": 170, "inner": 50, "total": 370}
    assert {name: times.times for name, times in found.items()} == {
        "step": 2, "forward": 2, "inner": 1, "total": 5
    }  # fmt: skip
    assert [found[name].peak_nbytes for name in ("step", "forward", "inner")] == [9, 7, None]


# --- sentences ------------------------------------------------------------------------


def rank_that_waits(rank: int, *waits: ThreadWait, name: str = "step") -> Records:
    phases = [PhaseSpan(name, {}, 0, 0, 1000), PhaseSpan("forward", {}, 1, 0, 500)]
    return Records(rank, 20, "local", waits=list(waits), phases=phases)


def test_sentences_say_who_waits_for_whom_and_where():
    ranks = [
        rank_that_waits(0, ThreadWait(100, 400, 2), ThreadWait(600, 610, 2)),
        rank_that_waits(1, ThreadWait(600, 649, 3)),
        rank_that_waits(2, ThreadWait(600, 1000, 1), name="serve"),
        Records(3, 4, "local"),
    ]
    assert findings(ranks) == [
        "rank 2 waits 40 % of its time for rank 1, 100 % of that outside the phases in it",
        "rank 0 waits 31 % of a step for rank 2, 97 % of that in forward",
    ]


def test_without_long_waits_and_without_phases():
    assert findings([rank_that_waits(0, ThreadWait(0, 49, 1))]) == [
        "no rank waits 5 % of its time for another"
    ]
    assert findings([Records(0, 1, "local", waits=[ThreadWait(0, 50, 1)])]) == []


def test_the_longest_waits_only_and_what_was_left_out():
    ranks = [rank_that_waits(rank, ThreadWait(0, 100 + rank, 19)) for rank in range(10)]
    ranks[0].left_out, ranks[0].phases_left_out = 3, 4
    found = findings(ranks)
    assert found[0] == "rank 0: 3 operations, and 4 phases and waits, were left out"
    assert [sentence.split()[1] for sentence in found[1:9]] == list("98765432")
    assert found[9:] == ["and 2 waits that are shorter"]


def test_the_largest_peak_of_each_phase():
    ranks = [rank_that_waits(rank) for rank in range(2)]
    for rank, peaks in enumerate([(5, 5), (6, 2)]):
        for span, peak in zip(ranks[rank].phases, peaks, strict=True):
            span.peak_nbytes = peak << 20
    assert findings(ranks)[-1] == "peak memory: step 6.0 MiB (rank 1), forward 5.0 MiB (rank 0)"


# --- on ranks -------------------------------------------------------------------------


def test_a_rank_that_others_wait_for_is_named(tmp_path: Path):
    def body(group: LocalGroup) -> None:
        with phase("step"):
            with phase("forward"):
                time.sleep(LONG_S * group.rank())
            with phase("average"):
                ringcoll.all_reduce(torch.ones(8), group=group, algorithm="ring")

    recording = traced(tmp_path / "trace.json", 2, body)
    early, late = recording.phases
    assert early["average"].waiting_for_s[1] > LONG_S / 2
    assert early["average"].waiting_s / early["average"].total_s > 0.5
    assert late["forward"].computing_s > LONG_S / 2
    assert recording.findings[0].startswith("rank 0 waits ")
    assert " % of a step for rank 1, " in recording.findings[0]
    assert "in average" in recording.findings[0]
    assert not any("peak" in sentence for sentence in recording.findings), "threads share memory"
    document = json.loads((tmp_path / "trace.json").read_text())
    assert document["otherData"]["findings"] == recording.findings


def test_asynchronous_operations_are_beside_until_they_are_waited_for(tmp_path: Path):
    is_waiting = threading.Event()

    def body(group: LocalGroup) -> None:
        with phase("backward"):
            if group.rank() == 1:
                is_waiting.wait(10)
                time.sleep(LONG_S)
            work = ringcoll.all_reduce(torch.ones(8), group=group, async_op=True)
            assert work is not None
            if group.rank() == 0:
                time.sleep(LONG_S)
        with phase("average"):
            is_waiting.set()
            work.wait()

    early = traced(tmp_path / "trace.json", 2, body).phases[0]
    assert early["backward"].beside_s > LONG_S / 2
    assert early["backward"].waiting_s == 0
    assert early["average"].waiting_for_s[1] > LONG_S / 2
    assert early["average"].beside_s < LONG_S / 2


def test_waits_for_messages_of_other_ranks(tmp_path: Path):
    are_waited_for = [threading.Event() for _ in range(3)]

    def body(group: LocalGroup) -> None:
        own, tensor = Messages(group), torch.ones(3)
        with phase("exchange"):
            if group.rank() == 0:
                are_waited_for[1].set()
                own.recv(tensor, 1)
                arrivals = Arrivals(own, tensor)
                arrivals.expect(2)
                are_waited_for[2].set()
                assert arrivals.take()[0] == 2  # whoever comes first
            else:
                are_waited_for[group.rank()].wait(10)
                time.sleep(LONG_S)
                own.send(tensor, 0)()

    waited = traced(tmp_path / "trace.json", 3, body).phases[0]["exchange"].waiting_for_s
    assert set(waited) == {1, 2}
    assert min(waited.values()) > LONG_S / 2


def test_a_trace_without_phases_has_no_times_of_phases(tmp_path: Path):
    def body(group: LocalGroup) -> None:
        ringcoll.all_reduce(torch.ones(8), group=group)

    recording = traced(tmp_path / "trace.json", 2, body)
    assert recording.phases == [{}, {}]
    assert recording.findings == []


# --- several groups -------------------------------------------------------------------


def with_another_group(
    world_size: int, body: Callable[[LocalGroup, LocalGroup], object]
) -> list[Any]:
    """Call a function with two groups of the same ranks."""
    hub, store = Hub(world_size), dist.HashStore()

    def main(group: LocalGroup) -> Any:
        transport = hub.transports()[group.rank()]
        member = Communicator(transport, dist.PrefixStore("other", store), 20.0)
        try:
            return body(group, LocalGroup(member))
        finally:
            member.close()

    return run_threads(main, world_size, timeout_s=20)


def test_several_groups_in_one_file(tmp_path: Path):
    path = tmp_path / "trace.json"

    def body(group: LocalGroup, other: LocalGroup) -> Recording:
        with ringcoll.trace(path, group, also=[other]) as recording, phase("step"):
            for numel in (30, 60):  # both groups at once, with the same numbers
                work = ringcoll.all_reduce(
                    torch.ones(numel), group=other, async_op=True, algorithm="ring"
                )
                ringcoll.all_reduce(torch.ones(9), group=group, algorithm="ring")
                assert work is not None
                work.wait()
        assert group.communicator.tracer is other.communicator.tracer is None
        return recording

    recording = with_another_group(3, body)[0]
    document = json.loads(path.read_text())
    check(document)
    sizes = [
        {nbytes for counter in messages(document, "send", number).values()
         for *_, nbytes, _ in counter}
        for number in (0, 1)
    ]  # fmt: skip
    assert sizes == [{12}, {40, 80}]
    assert recording.summary[0]["total"].operations == 4
    titles = {
        event["args"]["name"] for event in document["traceEvents"] if event["name"] == "thread_name"
    }
    assert {"phases", "waits (ranks 0 1 2)"} <= titles


def test_limits_hold_for_each_group(tmp_path: Path):
    path = tmp_path / "trace.json"

    def body(group: LocalGroup, other: LocalGroup) -> None:
        with ringcoll.trace(path, group, also=[other], max_operations=2):
            for each in (group, group, group, other, other, other):
                ringcoll.all_reduce(torch.ones(4), group=each)

    with_another_group(2, body)
    document = json.loads(path.read_text())
    check(document)
    assert document["otherData"]["summary"][1]["total"]["operations"] == 4
    assert document["otherData"]["operations_left_out"] == 2


def test_an_exception_leaves_no_group_traced(tmp_path: Path):
    def body(group: LocalGroup, other: LocalGroup) -> None:
        with (
            pytest.raises(LookupError, match="my own"),
            ringcoll.trace(tmp_path / "trace.json", group, also=[other]),
            phase("step"),
        ):
            raise LookupError("my own")
        assert group.communicator.tracer is other.communicator.tracer is None
        assert phase("after") is phase("all")

    with_another_group(2, body)
    assert list(tmp_path.iterdir()) == []


def test_groups_that_cannot_be_traced_together(tmp_path: Path):
    def body(group: LocalGroup, other: LocalGroup) -> None:
        for also in ([group], [other, other]):
            with (
                pytest.raises(ArgumentError, match="being traced already"),
                ringcoll.trace(tmp_path / "trace.json", group, also=also),
            ):
                pass
        larger = LocalGroup(Communicator(Hub(3).transports()[0], dist.HashStore(), 1.0))
        with (
            pytest.raises(ArgumentError, match="a rank is not in the first group"),
            ringcoll.trace(tmp_path / "trace.json", group, also=[larger]),
        ):
            pass
        larger.close()

    with_another_group(2, body)


# --- the checker notices --------------------------------------------------------------


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    def body(group: LocalGroup) -> None:
        for _ in range(2):
            with phase("step"), phase("average"):
                time.sleep(0.01 * group.rank())
                ringcoll.all_reduce(torch.ones(8), group=group)
                work = ringcoll.all_reduce(torch.ones(8), group=group, async_op=True)
                assert work is not None
                work.wait()

    path = tmp_path_factory.mktemp("good") / "trace.json"
    traced(path, 2, body)
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def slice_of(document: dict[str, Any], name: str) -> dict[str, Any]:
    return next(event for event in document["traceEvents"] if event["name"] == name)


def is_later(document: dict[str, Any]) -> None:
    slice_of(document, "average")["dur"] += 1e3


def is_deeper(document: dict[str, Any]) -> None:
    slice_of(document, "average")["args"]["depth"] = 2


def computes_more(document: dict[str, Any]) -> None:
    slice_of(document, "step")["args"]["computing_s"] += 1e-3


def waits_for_another(document: dict[str, Any]) -> None:
    document["otherData"]["phases"][0]["average"]["waiting_for_s"]["3"] = 1e-3


def waits_for_itself(document: dict[str, Any]) -> None:
    waited = document["otherData"]["phases"][0]["average"]["waiting_for_s"]
    waited["0"] = waited.pop("1")


def waits_more(document: dict[str, Any]) -> None:
    times = document["otherData"]["phases"][0]["average"]
    times["waiting_s"] += 1e-3
    times["computing_s"] -= 1e-3
    times["waiting_for_s"]["1"] += 1e-3


def is_counted_twice(document: dict[str, Any]) -> None:
    times = document["otherData"]["phases"][0]["step"]
    times["beside_s"] = times["computing_s"] + 1e-3


def is_forgotten(document: dict[str, Any]) -> None:
    del document["otherData"]["phases"][1]["average"]


def lasts_longer(document: dict[str, Any]) -> None:
    for name in ("total_s", "computing_s"):
        document["otherData"]["phases"][1]["total"][name] += 1e-2


def has_another_group(document: dict[str, Any]) -> None:
    event = next(event for event in document["traceEvents"] if event.get("cat") == "send")
    event["args"]["group"] = 1


def is_on_another_track(document: dict[str, Any]) -> None:
    wait = next(event for event in document["traceEvents"] if event.get("cat") == "wait")
    wait["tid"] = slice_of(document, "step")["tid"]


SPOILT = (
    is_later, is_deeper, computes_more, waits_for_another, waits_for_itself, waits_more,
    is_counted_twice, is_forgotten, lasts_longer, has_another_group, is_on_another_track,
)  # fmt: skip


@pytest.mark.parametrize("spoil", SPOILT)
def test_the_checker_notices(good: dict[str, Any], spoil: Callable[[dict[str, Any]], None]):
    check(good)
    spoilt = copy.deepcopy(good)
    spoil(spoilt)
    with pytest.raises(PictureError):
        check(spoilt)


def test_waits_are_for_ranks_of_the_group_by_their_places_in_it() -> None:
    """Waits for itself, and for ranks outside, are no waits for the group."""
    log = PhaseLog(lambda: 0, 9)
    log.left_out = 2
    log.waits = [ThreadWait(peer, peer + 1, peer) for peer in (-1, 4, 5, 6, 7)]
    records = Records(1, 3, "shared")
    _take(log, records, [7, 5, 4])  # this rank is 5
    assert records.waits == [ThreadWait(-1, 0, -1), ThreadWait(4, 5, 2), ThreadWait(7, 8, 0)]
    assert records.phases_left_out == 2
