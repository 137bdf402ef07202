"""A process answers other processes of its user that ask, on a Unix socket; on Linux only.

The socket has a name without a file, which ends with the process. The name holds the process's number
and its name space of process ids, as containers may share a network. Whoever asks sends nothing, and
the answer is one text. The kernel tells both ends which user the other end is, so that neither believes
a socket or a process of another user.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from ringcoll.errors import GroupBrokenError
from ringcoll.machine import process_state, started

FOREIGN = "belongs to another user"
"""Why `ask` does not believe a process."""

_SLOW_S = 5.0  # for who asks, and then does not read
_PAUSE_S = 1.0  # after a failure of the kernel, such as too many open files
_CREDENTIALS = 12  # bytes: numbers of the process, its user and its group
_STATES = {
    "R": "running",
    "S": "asleep",
    "D": "waiting for a device",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
}


def _prefix() -> str:
    """The beginning of the names of all processes that see each other's numbers."""
    return f"ringcoll-{Path('/proc/self/ns/pid').stat().st_ino}-"


def _other_end(connection: socket.socket) -> tuple[int, int]:
    """Process and user of the other end of a connection."""
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS)
    pid, user, _ = memoryview(told).cast("i")
    return pid, user


class Answering:
    """A thread that answers, until `end` or the end of the process.

    ``answer`` returns the text, which is made anew for each who asks.

    Raises
    ------
    OSError
        The system has no such sockets, or another user has taken the name.
    GroupBrokenError
        The program ends.
    """

    def __init__(self, answer: Callable[[], str]) -> None:
        if sys.platform != "linux":
            raise OSError("only Linux has sockets with names and without files")
        self._answer = answer
        self._socket = socket.socket(socket.AF_UNIX)
        self._has_ended = False
        try:
            self._socket.bind(f"\0{_prefix()}{os.getpid()}")
            self._socket.listen()
            self._thread = started(self._serve, "ringcoll-answers")
        except (OSError, GroupBrokenError):
            self._socket.close()
            raise

    def end(self) -> None:
        """End the thread, and give up the name."""
        self._has_ended = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._socket.close()
        if self._thread is not threading.current_thread():
            self._thread.join(_PAUSE_S)  # the name is free when the thread does not sleep on it

    def leave_to_parent(self) -> None:
        """Let go of the socket in a process that was forked off; its parent goes on to answer."""
        self._has_ended = True
        self._socket.close()

    def _serve(self) -> None:
        while not self._has_ended:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                if not self._has_ended:
                    time.sleep(_PAUSE_S)
                continue
            with connection, contextlib.suppress(OSError):
                if _other_end(connection)[1] == os.geteuid():
                    connection.settimeout(_SLOW_S)
                    connection.sendall(self._text().encode(errors="replace"))

    def _text(self) -> str:
        try:
            return self._answer()
        except Exception as error:  # noqa: BLE001  # told to who asks
            return f"{type(error).__name__}: {error}"


def answering() -> list[int]:
    """The processes that answer, of all users; who is asked says whose they are."""
    try:
        names = Path("/proc/net/unix").read_text(encoding="utf-8", errors="replace")
        found = re.findall(rf" @{re.escape(_prefix())}(\d{{1,9}})$", names, re.MULTILINE)
    except OSError:
        return []
    return sorted(set(map(int, found)))


def ask(pids: Iterable[int], limit_s: float) -> tuple[dict[int, str], dict[int, str]]:
    """Ask processes, all at once.

    Returns
    -------
    tuple
        The answers, and the reasons of those that did not answer, by process.
    """
    deadline = time.monotonic() + limit_s
    answers: dict[int, str] = {}
    silent: dict[int, str] = {}
    with contextlib.ExitStack() as stack:
        asked: dict[int, socket.socket] = {}
        for pid in pids:
            connection = stack.enter_context(socket.socket(socket.AF_UNIX))
            connection.settimeout(limit_s)
            try:
                connection.connect(f"\0{_prefix()}{pid}")
            except OSError:
                silent[pid] = in_words(pid)  # without groups, if it has not ended
                continue
            if _other_end(connection) == (pid, os.geteuid()):
                asked[pid] = connection
            else:
                silent[pid] = FOREIGN
        for pid, connection in asked.items():
            pieces = []
            try:
                while True:
                    connection.settimeout(max(deadline - time.monotonic(), 0.001))
                    pieces.append(connection.recv(1 << 16))
                    if not pieces[-1]:
                        break
                answers[pid] = b"".join(pieces).decode(errors="replace")
            except OSError:
                silent[pid] = f"does not answer within {limit_s:g} s: it {in_words(pid)}"
    return answers, silent


def in_words(pid: int) -> str:
    """The state of a process that does not answer."""
    try:
        state = process_state(pid).state
    except OSError:
        return "has ended"
    return f"is {_STATES[state]}" if state in _STATES else "has ended"
