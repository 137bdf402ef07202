"""The models that are trained: a perceptron, and a small decoder-only transformer.

Both are chains: `stages` cuts a model into modules, of which each takes what the one before
returns. So a pipeline of any of them is a list of modules, and no system has to know a model. The
transformer is that of GPT-2: attention and a perceptron in each block, a layer norm before each,
learned positions, and an output matrix that is the matrix of the embedding (*tied*).

Source: Vaswani et al., "Attention Is All You Need", NeurIPS 2017; Radford et al., "Language
Models are Unsupervised Multitask Learners", 2019; Press and Wolf, "Using the Output Embedding to
Improve Language Models", EACL 2017 (tied embeddings).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from ringcoll.training.arguments import require

_DTYPE = torch.float32  # whatever the default dtype is

AttentionFunction = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of queries, keys and values, each (batch, heads, tokens, width of a head)."""

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
