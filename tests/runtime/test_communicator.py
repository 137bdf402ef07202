"""What befalls a communicator while its ranks meet."""

from __future__ import annotations

import sys
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ringcoll
from ringcoll.backend import process_group as backend
from ringcoll.collectives.groups import communicator
from ringcoll.errors import GroupBrokenError, MismatchError, PeerLostError
from ringcoll.runtime import communicator as runtime
from ringcoll.transport import gloo
from tests.programs.threads import together

CPU = torch.device("cpu")


@pytest.mark.parametrize("by_monitor", [False, True])
def test_who_gives_up_while_the_ranks_connect_is_heard(
    monkeypatch: pytest.MonkeyPatch, by_monitor: bool
):
    """Gloo has no connections to break at that time; they must not be waited on later."""
    store, devices, members = dist.HashStore(), gloo._devices, threading.local()

    def give_up(is_local: bool) -> list[Any]:
        member = members.own
        if member.rank == 0 and by_monitor:
            member.monitor.error = MismatchError("two calls", peer=1, mine="this", theirs="that")
            member.monitor.on_break()
        elif member.rank == 0:
            member.abort()
        return devices(is_local)

    monkeypatch.setattr(gloo, "_devices", give_up)

    def main(rank: int) -> float:
        options = ringcoll.Options(transport="gloo")
        group = backend.ProcessGroup(store, rank, 2, timedelta(seconds=50), options)
        members.own = communicator(group, CPU)
        kind = MismatchError if by_monitor and not rank else PeerLostError
        start = time.monotonic()
        with pytest.raises(kind):
            ringcoll.all_reduce(torch.ones(3), group=group)
        with pytest.raises(GroupBrokenError):
            ringcoll.all_reduce(torch.ones(3), group=group)
        members.own.close()
        return time.monotonic() - start

    for seconds in together(2, main):
        assert isinstance(seconds, float), seconds
        assert seconds < 25


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
