"""Transports of processes, with ranks that are threads of this one: most of what they do needs no process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from ringcoll.runtime.transport import PIECES
from tests.programs import shared_memory as program
from tests.programs.threads import together
from tests.programs.transports import CHECKS, CONFORMANCE, LIMIT_S, TRANSPORTS

SHARED = ("shared", "shared, in pieces", "shared, read")


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFORMANCE)
@pytest.mark.parametrize("transport", [*SHARED, "gloo"])
def test_on_threads(transport: str, name: str) -> None:
    store = dist.HashStore()

    def main(rank: int) -> str:
        member = TRANSPORTS[transport](store, rank, 3)
        try:
            member.connect(LIMIT_S)
            return CHECKS[name](member)
        finally:
            member.close()

    assert together(3, main) == [""] * 3


OnThreads = Callable[..., list[Any]]


@pytest.fixture
def on_threads(monkeypatch: pytest.MonkeyPatch) -> OnThreads:
    """Calls a function of the programs for processes on threads, each with a transport of its rank."""

    def run(world_size: int, function: Callable[..., Any], name: str, *args: Any) -> list[Any]:
        store, of_thread = dist.HashStore(), threading.local()

        def transport_of_all(name: str) -> Any:
            transport = TRANSPORTS[name](store, of_thread.rank, world_size)
            transport.connect(LIMIT_S)
            return transport

        def main(rank: int) -> Any:
            of_thread.rank = rank
            return function(name, *args)

        monkeypatch.setattr(program, "transport_of_all", transport_of_all)
        meet = threading.Barrier(world_size).wait
        monkeypatch.setattr(program, "dist", SimpleNamespace(barrier=lambda: meet(LIMIT_S)))
        return together(world_size, main)

    return run


@pytest.mark.slow
@pytest.mark.parametrize("transport", SHARED)
@pytest.mark.parametrize("world_size", [2, 3])
def test_random_messages(on_threads: OnThreads, transport: str, world_size: int) -> None:
    found = on_threads(world_size, program.random_messages, transport, 11 * world_size, 2)
    assert found == [[]] * world_size


@pytest.mark.parametrize("world_size", [2, 4])
def test_exchanges(on_threads: OnThreads, world_size: int) -> None:
    found = on_threads(world_size, program.exchanges, "shared", 7, 60)
    assert found == [[]] * world_size


def test_a_message_for_several_peers_is_written_once(on_threads: OnThreads) -> None:
    found = on_threads(3, program.spread_messages, "shared, in pieces", 5, 10)
    for wrong, at_first, pieces, written in found:
        assert wrong == []
        assert at_first == PIECES, "there is room for all, whoever is late"
        assert pieces / 2 <= written <= pieces


def test_a_loan_holds_up_the_sender(on_threads: OnThreads) -> None:
    found = on_threads(2, program.lent_messages, "shared, read")
    assert found == [[True] * 2, [True] * 4]


def test_a_long_message_is_read_and_a_shorter_one_copied(on_threads: OnThreads) -> None:
    at_once = [True, False, False, False, True, True, True, False]
    assert on_threads(2, lambda _: program.ways(), "shared") == [at_once] * 2


def test_another_exchange_never_comes(on_threads: OnThreads) -> None:
    told = on_threads(2, lambda _: program.exchange_of_others(), "shared")
    assert any("no message within 0.3 s" in text for text in told)
    assert all("no message within" in text or "connection was broken" in text for text in told)


def test_lengths_that_differ_are_refused(on_threads: OnThreads) -> None:
    told = on_threads(2, lambda _: program.lengths_that_differ(), "shared")
    assert "a message of 20 bytes from rank 0 met a receive of 16 bytes" in told[1]
