"""CPU tensors that say that they are on a second CUDA device."""

from __future__ import annotations

import torch

__all__ = ["FIRST", "SECOND", "Elsewhere"]

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)


class Elsewhere(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return SECOND
