"""What every collective has to give, computed in one process from the definitions.

Written without the library's reduction code: integers go through numpy modulo 2^64,
bool through any and all, floats through float64 or exact sums.

The bound of sums that round
----------------------------
A sum of k numbers by k - 1 rounded additions, in whatever order, is off by at most
gamma(k - 1) * sum(abs(x)), where gamma(n) = n u / (1 - n u) and u is the unit roundoff of
the dtype in which the additions are made (Higham, Accuracy and Stability of Numerical
Algorithms, 2nd edition, section 4.2). Rounding to the dtype of the result adds u' times
the result. Each further operation on the way (a conversion to the wire dtype, the scaling
of PREMUL_SUM, the division of AVG) counts as one more rounding, n + 1. float16, bfloat16
and float8 are added in float32 unless a wire dtype is given, so u is that of float32 and
the one rounding at the end is nearly all of the error. Products round k - 1 times
relatively, gamma(k - 1) * abs(product); a product of complex numbers is normwise off by
sqrt(5) u for each factor (Brent, Percival, Zimmermann 2007). Below the normal range
rounding is off by half the least subnormal number, which is added for each operation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ringcoll.tools.testing import Expected

__all__ = ["moved", "reduced", "work_dtype"]

_ROUNDOFF = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
    torch.float8_e4m3fn: 2.0**-4,
    torch.float8_e5m2: 2.0**-3,
}
_LEAST = {
    torch.float64: 2.0**-1074,
    torch.float32: 2.0**-149,
    torch.float16: 2.0**-24,
    torch.bfloat16: 2.0**-133,
    torch.float8_e4m3fn: 2.0**-9,
    torch.float8_e5m2: 2.0**-16,
}
_PART = {torch.complex64: torch.float32, torch.complex128: torch.float64}


def moved(tensor: Tensor) -> Expected:
    """Data that are only moved: every bit has to arrive."""
    return Expected(tensor)


def work_dtype(dtype: torch.dtype, wire_dtype: torch.dtype | None) -> torch.dtype:
    """In which dtype sums are to be made."""
    if wire_dtype is not None:
        return wire_dtype
    narrow = dtype.is_floating_point and dtype.itemsize < 4
    return torch.float32 if narrow else dtype


def reduced(
    op: str,
    tensors: Sequence[Tensor],
    *,
    exact: bool = True,
    wire_dtype: torch.dtype | None = None,
    factors: Sequence[float] | None = None,
    function: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Expected:
    """The reduction of the ranks' tensors, in rank order.

    Parameters
    ----------
    op
        Name of the operator; ``"user"`` for ``function``.
    tensors
        Flat tensors, one a rank.
    exact
        Whether floats were chosen so that no operation but the last rounds.
    wire_dtype
        As given to the collective.
    factors
        Of PREMUL_SUM, one a rank.
    function
        The user's operator, folded from the left.
    """
    dtype = tensors[0].dtype
    if function is not None:
        total = tensors[0]
        for tensor in tensors[1:]:
            total = function(total, tensor)
        return Expected(total)
    if dtype is torch.bool:
        stacked = torch.stack(list(tensors))
        if op == "bxor":
            return Expected(stacked.sum(0) % 2 == 1)
        return Expected(stacked.all(0) if op in ("product", "min", "band") else stacked.any(0))
    if not (dtype.is_floating_point or dtype.is_complex):
        return Expected(_integers(op, tensors))
    if op in ("min", "max"):
        # Rounded to the wire dtype first, which changes no order.
        wide = torch.stack([t.to(wire_dtype or dtype).to(torch.float64) for t in tensors])
        best = wide.amin(0) if op == "min" else wide.amax(0)
        return Expected(best.to(dtype))
    return _rounded(op, tensors, exact, wire_dtype, factors)


def _integers(op: str, tensors: Sequence[Tensor]) -> Tensor:
    arrays = [tensor.numpy() for tensor in tensors]
    dtype, total = arrays[0].dtype, arrays[0]
    bitwise: dict[str, Any] = {
        "band": np.bitwise_and,
        "bor": np.bitwise_or,
        "bxor": np.bitwise_xor,
        "min": np.minimum,
        "max": np.maximum,
    }
    if op in bitwise:
        for array in arrays[1:]:
            total = bitwise[op](total, array)
        return torch.from_numpy(total.copy())
    # Arithmetic modulo 2^64, of which the low bits are arithmetic modulo 2^8, 2^16, 2^32.
    wide = total.astype(np.uint64)
    for array in arrays[1:]:
        other = array.astype(np.uint64)
        wide = wide * other if op == "product" else wide + other
    wrapped = wide.astype(dtype)
    if op == "avg":
        # Towards zero, as torch.div(rounding_mode="trunc").
        count = len(arrays)
        halves = [abs(number) // count * (1 if number > 0 else -1) for number in wrapped.tolist()]
        wrapped = np.array(halves, dtype=dtype)
    return torch.from_numpy(wrapped.copy())


def _exact_sum(arrays: Sequence[npt.NDArray[np.float64]]) -> npt.NDArray[np.float64]:
    """Correctly rounded sums, element by element."""
    columns = np.stack(arrays, axis=1)
    return np.array([math.fsum(column) for column in columns.tolist()], dtype=np.float64)


def _rounded(
    op: str,
    tensors: Sequence[Tensor],
    exact: bool,
    wire_dtype: torch.dtype | None,
    factors: Sequence[float] | None,
) -> Expected:
    dtype, count = tensors[0].dtype, len(tensors)
    work = work_dtype(dtype, wire_dtype)
    is_complex = dtype.is_complex
    wide = [tensor.to(torch.complex128 if is_complex else torch.float64) for tensor in tensors]
    roundings = count - 1
    if factors is not None:
        wide = [tensor * factor for tensor, factor in zip(wide, factors, strict=True)]
        roundings += 2  # the factor itself may round, too
    if op == "product":
        total, size = wide[0], wide[0].abs()
        for tensor in wide[1:]:
            total, size = total * tensor, size * tensor.abs()
    else:
        total = _sum(wide)
        size = torch.from_numpy(_exact_sum([tensor.abs().numpy() for tensor in wide]))
    if exact:
        part = _PART.get(work, work)
        if op == "avg" and not is_complex:
            total = (total.to(part) / torch.tensor(count, dtype=part)).to(dtype)
            return Expected(total)
        if op != "avg":
            return Expected(total.to(dtype))
    if op == "avg":
        total, size, roundings = total / count, size / count, roundings + 1
    if work is not dtype:
        roundings += 2  # of the input and of the result, to the wire dtype
    roundoff, least = _ROUNDOFF[_PART.get(work, work)], _LEAST[_PART.get(work, work)]
    step = roundoff * (math.sqrt(5) if is_complex and op == "product" else 1.0)
    # The reference is rounded to float64 itself: two roundings more, at that precision.
    gamma = roundings * step / (1 - roundings * step) + 2 * _ROUNDOFF[torch.float64]
    bound = gamma * size + (roundings + 1) * least
    last = _PART.get(dtype, dtype)
    bound = bound + _ROUNDOFF[last] * (total.abs() + bound) + _LEAST[last]
    return Expected(total, bound)


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    if tensors[0].is_complex():
        parts = [
            torch.from_numpy(_exact_sum([part(tensor).numpy() for tensor in tensors]))
            for part in (torch.real, torch.imag)
        ]
        return torch.complex(*parts)
    return torch.from_numpy(_exact_sum([tensor.numpy() for tensor in tensors]))
