"""Where a call stands in the user's code: the innermost frame that is neither this library's, torch's nor Python's."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from types import FrameType

import torch

__all__ = ["in_words", "user_frame", "user_line"]

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


def in_words(file: str, line: int) -> str:
    """A line of a file; the file's path is relative to the current folder if the file is below it.

    The text is empty if there is no file.

    >>> in_words(os.path.join(os.getcwd(), "train.py"), 14)
    'train.py:14'
    """
    with suppress(FileNotFoundError):  # the current folder was deleted
        file = file.removeprefix(f"{Path.cwd()}{os.sep}")
    return f"{file}:{line}" if file else ""
