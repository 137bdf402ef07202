"""What the library does under another default device, where nothing can be computed, or dtype."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import ringcoll
from ringcoll.training import make_trainer, usual_task

__all__ = ["called", "trained", "trained_in"]


def _under(device: str | None, function: Callable[[], Any]) -> Any:
    torch.set_default_device(device)
    try:
        return function()
    finally:
        torch.set_default_device(None)


def trained(device: str | None, names: list[str]) -> dict[str, list[float]]:
    """Losses of some steps of each trainer."""
    return {name: _under(device, partial(_losses, name)) for name in names}


def trained_in(dtype: torch.dtype, name: str) -> list[float]:
    """Losses of some steps of a trainer under a default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return _losses(name)
    finally:
        torch.set_default_dtype(before)


def _losses(name: str) -> list[float]:
    task = usual_task([name], width=16, batch=8)
    trainer = make_trainer(name, task)
    try:
        order = [torch.arange(8, device="cpu") + 8 * step for step in range(3)]
        return [float(loss) for loss in trainer.steps(order)]
    finally:
        trainer.close()


def called(device: str | None) -> dict[str, Tensor]:
    """Results of calls that make tensors of their own."""
    results: dict[str, Tensor] = _under(device, _called)
    return results


def _called() -> dict[str, Tensor]:
    rank, cpu = dist.get_rank(), torch.device("cpu")
    places = torch.tensor([[rank, 2]], device=cpu)
    total = torch.sparse_coo_tensor(places, torch.ones(2, device=cpu), (4,), device=cpu)
    ringcoll.all_reduce(total)
    half = torch.full((5,), rank + 1, dtype=torch.bfloat16, device=cpu)
    ringcoll.all_reduce(half, "avg")
    odd = torch.full((5,), rank + 1, dtype=torch.uint16, device=cpu)
    ringcoll.all_reduce(odd, reproducible=True)
    strided = torch.full((4, 4), rank + 1.0, device=cpu)[:, ::2]
    ringcoll.all_reduce(strided)
    ringcoll.barrier()
    sent = torch.arange(4.0, device=cpu) + rank
    got = torch.zeros(4, device=cpu)
    ringcoll.all_to_all_single(got, sent)
    return {"sparse": total.to_dense(), "half": half, "odd": odd, "strided": strided, "got": got}
