"""Bytes of what is trained on a rank, with AdamW: by formula, and measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ModelStates:
    """Bytes of what is trained on a rank; the master copy counts as optimizer."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """Bytes of all three."""
        return self.parameters + self.gradients + self.optimizer


def model_state_bytes(
    numel: int,
    world_size: int,
    stage: int,
    *,
    dtype: torch.dtype = torch.float32,
    mixed: torch.dtype | None = None,
) -> ModelStates:
    """Bytes a rank that the ZeRO paper predicts for training with AdamW (its figure 1).

    Parameters
    ----------
    numel
        Number of elements of all parameters together.
    stage
        0 for plain data parallelism, or 1, 2, 3.
    dtype
        Dtype of the parameters, if ``mixed`` is ``None``.
    mixed
        As for `ShardedAdamW`.

    Examples
    --------
    >>> import torch
    >>> [model_state_bytes(1, 4, stage, mixed=torch.bfloat16).total for stage in range(4)]
    [16.0, 7.0, 5.5, 4.0]
    """
    itemsize = (dtype if mixed is None else mixed).itemsize
    optimizer = 2 * dtype.itemsize if mixed is None else 3 * torch.float32.itemsize
    ranks = [world_size if stage >= first else 1 for first in (3, 2, 1)]
    kinds = zip((itemsize, itemsize, optimizer), ranks, strict=True)
    return ModelStates(*(numel * nbytes / sharing for nbytes, sharing in kinds))


def storage_nbytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the memory of tensors; memory that several tensors share is counted once."""
    storages = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
