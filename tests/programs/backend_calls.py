"""Calls of the process group behind ``init_process_group("ringcoll")``, on its ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions
from torch.nn.parallel import DistributedDataParallel

import ringcoll.runtime.collectives.arguments
from ringcoll.training import HookOptions, all_reduce_hook
from tests.programs.faults import catch

__all__ = ["SHORT_FORMS"]


def _own() -> Tensor:
    return torch.arange(4.0) + 10 * dist.get_rank()


def _all(group: Any) -> list[Tensor]:
    return [torch.arange(4.0) + 10 * rank for rank in range(group.size())]


def _zeros(group: Any) -> list[Tensor]:
    return [torch.zeros(4) for _ in range(group.size())]


def _allreduce(group: Any, *arguments: Any) -> tuple[Any, Any]:
    tensor = _own()
    group.allreduce(tensor, *arguments).wait()
    op = arguments[0] if arguments else dist.ReduceOp.SUM
    reduced = torch.stack(_all(group))
    return tensor, reduced.amax(0) if op == dist.ReduceOp.MAX else reduced.sum(0)


def _broadcast(group: Any) -> tuple[Any, Any]:
    tensor = _own()
    group.broadcast(tensor, root=1).wait()
    return tensor, _all(group)[1]


def _reduce(group: Any) -> tuple[Any, Any]:
    tensor = _own()
    group.reduce(tensor, root=1, op=dist.ReduceOp.SUM).wait()
    return tensor, torch.stack(_all(group)).sum(0) if group.rank() == 1 else _own()


def _allgather(group: Any) -> tuple[Any, Any]:
    outputs = _zeros(group)
    group.allgather(outputs, _own()).wait()
    return torch.stack(outputs), torch.stack(_all(group))


def _gather(group: Any) -> tuple[Any, Any]:
    outputs = _zeros(group)
    group.gather(outputs if group.rank() == 0 else [], _own(), 0).wait()
    wanted = _all(group) if group.rank() == 0 else _zeros(group)
    return torch.stack(outputs), torch.stack(wanted)


def _scatter(group: Any) -> tuple[Any, Any]:
    output = torch.zeros(4)
    group.scatter(output, _all(group) if group.rank() == 1 else [], 1).wait()
    return output, _all(group)[group.rank()]


def _reduce_scatter(group: Any) -> tuple[Any, Any]:
    output = torch.zeros(4)
    group.reduce_scatter(output, _all(group), op=dist.ReduceOp.SUM).wait()
    return output, group.size() * _all(group)[group.rank()]


def _alltoall(group: Any) -> tuple[Any, Any]:
    outputs = _zeros(group)
    group.alltoall(outputs, [_own() + peer for peer in range(group.size())]).wait()
    return torch.stack(outputs), torch.stack(_all(group)) + group.rank()


def _alltoall_base(group: Any) -> tuple[Any, Any]:
    output = torch.zeros(group.size(), 4)
    group.alltoall_base(output, _own().expand(group.size(), 4), [], []).wait()
    return output, torch.stack(_all(group))


def _barrier(group: Any) -> tuple[Any, Any]:
    group.barrier().wait()
    return torch.ones(1), torch.ones(1)


SHORT_FORMS: dict[str, Callable[[Any], tuple[Any, Any]]] = {
    "allreduce(tensor)": _allreduce,
    "allreduce(tensor, op)": lambda group: _allreduce(group, dist.ReduceOp.MAX),
    "allreduce(tensor, ReduceOp(op))": lambda group: _allreduce(
        group, dist.ReduceOp(dist.ReduceOp.MAX)
    ),
    "broadcast(tensor, root)": _broadcast,
    "reduce(tensor, root, op)": _reduce,
    "allgather(tensors, tensor)": _allgather,
    "gather(tensors, tensor, root)": _gather,
    "scatter(tensor, tensors, root)": _scatter,
    "reduce_scatter(tensor, tensors, op)": _reduce_scatter,
    "alltoall(tensors, tensors)": _alltoall,
    "alltoall_base(tensor, tensor, [], [])": _alltoall_base,
    "barrier()": _barrier,
}


def short_form(name: str) -> tuple[list[Any], list[Any]]:
    """What a call without c10d's options has given, and what it should."""
    got, wanted = SHORT_FORMS[name](dist.group.WORLD)
    return got.tolist(), wanted.tolist()


