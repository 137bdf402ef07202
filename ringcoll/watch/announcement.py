"""The failure that breaks a group, told at once, where the program's own report is late or never comes.

Problem: whoever waits for an asynchronous operation may look at it late or never, and torch's
``DistributedDataParallel`` raises the error with other words around it. ``torchrun`` ends all processes
within 0.1 s of the death of one, so that even an error that is raised at once is not printed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
import time
from pathlib import Path

from ringcoll.machine import error_file

_log = logging.getLogger("ringcoll")


def announce(text: str, *, is_raised: bool) -> None:
    """Tell, in one line, the failure that has broken a group.

    The line is an error of the log ``ringcoll``. A failure that is raised in the thread that made the call needs no line,
    except under ``torchrun``, whose error file gets the line as well, unless there is something in it.

    Parameters
    ----------
    text
        The failure, with the ranks and the operation.
    is_raised
        Whether the failure is about to be raised in the thread that made the call, or waits for it.
    """
    file = error_file()
    if is_raised and file is None:
        return
    line = " ".join(text.split())
    say(line, logging.ERROR)
    if file is not None:
        _write(file, line)


def say(line: str, level: int = logging.WARNING) -> None:
    """Write a line to the log; in a program that has not configured logging, Python writes it to stderr."""
    _log.log(level, "%s%s", "" if _log.hasHandlers() else "ringcoll: ", line)


def _write(file: Path, line: str) -> None:
    """Write an error file as ``torch.distributed.elastic.multiprocessing.errors.ErrorHandler`` does.

    ``torchrun`` fails on a file that is not whole, and may end this process at any moment; so the
    file gets its name when it is written.
    """
    extra = {
        "py_callstack": line,
        "timestamp": str(int(time.time())),
    }  # its summary shows the first
    content = json.dumps({"message": {"message": line, "extraInfo": extra}})
    with (
        contextlib.suppress(OSError),
        tempfile.NamedTemporaryFile("w", dir=file.parent, encoding="utf-8") as draft,
    ):
        draft.write(content)
        draft.flush()
        os.link(draft.name, file)  # not over another file
