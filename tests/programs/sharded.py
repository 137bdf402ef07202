"""Models that the sharded optimizer trains, their data, and training on a pool of processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringcoll.training import ShardedAdamW, Transformer, TransformerShape, mlp, next_token_loss

__all__ = ["BUCKET_BYTES", "KINDS", "OPTIONS", "STEPS", "Loss", "on_process", "params_of", "train"]

STEPS = 20
BUCKET_BYTES = 2500  # 4 buckets of the perceptron, 4 of the transformer
SAMPLES = 24  # of the whole batch: a multiple of every world size
OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}

Loss = Callable[[nn.Module, int, int, int], Tensor]
"""Loss of a model on the share of a rank: (model, step, rank, world size)."""


def perceptron() -> nn.Module:
    return mlp(4, 17, seed=1, inputs=6, outputs=3).double()


def perceptron_loss(model: nn.Module, step: int, rank: int, world_size: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    targets = torch.randn(SAMPLES, 3, generator=generator, dtype=torch.float64)
    share = slice(rank, None, world_size)
    dtype = next(model.parameters()).dtype
    loss: Tensor = (model(inputs[share].to(dtype)) - targets[share].to(dtype)).square().mean()
    return loss


def transformer() -> nn.Module:
    return Transformer(
        TransformerShape(vocabulary=11, context=5, width=8, heads=2, layers=1), 1
    ).double()


def transformer_loss(model: nn.Module, step: int, rank: int, world_size: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(11, (SAMPLES, 6), generator=generator)[rank::world_size]
    return next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])


KINDS: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "mlp": (perceptron, perceptron_loss),
    "transformer": (transformer, transformer_loss),
}


def train(
    optimizer: ShardedAdamW, model: nn.Module, loss: Loss, group: Any, steps: Iterable[int]
) -> None:
    """Do steps; each rank takes its share of the batch."""
    for step in steps:
        torch.autograd.backward(loss(model, step, group.rank(), group.size()))
        optimizer.step()


def params_of(optimizer: ShardedAdamW, model: nn.Module) -> dict[str, Tensor]:
    """The parameters that the module itself has."""
    optimizer.gather()
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def on_process(stage: int, max_norm: float) -> dict[str, Tensor]:
    """Train the transformer on the default group."""
    model = transformer()
    optimizer = ShardedAdamW(
        model, stage=stage, bucket_bytes=BUCKET_BYTES, max_norm=max_norm, **OPTIONS
    )
    train(optimizer, model, transformer_loss, dist.group.WORLD, range(STEPS))
    return params_of(optimizer, model)
