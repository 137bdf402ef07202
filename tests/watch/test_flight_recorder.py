"""What a process tells of its groups: when, to whom, and what that costs an operation."""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ringcoll
from ringcoll.errors import ArgumentError
from ringcoll.runtime.group import Communicator
from ringcoll.runtime.operation import Turn, Wait
from ringcoll.runtime.watch import (
    Running,
    answering,
    ask,
    flight_recorder,
    flight_report,
    read_record,
)
from ringcoll.runtime.watch.flight_report import Answering
from tests.programs.listeners import listening

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux has such sockets")


CALL = "all_reduce(sum, float32, 12 elements, algorithm ring)"


def own_groups() -> list[dict[str, Any]]:
    """The groups of this process, as it tells them on its socket."""
    told, silent = ask([os.getpid()], 10.0)
    assert not silent
    groups: list[dict[str, Any]] = read_record(told[os.getpid()])["groups"]
    return groups


def members(*ranks: int) -> list[Communicator]:
    """The ends of groups in this process that have these ranks."""
    watched: list[Any] = [
        member for reference in flight_recorder._watched if (member := reference())
    ]
    return [member for member in watched if member.rank in ranks]


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def is_silent() -> bool:
    names = [thread.name for thread in threading.enumerate()]
    return os.getpid() not in answering() and "ringcoll-answers" not in names


def test_the_last_operations_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_recorder, "_LAST", 3)

    def main(group: Any) -> list[dict[str, Any]]:
        for _ in range(5):
            ringcoll.all_reduce(torch.ones(4), group=group, algorithm="ring")
        ringcoll.barrier(group)
        told = own_groups()
        ringcoll.barrier(group)
        return told

    for told in ringcoll.run_threads(main, 2):
        assert len({group["group"] for group in told}) == 1
        assert {group["rank"] for group in told} == {0, 1}
        assert [group["transport"] for group in told] == ["local", "local"]
        for group in told:
            assert [each["number"] for each in group["operations"]] in ([3, 4, 5], [4, 5, 6])
            assert group["operations"][0] == {
                "number": group["operations"][0]["number"],
                "call": "all_reduce(sum, float32, 4 elements, algorithm ring)",
                "complete": True,
            }


def test_the_last_256_operations_are_kept() -> None:
    def main(group: Any) -> int:
        for _ in range(300):
            ringcoll.barrier(group)
        return len(group.communicator.snapshot()["operations"])

    assert ringcoll.run_threads(main, 2) == [256, 256]


def test_where_a_rank_is_that_waits() -> None:
    """Rank 2 comes late to the second operation; rank 0 waits for rank 2, and rank 1 for rank 0."""
    seen: list[dict[str, Any]] = []

    def steps() -> dict[int, tuple[int, int]]:
        """The operation and the step in which each rank waits."""
        running = {member.rank: member.monitor.progress.running() for member in members(0, 1, 2)}
        return {
            rank: (state.number, state.wait.step)
            for rank, state in running.items()
            if state and state.wait
        }

    def main(group: Any) -> None:
        tensor = torch.ones(12)
        for _ in range(2):
            ringcoll.all_reduce(tensor, group=group, algorithm="ring")
        if group.rank() == 2:
            assert eventually(lambda: steps() == {0: (2, 0), 1: (2, 1)})
            seen.append(read_record(json.dumps(flight_recorder.record())))
        ringcoll.all_reduce(tensor, group=group, algorithm="ring")

    ringcoll.run_threads(main, 3)
    (record,) = seen
    groups = {group["rank"]: group for group in record["groups"]}
    common = {"number": 2, "call": CALL, "meets": False, "is_receive": True}
    assert groups[0]["running"] == common | {"step": 0, "peer": 2, "chunks": [1]}
    assert groups[1]["running"] == common | {"step": 1, "peer": 0, "chunks": [1]}
    assert groups[2]["running"] is None
    for rank, group in groups.items():
        expected = [(0, True), (1, True), (2, False)][: 2 if rank == 2 else 3]
        assert [(call["number"], call["complete"]) for call in group["operations"]] == expected
        assert {call["call"] for call in group["operations"]} == {CALL}
        assert (group["world_size"], group["failure"], group["queued"]) == (3, None, [])
        assert record["threads"][f"rank-{rank}"].startswith(f"{__file__}:")


def test_where_a_rank_is_that_meets_and_what_is_queued() -> None:
    seen: list[dict[str, Any]] = []

    def main(group: Any) -> None:
        if group.rank() == 1:
            assert eventually(
                lambda: any(
                    each.monitor.progress.meets and len(each.snapshot()["queued"]) == 1
                    for each in members(0)
                )
            )
            (first,) = members(0)
            seen.append(first.snapshot())
        works = [ringcoll.all_reduce(torch.ones(3), group=group, async_op=True) for _ in range(2)]
        for work in works:
            assert work is not None
            work.wait()

    ringcoll.run_threads(main, 2)
    (group,) = seen
    nothing: dict[str, Any] = {"step": None, "peer": None, "is_receive": False, "chunks": []}
    assert group["running"] == {"number": 0, "call": "all_reduce", "meets": True} | nothing
    assert group["queued"] == [{"number": 1, "call": "all_reduce", "complete": False}]
    assert group["operations"] == [{"number": 0, "call": "all_reduce", "complete": False}]


