"""Files that are never seen incomplete."""

from __future__ import annotations

import os
import threading
from pathlib import Path

__all__ = ["replace_file"]


def replace_file(path: Path, content: str | bytes, mode: int = 0o666) -> None:
    """Write a draft beside a file, and put the draft in the file's place at once.

    What is no regular file, such as ``/dev/stdout`` or a pipe, is written to as it is. Of ``mode``, the
    ``umask`` takes away what it says.

    Raises
    ------
    OSError
        The file cannot be written; the draft is gone, and the file as before.
    """
    data = content.encode() if isinstance(content, str) else content
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    draft = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    draft.unlink(missing_ok=True)  # of a process that had the number before, and was killed
    try:
        # A new file: in a folder of all users, whoever guesses its name could have made a link.
        draft.touch(mode, exist_ok=False)
        draft.write_bytes(data)
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
