"""Run a kernel, wherever that is, and compare what it writes with torch on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.on_gpu.correctness import numbers
from ringcoll.runtime.reduction import Kernel
from tests.cases.kernel_table import NARROW, UNSIGNED, on_the_wire, widening

__all__ = [
    "Run",
    "bits",
    "check",
    "check_rounding",
    "check_widening",
    "every_number",
    "fitting",
    "folded",
    "wide",
]

Run = Callable[..., Kernel]
"""``run(kernel, into, sources, factor, most_blocks)`` returns the kernel with its run."""

CALLS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Sum": torch.add,
    "Product": torch.mul,
    "Min": torch.minimum,
    "Max": torch.maximum,
    "Band": torch.bitwise_and,
    "Bor": torch.bitwise_or,
    "Bxor": torch.bitwise_xor,
}


def wide(dtype: torch.dtype) -> torch.dtype:
    """In which dtype is computed; for unsigned numbers, one that torch can add."""
    if dtype in NARROW:
        return torch.float32
    return dtype


def folded(op: str, sources: list[Tensor], work: torch.dtype) -> Tensor:
    """The same with torch, in the type in which is computed."""
    if work in UNSIGNED[1:]:  # torch lacks most operators for these
        return exactly(op, sources, work)
    total = sources[0].to(work)
    for other in sources[1:]:
        total = CALLS[op](total, other.to(work))
    return total


def exactly(op: str, sources: list[Tensor], dtype: torch.dtype) -> Tensor:
    """With Python's integers."""
    calls: dict[str, Callable[[int, int], int]] = {
        "Sum": int.__add__,
        "Product": int.__mul__,
        "Min": min,
        "Max": max,
        "Band": int.__and__,
        "Bor": int.__or__,
        "Bxor": int.__xor__,
    }
    totals = sources[0].tolist()
    for other in sources[1:]:
        totals = [calls[op](a, b) for a, b in zip(totals, other.tolist(), strict=True)]
    limit = 1 << (8 * dtype.itemsize)
    return torch.tensor([total % limit for total in totals], dtype=dtype)


def bits(tensor: Tensor) -> list[int]:
    """Of every number; all NaNs are one, and both zeros."""
    tensor = tensor.cpu()
    if tensor.dtype.is_complex:
        tensor = torch.view_as_real(tensor).reshape(-1)
    if tensor.dtype.is_floating_point:
        work = tensor.double()
        work = torch.where(work.isnan(), torch.full_like(work, float("nan")), work + 0.0)
        return work.view(torch.int64).tolist()
    return tensor.tolist()


def check(
    run: Run,
    kernel: Kernel,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    numel: int,
    offsets: list[int],
    expected: Callable[[list[Tensor]], Tensor],
    *,
    factor: complex = 0.0,
    in_place: bool = False,
    most_blocks: int | None = None,
    seed: int = 0,
    device: str = "cpu",
) -> Kernel:
    """Run a kernel, and compare each result, and what is around it.

    ``dtypes`` are those of the first source and result, of the other sources, and of the
    second result.
    """
    first, rest, copy = dtypes
    places = iter(offsets)
    sources = []
    for number in range(kernel.sources):
        vector, _ = fitting(numel, rest if number else first, next(places), device)
        vector.copy_(numbers(numel, vector.dtype, seed + number))
        sources.append(vector)
    wanted = expected([one.cpu().clone() for one in sources])
    results = []
    for number in range(kernel.results):
        vector, whole = fitting(numel, copy if number else first, next(places), device)
        whole.view(torch.uint8).fill_(0xA5)
        results.append((vector, whole))
    into = [vector for vector, _ in results]
    if in_place:
        into[0] = sources[0]
    chosen = run(kernel, into, sources, factor, most_blocks)
    for vector in into:
        assert bits(vector) == bits(wanted.to(vector.dtype)), (kernel, numel, offsets)
    for vector, whole in results:
        vector.view(torch.uint8).fill_(0xA5)
        assert bool((whole.view(torch.uint8) == 0xA5).all()), "something else was written"
    return chosen


def fitting(
    numel: int, dtype: torch.dtype, offset: int, device: str = "cpu"
) -> tuple[Tensor, Tensor]:
    """A vector that starts so many elements after an address that is a multiple of 64 bytes.

    Returns
    -------
    (vector, whole)
        The whole has at least 64 bytes on either side.
    """
    around = 64 // dtype.itemsize
    nbytes = (numel + offset + 2 * around) * dtype.itemsize
    memory = torch.zeros(nbytes + 64, dtype=torch.uint8, device=device)
    start = -memory.data_ptr() % 64
    whole = memory[start : start + nbytes].view(dtype)
    return whole[around + offset : around + offset + numel], whole


def every_number(dtype: torch.dtype) -> Tensor:
    """All patterns of bits of a type of 8 or 16 bits."""
    unit = torch.uint8 if dtype.itemsize == 1 else torch.int16
    return torch.arange(1 << (8 * dtype.itemsize)).to(unit).view(dtype)


def check_widening(run: Run, dtype: torch.dtype, device: str = "cpu") -> None:
    """Every number of a narrow type, from aligned memory and from memory that is not."""
    every = every_number(dtype).to(device)
    for vector in (every, every[1:]):
        result = torch.empty_like(vector, dtype=torch.float32)
        run(widening(dtype), [result], [vector])
        assert bits(result) == bits(vector.cpu().float())


def check_rounding(run: Run, dtype: torch.dtype, device: str = "cpu") -> None:
    """Numbers of float32 near every number of a narrow type, and half way between two."""
    every = every_number(dtype).float()
    numbers = every[every.isfinite()].unique()
    middles = (numbers[1:] + numbers[:-1]) / 2
    beyond = numbers.abs().max() * torch.tensor([1.01, 1.03, 1.0714, 1.08, 1.2, 2.0, 1e30])
    special = torch.tensor([float("inf"), float("nan"), 1e-45, -0.0])
    exact = torch.cat([numbers, middles, beyond, -beyond, special])
    near = [torch.nextafter(exact, torch.tensor(side)) for side in (float("inf"), -1e38)]
    given = torch.cat([exact, *near]).contiguous()
    kept = torch.empty_like(given, device=device)
    rounded = torch.empty_like(kept, dtype=dtype)
    run(on_the_wire(torch.float32, dtype, 1), [kept, rounded], [given.to(device)])
    expected = given.to(dtype)
    assert bits(rounded) == bits(expected)
    assert bits(kept) == bits(expected.float())
