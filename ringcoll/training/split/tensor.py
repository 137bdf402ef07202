"""Tensor-parallel training on the public functions: each layer is split over the ranks.

Problem: a layer is too large for one rank. Its matrix is split, each rank multiplies by its piece,
and a collective puts the results together. With ``y = x W^T`` there are two ways to split:

====== ==================== ============================= =====================================
split  rank r holds         forward                       backward
====== ==================== ============================= =====================================
column rows r of W          ``y_r = x W_r^T``             ``dx = sum_r dy_r W_r``: all-reduce
row    columns r of W       ``y = sum_r x_r W_r^T``:      ``dx_r = dy W_r``
                            all-reduce
====== ==================== ============================= =====================================

A column layer followed by a row layer needs no collective between them, as what one leaves split
the other one takes split. So a perceptron, and attention by heads, cost one all-reduce forward
and one backward, each of the layer's activations: batch x tokens x width numbers. The collectives between
the layers are in `ringcoll.training.split.conjugate`.

*Sequence parallel*: between the split layers (layer norms, the ways around) every rank would do
the same work on the same activations. Instead each rank keeps the activations of its share of the
tokens; `gathered_to_add` enters a split layer in place of `copied`, and `reduced_and_split` leaves
it in place of `reduced`. As many bytes travel, and 1/k of those activations is kept.

Source: Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
Parallelism", 2019; Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
Models", MLSys 2023 (sequence parallel).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

from ringcoll.collectives import as_group
from ringcoll.collectives import functions as api
from ringcoll.errors import ArgumentError
from ringcoll.training.checks import require
from ringcoll.training.models import Attention, Perceptron, Transformer
from ringcoll.training.split.conjugate import (
    copied,
    gathered_to_add,
    reduced,
    reduced_and_split,
    slice_of,
    split,
)

_Collective = Callable[[Tensor], Tensor]  # a pair of `conjugate`, on the ranks of a group


def shard_of(tensor: Tensor, group: Any, dim: int, what: str) -> Tensor:
    """Copy of this rank's piece of a tensor; ``what`` is the dimension's name for the error."""
    member = as_group(group)
    require(tensor.shape[dim] % member.size() == 0, "model",
            f"the {what} does not divide evenly among the ranks",
            f"a multiple of {member.size()}", tensor.shape[dim], member.rank())  # fmt: skip
    return slice_of(tensor.detach(), group, dim).clone(memory_format=torch.contiguous_format)


class ColumnLinear(nn.Module):
    """Rows r of a linear layer's matrix; the output is split. Its input has been `copied`."""

    def __init__(self, whole: nn.Linear, group: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(shard_of(whole.weight, group, 0, "width of the layer's output"))
        self.bias = None
        if whole.bias is not None:
            self.bias = nn.Parameter(shard_of(whole.bias, group, 0, "width of the layer's output"))

    def forward(self, inputs: Tensor) -> Tensor:
        """(..., inputs) to (..., outputs / k)."""
        return functional.linear(inputs, self.weight, self.bias)


class RowLinear(nn.Module):
    """Columns r of a linear layer's matrix; the input is split, and ``leave`` adds outputs up.

    With ``share`` the ranks add the bias to different tokens, so that its gradients are added up.
    """

    def __init__(
        self, whole: nn.Linear, group: Any, leave: _Collective, *, share: bool = False
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(shard_of(whole.weight, group, 1, "width of the layer's input"))
        self.bias = nn.Parameter(whole.bias.detach().clone())
        self._leave, self._group, self._share = leave, group, share

    def forward(self, inputs: Tensor) -> Tensor:
        """(..., inputs / k) to (..., outputs)."""
        bias = copied(self.bias, self._group) if self._share else self.bias
        return self._leave(functional.linear(inputs, self.weight)) + bias


class SharedNorm(nn.Module):
    """A layer norm of which each rank applies a copy to its own tokens."""

    def __init__(self, whole: nn.LayerNorm, group: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(whole.weight.detach().clone())
        self.bias = nn.Parameter(whole.bias.detach().clone())
        self._eps, self._group = whole.eps, group

    def forward(self, inputs: Tensor) -> Tensor:
        """(batch, tokens / k, width) to the same."""
        weight, bias = copied(self.weight, self._group), copied(self.bias, self._group)
        return functional.layer_norm(inputs, weight.shape, weight, bias, self._eps)


class VocabularyEmbedding(nn.Module):
    """An embedding of which each rank holds the vectors of a part of the vocabulary."""

    def __init__(self, whole: nn.Embedding, group: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(shard_of(whole.weight, group, 0, "vocabulary"))
        self._first = as_group(group).rank() * len(self.weight)
        self._group = group

    def forward(self, tokens: Tensor) -> Tensor:
        """(...) to (..., width): this rank's vectors, zeros for other tokens, added up."""
        local = tokens - self._first
        is_mine = (local >= 0) & (local < len(self.weight))
        vectors = functional.embedding(local.where(is_mine, 0), self.weight)
        return reduced(vectors * is_mine[..., None], self._group)


def _before(module: nn.Module, function: _Collective) -> None:
    module.register_forward_pre_hook(lambda _, inputs: (function(inputs[0]),))


def tensor_parallel(model: nn.Module, group: Any = None, *, sequence: bool = False) -> nn.Module:
    """Split the layers of a model, in place, and return it: this rank keeps its pieces.

    If the ranks do not divide the heads, a width, or the vocabulary, `ArgumentError` is raised.

    Parameters
    ----------
    model
        A `Transformer`, of which attention is split by heads, perceptrons by width, embedding
        and scores by vocabulary: it returns this rank's scores, for `vocabulary_loss`. Or an
        ``nn.Sequential``, of which linear layers are split in turn by column and by row; a last
        one that is alone stays whole. All ranks give the same weights.
    sequence
        Whether activations between the split layers are split by tokens; for a `Transformer`.
    """
    size = as_group(group).size()
    enter: _Collective = partial(copied, group=group)
    leave: _Collective = partial(reduced, group=group)
    if isinstance(model, nn.Sequential):
        children = model.named_children()
        linear = [(name, layer) for name, layer in children if isinstance(layer, nn.Linear)]
        pieces: dict[str, nn.Module] = {}  # all of them first: an error leaves the model as it is
        for (wide, column), (narrow, row) in zip(linear[::2], linear[1::2], strict=False):
            pieces[wide] = ColumnLinear(column, group)
            pieces[narrow] = RowLinear(row, group, leave)
            _before(pieces[wide], enter)
        for name, layer in pieces.items():
            setattr(model, name, layer)
        return model
    if not isinstance(model, Transformer):
        raise ArgumentError("cannot be split", argument="model",
                            expected="a Transformer or nn.Sequential", got=type(model))  # fmt: skip
    require(model.shape.heads % size == 0, "model",
            "the heads do not divide evenly among the ranks",
            f"a multiple of {size}", model.shape.heads, as_group(group).rank())  # fmt: skip
    if sequence:
        enter = partial(gathered_to_add, group=group)
        leave = partial(reduced_and_split, group=group)
    _split_embedding(model, group, enter)
    if sequence:
        model.embedding.register_forward_hook(lambda _, inputs, output: split(output, group, 1))
    for module in list(model.modules()):
        if isinstance(module, Attention):
            for name in ("query", "key", "value"):
                setattr(module, name, ColumnLinear(getattr(module, name), group))
            module.output = RowLinear(module.output, group, leave, share=sequence)  # type: ignore[assignment]
            _before(module, enter)
        elif isinstance(module, Perceptron):
            module.widen = ColumnLinear(module.widen, group)  # type: ignore[assignment]
            module.narrow = RowLinear(module.narrow, group, leave, share=sequence)  # type: ignore[assignment]
            _before(module, enter)
        for name, child in list(module.named_children()):
            if sequence and isinstance(child, nn.LayerNorm):
                setattr(module, name, SharedNorm(child, group))
    return model


def _split_embedding(model: Transformer, group: Any, enter: _Collective) -> None:
    tokens = VocabularyEmbedding(model.embedding.tokens, group)
    scores = ColumnLinear(model.head.scores, group)
    scores.weight = tokens.weight  # tied, as before
    model.embedding.tokens, model.head.scores = tokens, scores  # type: ignore[assignment]
    _before(scores, enter)


class _VocabularyLoss(Function):
    """Cross-entropy of scores that are split by vocabulary, (rows, vocabulary / k)."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, targets: Tensor, group: Any) -> Tensor:
        largest = scores.amax(-1)
        api.all_reduce(largest, dist.ReduceOp.MAX, group)
        powers = (scores - largest[:, None]).exp()
        local = targets - as_group(group).rank() * scores.shape[-1]
        is_mine = (local >= 0) & (local < scores.shape[-1])
        local = local.where(is_mine, 0)
        target_scores = scores.gather(1, local[:, None])[:, 0] * is_mine
        sums = torch.stack([powers.sum(-1), target_scores])
        api.all_reduce(sums, group=group)
        ctx.save_for_backward(powers / sums[0][:, None], local, is_mine)
        return (sums[0].log() + largest - sums[1]).mean()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        shares, local, is_mine = ctx.saved_tensors
        grad = shares.clone()  # softmax, minus one at the target
        grad[torch.arange(len(local), device=local.device), local] -= is_mine.to(grad.dtype)
        return grad * (grads[0] / len(local)), None, None


def vocabulary_loss(scores: Tensor, targets: Tensor, group: Any = None) -> Tensor:
    """Mean cross-entropy; no rank ever holds all scores.

    Scores are (..., vocabulary / k), this rank's part; targets are (...), tokens of the whole
    vocabulary. Two all-reduces: of the largest score of each token, and of two sums a token.
    """
    flat = scores.flatten(0, -2)
    loss: Tensor = _VocabularyLoss.apply(flat, targets.flatten(), group)  # type: ignore[no-untyped-call]
    return loss
