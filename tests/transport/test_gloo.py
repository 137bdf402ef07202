"""What gloo itself would wait for in vain: ranks of other hosts that do not come, and who gives up."""

from __future__ import annotations

import random
import threading
import time
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ringcoll.errors import CollectiveTimeoutError, PeerLostError, TransportError
from ringcoll.runtime.launch import rendezvous
from ringcoll.runtime.transport import GlooTransport, Message

gloo: Any = import_module("ringcoll.runtime.transport.gloo")


@pytest.fixture
def transport(monkeypatch: pytest.MonkeyPatch) -> GlooTransport:
    """Rank 0 of two hosts; rank 1 has come, and died before it told its address."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(gloo, "meet", lambda *arguments: (0, 1))
    return GlooTransport(dist.HashStore(), 0, 2)


def test_the_time_limit_names_who_does_not_come(transport: GlooTransport) -> None:
    with pytest.raises(CollectiveTimeoutError, match="rank 1"):
        transport.connect(0.2)


def test_who_waits_for_an_address_can_be_woken(transport: GlooTransport) -> None:
    began = time.monotonic()
    waker = threading.Timer(0.1, transport.abort)
    waker.start()
    with pytest.raises(TransportError, match="gave up"):
        transport.connect(30.0)
    waker.join()
    assert time.monotonic() - began < 10


def give_up_at_random(name: str, tries: int) -> list[str]:
    """Exchange short messages through rank 0 until some rank gives up; return how each try ended."""
    store, rank, world_size = rendezvous()
    peers, mine = range(1, world_size), torch.ones(1)
    received = [torch.zeros(1) for _ in range(world_size)]
    endings = []
    for number in range(tries):
        choice = random.Random(number)
        who, when_s = choice.randrange(world_size), choice.uniform(0.0, 0.02)
        transport = GlooTransport(dist.PrefixStore(f"{name}/{number}", store), rank, world_size)
        transport.connect(20.0)
        store.add(f"{name}/{number}/connected", 1)
        while store.add(f"{name}/{number}/connected", 0) < world_size:
            time.sleep(0.001)
        giving_up = threading.Timer(when_s, transport.abort)
        if rank == who:
            giving_up.start()
        try:
            while True:
                if rank == 0:
                    for handle in transport.post([Message(p, received[p], 0) for p in peers], []):
                        transport.wait(handle, 5.0)
                    for handle in transport.post([], [Message(p, mine, 1) for p in peers]):
                        transport.wait(handle, 5.0)
                else:
                    posted = transport.post([Message(0, received[0], 1)], [Message(0, mine, 0)])
                    for handle in reversed(posted):  # the send first
                        transport.wait(handle, 5.0)
        except (PeerLostError, CollectiveTimeoutError) as error:
            endings.append(type(error).__name__)
        giving_up.cancel()
        transport.abort()
        transport.close()
    return endings


@pytest.mark.processes
def test_nobody_waits_for_who_gives_up(pool) -> None:
    """Half of the tries ended in the time limit when connections were broken at once."""
    tries = 30
    assert pool(4).run(give_up_at_random, "giving up", tries) == [["PeerLostError"] * tries] * 4
