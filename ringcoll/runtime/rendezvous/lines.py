"""Connections between processes of different hosts that tell of a death: lines.

A process listens at one address, and tells it to those that want to know of its death. A *line* is
a connection to such an address. It carries the address of the process that has made it, and nothing
else, so that both ends know whose death they hear of. The kernel keeps a line while both processes
live, also when one is stopped or holds Python's lock, and ends it when one ends: there are no
heartbeats, and no thread.

A line may also be cut by what lies between the hosts, and a firewall refuses connections, too. So a
process has surely ended only if its address could be reached before, or it has itself ended a line
that it had made; and if then, for a while, no process listens at its address. Of a process to which
there was no line yet, or whose host is cut off, nothing is known.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import socket
import threading
import time
from collections.abc import Iterable

from ringcoll.runtime.machine import family_of, is_loopback

Address = tuple[str, int]
"""Host and port."""

_GREETING_S = 0.2  # on a network of one room, a line takes less than a millisecond
_LOOK_S = 0.001
_BOTH = 2  # connections of a line, if both ends have made one
_HELLO = 64  # bytes at most; the longest address of IPv6 and a port have 45
STRANGERS = 256
"""Most connections that are kept until they have said whose they are, or all of their message."""
_BACKLOG = 1024
_SURE_S = 0.2  # of refusals, one after the other


def listening(host: str) -> socket.socket:
    """A socket that takes connections at a free port, and does not block."""
    server = socket.create_server((host, 0), family=family_of(host), backlog=_BACKLOG)
    server.setblocking(False)
    return server


def accepted(server: socket.socket, most: float = math.inf) -> list[socket.socket]:
    """The connections that have come to a socket, or ``most`` of them; they do not block."""
    connections: list[socket.socket] = []
    with contextlib.suppress(OSError):  # mostly as no more have come
        while len(connections) < most:
            connections.append(server.accept()[0])
            connections[-1].setblocking(False)
    return connections


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
        self._server = listening(host)
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
        waiting, self._strangers = [*self._strangers, *accepted(self._server, STRANGERS)], []
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
        while len(self._strangers) > STRANGERS:
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


def _before_fork() -> None:  # no other thread has a socket that is in no line yet
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
