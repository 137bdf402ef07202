"""The average of gradients over ranks, parameter by parameter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringcoll.collectives import functions as api
from ringcoll.collectives.groups import as_group
from ringcoll.reduction import Reproducible, premul_sum
from ringcoll.schedule.ir import Schedule
from ringcoll.training.checks import check_dense

__all__ = ["average_gradients", "average_op"]


def average_op(wire_dtype: torch.dtype | None, world_size: int) -> object:
    """Operator for an average; it divides before the sends if float16 could overflow."""
    return premul_sum(1 / world_size) if wire_dtype is torch.float16 else dist.ReduceOp.AVG


def average_gradients(
    module_or_params: nn.Module | Iterable[Tensor],
    group: Any = None,
    *,
    algorithm: str | Schedule = "auto",
    wire_dtype: torch.dtype | None = None,
    reproducible: Reproducible = False,
) -> None:
    """Replace each ``.grad`` by its average over all ranks; call it between backward and step.

    Parameters
    ----------
    module_or_params
        A module, or parameters in the same order on all ranks. Parameters that need no
        gradient are left out; a parameter whose ``.grad`` is ``None`` takes part with zeros.
    group
        Group of the ranks that train together; ``None`` for the default group.
    algorithm, wire_dtype, reproducible
        As for `ringcoll.all_reduce`.

    Raises
    ------
    ArgumentError
        A gradient is not dense; nothing was sent.
    RingcollError
        An all-reduce failed.
    """
    named: Iterable[tuple[object, Tensor]] = (
        module_or_params.named_parameters()
        if isinstance(module_or_params, nn.Module)
        else enumerate(module_or_params)
    )
    params = [(str(name), param) for name, param in named if param.requires_grad]
    for name, param in params:
        if param.grad is not None:
            check_dense(param.grad, name)
    op = average_op(wire_dtype, as_group(group).size())
    for _, param in params:
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        api.all_reduce(param.grad, op, group, algorithm=algorithm, wire_dtype=wire_dtype,
                       reproducible=reproducible)  # fmt: skip
