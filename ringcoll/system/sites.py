"""Where a call stands in the user's code: the innermost frame that is neither this library's, torch's nor Python's."""

from __future__ import annotations

import faulthandler
import os
import re
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from types import FrameType

import torch

__all__ = ["in_words", "line_of_thread", "user_frame", "user_line"]

_LIBRARY = tuple(
    f"{Path(str(file)).parents[n]}{os.sep}" for file, n in ((__file__, 1), (torch.__file__, 0))
)
_STANDARD = f"{Path(os.__file__).parent}{os.sep}"


@lru_cache(maxsize=4096)
def _is_users(file: str) -> bool:
    is_standard = file.startswith(_STANDARD) and "-packages" not in file
    return not (is_standard or file.startswith((*_LIBRARY, "<frozen")))


def user_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the user's code, at or above a frame."""
    while frame is not None and not _is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def user_line(frame: FrameType | None) -> tuple[str, int]:
    """File and line of the user's code at or above a frame; ``("", 0)`` if there is none."""
    frame = user_frame(frame)
    return ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def line_of_thread(ident: int) -> tuple[str, int]:
    """File and line of the user's code that another thread is in, as for `user_line`.

    To go through the frames of a thread that runs, by ``sys._current_frames``, has ended processes with a
    segmentation fault (Python 3.11). faulthandler reads them while no other thread runs.
    """
    if not hasattr(os, "memfd_create"):  # not Linux
        return "", 0
    try:
        memory = os.memfd_create("ringcoll")
    except OSError:  # no descriptor is left
        return "", 0
    try:
        faulthandler.dump_traceback(memory)
        text = os.pread(memory, os.fstat(memory).st_size, 0).decode(errors="replace")
    finally:
        os.close(memory)
    _, _, threads = text.partition(f"hread 0x{ident:016x} ")
    frames = re.findall(
        r'^  File "(.*)", line (\d+) in ', threads.partition("\n\n")[0], re.MULTILINE
    )
    return next(((file, int(line)) for file, line in frames if _is_users(file)), ("", 0))


def in_words(file: str, line: int) -> str:
    """A line of a file; the file's path is relative to the current folder if the file is below it.

    The text is empty if there is no file.

    >>> in_words(os.path.join(os.getcwd(), "train.py"), 14)
    'train.py:14'
    """
    with suppress(FileNotFoundError):  # the current folder was deleted
        file = file.removeprefix(f"{Path.cwd()}{os.sep}")
    return f"{file}:{line}" if file else ""
