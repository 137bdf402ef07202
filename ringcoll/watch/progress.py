"""The record of what a rank does: the operations that it has begun, and what it waits for.

The thread that runs operations writes the record, and asks for nothing; the `Monitor` and the
flight recorder read it from other threads. So an operation costs a few assignments only.

An operation of a transport whose `wait` orders a stream is over for the thread that runs it long
before its messages have come. It stays here, `Issued`, until the stream has come to its end.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from ringcoll.machine import in_words, line_of_thread, user_line
from ringcoll.operation import Operation, Turn, Wait, Words
from ringcoll.transport import Lane, beside

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
