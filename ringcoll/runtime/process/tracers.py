"""Torch's tracers: torch.compile's, and execution trace observers.

torch.compile traces into every function that it meets. Observers see operators as torch's profiler
does, but torch tells nobody in Python that one looks: so their starts and stops are noted.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any, TypeVar

_Method = TypeVar("_Method", bound=Callable[..., Any])


def untraced(method: _Method) -> _Method:
    """Keep torch.compile's tracer out of a method, and out of all functions that it calls.

    ``torch.compiler.disable`` does the same, but its import takes 2 s.
    """
    from torch._C._dynamo import eval_frame

    @wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        tracer = eval_frame.set_eval_frame(None)
        try:
            return method(*args, **kwargs)
        finally:
            eval_frame.set_eval_frame(tracer)

    wrapped: Any = run
    wrapped._torchdynamo_disable = True
    # After a graph break the tracer looks at every frame, and would warn that it cannot follow it.
    with suppress(AttributeError):  # names of torch 2.13
        frames: Any = eval_frame
        strategy = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
        frames.set_code_exec_strategy(wrapped.__code__, strategy)
    return wrapped  # type: ignore[no-any-return]


observers: set[int] = set()
"""Observers that look, by identity."""


def note_observers() -> None:
    """Note the execution trace observers that start from now on; a second call does no harm."""
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
