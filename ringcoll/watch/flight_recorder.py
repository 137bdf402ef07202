"""The flight recorder says, while a program hangs, what the groups of its process do.

Problem: a program that hangs says nothing, and the rank at fault is seldom the rank that one looks
at. All that there is to know is kept in any case: a `Monitor` has a group's last operations, and
the message that is waited for. So nothing is added to an operation. A process that asks
(``ringcoll dump``) makes a thread of this process read what is there; until then the thread sleeps
in the kernel. The thread is there as long as a group of more than one rank is. A record is plain
data, which `ringcoll.watch.flight_report` merges over the ranks.

The record of what a rank does: the operations that it has begun, and what it waits for.

The thread that runs operations writes the record, and asks for nothing; the `Monitor` and the
flight recorder read it from other threads. So an operation costs a few assignments only.

An operation of a transport whose `wait` orders a stream is over for the thread that runs it long
before its messages have come. It stays here, `Issued`, until the stream has come to its end.
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
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist

from ringcoll.errors import ArgumentError, GroupBrokenError
from ringcoll.machine import (
    DUMP,
    dump_folder,
    in_words,
    json_text,
    line_of_thread,
    replace_file,
    stacks,
    user_line,
    users,
)
from ringcoll.operation import Operation, Plan, Turn, Wait, Words
from ringcoll.schedule import Recv, RecvReduce, Send
from ringcoll.transport import Lane, beside
from ringcoll.watch.flight_report import Answering
from ringcoll.watch.monitor import Monitor

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


_REMEMBERED = 1024  # runs of operations that a rank compares with those that others tell
BARRIER = Turn("monitored_barrier", lambda: None)


class Running(NamedTuple):
    """An operation in execution, and the message that it waits for."""

    number: int
    operation: Operation | Turn
    wait: Wait | None

    @property
    def is_barrier(self) -> bool:
        """Whether it is no operation, but a monitored barrier."""
        return self.operation is BARRIER

    @property
    def peer(self) -> int | None:
        """The rank that is waited for."""
        return None if self.wait is None else self.wait.peer

    def where(self) -> str:
        """The call, and the step that it waits in, in words; calls are counted from 1 there."""
        call = self.operation.description or self.operation.name
        text = f"call {self.number + 1} of the group ({call})"
        return text if self.wait is None else f"{text}, step {self.wait.step}"


class Issued(NamedTuple):
    """An operation that is enqueued on a stream, and the messages that the stream waits for.

    ``waits`` are in order, each with a function that says whether the message is over.
    """

    number: int
    operation: Operation | Turn
    limit_s: float
    waits: Sequence[tuple[Wait, Callable[[], bool]]]
    lane: Lane

    def awaited(self) -> list[Wait]:
        """The messages of the earliest step that are not over; those of a step come together."""
        left = [wait for wait, is_over in self.waits if not is_over()]
        return [wait for wait in left if wait.step == left[0].step]


class Progress:
    """The operations of one rank of a group: the last, the one that runs, and those of streams.

    Attributes
    ----------
    current
        Number and operation of what the thread ``thread`` runs; ``None`` between operations.
    wait
        The message that it waits for.
    last
        The last operation that has begun.
    meets
        Whether the rank waits in the store, for all ranks.
    issued
        Operations that are enqueued on a stream; the monitor's thread takes away what is over.
    barrier
        The monitored barrier that the rank is in: number of calls before it, and its place.
    num_barriers
        Monitored barriers so far.
    failed
        What has broken the group.
    """

    def __init__(self) -> None:
        self.current: tuple[int, Operation | Turn] | None = None
        self.wait: Wait | None = None
        self.thread = 0
        self.meets = False
        self.issued: deque[Issued] = deque()
        self.barrier: tuple[int, str] | None = None
        self.num_barriers = 0
        self.failed: Running | None = None
        self.last: tuple[int, Operation | Turn | None] = (-1, None)
        # First ones of runs of the same operation: a root may be thousands of broadcasts ahead of
        # ranks that do something else. Only words: an operation has memory.
        self._runs: deque[tuple[int, Words | None]] = deque(maxlen=_REMEMBERED)
        self._awaited: tuple[int, Wait | None] = (-1, None)  # number of the first issued; message
        self._taking = threading.Lock()  # operations away from `issued`
        # Calls that are not run where they are made: numbers from, to; file, line.
        self._sites: deque[tuple[int, int, str, int]] = deque(maxlen=_REMEMBERED)
        # The call that was looked for last, and its place.
        self._site: tuple[object, str] = (None, "")

    # --- the thread that runs operations ----------------------------------------------------

    # An operation begins with four assignments, where it is run: a call of a function takes longer.

    def begin_run(self, before: tuple[int, Operation | Turn | None]) -> None:
        """Note that the last operation differs from that before it, or does not follow it."""
        number, operation = self.last
        if number != before[0] + 1:
            self._runs.append((before[0] + 1, None))  # numbers that were left out
        self._runs.append((number, None if operation is None else operation.words))

    def end(self) -> None:
        """Note that the operation is over."""
        self.current = self.wait = None

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """Note that this rank waits for all ranks in the block; after an error it still does."""
        self.meets = True
        yield
        self.meets = False

    def note_site(self, number: int, num_parts: int) -> None:
        """Note where the user makes a call that another thread may run."""
        self._sites.append((number, number + num_parts, *user_line(sys._getframe(1))))

    def enter_barrier(self, number: int) -> int:
        """Note that the rank enters a monitored barrier after so many calls; its own number."""
        self.barrier = number, in_words(*user_line(sys._getframe(1)))
        self.num_barriers += 1
        return self.num_barriers

    def forget(self) -> None:
        """Let go of all operations, which are bound to connections."""
        self.issued.clear()
        self._runs.clear()
        self.last, self.failed = (-1, None), None

    # --- who looks --------------------------------------------------------------------------

    def running(self) -> Running | None:
        """The operation that runs now, or that a stream has not finished."""
        first = self.first()
        if first is None:
            return self.on_host()
        number, wait = self._awaited
        return Running(first.number, first.operation, wait if number == first.number else None)

    def first(self) -> Issued | None:
        """The earliest operation that is enqueued on a stream."""
        with suppress(IndexError):
            return self.issued[0]
        return None

    def on_host(self) -> Running | None:
        """The operation that the thread of operations is at."""
        current, wait, barrier = self.current, self.wait, self.barrier
        if current is None:
            return None if barrier is None else Running(barrier[0], BARRIER, None)
        return Running(*current, wait if self.current is current else None)

    def awaits(self, first: Issued, wait: Wait | None) -> Running:
        """Note which message a stream waits for."""
        self._awaited = first.number, wait
        return Running(first.number, first.operation, wait)

    def take_away(self) -> None:
        """Take away the operations to whose end their streams have come."""
        while (first := self.first()) is not None:
            with beside(first.operation.device), self._taking:
                if first is not self.first():
                    return  # they are abandoned
                if not first.lane.is_over():
                    return
                self.issued.popleft()

    def abandon(self, error: BaseException) -> None:
        """Give an error to all whose operations a stream has not come to the end of."""
        with self._taking:
            while self.issued:
                self.issued.popleft().lane.fail(error)

    def recent(self, most: int) -> list[tuple[int, Words]]:
        """The last operations that have begun, in order, with their numbers."""
        end, operations = self.last[0] + 1, list[tuple[int, Words]]()
        for start, operation in reversed(tuple(self._runs)):
            first = max(start, end - most + len(operations))
            if operation is not None:
                operations += [(number, operation) for number in reversed(range(first, end))]
            end = start
            if len(operations) >= most:
                break
        return operations[::-1]

    def called(self, number: int) -> Words | None:
        """The operation of a number; ``None`` if it has not begun, or was too long ago."""
        if number > self.last[0]:
            return None
        runs = reversed(tuple(self._runs))
        return next((operation for start, operation in runs if start <= number), None)

    def site(self, number: int) -> str:
        """File and line of a call; empty if they are not known.

        To note them for each call would take time. So for a call that runs where it was made its
        thread is looked at, when something is wrong.
        """
        for first, end, file, line in reversed(tuple(self._sites)):
            if first <= number < end:
                return in_words(file, line)
            if end <= number:
                break
        current, barrier = self.current, self.barrier
        if current is None:
            return barrier[1] if barrier is not None and barrier[0] == number else ""
        if current[0] != number:
            return ""
        if self._site[0] is not current:
            is_own = self.thread == threading.get_ident()
            where = user_line(sys._getframe()) if is_own else line_of_thread(self.thread)
            if self.current is not current:  # the thread has gone on meanwhile
                return ""
            self._site = current, in_words(*where)
        return self._site[1]

    def place(self, number: int) -> str:
        """Where a call was made, in words with a space before them, as far as that is known."""
        if site := self.site(number):
            return f" at {site}"
        running = self.running()
        site = self.site(running.number) if running and running.number > number else ""
        return f" before {site}" if site else ""
