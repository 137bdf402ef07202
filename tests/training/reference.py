"""Training in one process, and how far a split model is from it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from ringcoll.training import Transformer, TransformerShape, mlp, next_token_loss

__all__ = ["SHAPE", "far", "perceptron", "samples", "tokens", "train", "transformer"]

SHAPE = TransformerShape(vocabulary=16, context=16, width=32, heads=8, layers=2)


def transformer(shape: TransformerShape = SHAPE) -> Transformer:
    """A small transformer in float64, always the same."""
    return Transformer(shape, seed=5).double()


def perceptron(layers: int = 4, width: int = 24) -> nn.Sequential:
    """A small perceptron in float64, always the same."""
    return mlp(layers, width, seed=5, inputs=12, outputs=6).double()


def tokens(step: int, batch: int = 4, shape: TransformerShape = SHAPE) -> tuple[Tensor, Tensor]:
    """Tokens and their next tokens, for a step of all ranks."""
    generator = torch.Generator().manual_seed(100 + step)
    drawn = torch.randint(shape.vocabulary, (batch, shape.context + 1), generator=generator)
    return drawn[:, :-1], drawn[:, 1:]


def samples(step: int, batch: int = 24) -> tuple[Tensor, Tensor]:
    """Rows of 12 numbers and their classes, for a step of all ranks."""
    generator = torch.Generator().manual_seed(100 + step)
    rows = torch.randn(batch, 12, generator=generator, dtype=torch.float64)
    return rows, torch.randint(6, (batch,), generator=generator)


def train(
    model: nn.Module,
    data: Callable[[int], tuple[Tensor, Tensor]],
    steps: int = 20,
    loss: Callable[[Tensor, Tensor], Tensor] = next_token_loss,
) -> list[float]:
    """AdamW on a model; the loss of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        inputs, targets = data(step)
        optimizer.zero_grad()
        value = loss(model(inputs), targets)
        torch.autograd.backward(value)
        optimizer.step()
        losses.append(value.item())
    return losses


def far(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Largest distance of two tensors of a pair, relative to the second one's largest element."""
    return max(
        float((left.detach() - right.detach()).abs().max() / right.detach().abs().max())
        for left, right in copy.copy(list(pairs))
    )
