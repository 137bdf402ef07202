"""The parameters of a module as a flat tensor, which can be sent as one message."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ringcoll.collectives import functions as api
from ringcoll.errors import ArgumentError
from ringcoll.training.checks import check_same_kinds

__all__ = ["FlatParameters", "begin_alike", "trained"]


def trained(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that need gradients.

    Raises
    ------
    ArgumentError
        No parameter needs a gradient.
    """
    params = [param for param in module.parameters() if param.requires_grad]
    if not params:
        raise ArgumentError("no parameter needs a gradient", argument="module")
    return params


def begin_alike(module: nn.Module, group: Any) -> None:
    """Replace parameters and buffers by those of rank 0; called by all ranks.

    Raises
    ------
    ArgumentError
        A rank has other parameters or buffers than rank 0; all ranks raise it.
    """
    check_same_kinds(module, group)
    for tensor in (*module.parameters(), *module.buffers()):
        api.broadcast(tensor.detach(), group=group, group_src=0)


class FlatParameters:
    """The parameters of a module that need gradients, read and written end to end.

    Parameters
    ----------
    module
        Module; its parameters that need gradients have one dtype and device.

    Raises
    ------
    ArgumentError
        No parameter needs a gradient, or two parameters differ in dtype or device.

    Examples
    --------
    >>> import torch
    >>> from ringcoll.training.flat import FlatParameters
    >>> flat = FlatParameters(torch.nn.Linear(2, 1))
    >>> flat.write(torch.tensor([1.0, 2.0, 3.0]))
    >>> flat.read().tolist(), flat.grads().tolist()
    ([1.0, 2.0, 3.0], [0.0, 0.0, 0.0])
    """

    def __init__(self, module: nn.Module) -> None:
        self._params = trained(module)
        kinds = {(param.dtype, param.device) for param in self._params}
        if len(kinds) > 1:
            raise ArgumentError(
                "the parameters cannot be laid end to end",
                argument="module",
                expected="parameters of one dtype, on one device",
                got=", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds)),
            )

    def _spread(self, flat: Tensor) -> list[Tensor]:
        pieces = torch.split(flat, [param.numel() for param in self._params])
        return [piece.view_as(param) for piece, param in zip(pieces, self._params, strict=True)]

    def read(self) -> Tensor:
        """A copy of the parameters, (numel,)."""
        return torch.cat([param.detach().flatten() for param in self._params])

    @torch.no_grad()
    def write(self, flat: Tensor) -> None:
        """Copy a tensor, (numel,), into the parameters."""
        for param, piece in zip(self._params, self._spread(flat), strict=True):
            param.copy_(piece)

    def grads(self) -> Tensor:
        """A copy of the gradients, (numel,); zeros for a parameter without a gradient."""
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._params]
        return torch.cat([grad.detach().flatten() for grad in grads])

    def set_grads(self, flat: Tensor) -> None:
        """Make the pieces of a tensor, (numel,), the gradients."""
        for param, piece in zip(self._params, self._spread(flat), strict=True):
            param.grad = piece
