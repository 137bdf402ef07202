"""Parameters of a whole model, put together from what the ranks hold of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringcoll.collectives import functions as api
from ringcoll.collectives.groups import as_group
from ringcoll.errors import TrainingError

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
        Place of this rank's pieces among the pieces of a parameter, from 0.

    Returns
    -------
    dict of str to Tensor
        The parameters, to the last bit, on every rank.

    Raises
    ------
    TrainingError
        Ranks that hold the same parameter, or the same piece, have different values; all ranks
        raise it.
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
