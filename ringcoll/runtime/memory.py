"""Working memory of a group: one tensor for each device, which grows when more is needed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["Workspace"]


class Workspace:
    """Working memory; operations of a group run one at a time, so they share it.

    Parameters
    ----------
    on_growth
        Called before memory is replaced: whatever is bound to it has to be forgotten.
    """

    def __init__(self, on_growth: Callable[[], None]) -> None:
        self.on_growth = on_growth
        self.tensors: dict[torch.device, Tensor] = {}
        self._views: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """At least so many elements of working memory."""
        view = self._views.get((device, dtype))
        if view is None or view.numel() < numel:
            with torch.inference_mode(False):  # it is used again outside of that mode
                view = self._grown(numel, dtype, device)
            self._views[device, dtype] = view
        return view

    def _grown(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        memory = self.tensors.get(device)
        if memory is None or memory.numel() < numel * dtype.itemsize:
            self.clear()
            # A multiple of the size of every dtype, so that each of them can view it.
            nbytes = -(-numel * dtype.itemsize // 64) * 64
            memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
            self.tensors[device] = memory
        return memory.view(dtype)

    def clear(self) -> None:
        """Let go of all memory."""
        self.tensors.clear()
        self._views.clear()
        self.on_growth()
