"""What is trained: models, their data, and a task, which is the same on all ranks.

The models are a perceptron, and a small decoder-only transformer. Both are chains: `stages` cuts a
model into modules, of which each takes what the one before returns. So a pipeline of any of them is
a list of modules, and no system has to know a model. The transformer is that of GPT-2: attention
and a perceptron in each block, a layer norm before each, learned positions, and an output matrix
that is the matrix of the embedding (*tied*).

The data are handwritten digits, scikit-learn's 1797 pictures of 8 x 8 pixels; and the text of
Python's own help (`pydoc_data.topics`), some 460 KiB of English that each Python brings: a token is
a character. Every order and every split is the same on all ranks and in all runs.

Source: Vaswani et al., "Attention Is All You Need", NeurIPS 2017; Radford et al., "Language
Models are Unsupervised Multitask Learners", 2019; Press and Wolf, "Using the Output Embedding to
Improve Language Models", EACL 2017 (tied embeddings).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from itertools import chain, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ringcoll.errors import MissingExtraError
from ringcoll.training.model_on_ranks import require
from ringcoll.training.names import LAYERS, LEARNING_RATES, MODELS

_MOMENTUM = 0.9
_DTYPE = torch.float32  # of models and data, whatever the default
_HEADS = 4
_TEST_SHARE = 0.2  # of the pictures, or of the text, kept for the test

AttentionFunction = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of queries, keys and values, each (batch, heads, tokens, width of a head)."""

# --- models -----------------------------------------------------------------------------------


_drawing = threading.Lock()


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Draw first weights: the same in every thread, and the user's generator stays as it is."""
    with _drawing, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def mlp(
    layers: int, width: int, seed: int, *, inputs: int = 64, outputs: int = 10
) -> nn.Sequential:
    """A perceptron with ReLU between its linear layers, by default from 64 pixels to 10 digits."""
    sizes = [inputs, *[width] * (layers - 1), outputs]
    with _seeded(seed):
        linear = [nn.Linear(before, after, dtype=_DTYPE) for before, after in pairwise(sizes)]
    layers_and_relus = [module for layer in linear for module in (layer, nn.ReLU())]
    return nn.Sequential(*layers_and_relus[:-1])


@dataclass(frozen=True)
class TransformerShape:
    """Sizes of a transformer.

    Number of different tokens; tokens of a sequence, at most; numbers that stand for a token
    between the blocks; heads of the attention, which share the width evenly; number of blocks.
    """

    vocabulary: int
    context: int = 64
    width: int = 64
    heads: int = 4
    layers: int = 4

    def __post_init__(self) -> None:
        require(self.width % self.heads == 0, "heads", "the heads do not share the width evenly",
                f"a divisor of {self.width}", self.heads)  # fmt: skip


