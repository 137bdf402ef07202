"""Linear layers of which each rank holds a piece, by column or by row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ringcoll.runtime.collectives import as_group
from ringcoll.training.arguments import require
from ringcoll.training.split import conjugate

Collective = Callable[[Tensor], Tensor]
"""A pair of `conjugate`, on the ranks of a group."""


def shard_of(tensor: Tensor, group: Any, dim: int, what: str) -> Tensor:
    """Copy of this rank's piece of a tensor; ``what`` is the dimension's name for the error."""
    member = as_group(group)
    require(tensor.shape[dim] % member.size() == 0, "model",
            f"the {what} does not divide evenly among the ranks",
            f"a multiple of {member.size()}", tensor.shape[dim], member.rank())  # fmt: skip
    piece = conjugate.slice_of(tensor.detach(), group, dim)
    return piece.clone(memory_format=torch.contiguous_format)


class ColumnLinear(nn.Module):
    """Rows r of a linear layer's matrix; the output is split. Its input has been `copied`."""

    def __init__(self, whole: nn.Linear, group: Any) -> None:
        super().__init__()
        width = "width of the layer's output"
        self.weight = nn.Parameter(shard_of(whole.weight, group, 0, width))
        self.bias = None
        if whole.bias is not None:
            self.bias = nn.Parameter(shard_of(whole.bias, group, 0, width))

    def forward(self, inputs: Tensor) -> Tensor:
        """(..., inputs) to (..., outputs / k)."""
        return functional.linear(inputs, self.weight, self.bias)


class RowLinear(nn.Module):
    """Columns r of a linear layer's matrix; the input is split, and ``leave`` adds outputs up.

    With ``share`` the ranks add the bias to different tokens, so that its gradients are added up.
    """

    def __init__(
        self, whole: nn.Linear, group: Any, leave: Collective, *, share: bool = False
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(shard_of(whole.weight, group, 1, "width of the layer's input"))
        self.bias = None
        if whole.bias is not None:
            self.bias = nn.Parameter(whole.bias.detach().clone())
        self._leave, self._group, self._share = leave, group, share

    def forward(self, inputs: Tensor) -> Tensor:
        """(..., inputs / k) to (..., outputs)."""
        outputs = self._leave(functional.linear(inputs, self.weight))
        if self.bias is None:
            return outputs
        bias = conjugate.copied(self.bias, self._group) if self._share else self.bias
        return outputs + bias


def before(module: nn.Module, function: Collective) -> None:
    """Let the input of a module pass a function first."""
    module.register_forward_pre_hook(lambda _, inputs: (function(inputs[0]),))
