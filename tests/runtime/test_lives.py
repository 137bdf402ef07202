"""Processes that are looked at: alive, ended, unknown, elsewhere, and one that took a number."""

import json
import os
import subprocess
import sys

import pytest
import torch.distributed as dist

from ringcoll.runtime import lives
from ringcoll.runtime.lives import Lives, tell
from ringcoll.system.machine import place, process_state

pytestmark = pytest.mark.processes


def told(store: dist.Store, rank: int, pid: int, *, start: str = "", where: str = "") -> None:
    """What `tell` would tell for another process."""
    began = start or process_state(pid).start
    store.set(lives._KEY.format(rank), json.dumps((pid, began, where or place())))


@pytest.fixture
def child():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_a_process_that_ends_is_seen(child):
    store = dist.HashStore()
    watched = Lives(store, 0, 3)
    assert watched.ended() == set(), "nobody has told anything"
    tell(store, 0)
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
    tell(store, 2)  # ranks that are threads
    assert Lives(store, 0, 3).ended() == set()


def test_a_store_that_is_gone_is_no_reason_to_fail():
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    other = dist.TCPStore("127.0.0.1", store.port, None, False)
    watched = Lives(other, 0, 2)
    del store
    tell(other, 0)
    assert watched.ended() == set()
