"""Mailboxes: long messages, strangers, and messages that arrive in part."""

from __future__ import annotations

import errno
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from ringcoll.runtime.rendezvous import Inbox, deliver, mailboxes

HOST, LIMIT_S = "127.0.0.1", 20.0


def read_until(inbox: Inbox, number: int) -> list[str]:
    """So many messages, or as many as come within the limit."""
    texts: list[str] = []
    deadline = time.monotonic() + LIMIT_S
    while len(texts) < number and time.monotonic() < deadline:
        texts += inbox.read()
    return texts


def is_closed(connection: socket.socket) -> bool:
    """Whether the other end has closed a connection, perhaps with bytes unread."""
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_a_message_that_is_longer_than_the_kernels_memory_arrives_whole() -> None:
    text = "".join(map(str, range(600_000)))  # 3.5 MB
    inbox = Inbox(HOST)
    inbox._server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
    with ThreadPoolExecutor(1) as threads:
        refused = threads.submit(deliver, text, [(HOST, inbox.port)], LIMIT_S)
        time.sleep(0.2)  # so long that the kernel takes no more
        assert read_until(inbox, 1) == [f"{text}\n"]
        assert refused.result(LIMIT_S) == set()
    inbox.close()


def test_a_message_that_is_too_long_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailboxes, "_LARGEST", 1000)
    inbox = Inbox(HOST)
    with socket.create_connection((HOST, inbox.port), LIMIT_S) as long:
        long.sendall(b"x" * 1001)  # and no end of the line
        deadline = time.monotonic() + LIMIT_S
        long.settimeout(0.01)
        assert inbox.read() == []
        while not is_closed(long):
            assert time.monotonic() < deadline
            assert inbox.read() == []
    deliver("short", [(HOST, inbox.port)], LIMIT_S)
    assert read_until(inbox, 1) == ["short\n"]
    inbox.close()


def test_of_many_messages_that_never_end_the_latest_stay_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mailboxes, "STRANGERS", 3)
    inbox = Inbox(HOST)
    strangers = [socket.create_connection((HOST, inbox.port), LIMIT_S) for _ in range(5)]
    for stranger in strangers:
        stranger.sendall(b"begun")
    assert inbox.read() == []
    for number, stranger in enumerate(strangers[2:]):
        stranger.sendall(f" {number}\n".encode())
    assert sorted(read_until(inbox, 3)) == ["begun 0\n", "begun 1\n", "begun 2\n"]
    for stranger in strangers[:2]:
        stranger.settimeout(LIMIT_S)
        assert is_closed(stranger)
    for stranger in strangers:
        stranger.close()
    inbox.close()


def test_who_is_refused_is_told_from_who_is_not_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    open_, closed = Inbox(HOST), Inbox(HOST)
    closed.close()
    addresses = [(HOST, open_.port), (HOST, closed.port)]
    assert deliver("words", addresses, LIMIT_S) == {(HOST, closed.port)}
    assert read_until(open_, 1) == ["words\n"]

    class Unreachable(socket.socket):
        def send(self, *_: object) -> int:
            raise OSError(errno.EHOSTUNREACH, "no route to host")

    monkeypatch.setattr(socket, "socket", Unreachable)
    assert deliver("words", addresses, LIMIT_S) == set()
    monkeypatch.undo()
    open_.close()


def test_who_does_not_answer_within_the_limit_is_not_refused() -> None:
    with socket.create_server((HOST, 0), backlog=0) as server:
        address = server.getsockname()
        with socket.create_connection(address):  # fills the queue, so that nobody else is answered
            begin_s = time.monotonic()
            assert deliver("words", [address], 0.2) == set()
            assert 0.2 <= time.monotonic() - begin_s < LIMIT_S


def test_a_host_that_nobody_knows_keeps_no_message_from_the_others() -> None:
    inbox = Inbox(HOST)
    assert deliver("words", [("a..b", 1), (HOST, inbox.port)], LIMIT_S) == set()
    assert read_until(inbox, 1) == ["words\n"]
    inbox.close()
