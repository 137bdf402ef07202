"""What torch does in C++, or for groups of its own classes only, for groups written in Python."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringcoll.runtime.group import Work
from ringcoll.runtime.process import note_observers, untraced

_c10d: Any = torch._C._distributed_c10d


@functools.cache
def mend_torch(group_class: type) -> object:
    """Fill torch's gaps for groups of a class; for other groups nothing changes."""
    _mend_built_in_hook(group_class)
    _mend_monitored_barrier(group_class)
    _mend_batches(group_class)
    note_observers()
    return _mend_bypasses()


def _mend_bypasses() -> Any:
    """Redirect the calls of C++ that would run a collective of the inner group.

    In torch 2.13 these are the functional collectives with ``out=``, which call methods that
    pybind11's trampoline does not know. The kernels below call the methods of any group by
    name, as torch's own kernels do. torch 2.14 has no such gap.
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

    torch_library: Any = torch.library  # it has no types
    library = torch_library.Library("_c10d_functional", "IMPL")
    for key in ("CPU", "CUDA"):
        library.impl("all_gather_into_tensor_out", all_gather_out, key)
        library.impl("reduce_scatter_tensor_out", reduce_scatter_out, key)
    return library


def _mend_built_in_hook(group_class: type) -> None:
    """Let DDP's built-in hook FP16_COMPRESS be torch's Python version of the hook.

    The C++ version wants a future whose value is a list of tensors made by C++; a future made
    in Python holds a Python object. Both versions halve, add up and widen alike.
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


def _mend_monitored_barrier(group_class: type) -> None:
    """Let ``torch.distributed.monitored_barrier``, which wants gloo, call the group's own."""
    native = dist.monitored_barrier

    @functools.wraps(native)
    def monitored_barrier(
        group: Any = None, timeout: Any = None, wait_all_ranks: bool = False
    ) -> None:
        own: Any = dist.group.WORLD if group is None else group
        if isinstance(own, group_class):
            own.monitored_barrier(timeout, wait_all_ranks)  # type: ignore[attr-defined]
        else:
            native(group, timeout, wait_all_ranks)

    _replace(monitored_barrier)


def _mend_batches(group_class: type) -> None:
    """Let ``torch.distributed.batch_isend_irecv`` call the group's ``batched``.

    torch starts the messages one by one, except on groups of its own class, and checks none before.
    """
    native = dist.batch_isend_irecv

    @untraced
    @functools.wraps(native)
    def batch_isend_irecv(p2p_op_list: list[dist.P2POp]) -> list[dist.Work]:
        dist.distributed_c10d._check_p2p_op_list(p2p_op_list)
        group: Any = p2p_op_list[0].group
        if isinstance(group, group_class):
            methods = {dist.isend: "send", dist.irecv: "recv"}
            messages = [(methods[p.op], p.tensor, p.group_peer, p.tag) for p in p2p_op_list]
            start = functools.partial(native, [*map(_resolved, p2p_op_list)])
            return group.batched(start, messages)  # type: ignore[no-any-return,attr-defined]
        return native(p2p_op_list)

    _replace(batch_isend_irecv)


def _resolved(message: dist.P2POp) -> dist.P2POp:
    """The same message, or the values of a conjugate view: torch would refuse it after others."""
    if message.op is not dist.isend or not message.tensor.is_conj():
        return message
    tensor, group, peer = message.tensor.resolve_conj(), message.group, message.group_peer
    return dist.P2POp(message.op, tensor, group=group, tag=message.tag, group_peer=peer)


def _replace(function: Callable[..., Any]) -> None:
    """Put a function in the place of the function of torch.distributed with the same name."""
    for module in (dist, dist.distributed_c10d):
        setattr(module, function.__name__, function)


def _registered(out: Tensor, work: dist.Work) -> Tensor:
    """Note the work that ``wait_tensor`` will wait for."""
    if isinstance(work, Work):
        # torch keeps the C++ part of a work only; a work of this library has no such part.
        work = _c10d._create_work_from_future(work.get_future())
    _c10d._register_work(out, work)
    return out
