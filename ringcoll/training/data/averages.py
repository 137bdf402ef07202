"""Averages of gradients over the ranks, parameter by parameter: to be read, and to be used.

Problem: k ranks hold the same model, and each rank computes gradients on data of its own. A
training step on all of the data needs the average of the gradients on every rank.

`average_gradients` is an all-reduce for each parameter, after backward: a loop of three lines. It
pays the latency of a message for each parameter, and the network rests during backward.
`ringcoll.training.data.bucketed` and `ringcoll.training.data.hooks` send while backward goes on.

Every rank gets the same averages to the last bit, so the models stay the same.

Ranks with batches of different sizes pass ``weight``, the number w of their samples: then the
average of the gradients g is ``sum(w g) / sum(w)``, to ``(k + 2) u sum(w |g|) / sum(w)`` in a dtype
of unit roundoff u on k ranks. The sum of the weights costs an all-reduce of one number a step.

A parameter that a rank does not use has no gradient there. The rank takes part with zeros, and
gets the average as all others do: the ranks' operations must match. (torch leaves ``.grad`` at
``None`` if no rank has used the parameter.)

With a wire dtype of 16 bits half as many bytes are sent. The largest float16 is 65504, which a
sum over ranks passes before it is divided. So for float16 each rank divides its gradients by the
number of ranks before they are sent. Small gradients may become denormal: scale the loss up, or
choose bfloat16, which has the range of float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringcoll.runtime.collectives import as_group
from ringcoll.runtime.collectives import functions as api
from ringcoll.runtime.reduction import Reproducible, premul_sum
from ringcoll.schedules import Schedule
from ringcoll.training.arguments import require
from ringcoll.training.model_on_ranks import check_dense


def average_op(wire_dtype: torch.dtype | None, world_size: int) -> object:
    """Operator for an average; it divides before the sends if float16 could overflow."""
    return premul_sum(1 / world_size) if wire_dtype is torch.float16 else dist.ReduceOp.AVG


class Weighing:
    """The share of this rank in the sum of all weights, by which its gradients are multiplied."""

    def __init__(self, weight: float | Tensor, group: Any) -> None:
        self._group, self._weight = as_group(group), float(weight)
        sent = self._weight if 0 <= self._weight < math.inf else math.nan  # so that all ranks raise
        self._total = torch.tensor([sent], dtype=torch.float64, device="cpu")
        self._work = api.all_reduce(self._total, group=group, async_op=True)

    def weigh(self, grad: Tensor) -> object:
        """Multiply a gradient by the share, in place, and return the operator."""
        assert self._work is not None
        self._work.wait()
        total = float(self._total)
        require(0 < total < math.inf, "weight", "the ranks cannot be weighed",
                "finite numbers, at least 0, not all 0",
                f"{self._weight} here, {total} in sum", self._group.rank())  # fmt: skip
        # Without samples, the gradient may be NaN.
        grad.mul_(self._weight / total) if self._weight else grad.zero_()
        return dist.ReduceOp.SUM


def average_gradients(
    module_or_params: nn.Module | Iterable[Tensor],
    group: Any = None,
    *,
    algorithm: str | Schedule = "auto",
    wire_dtype: torch.dtype | None = None,
    reproducible: Reproducible = False,
    weight: float | Tensor | None = None,
) -> None:
    """Replace each ``.grad`` by its average over all ranks; call it between backward and step.

    A gradient that is not dense raises `ArgumentError`, and nothing is sent.

    Parameters
    ----------
    module_or_params
        A module, or parameters in the same order on all ranks. Parameters that need no
        gradient are left out; a parameter whose ``.grad`` is ``None`` takes part with zeros.
    algorithm, wire_dtype, reproducible
        As for `ringcoll.all_reduce`.
    weight
        Number of samples that the gradients of this rank are a mean over, as a number or a tensor
        of one element; ``None`` on all ranks if all count alike. All ranks raise `ArgumentError` if
        all weights are 0, or a weight is negative or not finite.
    """
    named: Iterable[tuple[object, Tensor]] = (
        module_or_params.named_parameters()
        if isinstance(module_or_params, nn.Module)
        else enumerate(module_or_params)
    )
    params = [(name, param) for name, param in named if param.requires_grad]
    for name, param in params:
        if param.grad is not None:
            check_dense(param.grad, name)
    weighing = None if weight is None else Weighing(weight, group)
    op = average_op(wire_dtype, as_group(group).size())
    for _, param in params:
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        if weighing is not None:
            op = weighing.weigh(param.grad)
        api.all_reduce(param.grad, op, group, algorithm=algorithm, wire_dtype=wire_dtype,
                       reproducible=reproducible)  # fmt: skip
