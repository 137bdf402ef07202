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
and one backward, each of the layer's activations: batch x tokens x width numbers. The collectives
between the layers are in `ringcoll.training.split.conjugate`.

Source: Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
Parallelism", 2019.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ringcoll.errors import ArgumentError
from ringcoll.runtime.collectives import as_group
from ringcoll.training.arguments import require
from ringcoll.training.models import Attention, Perceptron, Transformer
from ringcoll.training.split import conjugate
from ringcoll.training.split.sequence import keep_own_tokens

_Collective = Callable[[Tensor], Tensor]  # a pair of `conjugate`, on the ranks of a group


def _shard_of(tensor: Tensor, group: Any, dim: int, what: str) -> Tensor:
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
        self.weight = nn.Parameter(_shard_of(whole.weight, group, 0, width))
        self.bias = None
        if whole.bias is not None:
            self.bias = nn.Parameter(_shard_of(whole.bias, group, 0, width))

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
        self.weight = nn.Parameter(_shard_of(whole.weight, group, 1, "width of the layer's input"))
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


def _before(module: nn.Module, function: _Collective) -> None:
    module.register_forward_pre_hook(lambda _, inputs: (function(inputs[0]),))


def tensor_parallel(model: nn.Module, group: Any = None, *, sequence: bool = False) -> nn.Module:
    """Split the layers of a model, in place, and return it: this rank keeps its pieces.

    If the ranks do not divide the heads, or a width, `ArgumentError` is raised.

    Parameters
    ----------
    model
        A `Transformer`, of which attention is split by heads and perceptrons by width; embedding
        and scores stay whole. Or an ``nn.Sequential``, of which linear layers are split in turn by
        column and by row; a last one that is alone stays whole. All ranks give the same weights,
        and get the outputs of the whole model.
    sequence
        Whether activations between the split layers are split by tokens; for a `Transformer`.
    """
    size = as_group(group).size()
    enter: _Collective = partial(conjugate.copied, group=group)
    leave: _Collective = partial(conjugate.reduced, group=group)
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
        enter = partial(conjugate.gathered_to_add, group=group)
        leave = partial(conjugate.reduced_and_split, group=group)
        keep_own_tokens(model, group)
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
    return model
