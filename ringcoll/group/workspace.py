"""Working memory of a group: one tensor for each device, which grows when more is needed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class Workspace:
    """Working memory; operations of a group run one at a time, so they share it.

    ``on_growth`` is called before memory is replaced, and has to forget all views of the memory.
    """

    def __init__(self, on_growth: Callable[[], None]) -> None:
        self.on_growth = on_growth
        self.tensors: dict[torch.device, Tensor] = {}

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """At least so many elements of working memory; called outside of inference mode."""
        memory = self.tensors.get(device)
        if memory is None or memory.numel() < numel * dtype.itemsize:
            self.clear()
            # A multiple of the size of every dtype, so that each of them can view the memory.
            nbytes = -(-numel * dtype.itemsize // 64) * 64
            memory = self.tensors[device] = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return memory.view(dtype)

    def clear(self) -> None:
        """Let go of all memory."""
        self.tensors.clear()
        self.on_growth()
