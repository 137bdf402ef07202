"""What a user reads of a rank that hangs or fails: who, in which call, on which line, and one cause."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import ringcoll
from ringcoll import LocalGroup, run_threads
from ringcoll.errors import (
    ArgumentError,
    CollectiveTimeoutError,
    MismatchError,
    PeerLostError,
    RingcollError,
)
from ringcoll.runtime.machine import settings
from tests.programs import last_calls
from tests.programs.mortal import run_mortals

HERE = (
    str(Path(__file__).relative_to(Path.cwd()))
    if Path(__file__).is_relative_to(Path.cwd())
    else __file__
)


def line() -> int:
    """Number of the caller's line."""
    return sys._getframe(1).f_lineno


def raised(function: Callable[[], Any]) -> RingcollError:
    with pytest.raises(RingcollError) as caught:
        function()
    return caught.value


@pytest.fixture
def notices(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Callable[[], list[str]]:
    """Hang notices after 0.4 s, as the log has them."""
    monkeypatch.setenv("RINGCOLL_HANG_NOTICE", "0.4")
    caplog.set_level(logging.WARNING, "ringcoll")
    return lambda: [
        item.getMessage() for item in caplog.records if "has waited" in item.getMessage()
    ]


# --- a hang ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("num_before", [0, 2])
def test_a_rank_that_waits_says_once_for_whom_and_where(
    notices: Any, num_before: int, is_async: bool
) -> None:
    lines: list[int] = []

    def main(group: LocalGroup) -> None:
        for _ in range(num_before):
            ringcoll.barrier(group)
        if group.rank() == 1:
            time.sleep(1.2)
        else:
            lines.append(line() + 1)
            work = ringcoll.all_reduce(torch.ones(3), group=group, async_op=is_async)
            if work is not None:
                work.wait()
            return
        ringcoll.all_reduce(torch.ones(3), group=group)

    run_threads(main, 2)
    assert notices() == [
        f"rank 0 has waited 0.4 s for rank 1 in all_reduce #{num_before + 1} ({HERE}:{lines[0]}); "
        f"`ringcoll dump {os.getpid()}` shows all ranks"
    ]


@pytest.mark.slow
def test_ranks_that_meet_name_all_that_have_not_come(notices: Any) -> None:
    def main(group: LocalGroup) -> None:
        time.sleep(1.2 if group.rank() in (1, 3) else 0)
        ringcoll.barrier(group)

    run_threads(main, 4)
    assert len(notices()) == 2
    for rank, text in zip((0, 2), sorted(notices()), strict=True):
        assert text.startswith(f"rank {rank} has waited 0.4 s for rank 1, rank 3 in barrier #1 (")


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan"])
def test_a_notice_after_no_time(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("RINGCOLL_HANG_NOTICE", text)
    with pytest.raises(ArgumentError, match="RINGCOLL_HANG_NOTICE"):
        run_threads(ringcoll.barrier, 2)


def test_no_notice(notices: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGCOLL_HANG_NOTICE", "off")

    def main(group: LocalGroup) -> None:
        time.sleep(0.8 * group.rank())
        ringcoll.barrier(group)

    run_threads(main, 2)
    assert notices() == []


# --- a disagreement -------------------------------------------------------------------


@pytest.mark.parametrize("debug", ["", "detail"])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_mismatch_names_both_lines(
    monkeypatch: pytest.MonkeyPatch, debug: str, is_async: bool
) -> None:
    monkeypatch.setenv("RINGCOLL_DEBUG", debug)
    monkeypatch.setattr(settings, "log_as_asked", lambda: None)
    lines = [0, 0, 0]

    def main(group: LocalGroup) -> RingcollError:
        rank = group.rank()

        def call() -> None:
            if rank == 1:
                lines[rank] = line() + 1
                work = ringcoll.all_reduce(
                    torch.ones(5), "max", group, is_async, algorithm="direct", timeout=20
                )
            else:
                lines[rank] = line() + 1
                work = ringcoll.all_reduce(
                    torch.ones(5), "sum", group, is_async, algorithm="direct", timeout=20
                )
            if work is not None:
                work.wait()

        ringcoll.barrier(group)
        return raised(call)

    for rank, error in enumerate(run_threads(main, 3)):
        assert isinstance(error, MismatchError), error
        other = 1 if rank != 1 else error.peer
        assert error.peer == other
        text = str(error)
        assert text.startswith(f"rank {rank}: the ranks disagree on call 2 of the group: rank ")
        assert (
            f"rank 1 called all_reduce(max, float32, 5 elements, algorithm direct) at {HERE}:{lines[1]}"
            in text
        )
        assert (
            f"called all_reduce(sum, float32, 5 elements, algorithm direct) at {HERE}:{lines[0]}"
            in text
        )
        assert error.__cause__ is None
        printed = "".join(traceback.format_exception(error))
        assert "direct cause" not in printed
        assert "During handling" not in printed


@pytest.mark.slow
@pytest.mark.parametrize("num_before", [0, 2])
@pytest.mark.parametrize("in_barrier", [0, 1])
@pytest.mark.parametrize("collective", ["all_reduce", "broadcast", "barrier"])
def test_a_monitored_barrier_against_another_call(
    in_barrier: int, num_before: int, collective: str
) -> None:
    lines = [0, 0]

    def main(group: LocalGroup) -> RingcollError:
        rank = group.rank()
        for _ in range(num_before):
            ringcoll.all_reduce(torch.ones(1), group=group)
            ringcoll.monitored_barrier(group)

        def call() -> None:
            if rank == in_barrier:
                lines[rank] = line() + 1
                ringcoll.monitored_barrier(group, timeout=20)
            elif collective == "barrier":
                ringcoll.barrier(group, timeout=20)
            elif collective == "broadcast":
                ringcoll.broadcast(torch.ones(3), in_barrier, group, timeout=20)
            else:
                ringcoll.all_reduce(torch.ones(3), group=group, timeout=20)

        start = time.monotonic()
        error = raised(call)
        assert time.monotonic() - start < 15
        with pytest.raises(RingcollError, match="broken by an earlier failure"):
            ringcoll.barrier(group)
        return error

    for error in run_threads(main, 2):
        assert isinstance(error, MismatchError), error
        text = str(error)
        assert f"the ranks disagree on call {num_before + 1} of the group: " in text
        assert f"rank {in_barrier} called monitored_barrier at {HERE}:{lines[in_barrier]}" in text
        assert f"rank {1 - in_barrier} called {collective}" in text


@pytest.mark.slow
def test_a_monitored_barrier_beside_asynchronous_calls_is_no_mismatch() -> None:
    """Each rank is slow once, in the barrier and in the call after it."""

    def main(group: LocalGroup) -> list[float]:
        results = []
        for slow in range(4):
            tensor = torch.full((3,), float(group.rank()))
            work = ringcoll.all_reduce(tensor, group=group, async_op=True)
            if group.rank() == slow % 2:
                time.sleep(0.6)
            ringcoll.monitored_barrier(group, timeout=20)
            if group.rank() == slow // 2:
                time.sleep(0.6)
            assert work is not None
            work.wait()
            ringcoll.barrier(group)
            results += tensor.tolist()
        return results

    assert run_threads(main, 2) == [[1.0] * 12] * 2


@pytest.mark.slow
def test_a_hang_in_a_monitored_barrier_is_said(notices: Any) -> None:
    def main(group: LocalGroup) -> None:
        time.sleep(1.2 * (group.rank() == 1))
        ringcoll.monitored_barrier(group, timeout=20)

    run_threads(main, 3)
    assert len(notices()) == 2
    for text in notices():
        assert "has waited 0.4 s for rank 1 in monitored_barrier #1 (" in text


# --- the last call of a program ---------------------------------------------------------


@pytest.mark.parametrize("name", last_calls.NAMES)
def test_who_waits_for_a_rank_that_has_returned_and_left_is_told_what_it_called(name: str) -> None:
    def main(group: LocalGroup) -> None:
        ringcoll.barrier(group)
        last_calls.call(name, group.rank(), group)

    error = raised(lambda: run_threads(main, 2))
    assert isinstance(error, MismatchError), error
    last_calls.check(name, str(error))


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("transport", ["shared", "gloo", "ucx"])
def test_who_waits_for_a_process_that_has_ended_is_told_what_it_called(transport: str) -> None:
    if transport == "ucx" and find_spec("ucxx") is None:
        pytest.skip("ucxx is not installed")
    for name in last_calls.NAMES if transport == "shared" else ("broadcast", "gather"):
        own = transport == "shared"  # the store is rank 0's, which returns and leaves first
        sent, error = run_mortals(last_calls.on_rank, 2, transport, name, store_dies=own)
        assert (sent is None) is (transport != "gloo"), "over gloo, messages wait for receivers"
        assert isinstance(error, MismatchError), error
        last_calls.check(name, str(error))


# --- a group of some ranks --------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.processes
def test_what_is_said_of_a_group_of_some_ranks_names_it_and_its_ranks_of_the_program() -> None:
    lines, error = run_mortals(last_calls.subgroup, 3)[1]
    notice = lines[-1]  # the ranks may be slow to meet
    assert notice.startswith("rank 1 has waited 0.4 s for rank 2 in all_reduce #2 of ")
    assert "all_reduce #2 of the group pair of ranks 1, 2 (" in notice
    assert error.startswith(
        "rank 1 timed out after its timeout of 1.2 s: no data came from rank 2, in call 2 of "
    )
    assert "in call 2 of the group pair of ranks 1, 2 (all_reduce" in error


# --- one cause ------------------------------------------------------------------------


def test_an_error_has_no_other_error_above_it() -> None:
    left = threading.Event()

    def main(group: LocalGroup) -> RingcollError | None:
        ringcoll.barrier(group)
        if group.rank() == 2:
            left.wait(30)
            return None
        error = raised(lambda: ringcoll.all_reduce(torch.ones(3), group=group, timeout=0.3))
        if isinstance(error, CollectiveTimeoutError | PeerLostError):
            time.sleep(0.5)
            left.set()
        return error

    for error in run_threads(main, 3)[:2]:
        printed = "".join(traceback.format_exception(error))
        assert printed.count("Traceback") == 1, printed
        assert "call 2 of the group (all_reduce(" in str(error)
