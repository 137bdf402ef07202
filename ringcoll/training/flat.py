"""Parameters end to end in a flat tensor, which can be sent as one message."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringcoll.collectives import as_group
from ringcoll.collectives import functions as api
from ringcoll.errors import ArgumentError, TrainingError
from ringcoll.training.checks import check_same_kinds, require


def trained(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that need gradients, by name; raises `ArgumentError` if there is none."""
    params = {name: param for name, param in module.named_parameters() if param.requires_grad}
    if not params:
        raise ArgumentError("no parameter needs a gradient", argument="module")
    return params


def begin_alike(module: nn.Module, group: Any) -> None:
    """Replace parameters and buffers by those of rank 0; all ranks raise if kinds differ."""
    check_same_kinds(module, group)
    for tensor in (*module.parameters(), *module.buffers()):
        api.broadcast(tensor.detach(), group=group, group_src=0)


def views_of(flat: Tensor, likes: Sequence[Tensor]) -> list[Tensor]:
    """Views of a flat tensor, from its begin, in the shapes of some tensors."""
    numels = [like.numel() for like in likes]
    pieces = torch.split(flat[: sum(numels)], numels)
    return [piece.view(like.shape) for piece, like in zip(pieces, likes, strict=True)]


class FlatParameters:
    """The parameters of a module that need gradients, read and written end to end.

    They have one dtype, and are on one device.

    >>> flat = FlatParameters(torch.nn.Linear(2, 1))
    >>> flat.write(torch.tensor([1.0, 2.0, 3.0]))
    >>> flat.read().tolist(), flat.grads().tolist()
    ([1.0, 2.0, 3.0], [0.0, 0.0, 0.0])
    """

    def __init__(self, module: nn.Module) -> None:
        self._params = list(trained(module).values())
        kinds = sorted({f"{param.dtype} on {param.device}" for param in self._params})
        require(len(kinds) == 1, "module", "the parameters cannot be laid end to end",
                "parameters of one dtype, on one device", ", ".join(kinds))  # fmt: skip

    def read(self) -> Tensor:
        """A copy of the parameters, (numel,)."""
        return torch.cat([param.detach().flatten() for param in self._params])

    @torch.no_grad()
    def write(self, flat: Tensor) -> None:
        """Copy a tensor, (numel,), into the parameters."""
        for param, piece in zip(self._params, views_of(flat, self._params), strict=True):
            param.copy_(piece)

    def grads(self) -> Tensor:
        """A copy of the gradients, (numel,); zeros for a parameter without a gradient."""
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._params]
        return torch.cat([grad.detach().flatten() for grad in grads])

    def set_grads(self, flat: Tensor) -> None:
        """Make the pieces of a tensor, (numel,), the gradients."""
        for param, piece in zip(self._params, views_of(flat, self._params), strict=True):
            param.grad = piece


def whole_parameters(
    held: Mapping[str, Tensor], shapes: Mapping[str, Tensor], group: Any, piece: int = 0
) -> dict[str, Tensor]:
    """Put the parameters of a model together, to the last bit, on every rank of a group.

    If ranks that hold the same parameter, or the same piece, have different values, all ranks raise
    `TrainingError`.

    Parameters
    ----------
    held
        What this rank holds, by name: whole parameters, or pieces along one dimension.
    shapes
        Tensors of the shapes of the whole parameters, by name, in the same order on all ranks.
    piece
        Place of this rank's pieces among the pieces of a parameter, from 0.
    """
    rank = as_group(group).rank()
    whole = {}
    for name, like in shapes.items():
        # The extremes over the ranks are what some rank holds: infinities are beyond any number.
        bounds = [torch.full_like(like, end, requires_grad=False) for end in (-math.inf, math.inf)]
        for bound, op in zip(bounds, (dist.ReduceOp.MAX, dist.ReduceOp.MIN), strict=True):
            if name in held:
                tensor, place = held[name].detach(), bound
                for dim, (all_of, mine) in enumerate(zip(like.shape, tensor.shape, strict=True)):
                    if all_of != mine:
                        place = place.narrow(dim, piece * mine, mine)
                place.copy_(tensor)
            api.all_reduce(bound, op, group)
        whole[name], lowest = bounds
        if not torch.equal(whole[name], lowest):
            raise TrainingError(
                f"rank {rank}: the ranks that hold {name} have different values of it"
            )
    return whole
