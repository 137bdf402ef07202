"""Threads of the process: how they start, end, and hear signals.

*The end.* Python ends in this order: it joins threads, calls the functions of `atexit`, the last
one first, stops all other threads, and deletes modules. A daemon thread that comes back from C++
while Python stops threads ends the process with "terminate called without an active exception", so
groups have to be closed before. But a function of `atexit`, or a finalizer, may still use a group,
whenever it was registered. No thread starts and no group is made then. A process that was forked
off has the groups of its parent without their threads. torch would wait for these threads where it
deletes such a group, and crash or wait without end.

*Signals.* Python calls functions for signals between two steps of the main thread. A wait of C++,
such as gloo's, is one step: a signal that comes meanwhile is heard when the wait is over. And what
the main thread does goes on only when the function has returned, which may wait for an operation of
the same group. So in a program that hears signals another thread waits, and the main thread waits
for that thread as Python does (`ringcoll.runtime.group.queue`). That takes time, so other programs
do not pay for it.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from ringcoll.errors import GroupBrokenError

_NO_THREADS = "Python starts no thread any more"
_last: list[Callable[[], object]] = []
_threading: Any = threading
_join_threads = _threading._shutdown
_groups: weakref.WeakSet[Any] = weakref.WeakSet()


def at_end(function: Callable[[], object]) -> None:
    """Call a function when those of `atexit` are over; of several, the last one first."""
    _last.append(function)


@atexit.register
def _run_last() -> None:
    with ExitStack() as stack:  # all are called, whatever some of them raise
        for function in _last:
            stack.callback(function)
        _last.clear()


def _end() -> None:
    """Join threads, as Python does first at its end; then call the functions of `at_end` as well.

    `atexit` has no way to register a function that comes after those that are registered already.
    """
    _join_threads()
    # Python calls it without a frame. Processes of `multiprocessing` call it, too, and may have
    # functions of `atexit` from their parents, which they do not run.
    caller = sys._getframe().f_back
    if caller is None:
        atexit.unregister(_run_last)  # it is for an end in which the line above was interrupted
        atexit._run_exitfuncs()
    if caller is None or caller.f_code.co_name == "_bootstrap":
        _run_last()


_threading._shutdown = _end


def keep_in_forks(group: Any) -> Any:
    """A process group of torch that has threads; processes that are forked off never delete it."""
    _groups.add(group)
    return group


def _keep_groups() -> None:
    for group in tuple(_groups):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


os.register_at_fork(after_in_child=_keep_groups)


def check_not_ending() -> None:
    """Raise `GroupBrokenError` if threads have been stopped, so that no group can be made."""
    if sys.is_finalizing():
        raise GroupBrokenError(f"the program ends: {_NO_THREADS}, and no group can be made")


def start_thread(target: Callable[..., object], name: str, *arguments: object) -> threading.Thread:
    """Start a daemon thread; `GroupBrokenError` if the program ends.

    Python 3.11 would wait without end for a thread that starts when the others have been stopped;
    from 3.12 on, none starts in the functions of `atexit` either.
    """
    check_not_ending()
    thread = threading.Thread(target=target, args=arguments, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        if "shutdown" not in str(error):  # the system has no more threads
            raise
        raise GroupBrokenError(f"the program ends: {_NO_THREADS}") from error
    return thread


# --- signals ------------------------------------------------------------------------------

_NOT_FOR_FUNCTIONS = {"SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSEGV", "SIGKILL", "SIGSTOP"}
_HEARD = [int(each) for each in signal.Signals if each.name not in _NOT_FOR_FUNCTIONS]
# `signal.getsignal` makes enums, and takes 40 times as long.
_kind_of: Any = signal._signal.getsignal  # type: ignore[attr-defined]


def hears_signals() -> bool:
    """Whether this is the main thread and has a function for a signal, not Python's for Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        return False
    for number in _HEARD:  # 1.2 us
        kind = _kind_of(number)
        if kind.__class__ is not int and kind not in (None, signal.default_int_handler):
            return True
    return False
