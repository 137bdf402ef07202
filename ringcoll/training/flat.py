"""Parameters end to end in a flat tensor, which can be sent as one message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ringcoll.collectives import functions as api
from ringcoll.errors import ArgumentError
from ringcoll.training.checks import check_same_kinds, require

__all__ = ["FlatParameters", "begin_alike", "trained", "views_of"]


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
