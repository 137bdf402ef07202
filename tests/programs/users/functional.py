"""Users of functional collectives, with and without gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as nn_collectives
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tests.programs.users.models import batch


def _group() -> Any:
    return dist.group.WORLD


def plain(rank: int, world_size: int) -> dict[str, Tensor]:
    """Every functional collective, once."""
    group = _group()
    own = batch(rank, 0, numel=world_size, width=3)
    found = {op: funcol.all_reduce(own, op, group) for op in ("sum", "avg", "max", "min")}
    found["gather"] = funcol.all_gather_tensor(own, 0, group)
    found["gather columns"] = funcol.all_gather_tensor(own, 1, group)
    found["reduce-scatter"] = funcol.reduce_scatter_tensor(own, "sum", 0, group)
    wide = batch(rank, 1, numel=2, width=2 * world_size)
    found["reduce-scatter columns"] = funcol.reduce_scatter_tensor(wide, "avg", 1, group)
    found["all-to-all"] = funcol.all_to_all_single(own, None, None, group)
    found["broadcast"] = funcol.broadcast(own, world_size - 1, group)
    turned = [(peer + 1) % world_size for peer in range(world_size)]
    found["permute"] = funcol.permute_tensor(own.reshape(-1), turned, group)
    mesh = init_device_mesh("cpu", (world_size,))
    found["mesh"] = funcol.all_reduce(own, "sum", (mesh, 0))
    tensors = [batch(rank, 2), batch(rank, 3, numel=world_size)]
    several = {
        "reduced": funcol.all_reduce_coalesced(tensors, "sum", group),
        "gathered": funcol.all_gather_into_tensor_coalesced(tensors, group),
        "scattered": funcol.reduce_scatter_tensor_coalesced(
            [tensors[1], 2 * tensors[1]], "sum", [0, 0], group
        ),
    }
    for name, results in several.items():
        for number, result in enumerate(results):
            found[f"{name} {number}"] = result
    return {name: funcol.wait_tensor(value).clone() for name, value in found.items()}


def into_given_tensors(rank: int, world_size: int) -> dict[str, Tensor]:
    """The operators below, with ``out=``, and in place."""
    group_name = _group().group_name
    operators: Any = torch.ops._c10d_functional
    own = batch(rank, 0, numel=2, width=3)
    gathered = torch.zeros(2 * world_size, 3)
    operators.all_gather_into_tensor_out(own, world_size, group_name, out=gathered)
    operators.wait_tensor(gathered)
    wide = batch(rank, 1, numel=2 * world_size, width=3)
    reduced = own.clone()
    operators.all_reduce_(reduced, "sum", group_name)
    operators.wait_tensor(reduced)
    sent = own.clone()
    operators.broadcast_(sent, world_size - 1, group_name)
    operators.wait_tensor(sent)
    scattered = operators.reduce_scatter_tensor(wide, "sum", world_size, group_name)
    operators.wait_tensor(scattered)
    return {"gathered": gathered, "reduced": reduced, "sent": sent, "scattered": scattered}


def scattered_into_a_given_tensor(rank: int, world_size: int) -> dict[str, Tensor]:
    """The reduce-scatter with ``out=``."""
    operators: Any = torch.ops._c10d_functional
    wide = batch(rank, 1, numel=2 * world_size, width=3)
    result = torch.zeros(2, 3)
    operators.reduce_scatter_tensor_out(wide, "sum", world_size, _group().group_name, out=result)
    operators.wait_tensor(result)
    return {"result": result}


def _graded(rank: int, function: Any, numel: int, width: int) -> tuple[Tensor, Tensor]:
    leaf = batch(rank, 0, numel=numel, width=width).requires_grad_()
    result = function(leaf)
    weights = batch(rank, 1, numel=result.shape[0], width=result.numel() // result.shape[0])
    (result * weights.reshape(result.shape)).sum().backward()
    assert leaf.grad is not None
    return result.detach(), leaf.grad


def with_gradients(rank: int, world_size: int) -> dict[str, Tensor]:
    """Those functional collectives that autograd knows."""
    group = _group()
    uneven = [1] * (world_size - 1) + [3]
    functions: dict[str, Any] = {
        "gather": lambda t: funcol.all_gather_tensor_autograd(t, 0, group),
        "gather columns": lambda t: funcol.all_gather_tensor_autograd(t, 1, group),
        "reduce-scatter": lambda t: funcol.reduce_scatter_tensor_autograd(t, "sum", 0, group),
        "all-to-all": lambda t: funcol.all_to_all_single_autograd(t, None, None, group),
    }
    found = {}
    for name, function in functions.items():
        found[name], found[f"{name}, grad"] = _graded(rank, function, 2 * world_size, 3)
    received = [uneven[rank]] * world_size
    found["uneven"], found["uneven, grad"] = _graded(
        rank,
        lambda t: funcol.all_to_all_single_autograd(t, received, uneven, group),
        sum(uneven),
        2,
    )
    return found


def of_torch_distributed_nn(rank: int, world_size: int) -> dict[str, Tensor]:
    """The older functions with gradients."""
    group = _group()  # the default is the group that was the world when they were imported

    def pieces(tensor: Tensor) -> list[Tensor]:
        return [piece.contiguous() for piece in tensor.chunk(world_size)]

    def all_to_all(tensor: Tensor) -> Tensor:
        outputs = [torch.zeros_like(piece) for piece in pieces(tensor)]
        return torch.cat(nn_collectives.all_to_all(outputs, pieces(tensor), group))

    functions: dict[str, Any] = {
        "all_reduce": lambda t: nn_collectives.all_reduce(1.0 * t, group=group),
        "all_gather": lambda t: torch.cat(nn_collectives.all_gather(t, group)),
        "reduce_scatter": lambda t: nn_collectives.reduce_scatter(
            torch.zeros_like(pieces(t)[0]), pieces(t), group=group
        ),
        "all_to_all": all_to_all,
        "all_to_all_single": lambda t: nn_collectives.all_to_all_single(
            torch.zeros_like(t), t, group=group
        ),
        "broadcast": lambda t: nn_collectives.broadcast(1.0 * t, 0, group),
        "reduce": lambda t: nn_collectives.reduce(1.0 * t, world_size - 1, group=group),
        "gather": lambda t: torch.cat(nn_collectives.gather(t, 0, group)),
        "scatter": lambda t: nn_collectives.scatter(pieces(t), 0, group),
    }
    found = {}
    for name, function in functions.items():
        found[name], found[f"{name}, grad"] = _graded(rank, function, 2 * world_size, 3)
    if rank != world_size - 1:
        del found["reduce"]  # gloo leaves partial sums there
    return found


def messages(rank: int, world_size: int) -> dict[str, Tensor]:
    """Sends and receives as operators, one by one and batched."""
    group_name = _group().group_name
    operators: Any = torch.ops._c10d_functional
    ahead, behind = (rank + 1) % world_size, (rank - 1) % world_size
    sent, got = batch(rank, 0), torch.zeros(4, 6)
    received = operators.irecv(got, behind, 0, group_name)
    operators.wait_tensor(operators.isend(sent, ahead, 0, group_name))
    operators.wait_tensor(received)
    other = torch.zeros(4, 6)
    batched = operators.batch_p2p_ops(
        ["irecv", "isend"], [behind, ahead], [1, 1], [other, batch(rank, 1)], group_name
    )
    for tensor in batched:
        operators.wait_tensor(tensor)
    return {"one": got, "batched": other}
