"""The data that models are trained on: digits, and a text.

The digits are scikit-learn's 1797 pictures of 8 x 8 pixels. The text is that of Python's own help
(`pydoc_data.topics`), some 460 KiB of English that each Python brings: a token is a character.
Every order and every split is the same on all ranks and in all runs.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringcoll.errors import MissingExtraError
from ringcoll.training.arguments import require

_TEST_SHARE = 0.2  # of the pictures, or of the text, kept for the test


class Examples(NamedTuple):
    """Inputs and targets, to train on and to test on: a row each.

    Of digits the inputs are rows of standardised pixels, and the targets are the digits. Of a text
    the inputs are rows of tokens, and the targets are the tokens that follow them.
    """

    train_inputs: Tensor
    train_targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor


class Text(NamedTuple):
    """A text as numbers of characters, and the characters."""

    tokens: Tensor
    characters: str

    def read(self, tokens: Tensor) -> str:
        """The characters of some tokens."""
        return "".join(self.characters[token] for token in tokens.tolist())


def load_digits() -> Examples:
    """The digits, split and in an order that never changes; each pixel standardised.

    Without scikit-learn `MissingExtraError` is raised.
    """
    try:
        datasets: Any = import_module("sklearn.datasets")
    except ImportError as error:
        raise MissingExtraError(
            "the digits are scikit-learn's, which comes with ringcoll[train]: "
            "pip install 'ringcoll[train]'"
        ) from error
    pictures, digits = datasets.load_digits(return_X_y=True)
    order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0), device="cpu")
    inputs, targets = torch.from_numpy(pictures).float()[order], torch.from_numpy(digits)[order]
    tested = round(_TEST_SHARE * len(digits))
    deviation, mean = torch.std_mean(inputs[tested:], dim=0)
    # Some pixels are hardly ever inked; a rare inked pixel must not outweigh all others.
    inputs = (inputs - mean) / deviation.clamp_min(1.0)
    return Examples(inputs[tested:], targets[tested:], inputs[:tested], targets[:tested])


def load_text() -> Text:
    """The text of Python's help, its topics in alphabetical order; only ASCII is kept.

    If this Python was installed without it, `MissingExtraError` is raised.
    """
    try:
        topics: dict[str, str] = import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise MissingExtraError("this Python was installed without pydoc_data") from error
    whole = "\n\n".join(topics[name] for name in sorted(topics))
    text = whole.encode("ascii", "ignore").decode()
    characters = "".join(sorted(set(text)))
    numbers = {character: number for number, character in enumerate(characters)}
    return Text(torch.tensor([numbers[character] for character in text], device="cpu"), characters)


def windows(text: Text, context: int, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Pieces of a text, and for each token the token that follows it: each (count, context).

    A text without ``context`` + 1 tokens raises `ArgumentError`. ``seed`` is that of the places,
    which are drawn with equal chances.
    """
    last = len(text.tokens) - context - 1
    most = f"at most {len(text.tokens) - 1}"
    require(last >= 0, "context", "the text is too short", most, context)
    chance = torch.Generator().manual_seed(seed)
    starts = torch.randint(last + 1, (count, 1), generator=chance, device="cpu")
    places = starts + torch.arange(context, device="cpu")
    return text.tokens[places], text.tokens[places + 1]


def text_examples(context: int, num_train: int = 1024, num_test: int = 128) -> Examples:
    """Pieces of the text of `load_text`; those of the test are from its last fifth."""
    text = load_text()
    end = round((1 - _TEST_SHARE) * len(text.tokens))
    train = windows(text._replace(tokens=text.tokens[:end]), context, num_train, seed=0)
    test = windows(text._replace(tokens=text.tokens[end:]), context, num_test, seed=1)
    return Examples(*train, *test)


def batches_of_all(num_samples: int, batch: int, seed: int, world_size: int) -> Tensor:
    """The `batches` of all ranks: indices, (steps, ranks, batch)."""
    steps = num_samples // (batch * world_size)
    require(steps > 0, "batch", "a step of all ranks needs more samples than there are",
            f"at most {num_samples // world_size}", batch)  # fmt: skip
    order = torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed), device="cpu")
    return order[: steps * world_size * batch].view(steps, world_size, batch)


def batches(num_samples: int, batch: int, seed: int, rank: int, world_size: int) -> Tensor:
    """Choose the samples that a rank sees in an epoch: indices, (steps, batch).

    All ranks have equally many samples, no sample is on two ranks, and a remainder is left out.

    Parameters
    ----------
    num_samples
        Number of samples; fewer than in one step of all ranks raise `ArgumentError`.
    batch
        Samples in a step of one rank.
    seed
        Seed of the order; another one for each epoch.
    """
    return batches_of_all(num_samples, batch, seed, world_size)[:, rank]
