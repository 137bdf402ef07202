"""A task, which is the same on all ranks: a model, its data, and how it learns."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ringcoll.training.arguments import LAYERS, LEARNING_RATES, MODELS, require
from ringcoll.training.examples import Examples, batches_of_all, load_digits, text_examples
from ringcoll.training.models import Transformer, TransformerShape, mlp

_MOMENTUM = 0.9
_HEADS = 4


@dataclass(frozen=True)
class Task:
    """A model, its data, and how it learns.

    Parameters
    ----------
    model
        A name in `MODELS`.
    examples
        Data of that model; see `Task.load`.
    layers, width
        Layers of the model, and neurons of a hidden layer, or numbers for a token.
    batch
        Samples in a step, for each rank.
    optimizer, lr
        A name in `LEARNING_RATES`, and the learning rate, ``None`` for the rate given there. SGD
        has momentum 0.9.
    seed
        Seed of the first weights and of the order of the samples.
    """

    model: str
    examples: Examples
    layers: int = LAYERS
    width: int = 256
    batch: int = 32
    optimizer: str = "sgd"
    lr: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for argument, known in (("model", MODELS), ("optimizer", LEARNING_RATES)):
            value = getattr(self, argument)
            require(value in known, argument, "not known", " or ".join(known), value)
        for argument in ("layers", "width", "batch"):
            value = getattr(self, argument)
            require(value >= 1, argument, "must be positive", "at least 1", value)
        rate = self.learning_rate
        require(0 < rate < math.inf, "lr", "not a learning rate", "> 0, finite", rate)

    @property
    def learning_rate(self) -> float:
        """The learning rate."""
        return LEARNING_RATES[self.optimizer] if self.lr is None else self.lr

    @staticmethod
    def load(model: str, context: int = 32) -> Examples:
        """The data of a model: digits, or pieces of a text with so many tokens each."""
        return load_digits() if model == "perceptron" else text_examples(context)

    @property
    def shape(self) -> TransformerShape:
        """The sizes of the transformer; the heads have to divide the width."""
        largest = max(int(tokens.max()) for tokens in self.examples)
        # A multiple of 16, as is usual: matrix products of such sizes are faster.
        vocabulary, context = (largest // 16 + 1) * 16, self.examples.train_inputs.shape[1]
        return TransformerShape(vocabulary, context, self.width, _HEADS, self.layers)

    def make(self) -> nn.Module:
        """The model with its first weights, on the CPU, the same in every call on every rank."""
        with torch.device("cpu"):
            if self.model == "perceptron":
                return mlp(self.layers, self.width, self.seed)
            return Transformer(self.shape, self.seed)

    def epoch(self, number: int, world_size: int) -> Tensor:
        """The samples of all ranks in an epoch: indices, (steps, ranks * batch)."""
        num_samples = len(self.examples.train_inputs)
        seed = self.seed + 1000 * number
        return batches_of_all(num_samples, self.batch, seed, world_size).flatten(1)

    def make_optimizer(
        self, params: Iterable[Tensor], lr: float | None = None
    ) -> torch.optim.Optimizer:
        """The optimizer, of some parameters; ``lr`` replaces the task's learning rate."""
        lr = self.learning_rate if lr is None else lr
        if self.optimizer == "sgd":
            return torch.optim.SGD(params, lr, momentum=_MOMENTUM)
        return torch.optim.AdamW(params, lr)
