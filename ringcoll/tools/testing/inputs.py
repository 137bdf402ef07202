"""Inputs that differ by rank, by block and by index.

A contribution that is lost, doubled or moved then changes the result. Three kinds:

- ``exact``: floats are small integers (powers of two for products), such that every
  order of reduction gives the same bits; integers take the whole range and wrap;
- ``rough``: floats are random reals, so that sums round;
- ``special``: floats with infinities, NaN, both zeros and subnormal numbers among them.

`reduced` is the right answer of a reduction. A sum of k numbers by k - 1 rounded additions, in
whatever order, is off by at most ``gamma(k - 1) * sum(abs(x))``, where
``gamma(n) = n u / (1 - n u)`` and u is the unit roundoff of the dtype (Higham, Accuracy and
Stability of Numerical Algorithms, 2nd edition, section 4.2). The division of an average, and the
rounding of a result that was added in a wider dtype, count as one more each. Products round as
often relatively.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, *FLOAT8)
COMPLEX = (torch.complex64, torch.complex128)
UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, *UNSIGNED)

# Sums over 13 ranks stay below 448, the largest number of float8 e4m3fn.
LARGEST = 20


def _generator(*numbers: int) -> torch.Generator:
    mixed = 0
    for number in numbers:
        mixed = (mixed * 1_000_003 + number + 12_345) % (1 << 62)
    return torch.Generator().manual_seed(mixed)


def _pattern(numel: int, rank: int, block: int, seed: int) -> Tensor:
    """Integers from -20 to 20; neighbours differ, and so do ranks and blocks."""
    index = torch.arange(numel, dtype=torch.int64, device="cpu")
    return (7 * index + 13 * rank + 5 * block + seed) % (2 * LARGEST + 1) - LARGEST


def _real(numel: int, rank: int, block: int, seed: int, kind: str, op: str) -> Tensor:
    """Float64 values; the caller rounds them to its dtype."""
    random = _generator(seed, rank, block)
    pattern = _pattern(numel, rank, block, seed)
    if op == "product":
        sign = 1.0 - 2.0 * (pattern % 2)
        if kind == "exact":
            return sign * 2.0 ** (pattern % 3 - 1)
        return sign * (
            0.75 + torch.rand(numel, dtype=torch.float64, generator=random, device="cpu")
        )
    if kind == "exact":
        return pattern.double()
    numbers = torch.randn(numel, dtype=torch.float64, generator=random, device="cpu") * 8
    if kind == "special" and numel:
        strange = torch.tensor(
            [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 5e-8, 1.0, -1.0],
            dtype=torch.float32,
            device="cpu",
        )
        where = torch.randint(0, 3, (numel,), generator=random, device="cpu") == 0
        which = torch.randint(0, len(strange), (numel,), generator=random, device="cpu")
        numbers = torch.where(where, strange[which].double(), numbers)
    return numbers


def values(
    dtype: torch.dtype,
    numel: int,
    *,
    rank: int,
    block: int = 0,
    seed: int = 0,
    kind: str = "exact",
    op: str = "sum",
) -> Tensor:
    """A flat tensor: the input of a rank for a block."""
    if dtype is torch.bool:
        random = _generator(seed, rank, block)
        # Mostly true for "and", mostly false for "or", so that both results occur.
        share = 0.9 if op in ("product", "min", "band") else 0.1
        return torch.rand(numel, dtype=torch.float32, generator=random, device="cpu") < share
    if dtype.is_complex:
        parts = (_real(numel, rank, block, seed + shift, kind, op) for shift in (0, 17))
        return torch.complex(*(part.to(dtype.to_real()) for part in parts))
    if dtype.is_floating_point:
        return _real(numel, rank, block, seed, kind, op).to(dtype)
    # The bits of integers: any value of the type may occur.
    random, nbytes = _generator(seed, rank, block), numel * dtype.itemsize
    raw = torch.randint(256, (nbytes,), dtype=torch.uint8, generator=random, device="cpu")
    return raw.view(dtype) if numel else torch.empty(0, dtype=dtype, device="cpu")


OPERATORS: dict[str, Any] = {
    "sum": np.add,
    "avg": np.add,
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}
_SIGNED_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Expected(NamedTuple):
    """The right answer: ``value``, up to ``bound`` where that is given."""

    value: Tensor
    bound: Tensor | None = None


def bits(tensor: Tensor) -> bytes:
    """The bytes of a tensor's elements, in logical order."""
    flat = _flat(tensor)
    return bytes(flat.view(torch.uint8).numpy().tobytes()) if flat.numel() else b""


