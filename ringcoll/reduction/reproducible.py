"""Reductions whose bits are a function of the ranks' inputs, and of nothing else.

Problem: the bits of a reduction of floats depend on its order, on what is rounded on its way, and, in
some of torch's functions, on the place of an element in its tensor: ``torch.maximum(+0.0, -0.0)`` is +0 at
some places and -0 at others, and a product of complex numbers rounds once at some places and twice at
others (torch 2.13 on x86-64: vectors and their ends run in different code). There are two levels:

``True``
    Bits depend on the inputs in rank order. Sums and products are made from left to right.
``"any_world_size"``
    Bits do not depend on the order of ranks either, nor on ranks that add zeros. Sums are exact, and
    are rounded once: `ringcoll.reduction.exact`.

Integers and bools need neither. Minima and maxima of floats become those of integers in the
same order, which are exact, at both levels.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from ringcoll.errors import ArgumentError
from ringcoll.reduction.exact import exact_sum
from ringcoll.reduction.operators import FLOAT8, Reduction
from ringcoll.schedule import OperandOrder

Reproducible = bool | Literal["any_world_size"]
"""Bits may depend on everything, on the inputs in rank order, or on the inputs in any order."""

_KEYS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_level(level: Any, rank: int | None = None) -> None:
    """Check an argument ``reproducible``.

    Raises
    ------
    ArgumentError
        There is no such level.
    """
    if not (isinstance(level, bool) or level == "any_world_size"):
        raise ArgumentError(
            "no such level",
            rank=rank,
            argument="reproducible",
            expected="False, True or 'any_world_size'",
            got=repr(level),
        )


def reproduced(
    reduction: Reduction,
    level: Reproducible,
    *,
    world_size: int,
    device: torch.device,
    rank: int | None = None,
) -> Reduction:
    """Make a reduction reproducible.

    Parameters
    ----------
    reduction
        Result of `resolve`.
    level
        ``False``: bits may depend on everything; ``True``: on the inputs in rank order;
        ``"any_world_size"``: not on the order and number of ranks either.
    world_size, device
        Number of ranks, and the tensors' device.
    rank
        Rank for error messages.

    Raises
    ------
    ArgumentError
        There is no such level, or the level is not defined for the operator or the device.
    """

    def refuse(message: str, expected: str, argument: str = "reproducible") -> ArgumentError:
        got = repr(level) if argument == "reproducible" else device
        return ArgumentError(message, rank=rank, argument=argument, expected=expected, got=got)

    check_level(level, rank)
    operator, dtype = reduction.operator, reduction.dtype
    is_exact_anyhow = not (dtype.is_floating_point or dtype.is_complex) and operator.user is None
    if level is False or is_exact_anyhow:
        return reduction
    if operator.name in ("min", "max"):
        return _by_keys(reduction)
    if dtype.is_complex and operator.user is None:
        reduction = _of_complex(reduction)
    if level is True:
        # A partial result is rounded to a narrower wire dtype when it is sent.
        is_narrow = reduction.wire_dtype is not reduction.work_dtype
        order = OperandOrder.AT_ONCE if is_narrow else OperandOrder.LEFT_TO_RIGHT
        return replace(reduction, manner="reproducible", order=order)
    if operator.user is not None or operator.name == "product":
        raise refuse(f"{operator} of {dtype} has no exact result to be rounded once", "True")
    if device.type != "cpu":
        raise refuse("exact sums are computed on the CPU only", "tensors of the CPU", "tensor")
    if world_size == 1:  # nothing is added, but no zero may be -0
        decode = reduction.decode
        return replace(reduction, decode=lambda total: decode(total + 0.0), shares_memory=False)
    return replace(reduction, manner="exact", order=OperandOrder.AT_ONCE, combine_all=exact_sum)


def _by_keys(reduction: Reduction) -> Reduction:
    """A minimum or maximum of integers that are ordered as the floats are.

    -0 is below +0, and a NaN is beyond all numbers, so that the result is NaN.
    """
    wire, work = reduction.wire_dtype, reduction.work_dtype
    carrier = torch.float16 if wire in FLOAT8 else wire  # it holds all numbers of 8 bits
    keys = _KEYS[carrier.itemsize]
    limits = torch.iinfo(keys)
    of_nan = limits.max if reduction.operator.name == "max" else limits.min

    def turned(bits: Tensor) -> Tensor:
        """Floats are a sign and a magnitude: negative ones are in falling order, as integers."""
        return bits ^ ((bits >> (limits.bits - 1)) & limits.max)

    def encode(tensor: Tensor) -> Tensor:
        values = reduction.encode(tensor).to(carrier)
        return turned(values.view(keys)).masked_fill_(values.isnan(), of_nan)

    return replace(
        reduction,
        manner="reproducible",
        work_dtype=keys,
        wire_dtype=keys,
        encode=encode,
        decode=lambda total: reduction.decode(turned(total).view(carrier).to(work)),
        finish=None,
        shares_memory=False,
    )


def _of_complex(reduction: Reduction) -> Reduction:
    """Products and scaled inputs of complex numbers, with the same rounding at every place."""
    operator, work, wire = reduction.operator, reduction.work_dtype, reduction.wire_dtype
    if operator.name == "product":
        return replace(reduction, combine=_complex_product)
    if operator.factor is None or operator.has_real_factor:
        return reduction

    def scale(tensor: Tensor) -> Tensor:
        factor = torch.as_tensor(operator.factor, dtype=work, device=tensor.device).reshape(())
        return _complex_product(tensor, factor, out=torch.empty_like(tensor)).to(wire).to(work)

    return replace(reduction, scale=scale)


def _complex_product(left: Tensor, right: Tensor, *, out: Tensor) -> Tensor:
    real = left.real * right.real - left.imag * right.imag
    imag = left.real * right.imag + left.imag * right.real
    return out.copy_(torch.complex(real, imag))
