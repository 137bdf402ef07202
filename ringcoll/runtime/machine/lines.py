"""Connections between processes of different hosts: lines that tell of a death, and mailboxes.

A process listens at one address, and tells it to those that want to know of its death. A *line* is
a connection to such an address. It carries the address of the process that has made it, and nothing
else, so that both ends know whose death they hear of. The kernel keeps a line while both processes
live, also when one is stopped or holds Python's lock, and ends it when one ends: there are no
heartbeats, and no thread.

A line may also be cut by what lies between the hosts, and a firewall refuses connections, too. So a
process has surely ended only if its address could be reached before, or it has itself ended a line
that it had made; and if then, for a while, no process listens at its address. Of a process to which
there was no line yet, or whose host is cut off, nothing is known.

A *mailbox* takes messages that arrive while their receiver sleeps, is stopped, or has not looked
for long. The kernel takes them: a message that was delivered is read whenever the receiver looks,
also if its sender has ended meanwhile. There is no thread, and no answer.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import termios
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path

from ringcoll.runtime.machine.facts import family_of, is_loopback

Address = tuple[str, int]
"""Host and port."""

_GREETING_S = 0.2  # on a network of one room, a line takes less than a millisecond
_LOOK_S = 0.001
_BOTH = 2  # connections of a line, if both ends have made one
_HELLO = 64  # bytes at most; the longest address of IPv6 and a port have 45
_STRANGERS = 256  # connections that have not said yet whose they are, or not all of their message
_SURE_S = 0.2  # of refusals, one after the other
_LARGEST = 1 << 22  # bytes of a message; a view of 1,000 members has some 200,000
_POLL_S = 0.0002  # between two looks whether a message was delivered


def _listening(host: str) -> socket.socket:
    """A socket that takes connections at a free port, and does not block."""
    server = socket.create_server((host, 0), family=family_of(host), backlog=1024)
    server.setblocking(False)
    return server


class _Line:
    """A process that listens at an address; a new line says ``hello``."""

    def __init__(self, address: Address, hello: bytes) -> None:
        self._address, self._hello = address, hello
        self.connections: list[socket.socket] = []  # one, or two if both ends have made one
        self._begun: socket.socket | None = None  # a connection that is not there yet
        self._has_proof = self.has_ended = False
        self._refused_s: float | None = None  # since when

    def add(self, connection: socket.socket) -> None:
        """Take a connection."""
        self.connections.append(connection)
        while len(self.connections) > _BOTH:
            self.connections.pop(0).close()

    def drop(self) -> None:
        """Let go of connections that have been cut."""
        for connection in (*self.connections,):
            end = end_of(connection)
            if end is not None:
                self._has_proof |= end
                self.connections.remove(connection)
                connection.close()

    def look(self) -> None:
        """See what has become of the connections; begin one if there is none."""
        self.drop()
        if (self._begun is not None or not self.connections) and not self.has_ended:
            self._connect()

    def _connect(self) -> None:
        try:
            if self._begun is None:
                self._begun = socket.socket(family_of(self._address[0]))
                self._begun.setblocking(False)
            connection, code = self._begun, self._begun.connect_ex(self._address)
        except (OSError, TypeError, ValueError):  # no descriptors are left, or it is no address
            return
        if code in (errno.EINPROGRESS, errno.EALREADY):
            return
        self._begun = None
        if code in (0, errno.EISCONN):
            with contextlib.suppress(OSError):  # cut already: the next look sees that
                connection.send(self._hello)
            self._has_proof, self._refused_s = True, None
            self.add(connection)
            return
        connection.close()
        if self.connections or not self._has_proof or code != errno.ECONNREFUSED:
            self._refused_s = None
        elif self._refused_s is None:
            self._refused_s = time.monotonic()
        else:
            self.has_ended = time.monotonic() - self._refused_s >= _SURE_S

    def close(self) -> None:
        """Close the connections."""
        for connection in (*self.connections, self._begun):
            if connection is not None:
                connection.close()


class Lines:
    """The address at which a process listens, and its lines; ``OSError`` if it cannot listen."""

    def __init__(self, host: str) -> None:
        self._server = _listening(host)
        self.address: Address = self._server.getsockname()[:2]
        self._hello = f"{self.address[0]} {self.address[1]}\n".encode()
        self._lines: dict[Address, _Line] = {}
        self._strangers: list[socket.socket] = []
        self.lock = threading.RLock()  # a handler of a signal may fork

    def has_ended(self, address: Address) -> bool:
        """Whether the process that listened at an address has surely ended; begins a line to it."""
        with self.lock:
            self._answer()
            line = self._line(address)
            line.look()
            return line.has_ended

    def greet(self, addresses: Iterable[Address], limit_s: float = _GREETING_S) -> None:
        """Make lines to processes; those that do not answer in time are never waited for again."""
        deadline = time.monotonic() + limit_s
        left = {address for address in addresses if address not in self._lines}
        while left := {
            address
            for address in left
            if not self.has_ended(address) and not self._line(address).connections
        }:
            if time.monotonic() > deadline:
                return
            time.sleep(_LOOK_S)

    def close(self) -> None:
        """Close all sockets."""
        for line in self._lines.values():
            line.close()
        for connection in (self._server, *self._strangers):
            connection.close()

    def _line(self, address: Address) -> _Line:
        return self._lines.setdefault(address, _Line(address, self._hello))

    def _answer(self) -> None:
        """Take the lines that others have made, and let go of those that were cut."""
        for line in self._lines.values():
            line.drop()
        with contextlib.suppress(OSError):  # mostly as nobody has come
            for _ in range(_STRANGERS):
                connection, _ = self._server.accept()
                connection.setblocking(False)
                self._strangers.append(connection)
        waiting, self._strangers = self._strangers, []
        for connection in waiting:
            try:
                address = _address_in(connection.recv(_HELLO))
            except BlockingIOError:
                self._strangers.append(connection)
                continue
            except OSError:
                address = None
            if address is None:
                connection.close()
            else:
                self._line(address).add(connection)
        while len(self._strangers) > _STRANGERS:
            self._strangers.pop(0).close()


def end_of(connection: socket.socket) -> bool | None:
    """Whether the other end has ended a connection, and not an error; ``None`` if it is there.

    The connection does not block, and its other end sends nothing.
    """
    try:
        return True if not connection.recv(1) else None  # nobody sends anything more
    except BlockingIOError:
        return None
    except OSError:
        return False


def _address_in(hello: bytes) -> Address | None:
    """The address in what a new line says; ``None`` if no process of this library says that."""
    host, _, port = hello.decode(errors="replace").partition(" ")
    number = port.removesuffix("\n")
    return (host, int(number)) if host and number.isdecimal() and port != number else None


# --- this process's lines -----------------------------------------------------------------

_own: Lines | None = None
_making = threading.RLock()  # as above


def listening_at(host: str) -> Address | None:
    """The address at which this process listens for lines, from now on until it ends.

    ``host`` is this machine's address on the way to the others; the first that is given stays.
    ``None`` for the loopback interface, as other hosts cannot reach that, and where nobody can
    listen.
    """
    global _own  # noqa: PLW0603  # the process has a single one
    with _making:
        # The name of an interface, behind the address, says something on this host only.
        if _own is None and not is_loopback(host) and "%" not in host:
            with contextlib.suppress(OSError):
                _own = Lines(host)
        return _own.address if _own is not None else None


def greet(addresses: Iterable[Address]) -> None:
    """Make lines from this process to others, so that their deaths will be seen."""
    if _own is not None:
        _own.greet(addresses)


def has_ended(address: Address) -> bool:
    """Whether a process of another host has surely ended; see `Lines.has_ended`."""
    return _own is not None and _own.has_ended(address)


def _before_fork() -> None:
    """Wait until no other thread has a socket that is in no line yet."""
    _making.acquire()
    if _own is not None:
        _own.lock.acquire()


def _in_parent() -> None:
    if _own is not None:
        _own.lock.release()
    _making.release()


def _in_child() -> None:
    """Leave the lines to the parent: held open by a child, they would not end with it."""
    global _own  # noqa: PLW0603  # as above
    if _own is not None:
        _own.close()
        _own = None
    _making.release()


os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)


def sockets() -> Iterator[socket.socket]:
    """The process's sockets for the internet, one at a time."""
    opened = Path("/proc/self/fd")
    for entry in opened.iterdir() if opened.exists() else ():
        try:
            if not stat.S_ISSOCK(os.fstat(int(entry.name)).st_mode):
                continue
            connection = socket.socket(fileno=os.dup(int(entry.name)))
        except OSError:
            continue  # closed meanwhile
        with connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                yield connection


