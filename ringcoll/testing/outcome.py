"""The answer of a rank: a value or a failure; and which of the failures is raised.

A rank that fails leaves its groups, so that ranks that wait for it fail soon, too. The failure that
came first in time is the cause. Its exception is raised by the parent; the ranks' tracebacks stand
above it, the first rank's first.
"""

from __future__ import annotations

import contextlib
import pickle
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from ringcoll.launch import RankError, pickled

_OF_PYTEST = {"Failed": "fail", "Skipped": "skip", "XFailed": "xfail"}  # they cannot be pickled


class Failure(NamedTuple):
    """A rank's exception, as it travels to the parent."""

    time_s: float  # of the clock that all processes of a host share
    rank: int
    kind: str
    text: str
    trace: str
    error: bytes  # pickled; empty if that is not possible


class RanksTraceback(Exception):  # noqa: N818  # the cause of an error, which shows where it was raised
    """Tracebacks of ranks."""


def leave() -> None:
    """End the groups of this rank, whatever state they are in."""
    with contextlib.suppress(Exception):
        if dist.is_initialized():
            dist.destroy_process_group()


def attempt(rank: int, function: Callable[[], Any]) -> bytes | Failure:
    """Call a function on a rank; its value is pickled, so that memory is not shared."""
    try:
        value = function()
        try:
            return pickled(value)
        except Exception as error:  # noqa: BLE001  # of any class that pickles itself
            raise TypeError(f"the value that the test returns cannot be sent: {error}") from None
    except BaseException as error:  # noqa: BLE001  # the parent raises the error
        now_s = time.monotonic()
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_globals["__name__"].startswith(
            "ringcoll.testing."
        ):
            trace = trace.tb_next
        lines = traceback.format_exception(type(error), error, trace)
        # Frames refer to groups, which end when nothing refers to them.
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = error.__context__ = error.__cause__ = None
        written = b""
        with contextlib.suppress(Exception):
            pickle.loads(pickled(error))
            written = pickled(error)
        return Failure(now_s, rank, type(error).__name__, str(error), "".join(lines), written)


def raise_first(failures: Sequence[Failure], world_size: int) -> None:
    """Raise the exception of the rank that failed first, if a rank failed."""
    __tracebackhide__ = True
    if not failures:
        return
    first, *others = sorted(failures)
    text = f"rank {first.rank} of {world_size}:\n{first.trace}"
    for other in others:
        summary = f"{other.kind}: {other.text}".strip().partition("\n")[0]
        text += f"\nrank {other.rank} failed after it: {summary}"
    cause = RanksTraceback(text)
    error: BaseException
    if first.kind in _OF_PYTEST:
        import pytest

        error = getattr(pytest, _OF_PYTEST[first.kind]).Exception(first.text)
    elif first.error:
        error = pickle.loads(first.error)
    else:
        by_rank = {failure.rank: (failure.kind, failure.text) for failure in failures}
        error = RankError(first.rank, by_rank, first.trace)
    raise error from cause