@pytest.mark.parametrize(
    "peer, step, is_receive, chunks",
    [
        (1, 0, True, [0]),
        (1, 0, False, [1]),
        (2, 0, False, [2]),
        (1, 2, True, [1]),
        (2, 2, True, [2]),
        (2, 2, False, [0]),
        (1, 1, True, []),  # the rank reduces, and exchanges nothing
    ],
)
def test_the_chunks_of_a_message(peer: int, step: int, is_receive: bool, chunks: list[int]) -> None:
    """Two-shot: each rank gets its chunk from all, reduces it, and sends it to all."""

    def main(group: Any) -> tuple[list[int], ...]:
        ringcoll.all_reduce(torch.ones(12), group=group, algorithm="two_shot")
        _, operation = group.communicator.monitor.progress.last
        waits = Wait(0, peer, step, is_receive), None
        return tuple(
            flight_recorder._chunks(Running(0, operation, wait), group.rank()) for wait in waits
        )

    assert ringcoll.run_threads(main, 3)[0] == (chunks, [])


def test_what_has_no_plan_has_no_chunks() -> None:
    turn = Turn("meeting", lambda: None)
    for is_receive in (True, False):
        state = flight_recorder._running(Running(3, turn, Wait(0, 1, 2, is_receive)), 0, False)
        where = {"meets": False, "step": 2, "peer": 1, "is_receive": is_receive, "chunks": []}
        assert state == {"number": 3, "call": "meeting"} | where


def test_a_long_command_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["x" * 150, "y" * 150])
    command = flight_recorder.record()["command"]
    assert command == f"{'x' * 150} {'y' * 49}"


def test_a_child_tells_nothing_of_its_parents_groups() -> None:
    def main(group: Any) -> int:
        if group.rank():
            return 0
        server = flight_recorder._answering
        assert server is not None
        if (pid := os.fork()) == 0:
            try:
                is_clean = not flight_recorder._watched and flight_recorder._answering is None
                os._exit(7 if is_clean and server._socket.fileno() == -1 else 1)
            finally:
                os._exit(2)
        assert server._socket.fileno() >= 0
        statuses: list[int] = []

        def has_ended() -> bool:
            ended, status = (0, 0) if statuses else os.waitpid(pid, os.WNOHANG)
            if ended:
                statuses.append(os.waitstatus_to_exitcode(status))
            return bool(statuses)

        if not eventually(has_ended):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        return statuses[0]

    assert ringcoll.run_threads(main, 2) == [7, 0]


def test_the_groups_that_are_left_are_told() -> None:
    def main(group: Any) -> int:
        ringcoll.barrier(group)
        if group.rank() == 0:
            group.communicator.close()
            number = len(own_groups())
            group.communicator.store.set("asked", "")
            return number
        group.communicator.store.wait(["asked"], timedelta(seconds=30))
        return 0

    assert ringcoll.run_threads(main, 2) == [1, 0]


def test_installed_packages_are_the_users_code() -> None:
    """They lie within the folder of the standard library."""
    place = f"{Path(os.__file__).parent}/site-packages/mine/train.py"
    names: dict[str, Any] = {"record": flight_recorder.record}
    exec(compile("def train():\n    return record()", place, "exec"), names)
    assert names["train"]()["threads"]["MainThread"] == f"{place}:2 in train"


@pytest.mark.slow
def test_nobody_answers_without_a_group_of_several_ranks() -> None:
    gc.collect()
    assert eventually(is_silent)
    ringcoll.run_threads(ringcoll.barrier, 1)
    assert is_silent()
    assert ringcoll.run_threads(lambda group: os.getpid() in answering(), 2) == [True, True]
    assert eventually(is_silent)
    assert not [name for name in listening() if "ringcoll" in name]


def test_an_operation_calls_nothing_of_the_recorder() -> None:
    """Neither a function of it, nor of the socket; and no thread runs meanwhile."""
    files = {flight_recorder.__file__, flight_report.__file__}

    def main(group: Any) -> list[str]:
        tensor = torch.ones(4)
        for _ in range(3):
            ringcoll.all_reduce(tensor, group=group, algorithm="ring")
        entered: list[str] = []

        def note(frame: FrameType, event: str, argument: object) -> None:
            if event == "call" and frame.f_code.co_filename in files:
                entered.append(frame.f_code.co_qualname)

        sys.setprofile(note)
        try:
            for _ in range(3):
                ringcoll.all_reduce(tensor, group=group, algorithm="ring")
        finally:
            sys.setprofile(None)
        return entered

    assert ringcoll.run_threads(main, 2) == [[], []]


def test_all_ranks_get_the_same_token() -> None:
    store = dist.HashStore()
    first = flight_recorder.token(store)
    assert len(first) == 32
    assert flight_recorder.token(store) == first
    assert flight_recorder.token(dist.PrefixStore("other", store)) != first