def causal_attention(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attention in which a token sees itself and the tokens before it.

    ``softmax(q k^T / sqrt(width)) v``, with the scores of later tokens at minus infinity; all are
    (batch, heads, tokens, width of a head).
    """
    scores = queries @ keys.transpose(-2, -1) / queries.shape[-1] ** 0.5
    tokens = queries.shape[-2]
    later = torch.ones(tokens, tokens, dtype=torch.bool, device=queries.device).triu(1)
    output: Tensor = scores.masked_fill(later, float("-inf")).softmax(-1) @ values
    return output


class Attention(nn.Module):
    """Self-attention; query, key and value are layers of their own, to be split by heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.attention: AttentionFunction = causal_attention
        self.query, self.key, self.value = (nn.Linear(width, width, dtype=_DTYPE) for _ in range(3))
        self.output = nn.Linear(width, width, dtype=_DTYPE)

    def forward(self, inputs: Tensor) -> Tensor:
        """(batch, tokens, width) to the same."""
        by_heads = (
            layer(inputs).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        output: Tensor = self.output(self.attention(*by_heads).transpose(1, 2).flatten(-2))
        return output


class Perceptron(nn.Module):
    """The perceptron of a block: four times as wide in the middle, with GELU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.widen, self.narrow = (
            nn.Linear(width, 4 * width, dtype=_DTYPE),
            nn.Linear(4 * width, width, dtype=_DTYPE),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """Apply it to each token."""
        output: Tensor = self.narrow(functional.gelu(self.widen(inputs)))
        return output


class Block(nn.Module):
    """A block: attention and a perceptron, each behind a layer norm and beside a way around."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(shape.width, dtype=_DTYPE)
        self.attention = Attention(shape.width, shape.heads)
        self.perceptron_norm = nn.LayerNorm(shape.width, dtype=_DTYPE)
        self.perceptron = Perceptron(shape.width)

    def forward(self, inputs: Tensor) -> Tensor:
        """(batch, tokens, width) to the same."""
        inputs = inputs + self.attention(self.attention_norm(inputs))
        output: Tensor = inputs + self.perceptron(self.perceptron_norm(inputs))
        return output


class Embedding(nn.Module):
    """The vectors of tokens and of their positions, ``places``, if these are not 0, 1, 2, ..."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width, dtype=_DTYPE)
        self.positions = nn.Embedding(shape.context, shape.width, dtype=_DTYPE)
        self.places: Tensor | None = None
        for table in (self.tokens, self.positions):  # so that the tied scores are small at first
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, tokens) to (batch, tokens, width)."""
        places = self.places
        places = torch.arange(tokens.shape[1], device=tokens.device) if places is None else places
        output: Tensor = self.tokens(tokens) + self.positions(places)
        return output


class Head(nn.Module):
    """A last layer norm, and a score for each token of the vocabulary; the matrix may be tied."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(shape.width, dtype=_DTYPE)
        self.scores = nn.Linear(shape.width, shape.vocabulary, bias=False, dtype=_DTYPE)

    def forward(self, inputs: Tensor) -> Tensor:
        """(batch, tokens, width) to scores, (batch, tokens, vocabulary)."""
        output: Tensor = self.scores(self.norm(inputs))
        return output


class Transformer(nn.Module):
    """A decoder-only transformer, from tokens to the scores of the next tokens."""

    def __init__(self, shape: TransformerShape, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape
        with _seeded(seed):
            self.embedding = Embedding(shape)
            self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
            self.head = Head(shape)
        self.head.scores.weight = self.embedding.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, tokens) to scores, (batch, tokens, vocabulary)."""
        inner = self.embedding(tokens)
        for block in self.blocks:
            inner = block(inner)
        scores: Tensor = self.head(inner)
        return scores


def next_token_loss(scores: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of scores, (..., vocabulary), and of tokens, (...)."""
    return functional.cross_entropy(scores.flatten(0, -2), targets.flatten())


def stages(model: nn.Module, num_stages: int) -> list[nn.Sequential]:
    """Cut a chain of modules into stages, with layers shared out as evenly as possible.

    The model is a `Transformer`, or an ``nn.Sequential``. The stages hold its own modules, no
    copies. A module without parameters, such as ReLU, stays with the layer before it. More stages
    than layers raise `ArgumentError`.
    """
    if isinstance(model, Transformer):
        layers: list[list[nn.Module]] = [[block] for block in model.blocks]
        layers[0].insert(0, model.embedding)
        layers[-1].append(model.head)
    else:
        layers = []
        for module in model.children():
            if layers and not any(True for _ in module.parameters()):
                layers[-1].append(module)
            else:
                layers.append([module])
    require(1 <= num_stages <= len(layers), "num_stages", "a stage would have no layers",
            f"1 to {len(layers)}", num_stages)  # fmt: skip
    ends = [len(layers) * stage // num_stages for stage in range(num_stages + 1)]
    return [nn.Sequential(*chain.from_iterable(layers[a:b])) for a, b in pairwise(ends)]


# --- data -------------------------------------------------------------------------------------


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
    steps = num_samples // (batch * world_size)
    require(steps > 0, "batch", "a step of all ranks needs more samples than there are",
            f"at most {num_samples // world_size}", batch)  # fmt: skip
    order = torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed), device="cpu")
    return order[: steps * world_size * batch].view(steps, world_size, batch)[:, rank]


# --- a task -----------------------------------------------------------------------------------


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

    def make_optimizer(
        self, params: Iterable[Tensor], lr: float | None = None
    ) -> torch.optim.Optimizer:
        """The optimizer, of some parameters; ``lr`` replaces the task's learning rate."""
        lr = self.learning_rate if lr is None else lr
        if self.optimizer == "sgd":
            return torch.optim.SGD(params, lr, momentum=_MOMENTUM)
        return torch.optim.AdamW(params, lr)
