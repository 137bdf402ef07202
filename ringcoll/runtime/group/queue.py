"""The queue of a group's operations: they run one at a time, in the order of their calls.

Operations share working memory (`Workspace`). An operation in the queue has a `Work`.

A thread holds `turn` while a call gets its place, and `serving` while it runs operations. A call
with nothing before it runs in the caller's thread: a blocking call to its end, an asynchronous call
for a moment, if the transport can wait for so long. Other operations wait in the queue, as does the
rest of an asynchronous call. A thread of the queue serves it; so does a thread that waits for a
work, as handing over between threads costs more than a short operation.

*Signals.* Python calls a function for a signal in the main thread, between two steps of whatever
that thread does. The function may raise an error, or call an operation of the same group. So an
operation stays in the queue until its work is complete, and the main thread of a program that hears
signals serves no queue: an operation cannot go on below the function that has interrupted it. The
locks are reentrant: a lock knows whether this thread has it, however the thread was interrupted.

A thread that has run an operation with callbacks leaves the queue to another thread, runs the
callbacks, and ends. So a callback may wait for other operations of the group. Each operation in the
queue has a token; a thread that takes a token runs an operation, if one is left.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from types import FrameType
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ringcoll.errors import (
    FORKED,
    NESTED,
    CollectiveTimeoutError,
    GroupBrokenError,
    NestedCallError,
)
from ringcoll.runtime.machine import seconds_of
from ringcoll.runtime.process import hears_signals, start_thread, untraced
from ringcoll.runtime.transport import Mark, future

_MOMENT_S = 0.2  # for a thread that has completed a work, and is about to give the turn back


Item = TypeVar("Item", bound=Any)  # an operation, with its `work`


class Queue(Generic[Item]):
    """Operations that wait for their turn; ``run`` runs an operation and completes its work.

    A caller that holds `turn` appends to `items`, and then calls `call_thread`.
    """

    def __init__(self, name: str, run: Callable[[Item], object]) -> None:
        self.turn = threading.RLock()
        self.serving: Any = threading.RLock()  # its `_is_owned` has no type
        self.items: deque[Item] = deque()
        self.threads: list[threading.Thread] = []
        self._name, self._run = name, run
        self._pid = os.getpid()
        self._tokens: queue.SimpleQueue[Work | bool] = queue.SimpleQueue()  # False ends the threads
        self._server: threading.Thread | None = None  # which serves, or waits to
        self._choosing = threading.Lock()
        self._ends = False

    def call_thread(self, callbacks_of: Work | None = None) -> None:
        """Let a thread of the queue serve, or run the callbacks of a work."""
        self._tokens.put(callbacks_of or True)
        self._keep_available()

    def serve_alone(self) -> None:
        """Run what is queued in this thread, where the program ends and starts no other thread."""
        while self._server is None and self.items:
            work = self._drain()
            if work is not None:
                work.settle()

    @untraced  # the thread that waits may be in a compiled region
    def help(self, work: Work) -> None:
        """Serve the queue in this thread until a work is complete, unless another thread does.

        A thread that is within an operation gets `NestedCallError`: the operation would have to be
        over first.
        """
        if os.getpid() != self._pid:  # the parent has the operations, and their threads
            raise GroupBrokenError(FORKED)
        if self.is_within(sys._getframe()):
            raise NestedCallError(f"a wait {NESTED}")
        if not hears_signals():
            self.serve(work)

    def serve(self, work: Work) -> None:
        """Run operations in this thread until a work is complete, unless another thread does."""
        serving = self.serving
        while self.items and not work.done:
            try:
                if not serving.acquire(blocking=False):
                    return
                while self.items and not work.done:
                    if (complete := self._run_first()).has_callbacks:
                        self.call_thread(complete)
                    self.items.popleft()
            finally:
                if serving._is_owned():
                    serving.release()

    def is_within(self, below: FrameType) -> bool:
        """Whether this thread is within an operation of the queue, below a frame.

        Lets go of `serving` if an interrupt has left it taken, between two steps of Python. The
        functions that take it have it as a variable.
        """
        frame = below.f_back if self.serving._is_owned() else None
        while frame is not None:
            is_of_queue = frame.f_globals.get("__package__") == __package__
            if is_of_queue and frame.f_locals.get("serving") is self.serving:
                return True
            frame = frame.f_back
        while self.serving._is_owned():
            self.serving.release()
        return False

    def _run_first(self) -> Work:
        """Run the first operation, if an interrupt has not come between its end and this call."""
        first = self.items[0]
        work: Work = first.work
        if not work.done:
            self._run(first)
        return work

    def close(self, limit_s: float, running_s: float | None = None) -> bool:
        """End the threads when nothing waits any more; return whether all operations are over.

        ``running_s`` is the time limit for an operation that another thread waits for; by default
        the same.
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
            is_within_operation = self.serving._is_owned()
            if is_within_operation or not self.serving.acquire(timeout=max(_MOMENT_S, left_s)):
                return False
            self.serving.release()
        return all(item.work.done for item in tuple(self.items))

    def _keep_available(self) -> None:
        """Make sure that a thread is left to serve; of several that start at once, one stays."""
        if self._server is None:
            with suppress(GroupBrokenError):  # the program ends: see `serve_alone`
                start_thread(self._serve, self._name)

    def _serve(self) -> None:
        with self._choosing:
            if self._server is not None:
                return
            self._server = threading.current_thread()
        for thread in (*self.threads,):
            if not thread.is_alive():
                self.threads.remove(thread)
        self.threads.append(self._server)
        work: Work | None = None
        while work is None:
            token = self._tokens.get()
            if token is False:
                self._tokens.put(False)  # for the other threads
                if self._tokens.qsize() == 1:
                    break
            else:
                work = token if isinstance(token, Work) else self._drain()
        self._server = None
        if work is not None:
            self._keep_available()
            work.settle()

    def _drain(self) -> Work | None:
        """Run what is queued, up to an operation with callbacks."""
        with (serving := self.serving):  # noqa: F841  # see `is_within`
            while self.items:
                work = self._run_first()
                self.items.popleft()
                if work.has_callbacks:
                    return work
        return None


