"""Reductions whose bits are a function of the ranks' inputs, and of nothing else.

Problem: the bits of a reduction of floats depend on its order, on what is rounded on its way, and,
in some of torch's functions, on the place of an element in its tensor: ``torch.maximum(+0.0,
-0.0)`` is +0 at some places and -0 at others, and a product of complex numbers rounds once at some
places and twice at others (torch 2.13 on x86-64: vectors and their ends run in different code).
There are two levels:

``True``
    Bits depend on the inputs in rank order. Sums and products are made from left to right.
``"any_world_size"``
    Bits do not depend on the order of ranks either, nor on ranks that add zeros. Sums are exact,
    and are rounded once (`exact_sum`).

Integers and bools need neither. Minima and maxima of floats become those of integers in the same
order, which are exact, at both levels.

For an exact sum, all k operands of an element are there at once. They are cut into *digits* that do
not overlap, from the highest bit of all of them to the lowest: a digit is an operand's multiple of
a unit, and the next unit is 2^d times as small::

    operand 0   1101 0010 0000 0000     Digits at the same place are integers of d bits. As doubles,
    operand 1        1111 0111 0000     k of them are added up without an error if 2^d k <= 2^52.
    operand 2   0001 1000 0000 0000     Most data have one or two places, and all of the range of
                |    |    |    |        a dtype has many; places are made until nothing is left.

The sums of the places become one number by carries between 64-bit integers, of which the leading
bits are kept. A bit that stands for all lost bits, *sticky*, tells the last rounding on which side
of the middle the number is.

Cost: as many messages and bytes as `direct` algorithms have, and per operand and place four passes
over pieces that stay in cache. No bit is lost between 2^-1074 and 2^1024, whatever the units are.

Sources: J. Demmel and H. D. Nguyen, "Parallel reproducible summation", IEEE Transactions on
Computers 64(7), 2015 (digits at fixed places); S. Boldo and G. Melquiond, "Emulation of a FMA and
correctly rounded sums: proved algorithms using rounding to odd", IEEE Transactions on Computers
57(4), 2008 (sticky bits).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import frexp, isfinite
from typing import Any, Literal

import torch
from torch import Tensor

from ringcoll.errors import ArgumentError
from ringcoll.runtime.reduction.operators import FLOAT8, Reduction
from ringcoll.schedules import OperandOrder

Reproducible = bool | Literal["any_world_size"]
"""Bits may depend on everything, on the inputs in rank order, or on the inputs in any order."""

_KEYS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_level(level: Any, rank: int | None = None) -> None:
    """Raise `ArgumentError` if an argument ``reproducible`` is no level."""
    if not (isinstance(level, bool) or level == "any_world_size"):
        raise ArgumentError(
            "no such level", "reproducible", "False, True or 'any_world_size'", repr(level), rank
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
    world_size, device, rank
        Number of ranks, and the tensors' device; the rank for error messages.

    Raises
    ------
    ArgumentError
        There is no such level, or the level is not defined for the operator or the device.
    """
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
        message = f"{operator} of {dtype} has no exact result to be rounded once"
        raise ArgumentError(message, "reproducible", "True", repr(level), rank)
    if device.type != "cpu":
        message = "exact sums are computed on the CPU only"
        raise ArgumentError(message, "tensor", "tensors of the CPU", device, rank)
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


# --- exact sums ---------------------------------------------------------------------------

_PIECE = 32_704  # numbers: below torch's grain size, so that no threads start; 256 KiB
_EXACT_BITS = 52  # a double has 53: one is for the carry
_SINGLE = 1000  # powers of two up to here are doubles, and so are their inverses


def exact_sum(sources: Sequence[Tensor], out: Tensor) -> None:
    """Add vectors up, and round each exact sum once, to the nearest number, ties to even.

    A sum that is zero is +0. Sums of infinities and NaN are those of any order. A sum that is too
    large is infinite, as IEEE 754 rounds it.

    Examples
    --------
    >>> total = torch.empty(1)
    >>> exact_sum([torch.tensor([number]) for number in (1e38, 1.0, -1e38)], total)
    >>> total.item()
    1.0
    """
    vectors = [*sources, out]
    if out.is_complex():
        vectors = [torch.view_as_real(vector).view(-1) for vector in vectors]
    pieces = [torch.split(vector, max(1, _PIECE // len(sources))) for vector in vectors]
    for *operands, total in zip(*pieces, strict=True):
        if len(operands) == 2:  # one addition has one rounding
            left, right = (operand.to(total.dtype) for operand in operands)
            torch.add(left, right, out=total).add_(0.0)
        elif total.numel():
            matrix = torch.stack([operand.double() for operand in operands])
            total.copy_(_rounded_sum(matrix, total.dtype))


def _rounded_sum(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of each column, rounded once; the matrix is changed."""
    most = float(matrix.abs().max())
    if not isfinite(most):
        finite = matrix.isfinite()
        special = matrix.masked_fill(finite, 0.0).sum(0).to(dtype)
        plain = _rounded_sum(matrix.masked_fill(~finite, 0.0), dtype)
        return torch.where(finite.all(0), plain, special)
    bits = _EXACT_BITS - (len(matrix) - 1).bit_length()
    unit = frexp(most)[1] - bits
    places = []
    while True:
        digits = _scaled(matrix, -unit).trunc_()
        places.append(digits.sum(0))
        matrix -= _scaled(digits, unit)
        if not matrix.any():
            break
        unit -= bits
    if len(places) == 1:
        return (_scaled(places[0], unit) + 0.0).to(dtype)
    return _joined(places, bits, unit, dtype)


def _joined(places: Sequence[Tensor], bits: int, unit: int, dtype: torch.dtype) -> Tensor:
    """Round ``(places[0] 2^(bits (n - 1)) + ... + places[n - 1]) 2^unit`` once."""
    digits = [place.long() for place in places]
    for index in range(len(digits) - 1, 0, -1):
        carry = digits[index] >> bits
        digits[index] -= carry << bits  # now from 0 to 2^bits - 1
        digits[index - 1] += carry
    lead, *lower = digits  # the sign is that of the first
    # A float32 is rounded from a double that holds the leading bits and the sticky bit as they are.
    width = 62 if dtype is torch.float64 else 53
    lost = torch.zeros_like(lead)  # bits
    sticky = torch.zeros_like(lead, dtype=torch.bool)
    for digit in lower:
        length = torch.frexp(lead.abs().double()).exponent
        room = (width - length).clamp(0, bits).masked_fill(lost > 0, 0).long()
        left = bits - room
        kept = digit >> left
        sticky |= digit != kept << left
        lead = (lead << room) | kept
        lost += left
    lead |= sticky
    high, low = lead >> 31, lead & 0x7FFFFFFF
    return _scaled(high.double() * 2.0**31 + low.double(), unit + lost).to(dtype)


def _scaled(tensor: Tensor, exponent: int | Tensor) -> Tensor:
    """``tensor * 2 ** exponent``, where the power itself may be beyond a double."""
    if isinstance(exponent, int):
        if abs(exponent) < _SINGLE:
            return tensor * 2.0**exponent
        half = exponent // 2
        return tensor * 2.0**half * 2.0 ** (exponent - half)
    half_of_each = exponent >> 1
    return tensor * _powers(half_of_each) * _powers(exponent - half_of_each)


def _powers(exponents: Tensor) -> Tensor:
    """Powers of two, made of bits: `torch.pow` may round."""
    return ((exponents + 1023) << 52).view(torch.float64)
