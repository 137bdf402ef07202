"""Processes that are looked at: alive, ended, unknown, elsewhere, and one that took a number."""

import contextlib
import os
import socket
import subprocess
import sys
import time

import pytest
import torch.distributed as dist

from ringcoll.runtime.lives import Lives, Process, tell
from ringcoll.system import lines
from ringcoll.system.lines import Lines
from ringcoll.system.machine import place, process_state

pytestmark = pytest.mark.processes


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


def test_a_number_that_was_given_away_again_is_another_process(child):
    store = dist.HashStore()
    told(store, 1, child.pid, start="1")
    assert Lives(store, 0, 2).ended() == {1}


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
        assert own_lines._line(server.getsockname()).is_there
    deadline = time.monotonic() + 10
    while watched.ended() != {1}:
        assert time.monotonic() < deadline
    assert watched.elsewhere.keys() == {1}
    assert watched.processes == {}


def test_lines_lead_to_the_ranks_at_powers_of_two_and_to_those_that_are_awaited(own_lines):
    """With 64 ranks these are 11 of 63; others are reached when they are waited for."""
    store = dist.HashStore()
    with contextlib.ExitStack() as servers:
        addresses = {}
        for peer in range(1, 64):
            server = servers.enter_context(socket.create_server(("127.0.0.1", 0)))
            addresses[peer] = server.getsockname()
            told(store, peer, 1, start="1", where="another kernel", address=addresses[peer])
        watched = Lives(store, 0, 64)
        watched.tell()

        def reached() -> set[int]:
            return {peer for peer in addresses if own_lines._line(addresses[peer]).is_there}

        near = {1, 2, 4, 8, 16, 32, 48, 56, 60, 62, 63}
        assert reached() == near
        assert watched.ended() == set()
        assert reached() == near
        assert watched.elsewhere.keys() == {*range(1, 64)}
        for _ in range(2):  # looks: the first begins the line
            assert watched.ended(3, None) == set()
        assert reached() == {*near, 3}
