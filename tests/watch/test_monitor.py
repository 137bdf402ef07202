"""What a rank is told of a peer process has ended while it waits for the peer's message."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ringcoll
from ringcoll.errors import CollectiveTimeoutError, PeerLostError, TransportError
from ringcoll.runtime.operation import Turn
from ringcoll.runtime.watch import Monitor, Process

FAR = Process(1, "1", "another kernel", ("192.0.2.1", 1))
LIMIT_S = 2.5  # longer than the last messages of a process that has ended are waited for


@pytest.mark.slow
@pytest.mark.parametrize(
    "last,is_far,kind,why",
    [
        (None, False, PeerLostError, "process has ended"),
        (None, True, PeerLostError, "process has ended"),
        ("0", True, PeerLostError, "has closed the group"),
        ("1", False, PeerLostError, "process has ended"),
        ("1", True, CollectiveTimeoutError, "timed out"),  # a network may be slow
    ],
    ids=["killed", "killed far", "closed before", "closed after", "closed after, far"],
)
def test_a_rank_whose_process_has_ended(
    monkeypatch: pytest.MonkeyPatch,
    last: str | None,
    is_far: bool,
    kind: type[TransportError],
    why: str,
) -> None:
    done, told = threading.Event(), threading.Event()

    def main(group: Any) -> BaseException | None:
        ringcoll.all_reduce(torch.ones(3), group=group)
        member = group.communicator
        if group.rank() == 1:
            if last is not None:
                member.store.set("left/1", last)
            told.set()
            assert done.wait(30)
            return None
        assert told.wait(30)
        monkeypatch.setattr(member.monitor.lives, "ended", lambda *_: {1})
        monkeypatch.setattr(member.monitor.lives, "elsewhere", {1: FAR} if is_far else {})
        try:
            ringcoll.all_reduce(torch.ones(3), group=group, timeout=LIMIT_S)
        except TransportError as error:
            return error
        finally:
            done.set()
        return None

    error, _ = ringcoll.run_threads(main, 2)
    assert isinstance(error, kind), error
    assert why in str(error)
    assert error.peer == 1


@pytest.mark.parametrize("reason", ["nothing", "operation", "barrier", "stream", "close"])
def test_the_thread_sleeps_only_if_nothing_has_begun_meanwhile(reason: str) -> None:
    """What has begun just now has seen that the thread was awake, and has not woken it."""
    monitor = Monitor(dist.HashStore(), 0, 2, lambda: None, SimpleNamespace())  # type: ignore[arg-type]
    monitor.awake = True
    monitor._wake.set()
    progress = monitor.progress
    if reason == "operation":
        progress.current = 3, Turn("a turn", lambda: None)
    elif reason == "barrier":
        progress.enter_barrier(3)
    elif reason == "stream":
        progress.issued.append(SimpleNamespace())  # type: ignore[arg-type]
    elif reason == "close":
        monitor._stop.set()
    monitor._sleep()
    assert monitor.awake is monitor._wake.is_set() is (reason != "nothing")
