"""The end of the program: what comes last; no thread starts and no group is made then.

Python ends in this order: it joins threads, calls the functions of `atexit`, the last one first, stops all
other threads, and deletes modules. A daemon thread that comes back from C++ while Python stops threads ends
the process with "terminate called without an active exception", so groups have to be closed before. But a
function of `atexit`, or a finalizer, may still use a group, whenever it was registered.

A process that was forked off has the groups of its parent without their threads. torch would wait for these threads
where it deletes such a group, and crash or wait without end.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

from ringcoll.errors import GroupBrokenError

_NONE = "Python starts no thread any more"
_last: list[Callable[[], object]] = []
_threading: Any = threading
_join_threads = _threading._shutdown


def at_end(function: Callable[[], object]) -> None:
    """Call a function when those of `atexit` are over; of several, the last one first."""
    _last.append(function)


@atexit.register
def _run_last() -> None:
    with contextlib.ExitStack() as stack:  # all are called, whatever some of them raise
        for function in _last:
            stack.callback(function)
        _last.clear()


def _end() -> None:
    """Join threads, which is the first that Python does at its end; then do what follows, in order.

    `atexit` has no way to register a function that comes after those that are registered already.
    """
    _join_threads()
    # Python calls it without a frame. Processes of `multiprocessing` call it, too, and may
    # have functions of `atexit` from their parents, which they do not run.
    if sys._getframe().f_back is None:
        atexit.unregister(_run_last)  # it is for an end in which the line above was interrupted
        atexit._run_exitfuncs()
        _run_last()


_threading._shutdown = _end


_with_threads: weakref.WeakSet[Any] = weakref.WeakSet()


def with_threads(group: Any) -> Any:
    """A process group of torch with threads of its own, which a process that is forked off never deletes."""
    _with_threads.add(group)
    return group


def _keep_for_ever() -> None:
    for group in tuple(_with_threads):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


os.register_at_fork(after_in_child=_keep_for_ever)


def check_goes_on() -> None:
    """Make sure that a group can be made.

    Raises
    ------
    GroupBrokenError
        The functions of `atexit` are over, and all threads but this one have been stopped.
    """
    if sys.is_finalizing():
        raise GroupBrokenError(f"the program ends: {_NONE}, and no group can be made")


def started(target: Callable[..., object], name: str, *arguments: object) -> threading.Thread:
    """Start a daemon thread.

    Raises
    ------
    GroupBrokenError
        The program ends. Python 3.11 would wait without end for a thread that starts when the others have
        been stopped; from 3.12 on, none starts in the functions of `atexit` either.
    """
    check_goes_on()
    thread = threading.Thread(target=target, args=arguments, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        if "shutdown" not in str(error):  # the system has no more threads
            raise
        raise GroupBrokenError(f"the program ends: {_NONE}") from error
    return thread
