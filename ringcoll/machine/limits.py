"""Numbers that a user gives, of any class: Python's, numpy's, tensors of one element."""

from __future__ import annotations

from datetime import timedelta
from operator import index
from typing import Any

from ringcoll.errors import ArgumentError

FOREVER_S = 2.0**31
"""A time limit that nobody lives to see: 68 years. Clocks that count nanoseconds in 64 bits hold it,
and Python's locks; both end before `timedelta.max`."""


def seconds_of(limit: Any, argument: str = "timeout", rank: int | None = None) -> float:
    """A time limit in seconds, at most `FOREVER_S`; ``inf`` and whatever is longer mean for ever.

    Raises
    ------
    ArgumentError
        The limit is not a positive time.
    """
    try:
        seconds = limit.total_seconds() if isinstance(limit, timedelta) else float(limit)
    except OverflowError:
        seconds = FOREVER_S if limit > 0 else 0.0  # a whole number that is too large for a float
    except (RuntimeError, TypeError, ValueError):
        seconds = 0.0
    if isinstance(limit, str | bytes) or not seconds > 0:
        raise ArgumentError(
            "must be positive", rank=rank, argument=argument, expected="> 0 s", got=limit
        )
    return min(seconds, FOREVER_S)


def whole(number: Any) -> Any:
    """A whole number as an ``int``; whatever is no whole number stays, to be refused by its user."""
    if number is None or type(number) is int:
        return number
    try:
        return index(number)
    except (RuntimeError, TypeError):
        return number
