"""Processes that are looked at: alive, ended, unknown, elsewhere, and one that took a number."""

import contextlib
import ctypes
import json
import os
import socket
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ringcoll.runtime.machine import ProcessState, own_address, place, process_state
from ringcoll.runtime.rendezvous import Address, Lines, lines
from ringcoll.runtime.watch import Lives, Process, lives, tell

HERE, ELSEWHERE = "this kernel", "another kernel"
ADDRESS = ("192.0.2.1", 5)


def told(
    store: dist.Store,
    rank: int,
    pid: int,
    *,
    start: str = "",
    where: str = "",
    address: tuple[str, int] | None = None,
) -> None:
    """What `tell` would tell for another process."""
    began = start or process_state(pid).start
    tell(store, rank, Process(pid, began, where or place(), address))


@pytest.fixture
def child():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


@pytest.mark.parametrize(
    "process,now,has_ended",
    [
        (Process(7, "8", HERE), ProcessState("S", 0, "8"), False),
        (Process(7, "8", HERE), ProcessState("T", 0, "8"), False),
        (Process(7, "8", HERE), ProcessState("Z", 0, "8"), True),
        (Process(7, "8", HERE), ProcessState("X", 0, "8"), True),
        (Process(7, "8", HERE), ProcessState("S", 0, "9"), True),
        (Process(7, "8", HERE), ProcessLookupError(), True),
        (Process(7, "8", HERE), FileNotFoundError(), True),
        (Process(7, "8", HERE), OSError(24, "Too many open files"), False),
        (Process(7, "", HERE), ProcessLookupError(), False),
        (Process(os.getpid(), "8", HERE), ProcessLookupError(), False),
        (Process(7, "8", ELSEWHERE), ProcessLookupError(), False),
        (Process(7, "8", ELSEWHERE, ADDRESS), ProcessState("S", 0, "8"), True),
    ],
)
def test_which_processes_have_ended(
    monkeypatch: pytest.MonkeyPatch, process: Process, now: ProcessState | OSError, has_ended: bool
):
    """Numbers are those of processes here; of a process elsewhere its line says so."""

    def state(pid: int) -> ProcessState:
        assert pid == 7
        if isinstance(now, OSError):
            raise now
        return now

    def line_has_ended(address: Address) -> bool:
        assert address == ADDRESS
        return True

    monkeypatch.setattr(lives, "place", lambda: HERE)
    monkeypatch.setattr(lives, "process_state", state)
    monkeypatch.setattr(lines, "has_ended", line_has_ended)
    assert process.has_ended() == has_ended


def test_where_processes_cannot_be_looked_at(monkeypatch: pytest.MonkeyPatch):
    def state(pid: int) -> ProcessState:
        raise FileNotFoundError("/proc")

    assert Process.own().start == process_state(os.getpid()).start
    monkeypatch.setattr(lives, "process_state", state)
    assert Process.own() == Process(os.getpid(), "", place(), None)


@pytest.mark.parametrize("told_as", ["[]", "no JSON"])
def test_what_no_rank_tells_is_nobody(told_as: str):
    store = dist.HashStore()
    store.set("ringcoll/process/1", told_as)
    watched = Lives(store, 0, 2)
    assert watched.ended() == set()
    assert watched.processes == watched.elsewhere == {}


@pytest.mark.processes
def test_a_process_that_ends_is_seen(child):
    store = dist.HashStore()
    watched = Lives(store, 0, 3)
    assert watched.ended() == set(), "nobody has told anything"
    watched.tell()
    told(store, 2, child.pid)
    assert watched.ended() == set()
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert watched.ended() == {2}, "a zombie has ended"
    child.wait()
    assert watched.ended() == {2}


@pytest.mark.processes
def test_a_number_that_was_given_away_again_is_another_process(child):
    store = dist.HashStore()
    told(store, 1, child.pid, start="1")
    assert Lives(store, 0, 2).ended() == {1}


_NEW_TIME = 0x80  # CLONE_NEWTIME


@pytest.mark.processes
def test_a_process_lives_though_the_clock_of_who_looks_is_another(child):
    """The reader is in a time name space that is 1000 s ahead, where a process's start is another number."""
    store = dist.HashStore()
    told(store, 1, child.pid)
    process = Process.of(json.loads(store.get("ringcoll/process/1")))
    assert process is not None
    reader = os.fork()
    if not reader:  # its children are in the new name space
        code = 3
        with contextlib.suppress(BaseException):
            if ctypes.CDLL(None).unshare(_NEW_TIME) == 0:
                Path("/proc/self/timens_offsets").write_text("boottime 1000 0\n")
                if not (inner := os.fork()):
                    began = [
                        each.partition(" ")[0]
                        for each in (process_state(child.pid).start, process.start)
                    ]
                    code = 2 if began[0] == began[1] else int(process.has_ended())
                    os._exit(code)
                code = os.waitstatus_to_exitcode(os.waitpid(inner, 0)[1])
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(reader, 0)[1])
    if code == 3:
        pytest.skip("no time name space can be made")
    assert code == 0


