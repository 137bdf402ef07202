"""Lines to processes that live, are stopped, are killed, were never reached; and who says nothing or nonsense."""

from __future__ import annotations

import errno
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from ringcoll.runtime.machine import sockets
from ringcoll.runtime.rendezvous import lines, serve_store
from ringcoll.runtime.rendezvous.lines import Address, Lines, listening_at

LOOPBACK = "127.0.0.1"
LIMIT_S = 10.0
LISTEN = f"""
import os, sys
from ringcoll.runtime.rendezvous.lines import Lines
own = Lines({LOOPBACK!r})
print(own.address[1], flush=True)
"""
GREET = "own.greet([({host!r}, {port})], 10.0); print('greeted', flush=True)\n"
LIVE = "sys.stdin.read()\n"


class Process:
    """Another process with lines of its own, which runs more of a program, and then waits."""

    def __init__(self, more: str = "") -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-c", LISTEN + more + LIVE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.address: Address = (LOOPBACK, int(self.line()))

    def line(self) -> str:
        assert self.popen.stdout is not None
        return self.popen.stdout.readline().strip()

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()


@pytest.fixture
def own() -> Iterator[Lines]:
    made = Lines(LOOPBACK)
    yield made
    made.close()


@pytest.fixture
def start() -> Iterator[Callable[[str], Process]]:
    started: list[Process] = []

    def begin(more: str = "") -> Process:
        started.append(Process(more))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        for stream in (process.popen.stdin, process.popen.stdout):
            assert stream is not None
            stream.close()


