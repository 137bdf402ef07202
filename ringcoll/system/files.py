"""Files that are never seen incomplete."""

from __future__ import annotations

import os
import threading
from pathlib import Path

__all__ = ["replace_file"]


def replace_file(path: Path, text: str) -> None:
    """Write a draft beside a file, and put the draft in the file's place at once.

    Raises
    ------
    OSError
        The file cannot be written; the draft is gone, and the file as before.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        draft.write_text(text, encoding="utf-8")
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