@pytest.mark.processes
def test_elsewhere_and_in_this_process_nobody_is_looked_at(child):
    store = dist.HashStore()
    told(store, 1, child.pid, start="1", where="another kernel")
    Lives(store, 2, 3).tell()  # ranks that are threads
    assert Lives(store, 0, 3).ended() == set()


def test_a_store_that_is_gone_is_no_reason_to_fail():
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    other = dist.TCPStore("127.0.0.1", store.port, None, False)
    watched = Lives(other, 0, 2)
    del store
    watched.tell()
    assert watched.ended() == set()


def test_a_rank_tells_its_process_also_without_a_way_to_others(monkeypatch: pytest.MonkeyPatch):
    def no_way(host: str) -> str:
        raise OSError(host)

    monkeypatch.setattr(lines, "_own", None)
    for way in (own_address, no_way):
        monkeypatch.setattr(lives, "own_address", way)
        store = dist.HashStore()
        Lives(store, 0, 2).tell()
        assert Process.of(json.loads(store.get("ringcoll/process/0"))) == Process.own()


@pytest.fixture
def own_lines(monkeypatch):
    made = Lines("127.0.0.1")
    monkeypatch.setattr(lines, "_own", made)
    yield made
    made.close()


def test_a_process_of_another_host_that_ends_is_seen(own_lines):
    store = dist.HashStore()
    with socket.create_server(("127.0.0.1", 0)) as server:
        told(store, 1, 1, start="1", where="another kernel", address=server.getsockname())
        watched = Lives(store, 0, 3)
        watched.tell()  # which makes the line
        assert watched.ended() == set()
        assert own_lines._line(server.getsockname()).connections
    deadline = time.monotonic() + 10
    while watched.ended() != {1}:
        assert time.monotonic() < deadline
    assert watched.elsewhere.keys() == {1}
    assert watched.processes == {}


NEAR_OF_64 = {1, 2, 4, 8, 16, 32, 48, 56, 60, 62, 63}


@pytest.mark.parametrize("world_size,near", [(64, NEAR_OF_64), (32, {*range(1, 32)})])
def test_lines_lead_to_near_ranks_and_to_those_that_are_awaited(
    own_lines: Lines, world_size: int, near: set[int]
):
    """In a small group all ranks are near; of 64 these are 11. Others are reached when they are waited for."""
    store = dist.HashStore()
    with contextlib.ExitStack() as servers:
        addresses = {}
        for peer in range(1, world_size):
            server = servers.enter_context(socket.create_server(("127.0.0.1", 0)))
            addresses[peer] = server.getsockname()
            told(store, peer, 1, start="1", where="another kernel", address=addresses[peer])
        watched = Lives(store, 0, world_size)
        watched.tell()

        def reached() -> set[int]:
            return {peer for peer in addresses if own_lines._line(addresses[peer]).connections}

        assert reached() == near
        assert watched.ended() == set()
        assert reached() == near
        assert watched.elsewhere.keys() == {*range(1, world_size)}
        for _ in range(2):  # looks: the first begins the line
            assert watched.ended(3, None) == set()
        assert reached() == {*near, 3}


def test_a_store_that_is_gone_is_asked_once() -> None:
    class Gone(dist.Store):
        def check(self, keys: list[str]) -> bool:
            asked.append(keys)
            raise dist.DistNetworkError("Broken pipe")

    asked: list[list[str]] = []
    processes = Lives(Gone(), 0, 4)
    assert processes.ended() == processes.ended(1) == set()
    assert len(asked) == 1


def test_where_the_store_is_gone_torchs_connections_are_tried_at_once() -> None:
    class Gone(dist.Store):
        def check(self, keys: list[str]) -> bool:
            raise dist.DistNetworkError("Broken pipe")

    class Gloo:
        def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
            tried.append(peer)
            if peer == 0:
                raise RuntimeError("Connection closed by peer")

        def _get_backend(self, device: torch.device) -> Any:
            return self

    tried: list[int] = []
    group = Gloo()
    watched = Lives(Gone(), 1, 3)
    watched.native = weakref.ref(group)
    assert watched.ended() == watched.ended() == {0}
    assert sorted(tried) == [0, 2], "and not again within a second"


def test_a_rank_that_made_no_call_is_seen_by_the_connections_of_torchs_own_group() -> None:
    """One that has told its process is not asked for; and none twice within a second."""

    class Gloo:
        def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
            tried.append(peer)
            if peer == 3:
                raise RuntimeError("Connection closed by peer")

        def _get_backend(self, device: torch.device) -> Any:
            return self

    tried: list[int] = []
    store, group = dist.HashStore(), Gloo()
    told(store, 1, os.getpid(), start="1", where="another kernel")
    watched = Lives(store, 0, 4)
    assert watched.ended() == set()
    watched.native = weakref.ref(group)
    assert watched.ended() == set(), "not in the first second"
    watched._tried_s -= 2
    assert watched.ended() == watched.ended() == {3}
    assert sorted(tried) == [2, 3]
    del group
    watched._tried_s -= 2
    assert watched.ended() == {3}, "it does not keep the group"