def comes_true(is_true: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + LIMIT_S
    while not is_true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def stays_alive(own: Lines, address: Address, looks: int = 20) -> bool:
    for _ in range(looks):
        if own.has_ended(address):
            return False
        time.sleep(0.01)
    return True


@pytest.mark.processes
def test_who_has_made_a_line_sees_the_end(own: Lines, start: Callable[..., Process]):
    process = start()
    own.greet([process.address], LIMIT_S)
    assert stays_alive(own, process.address)
    process.kill()
    assert comes_true(lambda: own.has_ended(process.address))
    assert own.has_ended(process.address), "for good"


@pytest.mark.processes
def test_who_was_greeted_sees_an_end_that_came_before_its_first_look(
    own: Lines, start: Callable[..., Process]
):
    process = start(GREET.format(host=LOOPBACK, port=own.address[1]))
    assert process.line() == "greeted"
    process.kill()
    assert comes_true(lambda: own.has_ended(process.address))


@pytest.mark.processes
def test_of_whom_there_was_no_line_nothing_is_known(own: Lines, start: Callable[..., Process]):
    """A firewall refuses connections, too."""
    process = start()
    process.kill()
    assert stays_alive(own, process.address)


@pytest.mark.processes
def test_who_is_stopped_lives(own: Lines, start: Callable[..., Process]):
    early, late = start(), start()
    own.greet([early.address], LIMIT_S)
    for process in (early, late):
        process.popen.send_signal(signal.SIGSTOP)
    own.greet([late.address], LIMIT_S)
    assert stays_alive(own, early.address)
    assert stays_alive(own, late.address)
    for process in (early, late):
        process.kill()
        assert comes_true(lambda: own.has_ended(process.address))  # noqa: B023


@pytest.mark.processes
def test_a_child_does_not_hold_the_lines_of_its_parent(own: Lines, start: Callable[..., Process]):
    fork = """
from ringcoll.runtime.rendezvous import lines
lines._own = own
child = os.fork()
if child == 0:
    print(os.getpid(), flush=True)
"""
    process = start(fork)
    child = int(process.line())
    own.greet([process.address], LIMIT_S)
    os.kill(process.popen.pid, signal.SIGKILL)
    process.popen.wait()
    try:
        assert comes_true(lambda: own.has_ended(process.address))
        os.kill(child, 0)  # it lives
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_line_that_is_cut_is_made_anew(own: Lines):
    """By what lies between the hosts, as far as one can see; here the other end closes it."""
    with socket.create_server((LOOPBACK, 0)) as server:
        address = server.getsockname()
        own.greet([address], LIMIT_S)
        server.settimeout(LIMIT_S)
        for _ in range(3):
            connection, _ = server.accept()
            assert connection.recv(64) == b"%s %d\n" % (LOOPBACK.encode(), own.address[1])
            connection.close()
            assert stays_alive(own, address, 5)
    assert comes_true(lambda: own.has_ended(address)), "nobody listens any more"


def test_who_was_never_reached_and_is_cut_off_from_here_is_not_dead(own: Lines):
    """A line from there has been cut, and a firewall refuses lines from here: its process may live."""
    with socket.create_server((LOOPBACK, 0)) as server:
        address = server.getsockname()
    with socket.create_connection(own.address) as line:
        line.sendall(b"%s %d\n" % (address[0].encode(), address[1]))
        assert stays_alive(own, address, 5)
        assert own._line(address).connections
        reset = struct.pack("ii", 1, 0)  # of socket(7), SO_LINGER: the end is no orderly one
        line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
    assert stays_alive(own, address, 50)
    assert not own._line(address).connections


def test_who_is_refused_for_a_moment_only_lives(own: Lines):
    with socket.create_server((LOOPBACK, 0)) as server:
        address = server.getsockname()
        own.greet([address], LIMIT_S)
        server.accept()[0].close()
    for _ in range(3):
        assert not own.has_ended(address), "refused"
    with socket.create_server(address):
        own.greet([address], LIMIT_S)
        assert stays_alive(own, address, 50)
        assert own._line(address).connections


def test_who_has_ended_has_ended_for_good(own: Lines):
    """Another process may listen at the same address later."""
    with socket.create_server((LOOPBACK, 0)) as server:
        address = server.getsockname()
        own.greet([address], LIMIT_S)
        server.accept()[0].close()
    assert comes_true(lambda: own.has_ended(address))
    with socket.create_server(address) as server:
        server.settimeout(0.1)
        assert own.has_ended(address)
        assert own.has_ended(address)
        with pytest.raises(TimeoutError):
            server.accept()


def test_both_ends_may_begin_at_once(own: Lines):
    other = Lines(LOOPBACK)
    for _ in range(5):
        assert not own.has_ended(other.address)
        assert not other.has_ended(own.address)
    assert own._line(other.address).connections
    assert other._line(own.address).connections
    assert own._strangers == other._strangers == []
    other.close()
    assert comes_true(lambda: own.has_ended(other.address))


def test_a_line_has_few_connections_however_many_say_that_they_are_it(own: Lines):
    made = [socket.create_connection(own.address) for _ in range(9)]
    for connection in made:
        connection.sendall(b"192.0.2.1 1\n")
    assert comes_true(lambda: not own.has_ended((LOOPBACK, 9)) and not own._strangers)
    line = own._line(("192.0.2.1", 1))
    assert comes_true(lambda: not own.has_ended((LOOPBACK, 9)) and len(line.connections) == 2)
    for connection in made:
        connection.close()
    assert comes_true(lambda: not own.has_ended((LOOPBACK, 9)) and not line.connections), (
        "not asked for"
    )


@pytest.mark.parametrize("host", ["", "no.such.host.invalid", "fe80::1%none", "::%\0", "a\0b"])
def test_no_address_is_no_reason_to_fail(own: Lines, host: str):
    own.greet([(host, 9)], 0.01)
    assert stays_alive(own, (host, 9), 3)


@pytest.mark.skipif(not socket.has_ipv6, reason="there is no IPv6")
def test_lines_and_stores_at_addresses_of_ipv6():
    first, second = Lines("::1"), Lines("::1")
    first.greet([second.address], LIMIT_S)
    assert comes_true(
        lambda: (
            not second.has_ended(first.address) and bool(second._line(first.address).connections)
        )
    )
    second.close()
    assert comes_true(lambda: first.has_ended(second.address))
    first.close()
    store = serve_store("::1")
    store.set("key", "value")
    assert store.get("key") == b"value"


def test_who_does_not_answer_is_not_waited_for(own: Lines):
    with socket.create_server((LOOPBACK, 0), backlog=0) as server:
        address = server.getsockname()
        with socket.create_connection(address):  # fills the queue, so that nobody else is answered
            begin = time.monotonic()
            own.greet([address], 0.2)
            assert 0.2 <= time.monotonic() - begin < LIMIT_S
            assert stays_alive(own, address)
            begin = time.monotonic()
            own.greet([address], LIMIT_S)
            assert time.monotonic() - begin < LIMIT_S, "another group has the same ranks"


@pytest.mark.processes
def test_strangers_change_nothing(own: Lines, start: Callable[..., Process]):
    process = start()
    silent = [socket.create_connection(own.address) for _ in range(3)]
    nonsense = (b"", b"\n", b"GET / HTTP/1.1\r\n\r\n", b"\xff\xfe 7\n", b"a 7", b"x" * 999, b" 1\n")
    for words in nonsense:
        with socket.create_connection(own.address) as stranger:
            stranger.sendall(words)
    own.greet([process.address], LIMIT_S)
    assert stays_alive(own, process.address)
    process.kill()
    assert comes_true(lambda: own.has_ended(process.address))
    for stranger in silent:
        stranger.close()


@pytest.mark.parametrize(
    "hello,address",
    [
        (b"192.0.2.1 1\n", ("192.0.2.1", 1)),
        (b"::1 65535\n", ("::1", 65535)),
        (b"192.0.2.1 1", None),  # the port may go on
        (b"192.0.2.1\n", None),
        (b" 1\n", None),
        (b"192.0.2.1 \n", None),
        (b"192.0.2.1 -1\n", None),
        (b"192.0.2.1 a\n", None),
        (b"\n", None),
        (b"", None),
    ],
)
def test_who_says_whose_line_it_is(hello: bytes, address: Address | None):
    assert lines._address_in(hello) == address


def test_strangers_that_say_nothing_are_not_kept_without_end(own: Lines, monkeypatch):
    monkeypatch.setattr(lines, "STRANGERS", 2)
    nobody = (LOOPBACK, 9)
    strangers = [socket.create_connection(own.address) for _ in range(5)]
    for _ in range(3):
        assert not own.has_ended(nobody)
        assert len(own._strangers) <= 2
    for stranger in strangers[:3]:
        stranger.settimeout(LIMIT_S)
        assert stranger.recv(1) == b"", "closed"
    for stranger in strangers:
        stranger.close()
    assert not own.has_ended(nobody)
    assert own._strangers == []


def test_nobody_listens_where_no_other_host_comes(monkeypatch):
    monkeypatch.setattr(lines, "_own", None)
    assert listening_at(LOOPBACK) is None
    assert listening_at("::1") is None
    assert listening_at("192.0.2.1") is None, "no address of this machine (RFC 5737)"
    assert not lines.has_ended((LOOPBACK, 9))


def test_the_first_address_stays(monkeypatch, own: Lines):
    monkeypatch.setattr(lines, "_own", own)
    assert listening_at(LOOPBACK) == listening_at("192.0.2.1") == own.address


def test_who_listens_where_others_come_and_whose_end_is_asked_for(monkeypatch):
    monkeypatch.setattr(lines, "_own", None)
    monkeypatch.setattr(lines, "is_loopback", lambda host: False)  # as if others could come
    assert listening_at(LOOPBACK + "%lo") is None
    address = listening_at(LOOPBACK)
    made = lines._own
    assert made is not None
    assert made.address == address
    with socket.create_server((LOOPBACK, 0)) as server:
        peer = server.getsockname()
        lines.greet([peer])
        assert made._line(peer).connections
        assert not lines.has_ended(peer)
        server.accept()[0].close()
    assert comes_true(lambda: lines.has_ended(peer))
    made.close()


def test_the_sockets_of_a_process_are_found_among_its_other_files(tmp_path: Path) -> None:
    address = "127.0.0.1", 0
    with (
        socket.create_server(address) as first,
        (tmp_path / "file").open("w"),
        socket.create_server(address) as second,
    ):
        ports = {one.getsockname()[1] for one in sockets()}
        assert {first.getsockname()[1], second.getsockname()[1]} <= ports


class Failing:
    """A socket whose connections fail, each with the next of some errors; the last one stays."""

    errors: list[int]

    def __init__(self, *family: object) -> None:
        pass

    def setblocking(self, flag: bool) -> None:
        pass

    def connect_ex(self, address: Address) -> int:
        return self.errors.pop(0) if len(self.errors) > 1 else self.errors[0]

    def close(self) -> None:
        pass


REFUSED = errno.ECONNREFUSED


@pytest.mark.parametrize("error", [errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT])
def test_only_who_is_refused_has_ended(monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    """A host that cannot be reached says nothing about a process; nor do refusals before that."""
    now_s = [0.0]
    monkeypatch.setattr(lines, "_SURE_S", 0.25)
    monkeypatch.setattr(lines, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(lines, "socket", SimpleNamespace(socket=Failing))
    monkeypatch.setattr(lines, "family_of", lambda host: socket.AF_INET)

    def looks(*errors: int) -> list[bool]:
        line = lines._Line(("192.0.2.1", 9), b"")
        line._has_proof, Failing.errors = True, [*errors]
        ended = []
        for _ in errors:
            line.look()
            ended.append(line.has_ended)
            now_s[0] += 0.25
        return ended

    assert looks(error, error, error) == [False] * 3
    assert looks(REFUSED, error, REFUSED, REFUSED) == [False, False, False, True]
    assert looks(error, REFUSED, error, REFUSED) == [False] * 4
    assert looks(REFUSED, REFUSED) == [False, True]
