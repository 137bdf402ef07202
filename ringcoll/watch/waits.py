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
from typing import Any

from ringcoll.errors import GroupBrokenError
from ringcoll.machine import in_words, line_of_thread, started
from ringcoll.watch.notices import say

_POLL_S = 0.1  # between two looks while somebody waits

waits: dict[Any, tuple[int, float]] = {}
"""Works that are waited for: by which thread, and since when. The oldest come first.

A work has ``notice_s``, the time after which its rank says that it waits, and ``has_waited(s)``,
the words for that.
"""
_somebody = threading.Event()
_thread: threading.Thread | None = None


def begin_wait(work: Any) -> None:
    """Note that this thread waits for a work, until the caller takes it out of `waits`."""
    global _thread  # noqa: PLW0603  # the process has a single one
    waits[work] = threading.get_ident(), time.monotonic()
    if not _somebody.is_set():
        _somebody.set()
        if _thread is None:
            with suppress(GroupBrokenError, RuntimeError):  # the program ends, or has no threads
                _thread = started(_watch, "ringcoll-waits")


def _watch() -> None:
    said: set[Any] = set()
    while True:
        _somebody.wait()
        time.sleep(_POLL_S)
        said = _look(said)


def _look(said: set[Any]) -> set[Any]:
    """Say which waits are long, except for those that were said; return those that were."""
    now_waiting, now = waits.copy(), time.monotonic()
    if not now_waiting:
        _somebody.clear()
        if waits:  # somebody has begun meanwhile, and seen the event still set
            _somebody.set()
    for work, (thread, since) in now_waiting.items():
        if work not in said and now - since > work.notice_s:
            site = in_words(*line_of_thread(thread))
            said.add(work)
            say(
                f"{work.has_waited(work.notice_s)}{f' ({site})' * bool(site)}; "
                f"`ringcoll dump {os.getpid()}` shows all ranks"
            )
    return said & now_waiting.keys()


def _in_child() -> None:
    global _somebody, _thread  # as above
    waits.clear()
    _somebody, _thread = threading.Event(), None


os.register_at_fork(after_in_child=_in_child)
