"""Messages to processes of other hosts, which may sleep: mailboxes.

A *mailbox* takes messages that arrive while their receiver sleeps, is stopped, or has not looked
for long. The kernel takes them: a message that was delivered is read whenever the receiver looks,
also if its sender has ended meanwhile. There is no thread, and no answer.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import socket
import termios
import time
import weakref
from collections.abc import Iterable

from ringcoll.runtime.machine import family_of
from ringcoll.runtime.rendezvous.lines import STRANGERS, Address, accepted, listening

_LARGEST = 1 << 22  # bytes of a message; a view of 1,000 members has some 200,000
_POLL_S = 0.0002  # between two looks whether a message was delivered


class Inbox:
    """Lines of text that others `deliver`, on a free port of one interface."""

    def __init__(self, host: str) -> None:
        self._server = listening(host)
        self.port: int = self._server.getsockname()[1]
        self._open: dict[socket.socket, bytes] = {}  # messages that have come in part
        self._end = weakref.finalize(self, _close, self._server, self._open)

    def read(self) -> list[str]:
        """All messages that have come since the last call, in their order."""
        self._open |= dict.fromkeys(accepted(self._server), b"")
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
        for connection in [*self._open][:-STRANGERS]:
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

    Return the addresses whose hosts say that nobody listens there. Of the others, some may not have
    been reached within the limit.
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
