"""Conjugate pairs: a collective forward, and its transpose backward.

Where a rank only copies its input forward, gradients are added up backward, and the other way
round; a gather forward is a reduce-scatter backward. Each such pair is one function here:

====================  ==================================  ==================================
function              forward                             backward
====================  ==================================  ==================================
`copied`              identity                            all-reduce
`reduced`             all-reduce                          identity
`gathered`            all-gather along a dimension        this rank's slice
`split`               this rank's slice                   all-gather
`gathered_to_add`     all-gather along a dimension        reduce-scatter
`reduced_and_split`   reduce-scatter along a dimension    all-gather
====================  ==================================  ==================================

They are pairs because a collective is a linear map of all ranks' inputs together, and backward
applies its transpose: the transpose of "each rank gets a copy" is "the copies' gradients are
added up".

Source: Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
Parallelism", 2019.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ringcoll.runtime.collectives import as_group
from ringcoll.runtime.collectives import functions as api

# Of a tensor, by the ranks of a group, along a dimension.
_Map = Callable[[Tensor, Any, int], Tensor]


def _same(tensor: Tensor, group: Any, dim: int) -> Tensor:
    return tensor.view_as(tensor)


def _all_reduce(tensor: Tensor, group: Any, dim: int) -> Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    api.all_reduce(total, group=group)
    return total


def _all_gather(tensor: Tensor, group: Any, dim: int) -> Tensor:
    piece = tensor.movedim(dim, 0).contiguous()
    whole = piece.new_empty(as_group(group).size() * piece.shape[0], *piece.shape[1:])
    api.all_gather_single(whole, piece, group)
    return whole.movedim(0, dim)


def _reduce_scatter(tensor: Tensor, group: Any, dim: int) -> Tensor:
    whole = tensor.movedim(dim, 0).contiguous()
    piece = whole.new_empty(whole.shape[0] // as_group(group).size(), *whole.shape[1:])
    api.reduce_scatter_single(piece, whole, group=group)
    return piece.movedim(0, dim)


def slice_of(tensor: Tensor, group: Any, dim: int) -> Tensor:
    """The slice of this rank along a dimension of a tensor, a view."""
    member = as_group(group)
    return tensor.chunk(member.size(), dim)[member.rank()]


class _Pair(Function):
    """Applies one linear map forward, and its transpose backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ahead: _Map, back: _Map, group: Any, dim: int) -> Tensor:
        ctx.back = lambda grad: back(grad, group, dim)
        return ahead(tensor, group, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(grads[0]), None, None, None, None


_apply: Callable[..., Tensor] = _Pair.apply


def copied(tensor: Tensor, group: Any = None) -> Tensor:
    """Use a tensor that all ranks have; ``y_r = x``, so ``dx = sum_r dy_r``."""
    return _apply(tensor, _same, _all_reduce, group, 0)


def reduced(tensor: Tensor, group: Any = None) -> Tensor:
    """Add up over ranks that go on alike; ``y = sum_r x_r`` on each rank, and ``dx_r = dy``."""
    return _apply(tensor, _all_reduce, _same, group, 0)


def gathered(tensor: Tensor, group: Any = None, dim: int = -1) -> Tensor:
    """Put slices together for ranks that go on alike; ``dx_r`` is slice r of ``dy``."""
    return _apply(tensor, _all_gather, slice_of, group, dim)


def split(tensor: Tensor, group: Any = None, dim: int = -1) -> Tensor:
    """Take this rank's slice of a tensor that all ranks have; ``dx`` are all ``dy_r`` in a row."""
    return _apply(tensor, slice_of, _all_gather, group, dim)


def gathered_to_add(tensor: Tensor, group: Any = None, dim: int = 1) -> Tensor:
    """Put slices together for ranks that go on differently; ``dx_r`` is slice r of ``sum dy``."""
    return _apply(tensor, _all_gather, _reduce_scatter, group, dim)


def reduced_and_split(tensor: Tensor, group: Any = None, dim: int = 1) -> Tensor:
    """Add up over the ranks, and keep this rank's slice; ``dx_r`` are all ``dy`` in a row."""
    return _apply(tensor, _reduce_scatter, _all_gather, group, dim)