def alone() -> list[list[float]]:
    """A world of one: every collective gives back what it got."""
    tensor, other, third = torch.arange(3.0), torch.zeros(3), torch.zeros(3)
    dist.all_reduce(tensor)
    dist.broadcast(tensor, 0)
    dist.reduce(tensor, 0, dist.ReduceOp.AVG)
    dist.all_gather_into_tensor(other, tensor)
    dist.reduce_scatter_tensor(third, other)
    dist.gather(tensor, [other], 0)
    dist.scatter(third, [other], 0)
    dist.all_to_all_single(other, third)
    work = dist.all_reduce(other, async_op=True)
    assert work.is_completed()
    assert torch.equal(work.get_future().wait()[0], other)
    dist.barrier()
    objects = [None]
    dist.all_gather_object(objects, "me")
    assert objects == ["me"]
    return [tensor.tolist(), other.tolist(), third.tolist()]


# --- options --------------------------------------------------------------------------


@contextmanager
def chosen() -> Iterator[list[tuple[str, str, torch.dtype]]]:
    """Collect, for each call, the collective, its algorithm, and the dtype that travels."""
    found: list[tuple[str, str, torch.dtype]] = []
    module: Any = ringcoll.runtime.operation.operation
    resolve = module.resolve

    def noting(request: Any, table: Any, hosts: Any) -> Any:
        resolved = resolve(request, table, hosts)
        schedule = resolved.plan.schedule
        if table is not None:  # a named algorithm is tried before the ranks meet
            found.append((schedule.collective, schedule.algorithm, request.wire_dtype))
        return resolved

    module.resolve = noting
    try:
        yield found
    finally:
        module.resolve = resolve


def with_options(options: Any) -> list[tuple[str, str, torch.dtype]]:
    """What is chosen for a few calls on a group with options."""
    group = dist.new_group(pg_options=options)
    size = dist.get_world_size()
    with chosen() as found:
        dist.all_reduce(torch.ones(8), group=group)
        dist.all_reduce(torch.ones(8, dtype=torch.int64), group=group)
        dist.all_gather_into_tensor(torch.ones(4 * size), torch.ones(4), group=group)
        dist.barrier(group)
    return found


def trained(transport: str, level: Any, by_hook: bool) -> tuple[list[float], bytes]:
    """Losses of a rank under torch's DistributedDataParallel, and the parameters' bits.

    The level is an option of the hook, or of the group.
    """
    of_group = ringcoll.Options(transport=transport, reproducible=not by_hook and level)
    group: Any = dist.new_group(pg_options=of_group)
    torch.manual_seed(3)
    layers = [torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), process_group=group)
    if by_hook:
        model.register_comm_hook(HookOptions(group, reproducible=level), all_reduce_hook)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 16, generator=data)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    whole = torch.cat([parameter.detach().view(-1) for parameter in model.parameters()])
    return losses, whole.numpy().tobytes()


def not_in_order() -> tuple[str, float]:
    """The error of a sum by an algorithm of another order; and a sum that needs no order."""
    options = ringcoll.Options(algorithm="ring", reproducible=True)
    group: Any = dist.new_group(pg_options=options)
    caught = catch(lambda: dist.all_reduce(torch.ones(4), group=group))
    dist.barrier(group)
    integer = torch.tensor([1 + dist.get_rank()])
    dist.all_reduce(integer, group=group)
    return caught.text, integer.item()


def refused(options: Any) -> tuple[str, str]:
    """The error with which options are refused; the others hear nothing of it."""
    caught = catch(lambda: dist.new_group(pg_options=options))
    return caught.kind, caught.text


def sequence_numbers() -> tuple[int, int]:
    """Collectives are counted; the user's sends are not."""
    group: Any = dist.new_group()
    before = group._get_sequence_number_for_group()
    dist.all_reduce(torch.ones(3), group=group)
    group.allreduce_coalesced([torch.ones(3)] * 2, AllreduceOptions()).wait()
    if dist.get_rank() < 2:
        peer = 1 - dist.get_rank()
        messages = [
            dist.P2POp(dist.isend, torch.ones(3), peer, group),
            dist.P2POp(dist.irecv, torch.ones(3), peer, group),
        ]
        for work in dist.batch_isend_irecv(messages):
            work.wait()
    return before, group._get_sequence_number_for_group()