class Work(dist.Work):
    """An operation on its way, as torch's own collectives return it.

    `wait` raises the operation's error, in the thread that waits. On CUDA tensors the operation is
    over for the host when all is enqueued; `wait` then makes the current stream wait for the rest.

    ``results`` are the tensors that will hold the result. A thread that is about to wait calls
    ``help_``, which may run the operation in that thread.

    Examples
    --------
    >>> import torch, ringcoll
    >>> def rank_main(group):
    ...     tensor = torch.ones(1)
    ...     work = ringcoll.all_reduce(tensor, group=group, async_op=True)
    ...     work.wait()
    ...     return tensor.item()
    >>> ringcoll.run_threads(rank_main, 2)
    [2.0, 2.0]
    """

    def __init__(
        self,
        description: str,
        results: Sequence[Tensor],
        help_: Callable[[Work], None] | None = None,
    ) -> None:
        super().__init__()
        self._description, self._results, self._help = description, list(results), help_
        self.done = False
        self._gate = threading.Lock()  # held until the operation is over
        self._gate.acquire()
        self._error: BaseException | None = None
        self._end: Mark | None = None
        self._changing = threading.RLock()
        self._base: torch.futures.Future[None] | None = None
        self._future: torch.futures.Future[list[Tensor]] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the operation.

        Parameters
        ----------
        timeout
            Time limit of this wait, beside the operation's time limit; zero, as in torch's
            C++ code, is no limit.

        Raises
        ------
        CollectiveTimeoutError
            The limit was exceeded; the operation goes on.
        GroupBrokenError
            The process was forked off since the call.
        RingcollError
            The operation failed.
        """
        if not self.done:
            help_ = self._help
            if help_ is not None and not timeout:
                help_(self)
            if not self.ends_within(seconds_of(timeout) if timeout else -1):
                raise CollectiveTimeoutError(f"{self._description} is not complete after {timeout}")
        if self._error is not None:
            raise self._error
        if self._end is not None:
            self._end.join()
        return True

    def ends_within(self, limit_s: float) -> bool:
        """Whether the operation is over within so many seconds; -1 is no limit."""
        try:
            self._gate.acquire(timeout=limit_s)
        finally:
            if self.done:  # also after an interrupt: others may wait
                with suppress(RuntimeError):  # another thread has just let go of it
                    self._gate.release()
        return self.done

    @property
    def has_callbacks(self) -> bool:
        """Whether `settle` has to follow the end of the operation."""
        return self._base is not None and not self._base.done()

    def is_completed(self) -> bool:
        """Whether the operation is over, with or without an error."""
        return self.done and (self._end is None or self._end.is_over())

    def is_success(self) -> bool:
        """Whether the operation is over, without an error."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """The operation's error, or ``None``."""
        return self._error if self._error is not None or self._end is None else self._end.error

    def result(self) -> list[Tensor]:
        """The tensors that hold the result when the operation is complete."""
        return self._results

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """A future of `result`; its callbacks never hold up other operations."""
        with self._changing:
            if self._future is None:
                self._base = future(self._results)
                # `set_exception` would make C++ code, such as that of DistributedDataParallel, take
                # the exception for the value; a callback that raises makes a future that has failed
                # for C++ too.
                self._future = self._base.then(self._outcome)
                if self.done:
                    self._base.set_result(None)
            return self._future

    def complete(self, error: BaseException | None, end: Mark | None = None) -> None:
        """End the operation, and wake all threads that wait.

        ``end`` is the point in the operation's stream after which its work is done.
        """
        with self._changing:
            self._error, self._end, self.done = error, end, True
            self._help = None
            self._gate.release()

    def settle(self) -> None:
        """Complete the future; the user's callbacks run here."""
        if self._base is not None and not self._base.done():
            self._base.set_result(None)

    def _outcome(self, base: object) -> list[Tensor]:
        if self._error is not None:
            raise self._error
        if self._end is not None:
            # The future's own stream is current here, and what the future holds is in
            # order from here on (``ivalue_inl.h``, ``Future::invokeCallback``).
            self._end.join()
        return self._results


class Workspace:
    """Working memory: one tensor for each device, which grows when more is needed.

    ``on_growth`` is called before memory is replaced, and has to forget all views of the memory.
    """

    def __init__(self, on_growth: Callable[[], None]) -> None:
        self.on_growth = on_growth
        self.tensors: dict[torch.device, Tensor] = {}

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """At least so many elements of working memory; called outside of inference mode."""
        memory = self.tensors.get(device)
        if memory is None or memory.numel() < numel * dtype.itemsize:
            self.clear()
            # A multiple of the size of every dtype, so that each of them can view the memory.
            nbytes = -(-numel * dtype.itemsize // 64) * 64
            memory = self.tensors[device] = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return memory.view(dtype)

    def clear(self) -> None:
        """Let go of all memory."""
        self.tensors.clear()
        self.on_growth()
