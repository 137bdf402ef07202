"""Keep torch.compile, which traces into every function that it meets, out of some."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

_Method = TypeVar("_Method", bound=Callable[..., Any])


def untraced(method: _Method) -> _Method:
    """Keep torch.compile's tracer out of a method, and out of all functions that it calls.

    ``torch.compiler.disable`` does the same, but its import takes 2 s.
    """

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        tracer = eval_frame.set_eval_frame(None)
        try:
            return method(*args, **kwargs)
        finally:
            eval_frame.set_eval_frame(tracer)

    wrapped: Any = run
    wrapped._torchdynamo_disable = True
    # After a graph break the tracer looks at every frame, and would warn that it cannot follow
    # this frame.
    with contextlib.suppress(AttributeError):  # names of torch 2.13
        frames: Any = eval_frame
        strategy = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
        frames.set_code_exec_strategy(wrapped.__code__, strategy)
    return wrapped  # type: ignore[no-any-return]