def _flat(tensor: Tensor) -> Tensor:
    """A copy of the elements in logical order, on the CPU; of a single one, with stride 1, too."""
    dense = tensor.dequantize() if tensor.is_quantized else tensor.detach().to_dense()
    plain = dense.resolve_conj().resolve_neg()
    # As integers: torch copies nothing of some dtypes.
    integers = plain.view(_SIGNED_OF_SIZE.get(plain.itemsize, plain.dtype)).reshape(-1)
    return integers.clone(memory_format=torch.contiguous_format).cpu().view(plain.dtype)


def mismatch(got: Tensor, answer: Expected, what: str = "result") -> str:
    """The mistake in a result, in words; empty if there is none."""
    want, bound = answer
    flat, want = _flat(got), _flat(want)
    if flat.numel() != want.numel():
        return f"{what} has {flat.numel()} elements, expected {want.numel()}"
    if bound is None:
        if flat.dtype is not want.dtype:
            return f"{what} is {flat.dtype}, expected {want.dtype}"
        wrong = _different_bits(flat, want)
    else:
        wide = torch.complex128 if flat.is_complex() else torch.float64
        # Not "> bound": a NaN has to be wrong.
        wrong = ~((flat.to(wide) - want).abs() <= bound)
    if not wrong.any():
        return ""
    index = int(wrong.nonzero()[0])
    allowed = "" if bound is None else f" within {bound[index].item():.3g}"
    return (
        f"{what} is wrong in {int(wrong.sum())} of {want.numel()} elements, first at {index}: "
        f"{flat[index].item()!r}, expected {want[index].item()!r}{allowed}"
    )


def _different_bits(got: Tensor, want: Tensor) -> Tensor:
    if not got.numel():
        return torch.zeros(0, dtype=torch.bool, device="cpu")
    if got.is_complex():
        real = got.dtype.to_real()
        return _different_bits(got.view(real), want.view(real)).view(-1, 2).any(1)
    view = _SIGNED_OF_SIZE[got.dtype.itemsize]
    wrong = got.view(view) != want.view(view)
    if got.dtype.is_floating_point and wrong.any():
        # Zeros of both signs, and all NaN, are the same number.
        mine, theirs = got.to(torch.float64), want.to(torch.float64)
        wrong &= ~((mine == theirs) | (mine.isnan() & theirs.isnan()))
    return wrong


def operators(dtype: torch.dtype) -> tuple[str, ...]:
    """The operators that are defined for a dtype."""
    if dtype is torch.bool:
        return tuple(name for name in OPERATORS if name != "avg")
    if dtype.is_complex:
        return ("sum", "avg")
    return tuple(OPERATORS)[:5] if dtype.is_floating_point else tuple(OPERATORS)


def reduced(op: str, tensors: Sequence[Tensor], *, exact: bool) -> Expected:
    """The reduction of the ranks' tensors, by its definition."""
    dtype, number, function = tensors[0].dtype, len(tensors), OPERATORS[op]
    if not (dtype.is_floating_point or dtype.is_complex):
        total = function.reduce(torch.stack(list(tensors)).numpy(), axis=0, dtype=None)
        flat = torch.from_numpy(np.atleast_1d(total)).to(dtype)  # modulo the integers of the dtype
        return Expected(torch.div(flat, number, rounding_mode="trunc") if op == "avg" else flat)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    array = torch.stack([tensor.to(wide) for tensor in tensors]).numpy()
    value = torch.from_numpy(function.reduce(array, axis=0))
    if op in ("min", "max") or (
        exact and op != "avg" and not (op == "product" and dtype.is_complex)
    ):
        return Expected(value.to(dtype))
    size = torch.from_numpy(function.reduce(np.abs(array), axis=0))
    if op == "avg":
        value, size = value / number, size / number
    limits = torch.finfo(dtype)
    step = limits.eps / 2
    roundings = number + (op == "avg")
    gamma = roundings * step / (1 - roundings * step)
    return Expected(value, gamma * size + (roundings + 1) * limits.smallest_normal * limits.eps)
