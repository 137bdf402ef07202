"""The queue of a group's operations: they run one at a time, in the order of their calls.

`turn` is held while a call gets its place, `serving` by the thread that runs operations. A call
with nothing before it runs in the caller's thread: a blocking one to its end, an asynchronous one for a moment, if
the transport can wait for so long. Other operations, and what is left, wait in the queue. A
thread of the queue's own serves it; so does whoever waits for a work, as handing over
between threads costs more than a short operation.

A thread that has run an operation with callbacks leaves the queue to another thread, runs the
callbacks, and ends. So a callback may wait for other operations of the group. Each operation in the
queue has a token; who takes a token runs an operation, unless others have run all, so that none is left.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from ringcoll.errors import FORKED, GroupBrokenError
from ringcoll.group.work import Work
from ringcoll.machine import started, untraced

Item = TypeVar("Item")

_MOMENT_S = 0.2  # for a thread that has completed a work, and is about to give the turn back


class Queue(Generic[Item]):
    """Operations that wait for their turn.

    ``run`` runs an operation and completes its work; it returns the work if that has callbacks.
    """

    def __init__(self, name: str, run: Callable[[Item], Work | None]) -> None:
        self.turn = threading.Lock()
        self.serving = threading.Lock()
        self.items: deque[Item] = deque()
        self.threads: list[threading.Thread] = []
        self.num_put = 0  # only a thread that holds `turn` changes it
        self.num_done = 0  # only a thread that holds `serving`, before a work is complete
        self._name, self._run = name, run
        self._pid = os.getpid()
        self._tokens: queue.SimpleQueue[Work | bool] = queue.SimpleQueue()  # False ends the threads
        self._counting = threading.Lock()
        self._available = 0  # threads that serve, or wait to
        self._ends = False

    def put(self, item: Item) -> None:
        """Append an operation; the caller holds `turn`."""
        self.num_put += 1
        self.items.append(item)
        self._tokens.put(True)
        self._keep_available()

    def put_back(self, item: Item) -> None:
        """Put an operation that has begun before all others; the caller holds `serving`."""
        self.items.appendleft(item)
        self._tokens.put(True)
        self._keep_available()

    def serve_alone(self) -> None:
        """Run what is queued in this thread, where the program ends and starts no other thread."""
        while not self._available and self.items:
            work = self._drain()
            if work is not None:
                work.settle()

    @untraced  # the thread that waits may be in a compiled region
    def help(self, work: Work) -> None:
        """Serve the queue in this thread until a work is complete, unless another thread does.

        Raises
        ------
        GroupBrokenError
            The process was forked off: its parent has the operations, and their threads.
        """
        if os.getpid() != self._pid:
            raise GroupBrokenError(FORKED)
        while self.items and not work.done and self.serving.acquire(blocking=False):
            try:
                while self.items and not work.done:
                    with_callbacks = self._run(self.items.popleft())
                    if with_callbacks is not None:
                        self._tokens.put(with_callbacks)
                        self._keep_available()
            finally:
                self.serving.release()

    def close(self, limit_s: float, running_s: float | None = None) -> bool:
        """End the threads when nothing waits any more; return whether all operations are over.

        ``running_s`` is the time limit for an operation that another thread waits for; by default the same.
        """
        if not self._ends:
            self._ends = True
            self._tokens.put(False)
        deadline, own = time.monotonic() + limit_s, threading.current_thread()
        # A thread that goes to callbacks starts another: no list of threads is the last one.
        while others := [each for each in self.threads if each.is_alive() and each is not own]:
            others[0].join(max(0.0, deadline - time.monotonic()))
            if others[0].is_alive():
                break
        # A thread of the user's may run an operation: Python's end must not meet it in C++.
        if own not in self.threads:
            left_s = deadline - time.monotonic() if running_s is None else running_s
            if not self.serving.acquire(timeout=max(_MOMENT_S, left_s)):
                return False
            self.serving.release()
        return self.num_put == self.num_done

    def _keep_available(self) -> None:
        """Make sure that a thread is left to serve."""
        if self._available:
            return
        with self._counting:
            if not self._available:
                self._available += 1
                try:
                    thread = started(self._serve, self._name)
                except BaseException as error:
                    self._available -= 1
                    if isinstance(error, GroupBrokenError):  # the program ends: see `serve_alone`
                        return
                    raise
                self.threads = [*filter(threading.Thread.is_alive, self.threads), thread]

    def _serve(self) -> None:
        work: Work | None = None
        while work is None:
            token = self._tokens.get()
            if token is False:
                self._tokens.put(False)  # for the other threads
                if self._tokens.qsize() == 1:
                    break
            else:
                work = token if isinstance(token, Work) else self._drain()
        with self._counting:
            self._available -= 1
        if work is not None:
            self._keep_available()
            work.settle()

    def _drain(self) -> Work | None:
        """Run what is queued, up to an operation with callbacks."""
        with self.serving:
            while self.items:
                work = self._run(self.items.popleft())
                if work is not None:
                    return work
        return None
