"""Messages through shared memory: every way of travelling, loans, deaths, and what is left."""

from __future__ import annotations

import os
import platform
import sys
import time
from array import array
from collections import deque

import pytest
import torch

from ringcoll.errors import ArgumentError
from ringcoll.runtime.launch import RankError, Ranks
from ringcoll.runtime.tensors.memory import may_write
from ringcoll.runtime.transport import SharedMemory, catalogue
from ringcoll.runtime.transport.shared import memory as shared_memory
from ringcoll.runtime.transport.shared import transport as shared
from ringcoll.runtime.transport.shared.channel import PeerChannel, RingReceive
from ringcoll.runtime.transport.shared.memory import (
    PIECES,
    SharedLayout,
    identity,
    read_process,
)
from tests.programs import shared_memory as program
from tests.programs.read_only import read_only


@pytest.mark.processes
@pytest.mark.parametrize("transport", ["shared", "shared, in pieces", "shared, read"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_random_messages(pool, transport: str, world_size: int):
    wrong = pool(world_size).run(program.random_messages, transport, 11 * world_size, 4)
    assert wrong == [[]] * world_size


@pytest.mark.processes
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_message_for_several_peers_is_written_once(pool, world_size: int):
    for wrong, at_first, pieces, written in pool(world_size).run(
        program.spread_messages, "shared, in pieces", 5, 40
    ):
        assert wrong == []
        assert at_first == PIECES, "there is room for all, whoever is late"
        # Later again where a peer was so late that its place was needed meanwhile.
        assert pieces / (world_size - 1) <= written <= pieces


@pytest.mark.processes
@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_exchanges(pool, world_size: int):
    assert pool(world_size).run(program.exchanges, "shared", 7, 300) == [[]] * world_size


@pytest.mark.processes
def test_a_rank_with_faults_has_no_exchanges_nor_have_the_others(pool):
    found = pool(3).run(program.with_faults_on_a_rank)
    assert found == [([3.0, 6.0, 9.0], 0)] * 3


@pytest.mark.processes
def test_another_exchange_never_comes(pool):
    told = pool(2).run(program.exchange_of_others)
    assert any("no message within 0.3 s" in text for text in told)
    assert all("no message within" in text or "connection was broken" in text for text in told)


@pytest.mark.processes
def test_a_loan_holds_up_the_sender(pool):
    assert pool(2).run(program.lent_messages, "shared, read") == [[True] * 2, [True] * 4]


@pytest.mark.processes
def test_a_long_message_is_read_and_a_shorter_one_copied(pool):
    at_once = [True, False, False, False, True, True, True, False]
    assert pool(2).run(program.ways) == [at_once] * 2


@pytest.mark.processes
def test_all_ranks_take_the_way_that_was_measured(pool):
    (before, measured, after), *others = pool(3).run(program.measured_ways)
    assert before is None
    assert measured in {*((1 << 16) << power for power in range(4)), (512 << 10) + 1, sys.maxsize}
    assert after == measured
    assert others == [[before, measured, after]] * 2


@pytest.mark.processes
def test_lengths_that_differ_are_refused(pool):
    told = pool(2).run(program.lengths_that_differ)
    assert "a message of 20 bytes from rank 0 met a receive of 16 bytes" in told[1]


@pytest.mark.processes
@pytest.mark.parametrize("when", ["reading", "sending"])
def test_a_death_with_a_loan_is_noticed(when: str):
    reports: list[tuple[str, int, float]] = []
    with Ranks(2, timeout_s=60.0) as ranks, pytest.raises(RankError):
        ranks.run(program.dies_with_a_loan, when, on_report=reports.append)
    ((text, peer, seconds),) = reports
    assert "rank 1" in text or "connection was broken" in text
    assert peer == 1
    assert seconds < 2


@pytest.mark.processes
def test_nobody_trusts_who_has_given_up(pool):
    assert pool(2).run(program.gives_up_while_it_sends) == ["the connection was broken", ""]


@pytest.mark.processes
def test_groups_unmap_their_memory(pool):
    for first, second in pool(2).run(program.memory_comes_and_goes, 20):
        assert second <= first < 20


@pytest.mark.processes
def test_what_the_machine_refuses_is_said(pool):
    for told in pool(2).run(program.without, "allocate"):
        assert "cannot have" in told
        assert "bytes of shared memory" in told
        assert "Operation not permitted" in told
    for told in pool(2).run(program.without, "memory"):
        assert f"cannot have {SharedLayout(range(2)).nbytes} bytes of shared memory" in told
        assert "only 1000 bytes are free" in told
    for told in pool(2).run(program.without, "open"):
        assert "rank 0 cannot open the memory of rank 1" in told
        assert "rank 1 cannot open the memory of rank 0" in told
        assert "RINGCOLL_TRANSPORT=gloo" in told


@pytest.mark.processes
@pytest.mark.parametrize("verify_messages", [False, True])
def test_where_one_rank_cannot_open_memory_all_take_another_transport(pool, verify_messages: bool):
    other = catalogue.beside("shared", "cpu").name
    verified = ", verified" * verify_messages
    found = pool(3).run(program.one_cannot_open, None, verify_messages)
    assert found == [f"6.0 over {other}{verified}"] * 3


@pytest.mark.processes
def test_where_one_rank_cannot_open_memory_that_was_asked_for(pool):
    for told in pool(3).run(program.one_cannot_open, "shared", False):
        assert told.startswith("TransportError: ")
        assert "rank 1 cannot open the memory of rank 0: [Errno 1]" in told
        assert "rank 0 cannot" not in told


@pytest.mark.processes
def test_closing_wakes_who_sleeps(pool):
    for told in pool(2).run(program.closed_by_another_thread):
        assert "broken" in told


def test_other_processors_have_to_be_asked_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    shared.check()
    with pytest.raises(ArgumentError, match="elsewhere ask for it"):
        shared.check_automatic()
    catalogue._automatic.cache_clear()
    assert catalogue.resolved("cpu") == catalogue.beside("shared", "cpu").name
    assert catalogue.resolved("cpu", "shared") == "shared"
    monkeypatch.undo()
    catalogue._automatic.cache_clear()
    assert catalogue.resolved("cpu") == "shared"


def test_unknown_processors_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shared_memory, "FUTEX", -1)
    shared_memory.missing_means.cache_clear()
    with pytest.raises(ArgumentError, match="needs x86-64 or aarch64"):
        shared.check()
    shared_memory.missing_means.cache_clear()
    monkeypatch.undo()
    shared.check()


@pytest.mark.processes
@pytest.mark.parametrize("transport", ["shared", "shared, in pieces"])
def test_with_fences_for_other_processors(pool, transport: str):
    found = pool(2).run(program.with_fences, transport, 5)
    assert [wrong for wrong, _ in found] == [[], []]
    for _, seen in found:  # what a fence has before it, and after it
        assert seen == {"before a number is stored", "after a number was seen"}


def test_memory_is_shared_by_number():
    memory, descriptor = SharedMemory.create(8192, 4096)
    other = SharedMemory.open(os.getpid(), descriptor, identity(descriptor))
    os.close(descriptor)
    memory.words[3] = 7
    assert other.words[3] == 7
    assert other.data[24] == 7
    memory.words[5] = 0
    read_process(os.getpid(), memory.address + 24, other.address + 40, 8)
    assert memory.words[5] == 7
    with pytest.raises(OSError, match=r"Bad address"):
        read_process(os.getpid(), 8, other.address, 8)


def test_a_futex_sleeps_until_its_limit_and_not_if_the_word_has_changed():
    memory, descriptor = SharedMemory.create(4096, 4096)
    os.close(descriptor)
    begin = time.monotonic()
    shared_memory.futex_wait(memory.address, 1, 5.0)
    assert time.monotonic() - begin < 2
    begin = time.monotonic()
    shared_memory.futex_wait(memory.address, 0, 0.1)
    assert time.monotonic() - begin > 0.05


def early(
    content: bytes, filled: int, **state: object
) -> tuple[PeerChannel, RingReceive, bytearray]:
    """A channel to which a message has come early, the receive that then asks for it, and its memory."""
    channel = object.__new__(PeerChannel)
    message, receive = object.__new__(RingReceive), object.__new__(RingReceive)
    memory = bytearray(b"-" * len(content))
    for item, into in ((message, bytearray(content)), (receive, memory)):
        item.into, item.nbytes, item.tag, item.lent = memoryview(into), len(content), 7, False
        item.filled, item.number, item.done, item.memory, item.address = 0, 0, False, None, 0
    message.filled = filled
    for name, value in state.items():
        setattr(message, name, value)
    channel.early, channel.posted, channel.unread = {7: deque([message])}, deque(), deque()
    channel._partial, channel.state = message, array("q", 30 * [1])
    return channel, receive, memory


def test_what_came_early_of_a_message_in_pieces_is_not_lost():
    channel, receive, memory = early(b"abcdef????", 6)
    other = object.__new__(RingReceive)
    channel.posted.append(other)
    channel.post(receive)
    assert bytes(memory) == b"abcdef----"
    assert (receive.filled, receive.done) == (6, False)
    assert channel._partial is receive, "the next piece goes on in it"
    assert list(channel.posted) == [receive, other], "before receives of later messages"
    assert not channel.early


def test_a_whole_message_that_came_early_is_there_at_once():
    channel, receive, memory = early(b"abcdef", 6, done=True)
    channel.post(receive)
    assert (bytes(memory), receive.done, list(channel.posted)) == (b"abcdef", True, [])


@pytest.mark.parametrize("lent", [False, True])
def test_a_message_that_came_early_as_a_place_is_read_there(lent: bool):
    channel, receive, memory = early(b"abcdef", 0, number=5, address=4096)
    receive.lent = lent
    channel.post(receive)
    assert (receive.number, receive.address, receive.done) == (5, 4096, lent)
    assert list(channel.unread) == ([] if lent else [receive])
    assert bytes(memory) == b"------"


def test_to_ask_whether_memory_can_be_written_changes_nothing() -> None:
    words = torch.arange(-3, 3, dtype=torch.int32)
    for index, value in enumerate(words.tolist()):
        assert may_write(words[index:].data_ptr() + index % 4)
        assert words[index] == value
    assert not may_write(read_only(words).data_ptr())
    assert not may_write(4096)  # nothing is there
