"""Models, optimizers and the number of the step as bytes, and back."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def packed(holders: Sequence[Any], step: int) -> Tensor:
    """The states of models and optimizers, and a step, as a tensor of bytes."""
    buffer = io.BytesIO()
    torch.save({"step": step, "states": [holder.state_dict() for holder in holders]}, buffer)
    return torch.frombuffer(bytearray(buffer.getbuffer()), dtype=torch.uint8)


def unpacked(data: Tensor, holders: Sequence[Any]) -> int:
    """Load states that `packed` has packed; return the step. Of pickles, only tensors and numbers are read."""
    found = torch.load(io.BytesIO(data.numpy().data), map_location="cpu", weights_only=True)
    for holder, state in zip(holders, found["states"], strict=True):
        holder.load_state_dict(state)
    return int(found["step"])
