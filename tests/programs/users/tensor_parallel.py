"""Users of DTensor: redistribution, tensor parallelism, and pipelines."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from tests.programs.users.models import WIDTH, batch, mlp


def _mesh(world_size: int) -> Any:
    return init_device_mesh("cpu", (world_size,))


def _full(tensor: Any) -> Tensor:
    full: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full


def redistribute(rank: int, world_size: int) -> dict[str, Tensor]:
    """From every placement to every other that can be reached, with uneven shards."""
    mesh = _mesh(world_size)
    whole = batch(0, 0, numel=7, width=5)
    own = batch(rank, 1, numel=7, width=5)
    sources = {
        "rows": distribute_tensor(whole, mesh, [Shard(0)]),
        "columns": distribute_tensor(whole, mesh, [Shard(1)]),
        "whole": distribute_tensor(whole, mesh, [Replicate()]),
        "sum": DTensor.from_local(own, mesh, [Partial("sum")]),
        "avg": DTensor.from_local(own, mesh, [Partial("avg")]),
        "max": DTensor.from_local(own, mesh, [Partial("max")]),
    }
    targets = {"rows": Shard(0), "columns": Shard(1), "whole": Replicate()}
    found = {}
    for (source, tensor), (target, placement) in itertools.product(
        sources.items(), targets.items()
    ):
        placed = tensor.redistribute(mesh, [placement])
        found[f"{source} to {target}"] = placed.to_local()
        found[f"{source} to {target}, full"] = placed.full_tensor()
    return found


def redistribute_and_back(rank: int, world_size: int) -> dict[str, Tensor]:
    """Gradients are redistributed the other way."""
    mesh = _mesh(world_size)
    leaf: Any = distribute_tensor(batch(0, 0, numel=7, width=5), mesh, [Shard(0)])
    leaf.requires_grad_()
    whole = leaf.redistribute(mesh, [Replicate()])
    local = whole.to_local(grad_placements=[Partial()])
    (local * (rank + 1)).square().sum().backward()
    return {"grad": leaf.grad.to_local(), "full": _full(leaf.grad)}


def redistribute_on_a_plane(rank: int, world_size: int) -> dict[str, Tensor]:
    """The same on a mesh of two dimensions, also one dimension after the other."""
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("a", "b"))
    tensor = distribute_tensor(batch(0, 0, numel=6, width=5), mesh, [Shard(0), Shard(1)])
    found = {"start": tensor.to_local()}
    turns: list[list[Placement]] = [
        [Shard(0), Shard(0)],
        [Replicate(), Shard(1)],
        [Shard(1), Replicate()],
        [Shard(1), Shard(0)],
    ]
    for number, placements in enumerate(turns):
        tensor = tensor.redistribute(mesh, placements)
        found[f"step {number}"] = tensor.to_local()
    product: Any = tensor @ distribute_tensor(
        batch(0, 1, numel=5, width=3), mesh, [Shard(0), Replicate()]
    )
    found["product"] = product.full_tensor()
    found["sum"] = _full(product.sum())
    return found


def operators(rank: int, world_size: int) -> dict[str, Tensor]:
    """Operators that communicate by themselves."""
    mesh = _mesh(world_size)
    left = distribute_tensor(batch(0, 0, numel=6, width=8), mesh, [Shard(1)])
    right = distribute_tensor(batch(0, 1, numel=8, width=5), mesh, [Shard(0)])
    product: Any = left @ right
    return {
        "product": product.full_tensor(),
        "softmax": _full(torch.softmax(left, dim=1)),
        "mean": _full(left.mean()),
        "max": _full(left.amax(dim=1)),
        "norm": _full(torch.linalg.vector_norm(left)),
    }


def _train(model: Any, inputs: list[Tensor], parameters: Any) -> dict[str, Tensor]:
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    losses = []
    for item in inputs:
        optimizer.zero_grad()
        loss = _full(model(item)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    found = {name: _full(value) for name, value in model.named_parameters()}
    return {**found, "losses": torch.stack(losses)}


def tensor_parallel(rank: int, world_size: int) -> dict[str, Tensor]:
    """By columns, then by rows."""
    plan: dict[str, Any] = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model = parallelize_module(mlp(hidden=12), _mesh(world_size), plan)
    return _train(model, [batch(0, step) for step in range(3)], model.parameters())


class _Block(nn.Module):
    """A normalisation and two layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.down(torch.relu(self.up(self.norm(inputs))))
        return result


