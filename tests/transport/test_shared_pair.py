"""Two ranks of one process, connected through shared memory: both ends of each message are at hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ringcoll.errors import PeerLostError
from ringcoll.runtime.transport import PIECE, PIECES, Message, SharedTransport
from ringcoll.runtime.transport.shared.channel import NUM_HELD

LIMIT_S = 20.0
Pair = tuple[SharedTransport, SharedTransport]


@pytest.fixture
def connected() -> Iterator[Callable[[bool], Pair]]:
    """Connects two ranks; their long messages are read where they lie, or travel in pieces."""
    made: list[SharedTransport] = []

    def connect(in_pieces: bool) -> Pair:
        store = dist.HashStore()
        first, second = (SharedTransport(store, rank, 2) for rank in range(2))
        made.extend((first, second))
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(lambda transport: transport.connect(LIMIT_S), made))
        for transport in made:
            for channel in transport.channels.values():
                channel.peer_reads = not in_pieces
            transport.direct_from = None
        return first, second

    yield connect
    for transport in made:
        transport.close()


def waited(transport: SharedTransport, handle: Any, others: SharedTransport) -> None:
    """Wait for a message, while the other rank sends what had no room."""
    with ThreadPoolExecutor(1) as thread:
        pushed = thread.submit(others.push, LIMIT_S)
        transport.wait(handle, LIMIT_S)
        pushed.result()


def content(number: int, nbytes: int) -> torch.Tensor:
    return (torch.arange(nbytes) * 31 + 7 * number).to(torch.uint8)


@pytest.mark.parametrize("nbytes", [PIECE, PIECE + 1, 2 * PIECE])
def test_more_long_messages_than_there_are_places_are_taken_in_any_order(
    connected: Callable[[bool], Pair], nbytes: int
) -> None:
    """Messages that are kept in their places leave one, through which the others come."""
    sender, receiver = connected(True)
    count = PIECES + 2
    sent = [content(number, nbytes) for number in range(count)]
    into = [torch.zeros(nbytes, dtype=torch.uint8) for _ in sent]
    sender.post([], [Message(1, tensor, tag) for tag, tensor in enumerate(sent)])
    loans = [Message(0, tensor, tag, lent=True) for tag, tensor in enumerate(into)]
    handles = receiver.post(loans, [])
    waited(receiver, handles[-1], sender)  # nothing is released before
    for handle, tensor in reversed([*zip(handles, sent, strict=True)]):
        waited(receiver, handle, sender)
        view = receiver.view(handle, torch.uint8)
        assert view is not None
        assert torch.equal(view, tensor)
    for handle in handles:
        receiver.release(handle)


def test_places_are_given_back(connected: Callable[[bool], Pair]) -> None:
    """So that later messages stay in their places, and are not copied."""
    sender, receiver = connected(True)
    (channel,) = receiver.channels.values()
    for turn in range(2 * PIECES):
        (sending,) = sender.post([], [Message(1, content(turn, PIECE), 0)])
        into = torch.zeros(PIECE, dtype=torch.uint8)
        (handle,) = receiver.post([Message(0, into, 0, lent=True)], [])
        receiver.wait(handle, LIMIT_S)
        assert channel.state[NUM_HELD] == 1
        view = receiver.view(handle, torch.uint8)
        assert view is not None
        assert torch.equal(view, content(turn, PIECE))
        assert not into.any(), "it was not copied"
        del view
        receiver.release(handle)
        assert channel.state[NUM_HELD] == 0
        sender.wait(sending, LIMIT_S)


@pytest.mark.parametrize("offered", [(0, 1 << 18), (1 << 18, 0), (1000, 500), (500, 1000)])
def test_exchanges_are_as_long_as_all_ranks_allow(offered: tuple[int, int]) -> None:
    """They have to decide alike: one whose messages pass through another transport allows none."""
    store = dist.HashStore()
    ranks = [SharedTransport(store, rank, 2) for rank in range(2)]
    for transport, nbytes in zip(ranks, offered, strict=True):
        transport.exchanges_to = nbytes
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda transport: transport.connect(LIMIT_S), ranks))
    assert [transport.exchanges_to for transport in ranks] == [min(offered)] * 2
    for transport in ranks:
        transport.close()


@pytest.mark.parametrize("who", [1, 2])
@pytest.mark.parametrize("is_broken", [True, False])
def test_who_has_closed_is_missed_by_those_that_wait_for_it_and_a_break_by_all(
    who: int, is_broken: bool
) -> None:
    """Rank 0 waits for rank 1."""
    store = dist.HashStore()
    ranks = [SharedTransport(store, rank, 3) for rank in range(3)]
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda transport: transport.connect(LIMIT_S), ranks))
        into = torch.zeros(4)
        (handle,) = ranks[0].post([Message(1, into, 0)], [])
        waiting = threads.submit(ranks[0].wait, handle, LIMIT_S)
        if is_broken:
            ranks[who].abort()
        ranks[who].close()
        if is_broken or who == 1:
            with pytest.raises(PeerLostError, match="the connection was broken") as raised:
                waiting.result(LIMIT_S)
            assert raised.value.peer == 1
        else:
            done, _ = wait([waiting], 0.2)
            assert not done
            ranks[1].post([], [Message(0, torch.arange(4.0), 0)])
            waiting.result(LIMIT_S)
            assert into.tolist() == [0, 1, 2, 3]
    for transport in ranks:
        transport.close()


def test_what_was_sent_before_a_rank_closes_is_taken(connected: Callable[[bool], Pair]) -> None:
    sender, receiver = connected(True)
    sender.post([], [Message(1, torch.arange(4.0), 0)])
    sender.close()
    into = torch.zeros(4)
    (handle, late) = receiver.post([Message(0, into, 0), Message(0, torch.zeros(1), 0)], [])
    receiver.wait(handle, LIMIT_S)
    assert into.tolist() == [0, 1, 2, 3]
    with pytest.raises(PeerLostError, match="the connection was broken"):
        receiver.wait(late, LIMIT_S)
