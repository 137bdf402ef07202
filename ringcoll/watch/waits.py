"""Waits for the user's own messages: a rank that has waited long says for whom.

Problem: ``dist.recv`` waits in C++, where no Python runs, and its message is no operation that a
`Monitor` sees. So one thread of the process looks at all such waits. It sleeps while nobody waits,
and a wait costs an entry in a table.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from typing import Protocol

from ringcoll.errors import GroupBrokenError
from ringcoll.machine import in_words, line_of_thread, started
from ringcoll.watch.notices import say

_POLL_S = 0.1  # between two looks while somebody waits


class Awaited(Protocol):
    """A message that a thread waits for."""

    @property
    def notice_s(self) -> float:
        """Seconds after which the rank says that it waits."""

    def has_waited(self, seconds: float) -> str:
        """Say in words which rank has waited so long, and for whom."""


_waits: dict[Awaited, tuple[int, float]] = {}  # the thread, and since when; the oldest first
_somebody = threading.Event()
_thread: threading.Thread | None = None


def begin_wait(message: Awaited) -> None:
    """Note that this thread waits for a message, until `end_wait`."""
    global _thread  # noqa: PLW0603  # the process has a single one
    _waits[message] = threading.get_ident(), time.monotonic()
    if not _somebody.is_set():
        _somebody.set()
        if _thread is None:
            with suppress(GroupBrokenError, RuntimeError):  # the program ends, or has no threads
                _thread = started(_watch, "ringcoll-waits")


def end_wait(message: Awaited) -> None:
    """Note that the wait is over."""
    _waits.pop(message, None)


def awaited() -> list[Awaited]:
    """All messages that threads of this process wait for, those that have waited longest first."""
    return [*_waits.copy()]


def _watch() -> None:
    said: set[Awaited] = set()
    while True:
        _somebody.wait()
        time.sleep(_POLL_S)
        said = _look(said)


def _look(said: set[Awaited]) -> set[Awaited]:
    """Say which waits are long, except for those that were said; return those that were."""
    waits, now = _waits.copy(), time.monotonic()
    if not waits:
        _somebody.clear()
        if _waits:  # somebody has begun meanwhile, and seen the event still set
            _somebody.set()
    for message, (thread, since) in waits.items():
        if message not in said and now - since > message.notice_s:
            site = in_words(*line_of_thread(thread))
            said.add(message)
            say(
                f"{message.has_waited(message.notice_s)}{f' ({site})' * bool(site)}; "
                f"`ringcoll dump {os.getpid()}` shows all ranks"
            )
    return said & waits.keys()


def _in_child() -> None:
    global _somebody, _thread  # as above
    _waits.clear()
    _somebody, _thread = threading.Event(), None


os.register_at_fork(after_in_child=_in_child)
