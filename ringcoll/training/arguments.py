"""Arguments of training systems: known names, usual values, the error of a wrong one; no torch."""

from __future__ import annotations

from ringcoll.errors import ArgumentError

MODELS = ("perceptron", "transformer")
"""The models by name: a perceptron reads digits, a transformer continues a text."""
LEARNING_RATES = {"sgd": 0.02, "adamw": 0.002}
"""The optimizers by name, each with the learning rate that is used if none is given."""
LAYERS = 4
"""Layers of a model, if none are given."""
GRAPHS = ("ring", "exponential")
"""The graphs of gossip by name: which ranks average with each other."""
MICROBATCHES = 4
"""Micro-batches of a step of the trainers with a pipeline."""


def require(
    holds: bool, argument: str, message: str, expected: object, got: object, rank: int | None = None
) -> None:
    """Raise `ArgumentError` unless a value is as a system needs it."""
    if not holds:
        raise ArgumentError(message, rank=rank, argument=argument, expected=expected, got=got)
