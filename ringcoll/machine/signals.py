"""Whether the program has functions for signals, which Python calls between two steps of the main thread.

A wait of C++, such as gloo's, is one step: a signal that comes meanwhile is heard when the wait is over. So who
hears signals waits in another thread, and the main thread waits for that thread as Python does. That makes
all-reduces of 4 bytes to 16 KiB over gloo take 1.4 to 1.6 times as long, so others do not pay for it.
"""

from __future__ import annotations

import signal
import threading
from typing import Any

_FAULTS = {"SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSEGV", "SIGKILL", "SIGSTOP"}
_HEARD = [int(each) for each in signal.Signals if each.name not in _FAULTS]
# `signal.getsignal` makes enums, and takes 40 times as long.
_kind_of: Any = signal._signal.getsignal  # type: ignore[attr-defined]


def hears_signals() -> bool:
    """Whether this is the main thread, and has a function for some signal; Python's own for Ctrl-C does not count."""
    if threading.current_thread() is not threading.main_thread():
        return False
    for number in _HEARD:  # 1.2 us
        kind = _kind_of(number)
        if kind.__class__ is not int and kind not in (None, signal.default_int_handler):
            return True
    return False
