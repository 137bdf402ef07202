"""Layers of which each rank holds a piece, for `ringcoll.training.split.tensor`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ringcoll.collectives.groups import as_group
from ringcoll.training.checks import require
from ringcoll.training.split.conjugate import (
    copied,
    reduced,
    slice_of,
)

__all__ = ["ColumnLinear", "RowLinear", "SharedNorm", "VocabularyEmbedding", "shard_of"]


def shard_of(tensor: Tensor, group: Any, dim: int, what: str) -> Tensor:
    """Copy of this rank's piece of a tensor.

    Parameters
    ----------
    tensor
        The whole tensor.
    group
        Group of the ranks that share it.
    dim
        The dimension that is split evenly.
    what
        Name of that dimension, for the error.

    Raises
    ------
    ArgumentError
        The ranks do not divide it.
    """
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
    """Columns r of a linear layer's matrix; the input is split, and outputs are added up.

    Parameters
    ----------
    whole
        The layer.
    group
        Group of the ranks that share it.
    leave
        What adds up: `reduced`, or `reduced_and_split`.
    share
        Whether the ranks add the bias to different tokens, so that its gradients are added up.
    """

    def __init__(
        self,
        whole: nn.Linear,
        group: Any,
        leave: Callable[[Tensor], Tensor],
        *,
        share: bool = False,
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
        """(...) to (..., width): this rank's vectors, zeros for the other ranks' tokens, added up."""
        local = tokens - self._first
        is_mine = (local >= 0) & (local < len(self.weight))
        vectors = functional.embedding(local.where(is_mine, 0), self.weight)
        return reduced(vectors * is_mine[..., None], self._group)
