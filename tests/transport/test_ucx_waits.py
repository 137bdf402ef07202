"""How UCX's messages are waited for: what ends a wait, and who is blamed; UCX itself is left out."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ringcoll.errors import CollectiveTimeoutError, PeerLostError
from ringcoll.runtime.transport import ucx

PEER, LIMIT_S = 2, 20.0


class Request:
    """A message that is complete after so many looks."""

    def __init__(self, looks: float) -> None:
        self.left = looks

    @property
    def completed(self) -> bool:
        return self.left <= 0

    def check_error(self) -> None:
        assert self.completed, "nobody has waited for it"


class Worker:
    """Moves one message; nothing else ever comes."""

    def __init__(self, request: Request) -> None:
        self.request, self.cancelled = request, 0

    def progress(self) -> None:
        self.request.left -= 1

    def arm(self) -> bool:
        return True

    def cancel_inflight_requests(self) -> None:
        self.cancelled += 1


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Makes rank 0 of three, which waits for a message of rank 2; looks cost no time."""
    made: list[ucx.UcxTransport] = []
    monkeypatch.setattr(ucx, "_SLEEP_S", 0.001)

    def make(looks: float, **state: Any) -> Any:
        transport: Any = ucx.UcxTransport(dist.HashStore(), 0, 3)
        made.append(transport)
        transport._worker = Worker(Request(looks))
        transport._descriptor = -1
        transport._spins = 5
        for name, value in state.items():
            setattr(transport, name, value)
        return transport

    yield make
    for transport in made:
        os.close(transport._alarm)


def wait(transport: Any, limit_s: float = LIMIT_S) -> None:
    transport.wait((transport._worker.request, PEER, torch.zeros(1)), limit_s)


@pytest.mark.parametrize("looks", [0, 1, 5, 6, 30])
def test_a_message_is_waited_for(waits: Callable[..., Any], looks: int) -> None:
    transport = waits(looks)
    wait(transport)
    assert transport._worker.request.left == 0, "and no longer than it needs"
    assert not transport._aborted


def test_the_limit_is_kept(waits: Callable[..., Any]) -> None:
    transport = waits(1 << 40)
    begin_s = time.monotonic()
    with pytest.raises(CollectiveTimeoutError, match=r"no message within 0\.1 s") as raised:
        wait(transport, 0.1)
    assert 0.1 <= time.monotonic() - begin_s < LIMIT_S
    assert raised.value.peer == PEER
    assert transport._worker.cancelled == 1, "nothing is written any more"


@pytest.mark.parametrize(
    "state, words",
    [
        ({"_ended": {PEER}}, "the process of rank 2 has ended"),
        ({"_heard": SimpleNamespace(completed=True)}, "the connection was broken"),
    ],
)
def test_a_peer_that_has_ended_or_given_up_is_not_waited_for(
    waits: Callable[..., Any], state: dict[str, Any], words: str
) -> None:
    transport = waits(1 << 40, **state)
    with pytest.raises(PeerLostError, match=words) as raised:
        wait(transport)
    assert raised.value.peer == PEER
    assert transport._aborted


def test_another_peer_may_end(waits: Callable[..., Any]) -> None:
    transport = waits(30, _ended={1}, _heard=SimpleNamespace(completed=False))
    wait(transport)
    assert not transport._aborted


def test_the_last_message_of_a_peer_that_has_ended_is_taken(waits: Callable[..., Any]) -> None:
    transport = waits(500, _ended={PEER})
    wait(transport)
    assert not transport._aborted


@pytest.mark.parametrize("is_far", [True, False])
@pytest.mark.parametrize("is_alive", [True, False])
def test_on_another_host_an_endpoint_knows_of_the_end(
    waits: Callable[..., Any], is_far: bool, is_alive: bool
) -> None:
    endpoints = {PEER: SimpleNamespace(alive=is_alive), 1: SimpleNamespace(alive=False)}
    transport = waits(1 << 40, _far={PEER, 1} if is_far else set(), _endpoints=endpoints)
    look = (transport._worker.request, PEER, None)
    if is_far and not is_alive:
        with pytest.raises(PeerLostError, match="rank 2, on another host, has ended"):
            transport._look_around(*look)
        assert transport._worker.cancelled == 1
        transport = waits(0, _far={PEER}, _endpoints=endpoints)
        transport._look_around(transport._worker.request, PEER, None)  # it came before the end
        assert not transport._aborted
    else:
        transport._look_around(*look)
        assert not transport._aborted
    transport = waits(1 << 40, _far={PEER})
    transport._look_around(transport._worker.request, PEER, None)  # it is not connected yet


def test_whose_end_disturbs_is_known(waits: Callable[..., Any]) -> None:
    transport = waits(0)
    first, second = (os.eventfd(0, os.EFD_NONBLOCK) for _ in range(2))
    transport._lives = {1: first, PEER: second}
    for life in (first, second):
        transport._sleeper.register(life, 1)
    assert not transport._disturbs([(transport._descriptor, 1)])
    assert transport._ended == set()
    os.eventfd_write(second, 1)
    assert transport._disturbs(transport._sleeper.poll(0))
    assert transport._ended == {PEER}
    assert transport._sleeper.poll(0) == [], "each end disturbs once"
    for life in (first, second):
        os.close(life)
