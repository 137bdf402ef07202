"""Calls that may never return, such as a question to a store whose host is stopped.

A thread makes such a call, and stays behind if it does not return.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from ringcoll.errors import GroupBrokenError
from ringcoll.runtime.machine import sockets
from ringcoll.runtime.process.threads import at_end, start_thread

Answer = TypeVar("Answer")

_GIVING_UP_S = 5.0  # for torch to give up: 0.6 to 3.1 s in 12 tries to connect within 1 s

CONNECTIONS: set[Future[Any]] = set()
"""Calls of C++ that connect to a store, which torch gives up after a while."""
MESSAGES: set[Future[Any]] = set()
"""Waits for messages in C++, which end with their connections."""


class NoAnswerError(TimeoutError):
    """A call did not return in time."""


class PendingCall(Future[Any]):
    """The result of a call that has begun, and the time at which it began."""

    def __init__(self) -> None:
        super().__init__()
        self.begun_s = time.monotonic()


def call_in_thread(
    function: Callable[[], Answer], pending: set[Any] | None = None
) -> Future[Answer]:
    """Call a function that may never return; ``pending`` holds the call until it returns."""
    call = PendingCall()
    try:
        start_thread(settle_call, "ringcoll-asks", function, call)
    except GroupBrokenError:  # the program ends
        settle_call(function, call)
    if pending is not None:
        pending.add(call)
        call.add_done_callback(pending.discard)
    return call


def settle_call(function: Callable[[], Answer], call: Future[Answer]) -> None:
    """Call a function, and keep its result or error in ``call``."""
    try:
        call.set_result(function())
    except BaseException as error:  # noqa: BLE001  # `Future.result` raises it
        call.set_exception(error)
        del function, call  # or the error, which refers to this frame, would keep both


def call_within(
    limit_s: float, function: Callable[[], Answer], pending: set[Any] | None = None
) -> Answer:
    """As `call_in_thread`; return the result. Raises `TimeoutError` after the limit."""
    call = call_in_thread(function, pending)
    try:
        wait([call], min(limit_s, threading.TIMEOUT_MAX))
        if not call.done():
            raise NoAnswerError(f"no answer within {limit_s:g} s")
        return call.result()
    finally:
        del call  # or its error, which refers to this frame, would keep it


def end_calls() -> None:
    """Wait until torch has given up: threads that come back from C++ at the end end the process."""
    for connection in sockets() if MESSAGES else ():  # nothing of the program comes after this
        with contextlib.suppress(OSError):
            connection.getpeername()  # gloo aborts the process if its listening socket is shut down
            connection.shutdown(socket.SHUT_RDWR)
    deadline = time.monotonic() + _GIVING_UP_S
    while (calls := (*CONNECTIONS, *MESSAGES)) and time.monotonic() < deadline:
        wait(calls, deadline - time.monotonic())


at_end(end_calls)
for _calls in (CONNECTIONS, MESSAGES):
    os.register_at_fork(after_in_child=_calls.clear)
