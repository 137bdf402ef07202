"""Two transports of a group, one inside the hosts and one between them; how messages travel is tried on several hosts."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ringcoll.errors import CollectiveTimeoutError, PeerLostError
from ringcoll.runtime.rendezvous import read_from_ranks
from ringcoll.runtime.transport import Hub, LocalTransport, Message, SharedTransport, catalogue
from ringcoll.runtime.transport.pairs import PairsTransport


class Near(SharedTransport):
    """Rank 0 of two ranks on two hosts, and the group is broken while the ranks meet."""

    def __init__(self) -> None:
        super().__init__(dist.HashStore(), 0, 2)
        self.has_met = lambda: None

    def connect(self, timeout_s: float) -> None:
        self.hosts = (0, 1)
        self.has_met()


def test_the_time_limit_of_meeting_counts_from_its_begin():
    begin_s = time.monotonic()
    how = (dist.HashStore(), "address", 0, [1], 60.0, lambda: False, list)
    with pytest.raises(CollectiveTimeoutError, match="for rank 1 to use the group"):
        read_from_ranks(*how, since_s=begin_s - 59.9)
    assert time.monotonic() - begin_s < 30


def test_what_is_broken_before_the_hosts_are_connected_does_not_connect_them():
    near = Near()
    pairs = PairsTransport(near, dist.HashStore(), 30.0)
    near.has_met = pairs.abort
    with pytest.raises(PeerLostError, match="rank 0 gave up meeting the others"):
        pairs.connect(30.0)
    pairs.close()


class NearLocal(LocalTransport):
    """Messages inside the hosts; it refuses others."""

    beside: Callable[[], bool] | None = None

    def bind(self, receives: Any, sends: Any) -> Any:
        for message in (*receives, *sends):
            assert self.hosts[message.peer] == self.hosts[self.rank]
        return super().bind(receives, sends)

    def push(self, timeout_s: float) -> None:
        """Nothing waits to be seen."""


@pytest.mark.parametrize("hosts", [(0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 2, 3), (0, 0, 0, 0)])
def test_each_message_takes_the_way_of_its_pair(
    hosts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far, k = Hub(4, hosts), Hub(4, hosts), 4
    bound: list[tuple[int, int]] = []

    class FarLocal(LocalTransport):
        def bind(self, receives: Any, sends: Any) -> Any:
            bound.extend((self.rank, message.peer) for message in (*receives, *sends))
            return super().bind(receives, sends)

    entry = SimpleNamespace(make=lambda store, rank, *rest: FarLocal(far, rank))
    monkeypatch.setattr(catalogue, "beside", lambda name, kind: entry)

    def main(rank: int) -> tuple[int, ...]:
        pairs = PairsTransport(NearLocal(near, rank), dist.HashStore(), 30.0)
        pairs.connect(30.0)
        peers = [peer for peer in range(k) if peer != rank]
        into = [torch.zeros(2) for _ in peers]
        receives = [Message(peer, tensor, 7) for peer, tensor in zip(peers, into, strict=True)]
        sends = [Message(peer, torch.tensor([rank, peer + 10.0]), 7) for peer in peers]
        for handle in pairs.bind(receives, sends)(5):
            pairs.wait(handle, 30.0)
        assert [tensor.tolist() for tensor in into] == [[peer, rank + 10.0] for peer in peers]
        return pairs.hosts

    with ThreadPoolExecutor(k) as threads:
        assert list(threads.map(main, range(k), timeout=60)) == [hosts] * k
    between = [(one, two) for one in range(k) for two in range(k) if hosts[one] != hosts[two]]
    assert sorted(bound) == sorted(2 * between)  # each pair's send and receive, and nothing else
