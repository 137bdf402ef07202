"""The flight recorder says, while a program hangs, what the groups of its process do.

Problem: a program that hangs says nothing, and the rank at fault is seldom the rank that one looks
at. A `Monitor` keeps a group's last operations in any case, and the message that is waited for, so
that the recorder adds nothing to an operation. A process that asks (``ringcoll dump``) makes a
thread of this process read them; until then the thread sleeps in the kernel. The thread is there as
long as a group of more than one rank is. A record is plain data, which
`ringcoll.runtime.watch.flight_report` merges over the ranks.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import signal
import sys
import threading
import uuid
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch.distributed as dist

from ringcoll.errors import ArgumentError, GroupBrokenError
from ringcoll.runtime.machine import DUMP, dump_folder, json_text, replace_file
from ringcoll.runtime.operation import Operation, Plan, Turn, Words
from ringcoll.runtime.process import thread_stacks, user_frame
from ringcoll.runtime.watch.diagnosis import Running
from ringcoll.runtime.watch.flight_report import Answering
from ringcoll.runtime.watch.monitor import Monitor
from ringcoll.schedules import Recv, RecvReduce, Send

_log = logging.getLogger("ringcoll")
_LAST = 256  # operations of each group
_COMMAND = 200  # characters


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
    """The record of this process, as JSON holds it: see `ringcoll.runtime.watch.flight_report`."""
    members = [member for reference in _watched if (member := reference()) is not None]
    frames, main = thread_stacks(), threading.main_thread()
    stacks = {
        "MainThread" if thread is main else thread.name: frames.get(thread.ident or 0, ())
        for thread in threading.enumerate()
    }
    return {
        "version": 1,
        "host": platform.node(),
        "pid": os.getpid(),
        "command": " ".join(sys.argv)[:_COMMAND],
        "threads": {
            name: f"{line.file}:{line.number} in {line.function}"
            for name, stack in stacks.items()
            if (line := user_frame(stack)) is not None
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
        raise ArgumentError("not set", DUMP, "a folder", "")
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
        **monitor.lives.by_host(),
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
