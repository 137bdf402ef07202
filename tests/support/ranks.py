"""Functions that run on the ranks of a pool of processes."""

from __future__ import annotations

__all__ = ["join"]


def join() -> None:
    pass