# --- mailboxes ----------------------------------------------------------------------------


class Inbox:
    """Lines of text that others `deliver`, on a free port of one interface."""

    def __init__(self, host: str) -> None:
        self._server = _listening(host)
        self.port: int = self._server.getsockname()[1]
        self._open: dict[socket.socket, bytes] = {}  # messages that have come in part
        self._end = weakref.finalize(self, _close, self._server, self._open)

    def read(self) -> list[str]:
        """All messages that have come since the last call, in their order."""
        with contextlib.suppress(OSError):  # mostly as no more have come
            while True:
                connection, _ = self._server.accept()
                connection.setblocking(False)
                self._open[connection] = b""
        texts = []
        for connection in [*self._open]:
            data, has_ended = self._open[connection], False
            try:
                while not has_ended and len(data) <= _LARGEST:
                    piece = connection.recv(1 << 16)
                    data += piece
                    has_ended = not piece or piece.endswith(b"\n")
            except BlockingIOError:
                self._open[connection] = data
            except OSError:
                has_ended = True
            if data.endswith(b"\n"):
                texts.append(data.decode(errors="replace"))
            if has_ended or len(data) > _LARGEST:
                self._forget(connection)
        for connection in [*self._open][:-_STRANGERS]:
            self._forget(connection)
        return texts

    def close(self) -> None:
        """Take nothing any more: whoever delivers is refused."""
        self._end()

    def _forget(self, connection: socket.socket) -> None:
        del self._open[connection]
        connection.close()


