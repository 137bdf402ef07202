"""The flight recorder says, while a program hangs, what the groups of its process do.

Problem: a program that hangs says nothing, and the rank at fault is seldom the rank that one looks
at. All that there is to know is kept in any case: a `Monitor` has a group's last operations, and
the message that is waited for. So nothing is added to an operation. A process that asks
(``ringcoll dump``) makes a thread of this process read what is there; until then the thread sleeps
in the kernel. The thread is there as long as a group of more than one rank is. A record is plain
data, which `ringcoll.watch.flight_report` merges over the ranks.

A process answers the processes of its user on a Unix socket, on Linux only. The socket has a name
without a file, which ends with the process. The name holds the process's number and its name space
of process ids, as containers may share a network. A process that asks sends nothing, and the answer
is one text. The kernel tells both ends which user the other end is, so that neither believes a
socket or a process of another user.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import re
import signal
import socket
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from ringcoll.errors import ArgumentError, GroupBrokenError
from ringcoll.machine import (
    DUMP,
    dump_folder,
    json_text,
    process_state,
    replace_file,
    stacks,
    started,
    users,
)
from ringcoll.operation import Operation, Plan, Turn, Words
from ringcoll.schedule import Recv, RecvReduce, Send
from ringcoll.watch.monitor import Monitor
from ringcoll.watch.progress import Running

_log = logging.getLogger("ringcoll")
FOREIGN = "belongs to another user"
"""Why `ask` does not believe a process."""

_LAST = 256  # operations of each group
_COMMAND = 200  # characters
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


class _Member(Protocol):
    def snapshot(self) -> dict[str, Any]:
        """The state of a rank of a group, as plain data."""


_watched: tuple[weakref.ref[_Member], ...] = ()  # replaced as a whole, so read without the lock
_answering: Answering | None = None
_changing = threading.RLock()  # a group may be collected, and closed, in the thread that holds it


def token(store: dist.Store) -> str:
    """A text that all ranks of a group get, and no other group has; empty if the store is gone."""
    with contextlib.suppress(RuntimeError):
        return store.compare_set("token", "", uuid.uuid4().hex).decode(errors="replace")
    return ""


def watch(member: _Member) -> None:
    """Tell of a group from now on."""
    global _answering, _watched  # noqa: PLW0603  # the process has a single one
    with _changing:
        _watched = (*_watched, weakref.ref(member))
        if _answering is None:
            try:
                _answering = Answering(lambda: json.dumps(record()))
            except (OSError, GroupBrokenError) as error:
                _log.debug("`ringcoll dump` cannot ask this process: %s", error)


def forget(member: _Member) -> None:
    """Tell of a group no more; with the last group the thread ends."""
    global _answering, _watched  # noqa: PLW0603  # as above
    with _changing:
        _watched = tuple(each for each in _watched if each() not in (None, member))
        if not _watched and _answering is not None:
            _answering.end()
            _answering = None


def _in_child() -> None:
    global _answering, _changing, _watched  # noqa: PLW0603  # as above
    _changing, _watched = threading.RLock(), ()
    if _answering is not None:
        _answering.leave_to_parent()
        _answering = None


os.register_at_fork(after_in_child=_in_child)


def record() -> dict[str, Any]:
    """The record of this process, as JSON holds it: see `ringcoll.watch.flight_report`."""
    members = [member for reference in _watched if (member := reference()) is not None]
    frames, main = stacks(), threading.main_thread()
    lines = {
        "MainThread" if thread is main else thread.name: users(frames.get(thread.ident or 0, ()))
        for thread in threading.enumerate()
    }
    return {
        "version": 1,
        "host": platform.node(),
        "pid": os.getpid(),
        "command": " ".join(sys.argv)[:_COMMAND],
        "threads": {
            name: f"{line.file}:{line.number} in {line.function}"
            for name, line in lines.items()
            if line is not None
        },
        "groups": [member.snapshot() for member in members],
    }


def save() -> None:
    """Write the record to the folder of ``RINGCOLL_DUMP``, if there is one."""
    folder = dump_folder()
    if folder is None:
        return
    try:
        path = folder / f"{platform.node()}-{os.getpid()}.json"
        replace_file(path, json_text(record()), 0o600)
    except OSError as error:
        _log.warning("the record of this process cannot be written: %s", error)


def dump_on_signal(number: signal.Signals) -> None:
    """Write the record to the folder of ``RINGCOLL_DUMP`` on a signal; called in the main thread.

    Python calls a signal's function in the main thread, which must not be in a call of C++, such as
    a wait in gloo. ``ringcoll dump`` needs no signal.

    Raises
    ------
    ArgumentError
        The variable names no folder.
    """
    if dump_folder() is None:
        raise ArgumentError("not set", argument=DUMP, expected="a folder", got="")
    signal.signal(number, lambda *_: save())


def operations(monitor: Monitor, queued: Sequence[tuple[int, Operation | Turn]]) -> dict[str, Any]:
    """The operations of a rank: those that ran last, the one that runs, and those that wait."""
    progress = monitor.progress
    running = progress.failed or progress.running()
    return {
        "operations": [
            _call(index, operation, complete=running is None or index < running.number)
            for index, operation in progress.recent(_LAST)
        ],
        "running": running
        and _running(running, monitor.rank, progress.meets or running.is_barrier),
        "queued": [_call(index, operation) for index, operation in queued[:_LAST]],
        "pids": {str(rank): process.pid for rank, process in monitor.lives.processes.items()},
        "elsewhere": sorted(monitor.lives.elsewhere),
    }


def _call(
    number: int, operation: Operation | Turn | Words, *, complete: bool = False
) -> dict[str, Any]:
    call = operation.description or operation.name
    return {"number": number, "call": call, "complete": complete}


def _running(running: Running, rank: int, meets: bool) -> dict[str, Any]:
    wait = running.wait
    return {
        "number": running.number,
        "call": running.operation.description or running.operation.name,
        "meets": meets,
        "step": None if wait is None else wait.step,
        "peer": running.peer,
        "is_receive": wait is not None and wait.is_receive,
        "chunks": _chunks(running, rank),
    }


def _chunks(running: Running, rank: int) -> list[int]:
    """The chunks of the message that is waited for."""
    plan, wait = running.operation.plan, running.wait
    if wait is None or not isinstance(plan, Plan):
        return []
    kinds = (Recv, RecvReduce) if wait.is_receive else (Send,)
    messages = [
        operation
        for operation in [*plan.schedule.steps(rank)][wait.step]
        if isinstance(operation, kinds) and operation.peer == wait.peer
    ]
    return sorted({ref.chunk for each in messages for ref in each.writes or each.reads})


def _prefix() -> str:
    """The beginning of the names of all processes that see each other's numbers."""
    return f"ringcoll-{Path('/proc/self/ns/pid').stat().st_ino}-"


def _other_end(connection: socket.socket) -> tuple[int, int]:
    """Process and user of the other end of a connection."""
    numbers = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS)
    pid, user, _ = memoryview(numbers).cast("i")
    return pid, user


class Answering:
    """A thread that answers with the text that ``answer`` returns, until `end`.

    Raises ``OSError`` if the system has no such sockets, or another user has taken the name;
    `GroupBrokenError` if the program ends.
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
        pids = re.findall(rf" @{re.escape(_prefix())}(\d{{1,9}})$", names, re.MULTILINE)
    except OSError:
        return []
    return sorted(set(map(int, pids)))


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
            answer = bytearray()
            try:
                while True:
                    connection.settimeout(max(deadline - time.monotonic(), 0.001))
                    if not (piece := connection.recv(1 << 16)):
                        break
                    answer += piece
                answers[pid] = answer.decode(errors="replace")
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
