"""Models that are trained in a pipeline, and in one process, to be compared."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ringcoll.training import (
    Pipeline,
    PipelineReport,
    PipelineSchedule,
    Transformer,
    TransformerShape,
    mlp,
    next_token_loss,
    stages,
)

__all__ = ["MODELS", "Trained", "in_pipeline", "in_process", "on_processes"]

MODELS = ("mlp", "transformer")
_SAMPLES = 2  # of a micro-batch
_seeding = threading.Lock()  # ranks that are threads have one random generator


@dataclass(frozen=True)
class Trained:
    """What a training ends with; gradients (of the first step) and parameters by stage."""

    losses: list[float]
    grads: dict[int, list[Tensor]]
    params: dict[int, list[Tensor]]
    report: PipelineReport | None = None


def _model(name: str, num_stages: int) -> nn.Module:
    shape = TransformerShape(vocabulary=7, context=5, width=8, heads=2, layers=num_stages)
    with _seeding:
        if name == "mlp":
            return mlp(num_stages + 1, 6, seed=1, inputs=5, outputs=3).double()
        return Transformer(shape, seed=1).double()


def _loss(name: str) -> Any:
    return functional.cross_entropy if name == "mlp" else next_token_loss


def _batch(name: str, num_microbatches: int, step: int) -> tuple[Tensor, Tensor]:
    """Data that differ by step and sample."""
    generator = torch.Generator().manual_seed(100 + step)
    samples = _SAMPLES * num_microbatches
    if name == "mlp":
        inputs = torch.randn(samples, 5, dtype=torch.float64, generator=generator)
        return inputs, torch.randint(3, (samples,), generator=generator)
    tokens = torch.randint(7, (samples, 6), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def _optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(dict.fromkeys(params), lr=0.1, momentum=0.9)


def _copies(tensors: Any) -> list[Tensor]:
    return [torch.zeros(0) if tensor is None else tensor.detach().clone() for tensor in tensors]


@lru_cache
def in_process(name: str, num_stages: int, num_microbatches: int, steps: int) -> Trained:
    """Train on whole batches, without a pipeline."""
    model = _model(name, num_stages)
    cut = dict(enumerate(stages(model, num_stages)))
    optimizer, losses, grads = _optimizer(model.parameters()), [], {}
    for step in range(steps):
        optimizer.zero_grad()
        inputs, targets = _batch(name, num_microbatches, step)
        loss = _loss(name)(model(inputs), targets)
        torch.autograd.backward(loss)
        losses.append(loss.item())
        if step == 0:
            grads = {n: _copies(p.grad for p in part.parameters()) for n, part in cut.items()}
        optimizer.step()
    return Trained(losses, grads, {n: _copies(part.parameters()) for n, part in cut.items()})


def in_pipeline(group: Any, name: str, schedule: PipelineSchedule, steps: int) -> Trained:
    """Train on one rank of a pipeline."""
    rank, last = group.rank(), schedule.world_size - 1
    mine = stages(_model(name, schedule.world_size), schedule.world_size)[rank]
    tied: Any = None
    if name == "transformer" and rank in (0, last):
        table: Any = mine[0].tokens if rank == 0 else mine[-1].scores
        tied = table.weight
    pipeline = Pipeline(mine, _loss(name), schedule, group, tied=tied)
    optimizer, losses, grads = _optimizer(mine.parameters()), [], {}
    for step in range(steps):
        optimizer.zero_grad()
        inputs, targets = _batch(name, schedule.num_microbatches, step)
        losses.append(
            pipeline.step(
                inputs if rank == 0 or step == 0 else None,
                targets if rank == last or step == 0 else None,
            ).item()
        )
        if step == 0:
            grads = {rank: _copies(p.grad for p in mine.parameters())}
        optimizer.step()
    params = {rank: _copies(mine.parameters())}
    return Trained(losses, grads, params, pipeline.last_step)


def on_processes(cases: list[tuple[str, PipelineSchedule]], steps: int) -> list[Trained]:
    """Train on the default group, for each model and schedule."""
    import torch.distributed as dist

    return [in_pipeline(dist.group.WORLD, name, schedule, steps) for name, schedule in cases]