def test_the_place_is_where_the_users_code_is() -> None:
    place = flight_recorder.record()["threads"]["MainThread"]
    assert place.startswith(f"{__file__}:")
    assert place.endswith("in test_the_place_is_where_the_users_code_is")
    event = threading.Event()

    def wait() -> None:
        event.wait()

    thread = threading.Thread(target=wait, name="mine")
    thread.start()
    assert eventually(lambda: "mine" in flight_recorder.record()["threads"])
    event.set()
    thread.join()


# --- who is answered ------------------------------------------------------------------


@pytest.fixture
def server():
    answer = Answering(lambda: "here I am")
    yield answer
    answer.end()
    assert eventually(is_silent)


def test_each_who_asks_is_answered(server: Answering) -> None:
    for _ in range(3):
        assert ask([os.getpid()], 10.0) == ({os.getpid(): "here I am"}, {})


def test_another_user_gets_nothing(server: Answering, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each end looks at the other end's user, as the kernel tells it."""
    real, own = flight_report._other_end, threading.current_thread()

    def other(connection: socket.socket) -> tuple[int, int]:
        pid, user = real(connection)
        is_server = threading.current_thread() is not own
        return pid, user + (is_server == sees_a_stranger)

    monkeypatch.setattr(flight_report, "_other_end", other)
    sees_a_stranger = True  # the process that is asked
    assert ask([os.getpid()], 10.0) == ({os.getpid(): ""}, {})
    sees_a_stranger = False  # the process that asks
    assert ask([os.getpid()], 10.0) == ({}, {os.getpid(): "belongs to another user"})


def test_the_kernel_says_who_is_at_the_other_end() -> None:
    here, there = socket.socketpair()
    with here, there:
        assert flight_report._other_end(here) == (os.getpid(), os.geteuid())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_real_process_of_another_user(server: Answering) -> None:
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        os.setresuid(12345, 12345, 12345)
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(f"\0{flight_report._prefix()}{os.getppid()}")
            os.write(writer, connection.recv(100) or b"nothing")
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as told:
        assert told.read() == b"nothing"
    os.waitpid(pid, 0)


def test_who_does_not_read_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_report, "_SLOW_S", 0.2)
    server = Answering(lambda: "x" * 5_000_000)
    with socket.socket(socket.AF_UNIX) as lazy:
        lazy.connect(f"\0{flight_report._prefix()}{os.getpid()}")
        told, _ = ask([os.getpid()], 30.0)
    server.end()
    assert len(told[os.getpid()]) == 5_000_000


def test_an_error_is_told_and_the_thread_goes_on() -> None:
    texts = iter(["right"])
    server = Answering(lambda: next(texts))
    for expected in ("right", "StopIteration: "):
        assert ask([os.getpid()], 10.0)[0] == {os.getpid(): expected}
    server.end()


def test_a_name_that_is_taken_is_no_reason_to_fail(
    server: Answering, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(OSError, match="in use"):
        Answering(lambda: "")
    with caplog.at_level(logging.DEBUG, "ringcoll"):
        assert ringcoll.run_threads(ringcoll.barrier, 2) == [None, None]
    assert "`ringcoll dump` cannot ask this process: " in caplog.text


def test_elsewhere_nothing_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(OSError, match="only Linux"):
        Answering(lambda: "")


# --- records in a folder --------------------------------------------------------------


def fail(group: Any) -> None:
    """Ranks of which one raises an error in an operation."""

    def adding(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("no sums on Sundays")

    with pytest.raises((ArithmeticError, ringcoll.errors.RingcollError)):
        ringcoll.all_reduce(torch.ones(4), ringcoll.UserOp(adding), group)


def test_who_fails_leaves_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ringcoll.run_threads(fail, 2)
    monkeypatch.setenv("RINGCOLL_DUMP", str(tmp_path))
    ringcoll.run_threads(fail, 2)
    (path,) = tmp_path.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    record = read_record(path.read_text())
    failed = [group for group in record["groups"] if "no sums on Sundays" in str(group["failure"])]
    # The rank that wrote last has its operation still; the other rank may have left its group by then.
    running = [group["running"] for group in failed if group["running"] is not None]
    assert running
    assert all(one["number"] == 0 and one["call"].startswith("all_reduce(") for one in running)


def test_a_folder_that_is_not_there_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RINGCOLL_DUMP", str(tmp_path / "nowhere"))
    ringcoll.run_threads(fail, 2)
    assert "the record of this process cannot be written" in caplog.text


def test_a_record_on_a_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(ArgumentError, match="RINGCOLL_DUMP"):
        flight_recorder.dump_on_signal(signal.SIGUSR1)
    monkeypatch.setenv("RINGCOLL_DUMP", str(tmp_path))
    try:
        flight_recorder.dump_on_signal(signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert eventually(lambda: bool(list(tmp_path.glob("*.json"))))
    finally:
        signal.signal(signal.SIGUSR1, before)
    (path,) = tmp_path.iterdir()
    assert json.loads(path.read_text())["groups"] == []
