"""Where torch 2.13 does not come by the front door of a process group written in Python.

`mend_bypasses`
    C++ code that would run a collective of the inner group.
`mend_built_in_hook`
    A communication hook in C++ that takes futures of C++ only.
`mend_batches`
    A function that is one operation for torch's own class of process groups only.
`mend_monitored_barrier`
    A function that asks for the backend's name, and wants it to be gloo.
`untraced`
    torch.compile, which would trace into the group's methods.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._dynamo import eval_frame

from ringcoll.work import Work

__all__ = [
    "mend_batches",
    "mend_built_in_hook",
    "mend_bypasses",
    "mend_monitored_barrier",
    "untraced",
]

_c10d: Any = torch._C._distributed_c10d
_Method = TypeVar("_Method", bound=Callable[..., Any])


def untraced(method: _Method) -> _Method:
    """Keep torch.compile's tracer out of a method and of all that it calls.

    As ``torch.compiler.disable`` does, without the 2 s that importing it takes.
    """

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        tracer = eval_frame.set_eval_frame(None)
        try:
            return method(*args, **kwargs)
        finally:
            eval_frame.set_eval_frame(tracer)

    made: Any = run
    made._torchdynamo_disable = True
    # Where nothing is traced on the way here, as after a graph break, the tracer looks at
    # every frame, and would warn that it cannot follow this one.
    with contextlib.suppress(AttributeError):  # where a version of torch has it otherwise
        frames: Any = eval_frame
        strategy = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
        frames.set_code_exec_strategy(made.__code__, strategy)
    return made  # type: ignore[no-any-return]


@functools.cache
def mend_bypasses() -> Any:
    """Bring home the calls of C++ that would run the inner group's own collective.

    In torch 2.13 these are the functional collectives with ``out=``, which call methods
    that pybind11's trampoline does not know. The kernels given here call the group's
    methods by name, so they do for any group what torch's own do. torch 2.14 has no gap.
    """
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14):
        return None

    def all_gather_out(
        input: Tensor,  # noqa: A002  # the schema's name
        group_size: int,
        group_name: str,
        *,
        out: Tensor,
    ) -> Tensor:
        group = _c10d._resolve_process_group(group_name)
        return _registered(out, group._allgather_base(out, input, _c10d.AllgatherOptions()))

    def reduce_scatter_out(
        input: Tensor,  # noqa: A002  # the schema's name
        reduce_op: str,
        group_size: int,
        group_name: str,
        *,
        out: Tensor,
    ) -> Tensor:
        group = _c10d._resolve_process_group(group_name)
        options = _c10d.ReduceScatterOptions()
        options.reduceOp = getattr(dist.ReduceOp, reduce_op.upper())
        return _registered(out, group._reduce_scatter_base(out, input, options))

    library: Any = torch.library.Library("_c10d_functional", "IMPL")  # type: ignore[no-untyped-call]
    for key in ("CPU", "CUDA"):
        library.impl("all_gather_into_tensor_out", all_gather_out, key)
        library.impl("reduce_scatter_tensor_out", reduce_scatter_out, key)
    return library


@functools.cache
def mend_built_in_hook(group_class: type) -> None:
    """Let DDP's built-in hook FP16_COMPRESS be torch's own Python version of it.

    The one in C++ insists on a future whose value is a list of tensors made by C++, and a
    future made in Python holds a Python object. Both halve, add up and widen alike.

    Parameters
    ----------
    group_class
        The class of process groups that need it; on others nothing changes.
    """
    ddp: Any = torch.nn.parallel.DistributedDataParallel
    built_in = ddp._register_builtin_comm_hook

    @functools.wraps(built_in)
    def register(self: Any, comm_hook_type: Any) -> None:
        compresses = comm_hook_type == dist.BuiltinCommHookType.FP16_COMPRESS
        if compresses and isinstance(self.process_group, group_class):
            from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

            self.register_comm_hook(self.process_group, default_hooks.fp16_compress_hook)
        else:
            built_in(self, comm_hook_type)

    ddp._register_builtin_comm_hook = register


@functools.cache
def mend_monitored_barrier(group_class: type) -> None:
    """Let ``torch.distributed.monitored_barrier`` call the group's own.

    Parameters
    ----------
    group_class
        The class of process groups that have one; on others nothing changes.
    """
    torchs = dist.monitored_barrier

    @functools.wraps(torchs)
    def monitored_barrier(
        group: Any = None, timeout: Any = None, wait_all_ranks: bool = False
    ) -> None:
        meant = dist.group.WORLD if group is None else group
        if isinstance(meant, group_class):
            meant.monitored_barrier(timeout, wait_all_ranks)  # type: ignore[attr-defined]
        else:
            torchs(group, timeout, wait_all_ranks)

    for module in (dist, dist.distributed_c10d):
        module.monitored_barrier = monitored_barrier  # type: ignore[attr-defined]


@functools.cache
def mend_batches(group_class: type) -> None:
    """Let ``torch.distributed.batch_isend_irecv`` be one operation, where the group can do so.

    torch's own starts the messages one by one on groups of any class but its own.

    Parameters
    ----------
    group_class
        The class of process groups with a ``batched``; on others nothing changes.
    """
    torchs = dist.batch_isend_irecv

    @untraced
    @functools.wraps(torchs)
    def batch_isend_irecv(p2p_op_list: list[dist.P2POp]) -> list[dist.Work]:
        start = functools.partial(torchs, p2p_op_list)
        dist.distributed_c10d._check_p2p_op_list(p2p_op_list)
        group: Any = p2p_op_list[0].group
        if isinstance(group, group_class):
            return group.batched(start, p2p_op_list[0].tensor.device)  # type: ignore[no-any-return,attr-defined]
        return start()

    for module in (dist, dist.distributed_c10d):
        module.batch_isend_irecv = batch_isend_irecv  # type: ignore[attr-defined]


def _registered(out: Tensor, work: dist.Work) -> Tensor:
    """Note the work that ``wait_tensor`` will wait for."""
    if isinstance(work, Work):
        # Only the part of a work that is C++ is kept; this one has no other.
        work = _c10d._create_work_from_future(work.get_future())
    _c10d._register_work(out, work)
    return out
