"""What a transport has to do, on gloo between processes and in one process with threads."""

from __future__ import annotations

import threading

import pytest

from ringcoll.errors import TransportError
from ringcoll.transport.base import Message
from ringcoll.transport.local import Hub
from tests.support.transports import CONFORMANCE, conforms_over_gloo, spares_other_connections


@pytest.mark.processes
@pytest.mark.parametrize("name", CONFORMANCE)
@pytest.mark.parametrize("world_size", [2, 3])
def test_gloo(pool, name: str, world_size: int):
    assert pool(world_size).run(conforms_over_gloo, name) == [""] * world_size


@pytest.mark.parametrize("name", CONFORMANCE)
@pytest.mark.parametrize("world_size", [2, 3])
def test_local(name: str, world_size: int):
    found = ["not done"] * world_size
    transports = Hub(world_size).transports()

    def main(rank: int) -> None:
        transports[rank].connect(10)
        found[rank] = CONFORMANCE[name](transports[rank])

    threads = [threading.Thread(target=main, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == [""] * world_size


@pytest.mark.processes
def test_gloo_breaks_only_its_own_connections(pool):
    assert pool(2).run(spares_other_connections) == [[], []]


def test_local_refuses_lengths_that_differ():
    import torch

    first, second = Hub(2).transports()
    first.post([], [Message(1, torch.zeros(3), 0)])
    with pytest.raises(TransportError, match="3 elements met a receive of 4"):
        second.post([Message(0, torch.zeros(4), 0)], [])