def _close(server: socket.socket, connections: dict[socket.socket, bytes]) -> None:
    for connection in (server, *connections):
        connection.close()
    connections.clear()


def deliver(text: str, addresses: Iterable[Address], limit_s: float) -> set[Address]:
    """Send a line of text to mailboxes, and wait until their kernels have it.

    Returns
    -------
    set
        The addresses whose hosts say that nobody listens there. To the others that were not reached
        within the limit, nothing is said.
    """
    data = f"{text}\n".encode()
    refused: set[Address] = set()
    deadline = time.monotonic() + limit_s
    with contextlib.ExitStack() as stack:
        ways: dict[Address, tuple[socket.socket, bytes]] = {}
        for address in addresses:
            way = stack.enter_context(socket.socket(family_of(address[0])))
            way.setblocking(False)
            with contextlib.suppress(OSError):  # nobody knows the host's name
                way.connect_ex(address)
                ways[address] = way, data
        while ways:
            for address, (way, rest) in [*ways.items()]:
                try:
                    if rest:
                        ways[address] = way, rest[way.send(rest) :]
                    elif not _is_on_its_way(way):
                        del ways[address]
                except OSError as error:
                    if error.errno in (errno.EAGAIN, errno.ENOTCONN, errno.EINPROGRESS):
                        continue
                    if error.errno == errno.ECONNREFUSED:
                        refused.add(address)
                    del ways[address]
            if ways:
                if time.monotonic() > deadline:
                    break
                time.sleep(_POLL_S)
    return refused


def _is_on_its_way(way: socket.socket) -> bool:
    """Whether the other end's kernel has not acknowledged all bytes; SIOCOUTQ in tcp(7)."""
    try:
        return any(fcntl.ioctl(way, termios.TIOCOUTQ, bytes(4)))
    except OSError:  # not on Linux
        return False
