"""The program that uses the library: how it ends, whether it hears signals, where its calls stand.

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

*Places of calls.* A call stands where the innermost frame is that is neither this library's,
torch's nor Python's.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import os
import re
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from functools import lru_cache, wraps
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TypeVar

from ringcoll.errors import GroupBrokenError

_NONE = "Python starts no thread any more"
_last: list[Callable[[], object]] = []
_threading: Any = threading
_join_threads = _threading._shutdown
_with_threads: weakref.WeakSet[Any] = weakref.WeakSet()


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
    """Join threads, which is the first that Python does at its end; then do what follows, in order.

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


def with_threads(group: Any) -> Any:
    """A process group of torch with threads of its own; forked-off processes never delete it."""
    _with_threads.add(group)
    return group


def _keep_for_ever() -> None:
    for group in tuple(_with_threads):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


os.register_at_fork(after_in_child=_keep_for_ever)


def check_goes_on() -> None:
    """Raise `GroupBrokenError` if threads have been stopped, so that no group can be made."""
    if sys.is_finalizing():
        raise GroupBrokenError(f"the program ends: {_NONE}, and no group can be made")


def started(target: Callable[..., object], name: str, *arguments: object) -> threading.Thread:
    """Start a daemon thread; `GroupBrokenError` if the program ends.

    Python 3.11 would wait without end for a thread that starts when the others have been stopped;
    from 3.12 on, none starts in the functions of `atexit` either.
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


# --- signals ------------------------------------------------------------------------------

_FAULTS = {"SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSEGV", "SIGKILL", "SIGSTOP"}
_HEARD = [int(each) for each in signal.Signals if each.name not in _FAULTS]
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


# --- places of calls ----------------------------------------------------------------------

_STANDARD = f"{Path(os.__file__).parent}{os.sep}"
# As faulthandler writes them.
_THREAD = re.compile(r"^(?:Current t|T)hread 0x(\w+) .*\n((?:  .*\n)*)", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


class Line(NamedTuple):
    """A line of code that a thread is in, and the name of its function."""

    file: str
    number: int
    function: str


@lru_cache(maxsize=4096)
def _is_users(file: str) -> bool:
    import torch  # `ringcoll dump` starts threads without torch

    folders = Path(__file__).parents[2], Path(torch.__file__).parent
    libraries = [f"{folder}{os.sep}" for folder in folders]
    is_standard = file.startswith(_STANDARD) and "-packages" not in file
    return not (is_standard or file.startswith((*libraries, "<frozen")))


def user_line(frame: FrameType | None) -> tuple[str, int]:
    """File and line of the user's code at or above a frame; ``("", 0)`` if there is none."""
    while frame is not None:
        if _is_users(frame.f_code.co_filename):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return "", 0


def line_of_thread(ident: int) -> tuple[str, int]:
    """File and line of the user's code that another thread is in, as for `user_line`."""
    frame = users(stacks().get(ident, ()))
    return ("", 0) if frame is None else frame[:2]


def stacks() -> dict[int, list[Line]]:
    """The frames of each thread of this process, the innermost first, by the thread's identifier.

    To go through the frames of a thread that runs, by ``sys._current_frames``, has ended processes
    with a segmentation fault (Python 3.11). faulthandler reads them while no other thread runs.
    """
    try:
        memory = os.memfd_create("ringcoll")
    except (AttributeError, OSError):  # not Linux; no descriptor is left
        return {}
    try:
        faulthandler.dump_traceback(memory)
        text = os.pread(memory, os.fstat(memory).st_size, 0).decode(errors="replace")
    finally:
        os.close(memory)
    return {
        int(ident, 16): [Line(file, int(line), name) for file, line, name in _FRAME.findall(frames)]
        for ident, frames in _THREAD.findall(text)
    }


def users(frames: Iterable[Line]) -> Line | None:
    """The innermost frame of the user's code."""
    return next((frame for frame in frames if _is_users(frame.file)), None)


def in_words(file: str, line: int) -> str:
    """A line of a file, below the current folder with a relative path; empty without a file.

    >>> in_words(os.path.join(os.getcwd(), "train.py"), 14)
    'train.py:14'
    """
    with suppress(FileNotFoundError):  # the current folder was deleted
        file = file.removeprefix(f"{Path.cwd()}{os.sep}")
    return f"{file}:{line}" if file else ""


# --- torch.compile, which traces into every function that it meets ------------------------

_Method = TypeVar("_Method", bound=Callable[..., Any])


def untraced(method: _Method) -> _Method:
    """Keep torch.compile's tracer out of a method, and out of all functions that it calls.

    ``torch.compiler.disable`` does the same, but its import takes 2 s.
    """
    from torch._C._dynamo import eval_frame

    @wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        tracer = eval_frame.set_eval_frame(None)
        try:
            return method(*args, **kwargs)
        finally:
            eval_frame.set_eval_frame(tracer)

    wrapped: Any = run
    wrapped._torchdynamo_disable = True
    # After a graph break the tracer looks at every frame, and would warn that it cannot follow it.
    with suppress(AttributeError):  # names of torch 2.13
        frames: Any = eval_frame
        strategy = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
        frames.set_code_exec_strategy(wrapped.__code__, strategy)
    return wrapped  # type: ignore[no-any-return]
