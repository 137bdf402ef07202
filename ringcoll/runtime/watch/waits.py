"""Waits for the user's own messages: a rank that has waited long says for whom.

Problem: ``dist.recv`` waits in C++, where no Python runs, and its message is no operation that a
`Monitor` sees. So one thread of the process looks at all such waits, some times a second. A wait
itself costs an entry in a table.

The table has plain data only: a thread that let go of a group of torch as the last one would end
the process, if Python ends meanwhile.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from typing import Any, NamedTuple

from ringcoll.errors import GroupBrokenError
from ringcoll.runtime.process import line_in_words, line_of_thread, start_thread
from ringcoll.runtime.watch.notices import Names, say

_POLL_S = 0.2  # between two looks
_WORDS = {
    "send": "{}, while it sent to it with tag {}",
    "recv": "{}, while it received from it with tag {}",
    "recv_anysource": "{}, while it received from any with tag {}",
    "batch": "{}, in a batch of sends and receives",
}


class UserMessage(NamedTuple):
    """A message of the user's; ``group`` and ``number`` say which, ``peer`` may be unknown."""

    group: int
    number: int
    rank: int
    method: str
    peer: int | None
    tag: int
    names: Names

    def in_words(self, verb: str) -> str:
        """What the message's rank does: it ``verb`` another one."""
        names, words = self.names, _WORDS[self.method].format(self.names.of(self.peer), self.tag)
        return f"{names.of(self.rank)} {verb} {words}{f' in {names.group}' * bool(names.members)}"

    def record(self) -> dict[str, Any]:
        """The wait for the message, as `ringcoll.runtime.watch.flight_report` has an operation."""
        return {
            "number": self.number,
            "call": f"{self.method}(tag {self.tag})",
            "meets": False,
            "step": None,
            "peer": self.peer,
            "is_receive": self.method != "send",
            "chunks": [],
        }


waits: dict[UserMessage, tuple[int, float, float]] = {}
"""The thread that waits, since when, and after how many seconds that is said; the oldest first."""
_unwatched = threading.Lock()  # held from when the thread begins


def begin_wait(message: UserMessage, notice_s: float) -> None:
    """Note that this thread waits for a message, until the caller takes it out of `waits`."""
    waits[message] = threading.get_ident(), time.monotonic(), notice_s
    if _unwatched.acquire(blocking=False):
        with suppress(GroupBrokenError, RuntimeError):  # the program ends, or has no threads
            start_thread(_watch, "ringcoll-waits")


def _watch() -> None:
    said: set[UserMessage] = set()
    while True:
        time.sleep(_POLL_S)
        said &= waits.keys()
        for message, (thread, since, notice_s) in waits.copy().items():
            if message not in said and time.monotonic() - since > notice_s:
                said.add(message)
                site = line_in_words(*line_of_thread(thread))
                say(
                    f"{message.in_words(f'has waited {notice_s:g} s for')}"
                    f"{f' ({site})' * bool(site)}; `ringcoll dump {os.getpid()}` shows all ranks"
                )


def _in_child() -> None:
    global _unwatched  # noqa: PLW0603  # the process has a single one
    waits.clear()
    _unwatched = threading.Lock()


os.register_at_fork(after_in_child=_in_child)
