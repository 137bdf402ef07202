"""Parameters of a whole model, put together from what the ranks hold of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringcoll.collectives import functions as api

__all__ = ["whole_parameters"]


def whole_parameters(
    held: Mapping[str, Tensor], shapes: Mapping[str, Tensor], group: Any, piece: int = 0
) -> dict[str, Tensor]:
    """Put the parameters of a model together; all ranks of the group call it.

    Parameters
    ----------
    held
        What this rank holds, by name: whole parameters, or pieces along one dimension.
    shapes
        Tensors of the shapes of the whole parameters, by name, in the same order on all ranks.
    group
        Group of the ranks that hold the model together.
    piece
        Number of this rank's pieces among those of a parameter.

    Returns
    -------
    dict of str to Tensor
        The parameters, to the last bit, on every rank.
    """
    whole = {}
    for name, like in shapes.items():
        # The maximum over the ranks is what some rank holds: all others have less than any number.
        whole[name] = torch.full_like(like, float("-inf"), requires_grad=False)
        if name in held:
            tensor, place = held[name].detach(), whole[name]
            for dim, (all_of, mine) in enumerate(zip(like.shape, tensor.shape, strict=True)):
                if all_of != mine:
                    place = place.narrow(dim, piece * mine, mine)
            place.copy_(tensor)
        api.all_reduce(whole[name], dist.ReduceOp.MAX, group)
    return whole
