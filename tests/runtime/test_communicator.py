"""What befalls a communicator while its ranks meet."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ringcoll
from ringcoll.backend import process_group as backend
from ringcoll.collectives.groups import communicator
from ringcoll.errors import (
    CollectiveTimeoutError,
    GroupBrokenError,
    MismatchError,
    PeerLostError,
    TransportError,
)
from ringcoll.runtime import communicator as runtime
from ringcoll.runtime.communicator import Communicator
from ringcoll.runtime.monitor import Monitor
from ringcoll.transport import base, gloo
from ringcoll.transport.base import Transport
from tests.programs.threads import together

CPU = torch.device("cpu")


@pytest.mark.parametrize("by_monitor", [False, True])
def test_who_gives_up_while_the_ranks_connect_is_heard(
    monkeypatch: pytest.MonkeyPatch, by_monitor: bool
):
    """Gloo has no connections to break at that time; they must not be waited on later."""
    store, meet = dist.HashStore(), base.meet
    members: dict[int, Communicator] = {}

    def give_up(store: dist.Store, transport: Transport, *how: Any) -> tuple[int, ...]:
        hosts = meet(store, transport, *how)
        member = members[transport.rank]
        if member.rank == 0 and by_monitor:
            member.monitor.error = MismatchError("two calls", peer=1, mine="this", theirs="that")
            member.monitor.on_break()
        elif member.rank == 0:
            member.abort()
        return hosts

    monkeypatch.setattr(gloo, "meet", give_up)

    def main(rank: int) -> float:
        options = ringcoll.Options(transport="gloo")
        group = backend.ProcessGroup(store, rank, 2, timedelta(seconds=50), options)
        members[rank] = communicator(group, CPU)
        kind = MismatchError if by_monitor and not rank else PeerLostError
        start = time.monotonic()
        with pytest.raises(kind):
            ringcoll.all_reduce(torch.ones(3), group=group)
        with pytest.raises(GroupBrokenError):
            ringcoll.all_reduce(torch.ones(3), group=group)
        members[rank].close()
        return time.monotonic() - start

    for seconds in together(2, main):
        assert isinstance(seconds, float), seconds
        assert seconds < 25


@pytest.mark.parametrize("at", ["report", "abandon"])
def test_an_interrupt_while_a_failure_is_reported_breaks_the_group(
    monkeypatch: pytest.MonkeyPatch, at: str
):
    """Who goes on may change what its peers are still reading."""
    interrupted: list[int] = []

    def interrupt(self: Monitor, error: BaseException) -> str:
        if self.rank == 0 and not interrupted:
            interrupted.append(1)
            raise KeyboardInterrupt
        return str(original(self, error))

    original = getattr(Monitor, at)
    monkeypatch.setattr(Monitor, at, interrupt)

    def fail() -> None:
        raise OSError("the first failure")

    def main(group: ringcoll.LocalGroup) -> str:
        member = communicator(group, CPU)
        ringcoll.barrier(group=group)
        if group.rank() == 0:
            with pytest.raises((KeyboardInterrupt, OSError)):
                member.in_turn(fail, "turn")
            with pytest.raises(GroupBrokenError, match="the first failure"):
                ringcoll.all_reduce(torch.ones(3), group=group)
        else:
            with pytest.raises((TransportError, PeerLostError)) as caught:
                ringcoll.all_reduce(torch.ones(3), group=group, timeout=timedelta(seconds=20))
            assert not isinstance(caught.value, CollectiveTimeoutError)
        return "broken"

    assert ringcoll.run_threads(main, 2) == ["broken"] * 2
    assert interrupted == [1]


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_program_that_an_exception_has_ended_waits_for_nothing(
    monkeypatch: pytest.MonkeyPatch, is_lost: bool
):
    limits_s: list[float] = []

    class Pending:
        def close(self, limit_s: float) -> None:
            limits_s.append(limit_s)

    monkeypatch.setattr(runtime, "_open_communicators", [Pending(), Pending()])
    if is_lost:
        monkeypatch.setattr(sys, "last_type", KeyboardInterrupt, raising=False)
    else:
        monkeypatch.delattr(sys, "last_type", raising=False)
    runtime._close_all()
    first, second = limits_s
    assert first == second
    assert (first == 0) is is_lost
