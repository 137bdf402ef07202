"""torch's DistributedDataParallel with compressed buckets, on the ranks of a pool."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ringcoll.training import (
    CompressedBuckets,
    Compressor,
    Int8,
    PowerSGD,
    Sent,
    TopK,
    compressed_hook,
)
from tests.programs import out_of_step
from tests.programs.faults import Caught, catch

__all__ = ["COMPRESSORS", "Averaged", "average", "fail", "gradients", "learn"]

Shapes = dict[str, tuple[int, ...]]

COMPRESSORS: dict[str, Callable[..., Compressor]] = {
    "top-k": partial(TopK, 0.2),
    "int8": partial(Int8, 8),
    "PowerSGD": partial(PowerSGD, 2),
}
SHAPES: Shapes = {"first": (7, 5), "second": (11,), "third": (3, 4), "fourth": (40,)}
VECTOR: Shapes = {"only": (101,)}


class Backwards(nn.Module):
    """Parameters whose gradients are the inputs, and arrive in an order that torch does not expect.

    So torch lays the buckets out anew after the first backward.
    """

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=torch.float64)))

    def forward(self, wanted: dict[str, Tensor]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for name in reversed(wanted):
            total = total + (self.get_parameter(name) * wanted[name]).sum()
        return total


def gradients(shapes: Shapes, rank: int, step: int) -> dict[str, Tensor]:
    """Normal numbers that differ by parameter, rank, step and index."""
    generator = torch.Generator().manual_seed(1 + rank + 100 * step)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in shapes.items()
    }


class Noting(CompressedBuckets):
    """Notes the parameters of each bucket, by name."""

    def __init__(self, make: Callable[[], Compressor], module: nn.Module) -> None:
        super().__init__(make)
        self.names = {param: name for name, param in module.named_parameters()}
        self.buckets: list[tuple[str, ...]] = []

    def average(self, bucket: Any) -> Tensor:
        self.buckets.append(tuple(self.names[param] for param in bucket.parameters()))
        return super().average(bucket)


@dataclass(frozen=True)
class Averaged:
    """A step: the parameters of each bucket; by name, averages and residuals; and the report."""

    buckets: list[tuple[str, ...]]
    averages: dict[str, Tensor]
    residuals: dict[str, Tensor]
    report: Sent


def average(name: str, shapes: Shapes, steps: int) -> list[Averaged]:
    """Run backward and the hook, with buckets of some two parameters."""
    module = Backwards(shapes)
    ddp = DistributedDataParallel(module, bucket_cap_mb=400 / (1 << 20))
    state = Noting(COMPRESSORS[name], module)
    ddp.register_comm_hook(state, compressed_hook)
    averaged = []
    for step in range(steps):
        state.buckets = []
        ddp.zero_grad()
        torch.autograd.backward(ddp(gradients(shapes, dist.get_rank(), step)))
        averages = {key: param.grad.clone() for key, param in named(module)}
        residuals = {key: state._residuals[param].view_as(param) for key, param in named(module)}
        averaged.append(Averaged(state.buckets, averages, residuals, state.last_step))
    return averaged


def named(module: nn.Module) -> list[tuple[str, Any]]:
    return list(module.named_parameters())


def learn(name: str, steps: int) -> Tensor:
    """Train the model of `tests.programs.out_of_step`; return its parameters."""
    module = out_of_step.initial(0)
    ddp = DistributedDataParallel(module)
    ddp.register_comm_hook(CompressedBuckets(COMPRESSORS[name]), compressed_hook)
    optimizer = out_of_step.sgd(module)
    for step in range(steps):
        out_of_step.backward(ddp, dist.get_rank(), step)
        optimizer.step()
    return out_of_step.flat(module)


class Failing(Int8):
    """Fails in the second step."""

    def exchange(self, wanted: Tensor) -> tuple[Tensor, Tensor, int]:
        if self.residual is not None:
            raise self.refuse("fails", "tensor", "the first step", "the second step")
        return super().exchange(wanted)


def fail() -> tuple[Caught, Caught]:
    """The errors of two steps of backward."""
    ddp = DistributedDataParallel(nn.Linear(3, 2))
    ddp.register_comm_hook(CompressedBuckets(Failing), compressed_hook)

    def step() -> None:
        torch.autograd.backward(ddp(torch.ones(1, 3)).sum())

    return catch(step), catch(step)
