"""Files that are never seen incomplete, and files that are read without surprise; strict JSON."""

from __future__ import annotations

import errno
import json
import os
import stat
import threading
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import IO, Any

_MOST_NBYTES = 1 << 28
"""Bytes of a file that is read as a whole: the text of a ring on 1,024 ranks has half as many."""
_STREAMS = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")
"""Pipes that have a writer, as of a shell's ``<(...)``; others may wait for ever."""


def json_text(value: Any, **options: Any) -> str:
    """Write a value as JSON that every program reads: numbers that are not finite are ``null``.

    All is ASCII, and for print.
    """
    try:
        text = json.dumps(value, allow_nan=False, **options)
    except ValueError:
        text = json.dumps(_finite(value), allow_nan=False, **options)
    return text.replace("\x7f", "\\u007f")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, Mapping):
        return {_finite(key): _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def read_file(path: Path) -> str:
    """Read a text in UTF-8.

    An ``OSError`` gives the reason in words why it cannot be read: it is too large, no text, or no
    file, as a folder, a device, or a pipe without a writer.
    """
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode) and not (stat.S_ISFIFO(mode) and str(path).startswith(_STREAMS)):
            raise OSError("it is no file")
        with path.open("rb") as file:
            return text_of(file)
    except OSError as error:
        raise OSError(error.strerror or str(error)) from error


def read_json_file(path: Path) -> Any:
    """Read JSON; an OSError as of `read_file`, and a ValueError if the text is no JSON."""
    return json.loads(read_file(path))


def text_of(file: IO[bytes]) -> str:
    """Read a text in UTF-8; an OSError as of `read_file` if it is too large, or no text."""
    data = file.read(_MOST_NBYTES + 1)
    if len(data) > _MOST_NBYTES:
        raise OSError(f"it has more than {_MOST_NBYTES} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise OSError(f"it is no text: {error}") from error


def replace_file(path: Path, content: str | bytes, mode: int = 0o666) -> None:
    """Write a draft beside a file, and put the draft in the file's place at once.

    A path that is no regular file, such as ``/dev/stdout`` or a pipe with a reader, is written to
    directly. The ``umask`` applies to ``mode``. An ``OSError`` names the file; the draft is deleted
    then, and the file is as before.
    """
    data = content.encode() if isinstance(content, str) else content
    # A name of its own: the file's name may be as long as a name can be.
    draft = path.with_name(f".ringcoll.{os.getpid()}.{threading.get_ident()}")
    try:
        if path.exists() and not path.is_file():
            # Without O_NONBLOCK, a pipe that nobody reads waits for ever; so it is an error.
            descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
            os.set_blocking(descriptor, True)
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(data)
            return
        draft.unlink(missing_ok=True)  # of a process that had the number before, and was killed
        # A new file: in a folder of all users, a user who guesses its name could have made a link.
        draft.touch(mode, exist_ok=False)
        try:
            draft.write_bytes(data)
            with draft.open("rb") as file:
                os.fsync(file.fileno())
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:  # of a write, it names no file, and of a draft, another one
        reason = "nobody reads it" if error.errno == errno.ENXIO else error.strerror or str(error)
        raise OSError(error.errno, reason, str(path)) from error
