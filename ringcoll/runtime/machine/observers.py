"""Torch's execution trace observers, which see operators as its profiler does.

Problem: torch tells nobody in Python that one looks. So their starts and stops are noted.
"""

from __future__ import annotations

from typing import Any

observers: set[int] = set()
"""Observers that look, by identity."""


def note_observers() -> None:
    """Note the observers that start from now on; a second call does no harm."""
    from torch.profiler import ExecutionTraceObserver

    observer: Any = ExecutionTraceObserver
    start, stop = observer.start, observer.stop

    def noted_start(self: Any) -> None:
        observers.add(id(self))
        start(self)

    def noted_stop(self: Any) -> None:
        stop(self)
        observers.discard(id(self))

    if start.__name__ != noted_start.__name__:
        observer.start, observer.stop = noted_start, noted_stop