def sequence_parallel(rank: int, world_size: int) -> dict[str, Tensor]:
    """The normalisation on shards of the sequence, gathered before and scattered after."""
    torch.manual_seed(3)
    mesh = _mesh(world_size)
    plan: dict[str, Any] = {
        "": PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),)),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    model = parallelize_module(_Block(12), mesh, plan)
    inputs = [batch(0, step, numel=2 * 12, width=12).reshape(2, 12, 12) for step in range(3)]
    return _train(model, inputs, model.parameters())


class _Words(nn.Module):
    """An embedding and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.output = nn.Linear(8, 12)

    def forward(self, words: Tensor) -> Tensor:
        result: Tensor = self.output(self.embedding(words))
        return result


def parallel_loss(rank: int, world_size: int) -> dict[str, Tensor]:
    """An embedding by rows, and a cross entropy over classes that are sharded."""
    torch.manual_seed(4)
    plan: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "output": ColwiseParallel(use_local_output=False),
    }
    model = parallelize_module(_Words(), _mesh(world_size), plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(2):
        words = (torch.arange(6) * (step + 2)) % 12
        optimizer.zero_grad()
        with loss_parallel():
            loss = nn.functional.cross_entropy(model(words), (words + 1) % 12)
            loss.backward()
        optimizer.step()
        losses.append(_full(loss).detach())
    found = {name: _full(value) for name, value in model.named_parameters()}
    return {**found, "losses": torch.stack(losses)}


def sharded_and_tensor_parallel(rank: int, world_size: int) -> dict[str, Tensor]:
    """Data parallel with shards in one dimension of the mesh, tensor parallel in the other."""
    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("data", "tensor"))
    plan: dict[str, Any] = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model: Any = parallelize_module(mlp(hidden=12), mesh["tensor"], plan)
    fully_shard(model, mesh=mesh["data"])
    shard = mesh["data"].get_local_rank()
    return _train(model, [batch(shard, step) for step in range(3)], model.parameters())


# --- pipelines ------------------------------------------------------------------------


def _stages(world_size: int, count: int) -> list[nn.Module]:
    torch.manual_seed(5)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count)]


def _pipeline(rank: int, world_size: int, schedule: Any, each: int) -> dict[str, Tensor]:
    modules = _stages(world_size, each * world_size)
    own = [rank + turn * world_size for turn in range(each)]
    count = len(modules)
    stages = [PipelineStage(modules[index], index, count, torch.device("cpu")) for index in own]
    microbatches = 2 * world_size
    runs = schedule(
        stages if each > 1 else stages[0],
        n_microbatches=microbatches,
        loss_fn=lambda output, target: (output - target).square().mean(),
    )
    inputs, target = batch(0, 0, numel=2 * microbatches), batch(1, 0, numel=2 * microbatches)
    found: dict[str, Tensor] = {}
    for step in range(2):
        losses: list[Tensor] = []
        arguments = (inputs,) if 0 in own else ()
        last = count - 1 in own
        output = runs.step(
            *arguments, target=target if last else None, losses=losses if last else None
        )
        if last:
            found[f"output {step}"] = output
            found[f"losses {step}"] = torch.stack(losses)
    for index in own:
        for name, parameter in modules[index].named_parameters():
            assert parameter.grad is not None
            found[f"grad {index} {name}"] = parameter.grad
    return found


def pipeline_gpipe(rank: int, world_size: int) -> dict[str, Tensor]:
    """All forward passes, then all backward passes."""
    return _pipeline(rank, world_size, ScheduleGPipe, 1)


def pipeline_1f1b(rank: int, world_size: int) -> dict[str, Tensor]:
    """One forward, one backward."""
    return _pipeline(rank, world_size, Schedule1F1B, 1)


def pipeline_interleaved(rank: int, world_size: int) -> dict[str, Tensor]:
    """Two stages a rank."""
    return _pipeline(rank, world_size, ScheduleInterleaved1F1B, 2)


def pipeline_zero_bubble(rank: int, world_size: int) -> dict[str, Tensor]:
    """Two stages a rank, and the gradients of weights put off."""
    return _pipeline(rank, world_size, ScheduleInterleavedZeroBubble, 2)
