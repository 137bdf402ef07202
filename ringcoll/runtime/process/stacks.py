"""The lines of code that threads are in.

A call stands where the innermost frame is that is neither this library's, torch's nor Python's.
"""

from __future__ import annotations

import faulthandler
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import NamedTuple

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
    frame = user_frame(thread_stacks().get(ident, ()))
    return ("", 0) if frame is None else frame[:2]


def thread_stacks() -> dict[int, list[Line]]:
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


def user_frame(frames: Iterable[Line]) -> Line | None:
    """The innermost frame of the user's code."""
    return next((frame for frame in frames if _is_users(frame.file)), None)


def line_in_words(file: str, line: int) -> str:
    """A line of a file, below the current folder with a relative path; empty without a file.

    >>> line_in_words(os.path.join(os.getcwd(), "train.py"), 14)
    'train.py:14'
    """
    with suppress(FileNotFoundError):  # the current folder was deleted
        file = file.removeprefix(f"{Path.cwd()}{os.sep}")
    return f"{file}:{line}" if file else ""
