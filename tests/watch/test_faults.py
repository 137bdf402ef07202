"""Bad input and faults on real processes: errors with names, never a hang, never a crash."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ringcoll.runtime.launch import RankError, Ranks
from ringcoll.runtime.rendezvous import serve_store
from tests.programs import alarms, faults
from tests.programs.faults import Caught
from tests.programs.started import started
from tests.programs.warm import WarmProgram

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]


# --- bad arguments --------------------------------------------------------------------


def test_bad_arguments_are_refused_and_the_group_still_works(pool):
    wanted = {
        "dtype of the operator": ("ArgumentError", "bor"),
        "device": ("ArgumentError", "meta"),
        "length of the list": ("ArgumentError", "expected 3 tensors, got 1"),
        "root outside": ("ArgumentError", "not in the group"),
        "global root outside": ("ArgumentError", "not in the group"),
        "unknown algorithm": ("UnknownAlgorithmError", "double_tree"),
        "wrong schedule": ("VerificationError", "ends wrong"),
        "world size": ("UnsupportedWorldSizeError", "only multiples of four"),
        "no tensor": ("ArgumentError", "not a tensor"),
    }
    for found in pool(3).run(faults.bad_calls, list(wanted)):
        for (caught, posted, works), (kind, part) in zip(found, wanted.values(), strict=True):
            assert caught.kind == kind
            assert part in caught.text
            assert posted == 0
            assert works, "the group works afterwards"


# --- disagreement ---------------------------------------------------------------------


@pytest.mark.parametrize("name", faults.DISAGREEMENTS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_disagree_raise_with_both_calls_named(pool, name: str, world_size: int):
    found: list[Caught] = pool(world_size).run(faults.disagree, name, 1)
    for rank, caught in enumerate(found):
        if world_size == 2 or rank == 1:
            assert caught.delivered == [], "data of another call were delivered"
        if caught.kind == "" and rank != 1 and name.startswith(("root", "lengths of all")):
            # All that it sends and receives is with ranks that agree: it is done, and
            # hears of the others in its next call.
            assert world_size > 2
            assert caught.next_kind == "MismatchError"
            assert caught.fresh_works
            continue
        assert caught.kind == "MismatchError", (rank, caught)
        assert caught.seconds < 10, (rank, caught)
        assert caught.mine != caught.theirs
        ranks = set(map(int, re.findall(r"rank (\d+) called", caught.text)))
        assert len(ranks) == 2, "both are named"
        assert 1 in ranks or name in ("number of calls", "order of calls"), caught.text
        assert caught.mine in caught.text
        assert caught.theirs in caught.text
        assert caught.next_kind == "GroupBrokenError"
        assert caught.fresh_works
    # Seen from both sides, it is the same two calls.
    if world_size == 2:
        assert (found[0].mine, found[0].theirs) == (found[1].theirs, found[1].mine)


def test_the_words_of_a_mismatch(pool):
    caught = pool(2).run(faults.disagree, "length", 1)[0]
    for part in (
        "8 elements",
        "9 elements",
        "all_reduce",
        "float32",
        "sum",
        "ring",
        "call 1 of the group",
    ):
        assert part in caught.text, caught.text
    caught = pool(2).run(faults.disagree, "lengths of all-to-all", 1)[0]
    for part in ("4 elements", "5 elements", "from rank 0 to rank 1"):
        assert part in caught.text, caught.text


@pytest.mark.parametrize("transport", ["shared", "ucx"])
@pytest.mark.parametrize("name", ["root of broadcast", "root of reduce", "root of gather"])
def test_what_needs_no_waiting_is_found_at_the_next_meeting(pool, transport: str, name: str):
    """Short messages to a root need nobody: both ranks may return, but no later result is given."""
    if transport == "ucx":
        pytest.importorskip("ucxx")
    for first, agreed in pool(2).run(faults.disagree_unseen, transport, name):
        assert first.kind in ("", "MismatchError")
        assert agreed.kind == ("GroupBrokenError" if first.kind else "MismatchError"), agreed
        assert agreed.delivered == []
        assert agreed.seconds < 10
        if not first.kind:
            assert "disagree on call 2 of the group" in agreed.text


@pytest.mark.parametrize(
    "transport,name,word",
    [
        ("shared", "root of broadcast", "broadcast"),
        ("shared", "root of reduce", "reduce"),
        ("ucx", "root of gather", "gather"),
        ("ucx", "operator", "max"),
        ("gloo", "operator", "max"),
    ],
)
def test_in_detail_each_call_is_compared_before_it_runs(pool, transport: str, name: str, word: str):
    if transport == "ucx":
        pytest.importorskip("ucxx")
    for rank, (first, _) in enumerate(pool(2).run(faults.disagree_in_detail, transport, name)):
        assert first.kind == "MismatchError", (rank, first)
        assert word in first.text
        assert first.seconds < 5


@pytest.mark.parametrize("transport", ["shared", "ucx"])
def test_a_root_that_runs_far_ahead_is_told_what_the_others_do(pool, transport: str):
    if transport == "ucx":
        pytest.importorskip("ucxx")
    for caught in pool(2).run(faults.run_ahead, transport, 3000):
        assert caught.kind == "MismatchError", caught
        assert "broadcast" in caught.text
        assert "all_reduce" in caught.text
        assert caught.seconds < 10


def test_what_equals_a_right_argument_is_refused_all_the_same(pool):
    for segment, vmap, grad in pool(2).run(faults.refused):
        assert segment.kind == "ArgumentError"
        assert "segment_bytes" in segment.text
        assert vmap.kind == grad.kind == "ArgumentError"
        assert "vmap" in vmap.text


# --- death ----------------------------------------------------------------------------


def deaths(
    world_size: int, dying: int, function: Callable[..., None], *args: object
) -> list[tuple[int, Caught]]:
    """Run a function in which a rank dies; returns what the survivors reported."""
    reports: list[tuple[int, Caught]] = []
    with Ranks(world_size, timeout_s=60.0) as ranks, pytest.raises(RankError) as failure:
        ranks.run(function, *args, on_report=reports.append)
    assert failure.value.failures == {dying: ("ProcessDied", "the process ended with exit code -9")}
    assert {rank for rank, _ in reports} == set(range(world_size)) - {dying}
    return reports


@pytest.mark.parametrize(
    "world_size,posts,collective,algorithm",
    [
        (2, 0, "all_reduce", "ring"),
        (3, 2, "all_reduce", "ring"),
        (4, 3, "all_reduce", "ring"),
        (4, 1, "all_reduce", "double_tree"),
        (3, 1, "all_gather", "ring"),
    ],
)
def test_a_peer_that_dies_raises_on_every_survivor(
    world_size: int, posts: int, collective: str, algorithm: str
):
    dying = 1
    reports = deaths(world_size, dying, faults.die_at, dying, posts, collective, algorithm)
    for rank, caught in reports:
        assert caught.kind == "PeerLostError", (rank, caught)
        assert caught.seconds < 5, (rank, caught)
        assert caught.peer == dying, (rank, caught)
        assert f"rank {dying}" in caught.text
        assert re.search(r"call \d+ of the group \(.*\)\), step \d+", caught.text), caught.text
        assert collective in caught.text
        assert caught.next_kind == "GroupBrokenError"


def test_a_peer_that_is_dead_already(monkeypatch: pytest.MonkeyPatch):
    for rank, caught in deaths(3, 2, faults.die_before, 2):
        assert caught.kind == "PeerLostError", (rank, caught)
        assert caught.peer == 2, (rank, caught)
        assert caught.seconds < 5
        assert re.search(r"call \d+ of the group \(all_reduce\(.*\)\), step \d+", caught.text), (
            caught.text
        )


def test_a_peer_that_dies_while_operations_are_queued():
    reports = deaths(2, 1, faults.die_in_async, 1)
    assert len(reports) == 5
    assert reports[0][1].kind == "PeerLostError"
    assert [caught.kind for _, caught in reports[1:]] == ["GroupBrokenError"] * 4
    assert {caught.peer for _, caught in reports} == {1}
    assert sum(caught.seconds for _, caught in reports) < 5


def test_the_host_of_the_store_dies():
    """There is nobody left to ask; everybody is told all the same, by the broken connections."""
    for rank, caught in deaths(3, 0, faults.die_with_the_store, 0):
        assert caught.kind == "PeerLostError", (rank, caught)
        assert caught.seconds < 10, (rank, caught)
        assert re.search(r"call \d+ of the group \(all_reduce\(.*\)\), step \d+", caught.text), (
            caught.text
        )


# --- absence --------------------------------------------------------------------------


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize(
    "world_size,algorithm", [(2, "ring"), (3, "direct"), (4, "ring"), (4, "double_tree")]
)
def test_a_rank_that_never_arrives_is_named(pool, world_size: int, algorithm: str, async_op: bool):
    absent = world_size - 1
    found: list[Caught | None] = pool(world_size).run(
        lambda_stay_away, absent, algorithm, False, async_op
    )
    for rank, caught in enumerate(found):
        if rank == absent:
            assert caught is None
            continue
        assert caught is not None
        assert caught.kind == "CollectiveTimeoutError", (rank, caught)
        assert 1.0 < caught.seconds < 6, (rank, caught)
        assert caught.peer == absent, (rank, caught)
        assert f"rank {absent}" in caught.text, (rank, caught)
        assert re.search(r"call \d+ of the group \(all_reduce\(.*\)\), step \d+", caught.text), (
            caught.text
        )
        assert "call 2 of the group" in caught.text
        assert caught.next_kind == "GroupBrokenError"
        assert caught.fresh_works


def lambda_stay_away(absent: int, algorithm: str, first: bool, async_op: bool) -> Caught | None:
    return faults.stay_away(absent, algorithm, first=first, async_op=async_op)


@pytest.mark.parametrize("async_op", [False, True])
def test_a_rank_that_never_uses_the_group_at_all_is_named(pool, async_op: bool):
    found = pool(3).run(lambda_stay_away, 1, "ring", True, async_op)
    for rank in (0, 2):
        caught = found[rank]
        assert caught.kind == "CollectiveTimeoutError", caught
        assert caught.peer == 1
        for part in ("rank 1", "first time", "all_reduce", "call 1 of the group"):
            assert part in caught.text, caught.text
        assert caught.fresh_works


def test_a_rank_that_is_slow_inside_an_operation_times_out_on_the_others(pool):
    for rank, caught in enumerate(pool(3).run(faults.sleep_on, 1)):
        assert caught.kind in ("CollectiveTimeoutError", "PeerLostError"), (rank, caught)
        if rank != 1:
            assert caught.kind == "CollectiveTimeoutError", (rank, caught)
            assert caught.seconds < 4


# --- errors of the user's own ----------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["ring", "direct", "double_tree"])
def test_an_operator_that_raises_is_told_to_the_others(pool, algorithm: str):
    for rank, caught in enumerate(pool(3).run(faults.raise_in_operator, 1, algorithm)):
        if rank == 1:
            assert caught.kind == "ArithmeticError"
        elif algorithm == "direct" and caught.kind == "":
            # It has all that it needs from rank 1, and hears of it in its next call.
            assert caught.next_kind == "PeerLostError"
            continue
        else:
            assert caught.kind == "PeerLostError", (rank, caught)
            assert caught.peer == 1
            assert "rank 1 failed with ArithmeticError" in caught.text
        assert "no sums on Sundays" in caught.text
        assert caught.seconds < 5
        assert caught.next_kind == "GroupBrokenError"
        assert caught.fresh_works


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend, transport",
    [("gloo", "gloo"), ("gloo", "shared"), ("gloo", "ucx"), ("ringcoll", "gloo")],
)
def test_a_signal_is_heard_at_once_in_every_wait(pool, backend: str, transport: str):
    if transport == "ucx":
        pytest.importorskip("ucxx")
    late: set[str] | None = None
    for _ in range(3):  # a busy machine is late at times, a wait that hears nothing each time
        delays = pool(2, backend).run(alarms.waits, transport)[0]
        assert len(delays) == (10 if backend == "ringcoll" else 6)
        if transport == "ucx":
            del delays["meeting"]  # to make UCX's worker is no wait, and takes as long as it takes
        now = {way for way, delay in delays.items() if delay > 0.2}
        late = now if late is None else late & now
        if not late:
            return
    pytest.fail(f"heard late, three times: {late}")


# --- the end of a program -------------------------------------------------------------

ENDS = {
    "all done": 0,
    "nobody waits": 0,
    "a peer never comes": 0,
    "before the ranks have met": 0,
    "after destroy_process_group": 0,
    "a thread waits": 0,
    "a child ends": 0,
    "callbacks": 0,
    "an exception": 3,
}


# The call is asynchronous, so a line tells its failure (docs/reliability.md), if rank 1 ends first.
_LOST = r"ringcoll: rank 0 lost rank 1: .*all_reduce"
COMPLAINTS = dict.fromkeys(("a peer never comes", "a thread waits"), _LOST)


@contextlib.contextmanager
def both_ranks(
    store: str, *command: str, by: type[subprocess.Popen[Any]] = WarmProgram
) -> Iterator[list[subprocess.Popen[str]]]:
    """The two ranks of a program, which meet at a store."""
    settings: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "cwd": ROOT}
    settings["env"] = os.environ | {
        "RINGCOLL_HANG_NOTICE": "off"
    }  # some wait for as long at the end
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                started(sys.executable, *command, str(rank), "2", store, by=by, **settings)
            )
            for rank in range(2)
        ]


def run_programs(backend: str, case: str, store: str) -> None:
    """Run a program on two ranks that end in a given way."""
    command = ["-W", "error", "-m", "tests.programs.exits", backend, case]
    by: type[subprocess.Popen[Any]] = (
        subprocess.Popen if case == "all done" else WarmProgram
    )  # once as users start it
    with both_ranks(store, *command, by=by) as processes:
        outputs = [process.communicate(timeout=90) for process in processes]
    for process, (out, error) in zip(processes, outputs, strict=True):
        assert process.returncode == ENDS[case], error
        if error:
            (line,) = error.splitlines()
            assert re.match(COMPLAINTS.get(case, "nothing"), line), line
        assert ("the end" in out) == (ENDS[case] == 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend, case",
    [
        *(("gloo", case) for case in ENDS),
        *(("ringcoll", case) for case in ("nobody waits", "a peer never comes", "callbacks")),
    ],
)
def test_a_program_ends_cleanly_with_operations_pending(backend: str, case: str):
    store = serve_store()
    run_programs(backend, case, str(store.port))


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["ucx", "gloo"])  # shared memory is the default above
def test_a_child_that_ends_leaves_its_parents_group_alone(transport: str, monkeypatch):
    if transport == "ucx":
        pytest.importorskip("ucxx")
    monkeypatch.setenv("RINGCOLL_TRANSPORT", transport)
    store = serve_store()
    run_programs("ringcoll", "a child ends", str(store.port))


@pytest.mark.slow
@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_in_training_leaves_no_process():
    store = serve_store()
    command = ["-m", "tests.programs.exits", "ringcoll", "in training"]
    with both_ranks(str(store.port), *command) as ranks:
        for process in ranks:
            assert process.stdout is not None
            assert process.stdout.readline() == "training\n"
        time.sleep(0.5)
        for process in ranks:  # as a terminal does
            process.send_signal(signal.SIGINT)
        errors = [process.communicate(timeout=40)[1] for process in ranks]
    for process, error in zip(ranks, errors, strict=True):
        # Python's own way to end on an interrupt; or the other rank was quicker to go.
        assert process.returncode in (-signal.SIGINT, 1), error
        assert "KeyboardInterrupt" in error or "lost rank" in error
        assert "terminate called" not in error
    assert any("KeyboardInterrupt" in error for error in errors)


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend, transport",
    [("gloo", "shared"), ("ringcoll", "ucx"), ("ringcoll", "gloo")],
)
def test_a_group_is_open_while_the_program_has_functions_to_call(
    backend: str, transport: str, monkeypatch: pytest.MonkeyPatch
):
    """A function of `atexit` that comes before all others, and what is deleted after the last of them."""
    if transport == "ucx":
        pytest.importorskip("ucxx")
    monkeypatch.setenv("RINGCOLL_TRANSPORT", transport)
    outputs = []
    store = serve_store()
    by: type[subprocess.Popen[Any]] = WarmProgram
    if transport == "shared":
        by = subprocess.Popen  # once as users start it
    with contextlib.ExitStack() as stack:
        command = [sys.executable, "-W", "error", "-m", "tests.programs.late", backend]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        ranks = [
            stack.enter_context(
                started(*command, str(rank), str(store.port), by=by, cwd=ROOT, **pipes)
            )
            for rank in range(2)
        ]
        for process in ranks:
            out, error = process.communicate(timeout=90)
            assert (process.returncode, error) == (0, ""), error
            # UCX complains of the thread's group, which is broken.
            outputs.append([line for line in out.splitlines() if line[:1] != "["])
    deleted = [
        "deleted, a group in use: GroupBrokenError",
        "deleted, a new group: GroupBrokenError",
    ]
    for lines in outputs:
        assert lines[:4] == [
            "first: [24.0]",
            "at exit: [24.0]",
            "at exit, a new group: [24.0]",
            "finalized: [24.0]",
        ]
        assert lines[4:] == deleted


def test_ranks_may_meet_in_a_file(tmp_path: Path):
    run_programs("ringcoll", "all done", str(tmp_path / "store"))
