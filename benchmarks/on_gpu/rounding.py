"""Errors of bfloat16 sums, by algorithm and dtype on the wire. Needs no GPU.

The inputs of 8 ranks are random; their sum in float64 is exact. Errors are in units in the last place: of bfloat16, at the exact sum. A sum that is rounded once is
off by half a unit at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

import ringcoll
from benchmarks.on_gpu.rows import Row, Settings
from ringcoll.runtime.launch import LocalGroup
from ringcoll.runtime.reduction import UserOp, gpu

__all__ = [
    "BFLOAT16_RING",
    "DEFAULT",
    "DIRECT",
    "MEAN",
    "TABLE",
    "TORCH_SUM",
    "Error",
    "error",
    "rounding",
]

TABLE = "Rounding: all-reduce of random bfloat16 numbers, 8 ranks"
MEAN = "mean error (ulp)"
DEFAULT = "ring, float32 wire (the default)"
DIRECT = "direct, float32 wire"
BFLOAT16_RING = "ring, bfloat16 wire: rounded at each hop"
TORCH_SUM = "torch.sum over the gathered inputs"

_RANKS = 8
_NUMEL = 1 << 18
_FRACTION_BITS = 7  # of bfloat16, beyond the leading one


class Error(NamedTuple):
    """Errors in units in the last place, over all elements."""

    mean: float
    median: float
    largest: float
    not_nearest: float
    """Share of the elements that are not the nearest bfloat16 number to the exact sum."""


def error(result: Tensor, exact: Tensor) -> Error:
    """Compare a result in bfloat16 with the exact result in float64.

    Examples
    --------
    >>> result = torch.tensor([1.0, 1.0078125]).bfloat16()  # neighbours
    >>> error(result, torch.tensor([1.0, 1.0]).double())
    Error(mean=0.5, median=0.0, largest=1.0, not_nearest=0.5)
    """
    _, exponent = torch.frexp(exact)  # of a number of [0.5, 1) times 2^exponent
    unit = torch.ldexp(torch.ones_like(exact), exponent - 1 - _FRACTION_BITS)
    off = (result.double() - exact).abs() / unit
    nearest = result == exact.bfloat16()
    return Error(
        mean=float(off.mean()),
        median=float(off.median()),
        largest=float(off.max()),
        not_nearest=float((~nearest).double().mean()),
    )


_Sum = Callable[[Tensor, LocalGroup], object]


def _ways() -> dict[str, _Sum]:
    reduce, plain = ringcoll.all_reduce, UserOp(torch.add, commutative=True)

    def ring(wire: torch.dtype) -> _Sum:
        return lambda tensor, group: reduce(tensor, group=group, algorithm="ring", wire_dtype=wire)

    return {
        DEFAULT: lambda tensor, group: reduce(tensor, group=group, algorithm="ring"),
        DIRECT: lambda tensor, group: reduce(tensor, group=group, algorithm="direct"),
        "tree, float32 wire": lambda tensor, group: reduce(tensor, group=group, algorithm="tree"),
        BFLOAT16_RING: ring(torch.bfloat16),
        "ring, torch.add of bfloat16": lambda tensor, group: reduce(
            tensor, plain, group=group, algorithm="ring"
        ),
        "direct, bfloat16 wire": lambda tensor, group: reduce(
            tensor, group=group, algorithm="direct", wire_dtype=torch.bfloat16
        ),
        "ring, float8_e4m3fn wire": ring(torch.float8_e4m3fn),
        "ring, float8_e5m2 wire": ring(torch.float8_e5m2),
    }


def rounding(settings: Settings) -> Iterator[Row]:
    """Measure the error of every way to add, and of `torch.sum`."""
    numel = 1 << 12 if settings.rehearsal else _NUMEL
    generator = torch.Generator().manual_seed(8)
    numbers = torch.randn(_RANKS, numel, generator=generator).bfloat16()
    exact, inputs = numbers.double().sum(0), numbers.to(settings.place)
    yield _row(TORCH_SUM, inputs.sum(0), exact, "torch")
    for what, add_up in _ways().items():
        before = gpu.bound.copy()
        result = _result(inputs, add_up)
        bound = gpu.bound - before
        yield _row(
            what, result, exact, "kernel" if bound["cupy"] and not bound["torch"] else "torch"
        )


def _result(inputs: Tensor, add_up: _Sum) -> Tensor:
    def on_rank(group: LocalGroup) -> Tensor:
        tensor = inputs[group.rank()].clone()
        add_up(tensor, group)
        return tensor

    first, *others = ringcoll.run_threads(on_rank, _RANKS)
    assert isinstance(first, Tensor)
    assert all(torch.equal(first, other) for other in others)
    return first


def _row(what: str, result: Tensor, exact: Tensor, by: str) -> Row:
    errors = error(result.cpu(), exact)
    cells = {
        "what": what,
        "by": by,
        "on": str(result.device),
        MEAN: errors.mean,
        "median (ulp)": errors.median,
        "largest error (ulp)": errors.largest,
        "not the nearest number": f"{100 * errors.not_nearest:.3g} %",
    }
    return Row(TABLE, cells)
