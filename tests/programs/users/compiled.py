"""Users of torch.compile, with collectives inside."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.programs.users.models import batch, mlp, state, train


def _group() -> Any:
    return dist.group.WORLD


def _compiled(function: Any, how: str, *, whole: bool = False) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, backend=how, fullgraph=whole)


def _data_parallel(rank: int, how: str) -> dict[str, Tensor]:
    first = dist._DEFAULT_FIRST_BUCKET_BYTES
    dist._DEFAULT_FIRST_BUCKET_BYTES = 100  # the first bucket must not be the largest
    try:
        model = DistributedDataParallel(mlp(), bucket_cap_mb=0.0002)
        losses = train(_compiled(model, how), model.parameters(), rank)
    finally:
        dist._DEFAULT_FIRST_BUCKET_BYTES = first
    return {**state(model), "losses": torch.stack(losses)}


def data_parallel(rank: int, world_size: int) -> dict[str, Tensor]:
    """The graph is split where a bucket is full."""
    return _data_parallel(rank, "aot_eager")


def data_parallel_inductor(rank: int, world_size: int) -> dict[str, Tensor]:
    """The same, as machine code."""
    return _data_parallel(rank, "inductor")


def fully_sharded(rank: int, world_size: int) -> dict[str, Tensor]:
    """Hooks that communicate, around compiled layers."""
    model: Any = mlp()
    torch._dynamo.reset()
    for layer in model:
        layer.compile(backend="aot_eager")
    fully_shard(model)
    train(model, model.parameters(), rank)
    return {name: value.full_tensor() for name, value in model.named_parameters()}


def _functional(tensor: Tensor) -> Tensor:
    group = _group()
    total = funcol.all_reduce(tensor * 2, "sum", group) + 1
    gathered = funcol.all_gather_tensor(total.sin(), 0, group)
    scattered = funcol.reduce_scatter_tensor(gathered.cos(), "sum", 0, group)
    moved = funcol.all_to_all_single(scattered, None, None, group)
    result: Tensor = moved * 3 + funcol.broadcast(moved, 0, group)
    return result


def _with_functional(rank: int, world_size: int, how: str) -> dict[str, Tensor]:
    function = _compiled(_functional, how, whole=True)
    return {str(step): function(batch(rank, step, numel=world_size)) for step in range(2)}


def functional(rank: int, world_size: int) -> dict[str, Tensor]:
    """Functional collectives in one graph."""
    return _with_functional(rank, world_size, "aot_eager")


def functional_inductor(rank: int, world_size: int) -> dict[str, Tensor]:
    """The same; inductor reuses tensors for the results."""
    return _with_functional(rank, world_size, "inductor")


def _with_gradients(rank: int, world_size: int, how: str) -> dict[str, Tensor]:
    def inner(tensor: Tensor) -> Tensor:
        gathered = funcol.all_gather_tensor_autograd(tensor.sin(), 0, _group())
        result: Tensor = funcol.reduce_scatter_tensor_autograd(
            gathered.square(), "sum", 0, _group()
        )
        return result

    leaf = batch(rank, 0, numel=world_size).requires_grad_()
    result = _compiled(inner, how, whole=True)(leaf)
    (result * batch(rank, 1, numel=world_size)).sum().backward()
    assert leaf.grad is not None
    return {"result": result, "grad": leaf.grad}


def with_gradients(rank: int, world_size: int) -> dict[str, Tensor]:
    """Collectives in the backward graph as well."""
    return _with_gradients(rank, world_size, "aot_eager")


def with_gradients_inductor(rank: int, world_size: int) -> dict[str, Tensor]:
    """The same, as machine code."""
    return _with_gradients(rank, world_size, "inductor")


def _broken(tensor: Tensor) -> Tensor:
    total = funcol.all_reduce(tensor, "sum", _group()) * 2
    torch._dynamo.graph_break()
    work: Any = dist.all_reduce(total, async_op=True)
    work.wait()
    torch._dynamo.graph_break()
    result: Tensor = total * 3 + 1
    return result


def _in_place(tensor: Tensor) -> Tensor:
    total = tensor * 2
    dist.all_reduce(total)
    gathered = total.new_zeros(dist.get_world_size() * total.shape[0], total.shape[1])
    dist.all_gather_into_tensor(gathered, total)
    scattered = torch.zeros_like(total)
    dist.reduce_scatter_tensor(scattered, gathered)
    return scattered + 1


def _called(function: Callable[[Tensor], Tensor], rank: int, how: str) -> dict[str, Tensor]:
    compiled = _compiled(function, how)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Dynamo does not know")  # it looked into our methods
        return {str(step): compiled(batch(rank, step)) for step in range(2)}


def graph_break(rank: int, world_size: int) -> dict[str, Tensor]:
    """A collective before and one in a gap between graphs."""
    return _called(_broken, rank, "aot_eager")


def graph_break_inductor(rank: int, world_size: int) -> dict[str, Tensor]:
    """The same, as machine code."""
    return _called(_broken, rank, "inductor")


def in_place(rank: int, world_size: int) -> dict[str, Tensor]:
    """torch.distributed's own functions, which the tracer replaces."""
    return _called(_in_place, rank, "aot_eager")


def in_place_inductor(rank: int, world_size: int) -> dict[str, Tensor]:
    """The same, as machine code."""
    return _called(_in_place, rank, "inductor")


def _around_a_ring(tensor: Tensor) -> Tensor:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    ahead, behind = (rank + 1) % world_size, (rank - 1) % world_size
    got = torch.zeros_like(tensor)
    pair = [
        dist.P2POp(dist.irecv, got, behind),
        dist.P2POp(dist.isend, tensor * 2, ahead),
    ]
    for work in dist.batch_isend_irecv(pair):
        work.wait()
    return got + 1


def messages(rank: int, world_size: int) -> dict[str, Tensor]:
    """Sends and receives, batched."""
    return _called(_around_a_ring, rank, "aot_eager")
