"""Calls that torch's dispatch modes and its profiler see.

They see c10d's operators, as torch's own process groups run every call as one; a group that is
written in Python runs none. So while somebody looks, the call of torch's base class is made (the
operator), under a mode of this module that stands below all modes of the user, and runs this
library's call in the place of the operator's kernel. Nothing native runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

from ringcoll.runtime.process import observers

_c10d: Any = torch._C._distributed_c10d
_num_modes = torch._C._len_torch_dispatch_stack
_profiler = torch.autograd.profiler


def is_watched() -> bool:
    """Whether a dispatch mode of this thread, torch's profiler or its observer looks at calls."""
    return _profiler._is_profiler_enabled or bool(_num_modes() or observers)


class _CallMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs a call in the place of c10d's operator."""

    def __init__(self, run: Callable[[], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._run, self.work, self.has_run = run, None, False
        self.error: BaseException | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "c10d" or self.has_run:
            return func(*args, **(kwargs or {}))
        self.has_run = True
        try:
            self.work = self._run()
        except BaseException as error:
            self.error = error
            raise
        # The caller gets the call's own work; torch would keep no more of it than this.
        results = [
            _complete_work() if "Work" in str(result.type) else args[0]
            for result in func._schema.returns
        ]
        return results[0] if len(results) == 1 else tuple(results)


@functools.cache
def _complete_work() -> Any:
    future: torch.futures.Future[None] = torch.futures.Future()
    future.set_result(None)
    return _c10d._create_work_from_future(future).boxed()


def observed(
    native: Callable[..., Any], arguments: tuple[Any, ...], keywords: Mapping[str, Any], run: Any
) -> Any:
    """Call ``run()`` in the place of the operator that ``native(*arguments, **keywords)`` calls."""
    modes = _get_current_dispatch_mode_stack()
    if any(getattr(mode, "_mode_key", None) is not None for mode in modes):
        return run()  # torch traces with tensors that have no memory: there is no call to see
    mode_of_call = _CallMode(run)
    _replace_modes(modes, [mode_of_call, *modes])
    try:
        result = native(*arguments, **keywords)
    except BaseException as error:
        if mode_of_call.error is not None:
            raise mode_of_call.error from None
        if isinstance(error, TypeError) and not mode_of_call.has_run:
            return run()  # torch lacks this form of the call
        raise
    finally:
        _replace_modes([mode_of_call, *modes], modes)
    # A mode of the user may have answered by itself.
    return mode_of_call.work if mode_of_call.has_run else result


def _replace_modes(before: list[Any], after: list[Any]) -> None:
    for _ in before:
        _pop_mode()
    for mode in after:
        _push_mode(mode)
