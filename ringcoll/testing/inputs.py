"""Inputs that differ by rank, by block and by index.

A contribution that is lost, doubled or moved then changes the result. Three kinds:

- ``exact``: floats are small integers (powers of two for products), such that every
  order of reduction gives the same bits; integers take the whole range and wrap;
- ``rough``: floats are random reals, so that sums round;
- ``special``: floats with infinities, NaN, both zeros and subnormal numbers among them.
"""

from __future__ import annotations

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
    found = torch.randn(numel, dtype=torch.float64, generator=random, device="cpu") * 8
    if kind == "special" and numel:
        strange = torch.tensor(
            [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 5e-8, 1.0, -1.0], device="cpu"
        )
        where = torch.randint(0, 3, (numel,), generator=random, device="cpu") == 0
        which = torch.randint(0, len(strange), (numel,), generator=random, device="cpu")
        found = torch.where(where, strange[which].double(), found)
    return found


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
        return torch.rand(numel, generator=random, device="cpu") < share
    if dtype.is_complex:
        parts = [
            _real(numel, rank, block, seed + shift, kind, op).to(
                torch.float32 if dtype is torch.complex64 else torch.float64
            )
            for shift in (0, 17)
        ]
        return torch.complex(*parts)
    if dtype.is_floating_point:
        return _real(numel, rank, block, seed, kind, op).to(dtype)
    # The bits of integers: any value of the type may occur.
    raw = torch.randint(
        0,
        256,
        (numel * dtype.itemsize,),
        dtype=torch.uint8,
        generator=_generator(seed, rank, block),
        device="cpu",
    )
    return raw.view(dtype) if numel else torch.empty(0, dtype=dtype, device="cpu")
