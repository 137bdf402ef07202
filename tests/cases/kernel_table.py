"""Every kernel that there is a test for: operators, dtypes, and forms."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import torch

from ringcoll.runtime.reduction import Kernel, c_type

__all__ = [
    "COMPLEX",
    "FLOATS",
    "KERNELS",
    "MANY",
    "NARROW",
    "SIGNED",
    "TABLE",
    "UNSIGNED",
    "WIRES",
    "on_the_wire",
    "plain",
    "runs",
    "widening",
]

NARROW = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
FLOATS = (torch.float64, torch.float32, *NARROW)
COMPLEX = (torch.complex64, torch.complex128)
SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
ARITHMETIC, ORDER, BITS = ("Sum", "Product"), ("Min", "Max"), ("Band", "Bor", "Bxor")
TABLE = [
    *product((*ARITHMETIC, *ORDER), FLOATS),
    *product(ARITHMETIC, COMPLEX),
    *product((*ARITHMETIC, *ORDER, *BITS), (*SIGNED, *UNSIGNED)),
]
# (work, wire): partial results, and what is sent.
WIRES = [
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.float32, torch.float8_e4m3fn),
    (torch.float32, torch.float8_e5m2),
    (torch.float64, torch.float32),
    (torch.float64, torch.bfloat16),
    (torch.complex128, torch.complex64),
]
MANY = (1, 3, 8)  # numbers of sources, beside 2


def name(dtype: torch.dtype) -> str:
    found = c_type(dtype)
    assert found is not None
    return found


def plain(op: str, dtype: torch.dtype, sources: int = 2, finish: str = "Plain") -> Kernel:
    one = name(dtype)
    return Kernel(op, finish, one, one, one, one, sources, 1)


def on_the_wire(work: torch.dtype, wire: torch.dtype, sources: int = 2) -> Kernel:
    """Partial result + what arrived -> partial result, and what is sent."""
    wide, thin = name(work), name(wire)
    return Kernel("Sum", "Plain", wide, thin, wide, thin, sources, 2, rounded=thin)


def arriving(work: torch.dtype, wire: torch.dtype) -> list[Kernel]:
    """Partial result + what arrived -> partial result; the lower rank's is on the left."""
    wide, thin = name(work), name(wire)
    pairs = (wide, thin), (thin, wide)
    return [Kernel("Sum", "Plain", *pair, wide, wide, 2, 1) for pair in pairs]


def widening(dtype: torch.dtype) -> Kernel:
    """Every number of a narrow type, in float32."""
    return replace(plain("Sum", dtype, 1), into="float32", copy="float32")


def runs(kernel: Kernel) -> list[Kernel]:
    """The kernel for all alignments."""
    return [replace(kernel, run=1 << i) for i in range(kernel.pack.bit_length())]


KERNELS = [
    *(plain(*one) for one in TABLE),
    *(plain("Sum", dtype, n) for n in MANY for dtype in (torch.float32, torch.bfloat16)),
    *(plain("Sum", dtype, 2, "Divide") for dtype in (*FLOATS, *COMPLEX, *SIGNED, *UNSIGNED)),
    *(plain("Sum", dtype, 1, "Scale") for dtype in (*FLOATS, *COMPLEX)),
    *(plain("Sum", dtype, 1, "Multiply") for dtype in COMPLEX),
    *(on_the_wire(*one, n) for one in WIRES for n in (1, 2, 3)),
    *(kernel for one in WIRES for kernel in arriving(*one)),
    *(replace(plain("Max", dtype, 2), results=2) for dtype in (torch.float32, torch.int8)),
]
