"""Small models, data and training loops that the programs share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["WIDTH", "batch", "mlp", "state", "train"]

WIDTH = 6


def mlp(*, hidden: int = 8, seed: int = 7) -> nn.Sequential:
    """Three layers; the same on all ranks."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(WIDTH, hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.Tanh(),
        nn.Linear(hidden, 3),
    )


def batch(rank: int, step: int, *, numel: int = 4, width: int = WIDTH) -> Tensor:
    """Data that differ by rank, step and index."""
    generator = torch.Generator().manual_seed(1000 * rank + step + 1)
    return torch.randn(numel, width, generator=generator)


def train(
    model: Callable[[Tensor], Tensor],
    parameters: Iterable[Tensor],
    rank: int,
    *,
    steps: int = 3,
    optimizer: Any = None,
) -> list[Tensor]:
    """Some steps of SGD; returns the losses."""
    optimizer = optimizer or torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(batch(rank, step)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, gradients and buffers, by name."""
    found = {f"buffer {name}": value for name, value in model.named_buffers()}
    for name, parameter in model.named_parameters():
        found[name] = parameter
        if parameter.grad is not None:
            found[f"grad {name}"] = parameter.grad
    return found
