"""Operators on every dtype, against numbers of Python that never overflow or round."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ringcoll import UserOp
from ringcoll.errors import ArgumentError
from ringcoll.runtime.reduction import (
    OPERATORS,
    SERIAL_NUMEL,
    Operator,
    Reduction,
    as_operator,
    premul_sum,
    resolve,
)
from ringcoll.schedules import OperandOrder

UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
NARROW = (torch.float16, torch.bfloat16, *FLOAT8)
FLOATS = (torch.float64, torch.float32, *NARROW)
COMPLEX = (torch.complex64, torch.complex128)

EXACT: dict[str, Callable[[int, int], int]] = {
    "sum": int.__add__,
    "avg": int.__add__,
    "product": int.__mul__,
    "min": min,
    "max": max,
    "band": int.__and__,
    "bor": int.__or__,
    "bxor": int.__xor__,
}


def reduced(reduction: Reduction, inputs: list[torch.Tensor]) -> torch.Tensor:
    """What the executor does with inputs of several ranks."""
    encoded = [reduction.encode(tensor.clone()) for tensor in inputs]
    if reduction.scale is not None:
        encoded = [reduction.scale(tensor) for tensor in encoded]
    total = encoded[0].clone()
    for other in encoded[1:]:
        reduction.combine(total, other, out=total)
    if reduction.finish is not None:
        reduction.finish(total, len(inputs))
    return reduction.decode(total)


def wrapped(number: int, dtype: torch.dtype) -> int:
    info = torch.iinfo(dtype)
    return (number - info.min) % (info.max - info.min + 1) + info.min


def divided(total: int, world_size: int) -> int:
    """Towards zero."""
    return abs(total) // world_size * (1 if total >= 0 else -1)


@pytest.mark.parametrize("dtype", [*UNSIGNED, *SIGNED], ids=str)
@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_integers(dtype: torch.dtype, name: str, world_size: int) -> None:
    info = torch.iinfo(dtype)
    edges = [info.min, info.min + 1, 0, 1, 2, 5, 100, info.max // 2 + 1, info.max - 2, info.max]
    rows = [
        [edges[(i * (rank + 1) + rank) % len(edges)] for i in range(40)]
        for rank in range(world_size)
    ]
    result = reduced(resolve(name, dtype), [torch.tensor(row, dtype=dtype) for row in rows])
    expected = [wrapped(reduce(EXACT[name], column), dtype) for column in zip(*rows, strict=True)]
    if name == "avg":
        expected = [divided(total, world_size) for total in expected]
    assert result.dtype is dtype
    assert result.tolist() == expected


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8], ids=str)
@pytest.mark.parametrize("world_size", [127, 128, 255, 256, 300])
def test_the_mean_of_more_ranks_than_the_dtype_can_count(
    dtype: torch.dtype, world_size: int
) -> None:
    sums = [-128, -127, -1, 0, 1, 127] if dtype is torch.int8 else [0, 1, 127, 128, 254, 255]
    reduction = resolve("avg", dtype)
    assert reduction.finish is not None
    tensor = torch.tensor(sums, dtype=dtype)
    reduction.finish(tensor, world_size)
    assert tensor.tolist() == [divided(total, world_size) for total in sums]


@pytest.mark.parametrize("world_size", [2, 3, 1000, 2**31 - 1])
def test_the_mean_of_numbers_of_64_bits(world_size: int) -> None:
    sums = [0, 1, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1, 0x123456789ABCDEF0]
    reduction = resolve("avg", torch.uint64)
    assert reduction.finish is not None
    total = reduction.encode(torch.tensor(sums, dtype=torch.uint64))
    reduction.finish(total, world_size)
    assert reduction.decode(total).tolist() == [number // world_size for number in sums]


BOOLS = {"sum": any, "max": any, "bor": any, "product": all, "min": all, "band": all}


@pytest.mark.parametrize("name", BOOLS)
def test_truth_values(name: str) -> None:
    rows = [*zip(*itertools.product([False, True], repeat=3), strict=True)]
    result = reduced(resolve(name, torch.bool), [torch.tensor(row) for row in rows])
    assert result.tolist() == [BOOLS[name](column) for column in zip(*rows, strict=True)]


def test_truth_values_that_differ() -> None:
    rows = [torch.tensor(row) for row in ([False, False, True, True], [False, True, False, True])]
    assert reduced(resolve("bxor", torch.bool), rows).tolist() == [False, True, True, False]


@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX], ids=str)
@pytest.mark.parametrize("name", ["sum", "avg", "product", "min", "max"])
def test_small_whole_floats_are_exact(dtype: torch.dtype, name: str) -> None:
    if dtype.is_complex and name in ("min", "max"):
        with pytest.raises(ArgumentError, match="not defined") as caught:
            resolve(name, dtype)
        assert "product" in str(caught.value)
        return
    rows = [[4, 2, -6, 1], [2, 2, 2, 3], [2, -1, 1, 2], [0, 1, -1, 2]]
    inputs = [torch.tensor(row, dtype=torch.float32).to(dtype) for row in rows]
    expected = [reduce(EXACT[name], column) for column in zip(*rows, strict=True)]
    result = reduced(resolve(name, dtype), inputs)
    assert result.dtype is dtype
    assert result.to(torch.complex128).real.tolist() == [
        total / 4 if name == "avg" else total for total in expected
    ]


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("name", ["sum", "avg", "product", "premul_sum"])
def test_narrow_floats_are_computed_in_wide_ones(dtype: torch.dtype, name: str) -> None:
    op = premul_sum(2.0) if name == "premul_sum" else name
    reduction = resolve(op, dtype)
    assert (reduction.work_dtype, reduction.wire_dtype) == (torch.float32, torch.float32)
    assert not reduction.shares_memory


@pytest.mark.parametrize("name", ["min", "max"])
def test_the_extremes_of_16_bits_need_no_wide_floats(name: str) -> None:
    reduction = resolve(name, torch.bfloat16)
    assert (reduction.work_dtype, reduction.wire_dtype) == (torch.bfloat16, torch.bfloat16)
    assert reduction.shares_memory
    tensor = torch.ones(3, dtype=torch.bfloat16)
    assert reduction.encode(tensor) is tensor
    assert reduction.decode(tensor) is tensor
    assert resolve(name, torch.float8_e5m2).work_dtype is torch.float32


def test_the_mean_of_large_float16_is_finite() -> None:
    inputs = [torch.full((2,), 60_000.0, dtype=torch.float16)] * 8
    assert reduced(resolve("avg", torch.float16), inputs).tolist() == [60_000.0, 60_000.0]


# --- the dtype on the wire ---------------------------------------------------------------

THIRD = torch.tensor([1 / 3, 1.0, 1e-3], dtype=torch.float32)


@pytest.mark.parametrize(
    "dtype, wire, work",
    [
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.float32, torch.float32, torch.float32),
        (torch.float32, torch.float64, torch.float64),
        (torch.float16, torch.float16, torch.float32),
        (torch.bfloat16, torch.float16, torch.float32),
        (torch.complex128, torch.complex64, torch.complex128),
    ],
)
def test_what_is_sent_is_rounded_and_what_is_added_is_not(
    dtype: torch.dtype, wire: torch.dtype, work: torch.dtype
) -> None:
    reduction = resolve("avg", dtype, wire_dtype=wire)
    assert (reduction.work_dtype, reduction.wire_dtype) == (work, wire)
    encoded = reduction.encode(THIRD.to(dtype))
    assert encoded.dtype is work
    assert torch.equal(encoded, THIRD.to(dtype).to(work).to(wire).to(work))
    assert reduction.shares_memory == (dtype is work is wire)
    assert reduction.finish is not None
    total = encoded * 7
    expected = (total / 3).to(wire).to(work)
    reduction.finish(total, 3)
    assert torch.equal(total, expected)
    decoded = reduction.decode(total)
    assert decoded.dtype is dtype
    assert torch.equal(decoded, total.to(dtype))


def test_a_sum_on_a_narrow_wire_is_rounded_and_not_divided() -> None:
    reduction = resolve("sum", torch.float32, wire_dtype=torch.bfloat16)
    assert reduction.finish is not None
    total = THIRD.clone()
    reduction.finish(total, 3)
    assert torch.equal(total, THIRD.bfloat16().float())
    assert resolve("sum", torch.float32).finish is None


def test_scaled_inputs_are_rounded_once_and_then_to_the_wire() -> None:
    reduction = resolve(premul_sum(1 / 3), torch.bfloat16, wire_dtype=torch.bfloat16)
    assert reduction.scale is not None
    scaled = reduction.scale(reduction.encode(THIRD.bfloat16()))
    assert scaled.dtype is torch.float32
    assert torch.equal(scaled, (THIRD.bfloat16().float() * (1 / 3)).bfloat16().float())


@pytest.mark.parametrize("factor", [0.1, torch.tensor([0.1]), torch.tensor([[0.1]])])
def test_a_factor_of_a_narrow_dtype_is_not_rounded_first(factor: Any) -> None:
    reduction = resolve(premul_sum(factor), torch.float32)
    assert reduction.scale is not None
    assert torch.equal(reduction.scale(THIRD), THIRD * 0.1)
    assert reduction.scale(THIRD).shape == THIRD.shape


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.complex128], ids=str)
def test_wide_inputs_are_scaled_as_they_are(dtype: torch.dtype) -> None:
    inputs = torch.tensor([1 / 3, 1e-3, 12345.678], dtype=torch.float64).to(dtype)
    scale = resolve(premul_sum(0.1), dtype).scale
    assert scale is not None
    assert torch.equal(scale(inputs), inputs * 0.1)


@pytest.mark.parametrize("dtype", [torch.bool, *UNSIGNED, *SIGNED, *FLOATS, *COMPLEX], ids=str)
@pytest.mark.parametrize("name", EXACT)
def test_memory_is_shared_where_that_is_said(dtype: torch.dtype, name: str) -> None:
    """What is written to the encoded tensor has to be in the user's: otherwise it is decoded."""
    try:
        reduction = resolve(name, dtype)
    except ArgumentError:
        return
    tensor = torch.zeros(4, dtype=torch.uint8).to(dtype)
    encoded = reduction.encode(tensor)
    decoded = reduction.decode(encoded)
    shares = [each.data_ptr() == tensor.data_ptr() for each in (encoded, decoded)]
    assert shares == [reduction.shares_memory] * 2


def test_a_factor_of_the_user_is_not_kept() -> None:
    """The factor may be changed, and is given back."""
    factor = torch.tensor([2.0])
    op = premul_sum(factor)
    assert resolve(op, torch.float32) is not resolve(op, torch.float32)
    for kept in ("sum", dist.ReduceOp.MAX, premul_sum(2.0), Operator("min")):
        assert resolve(kept, torch.float32) is resolve(kept, torch.float32)


@pytest.mark.parametrize(
    "dtype, wire, words",
    [
        (torch.float32, "bfloat16", "not a dtype"),
        (torch.float32, torch.int32, "must be a floating-point dtype"),
        (torch.float32, torch.complex64, "must be a floating-point dtype"),
        (torch.complex64, torch.float32, "must be a floating-point dtype"),
        (torch.int32, torch.int16, "must be a floating-point dtype"),
        (torch.int32, torch.float32, "must be a floating-point dtype"),
        (torch.float32, torch.float8_e8m0fnu, "cannot be sent"),
    ],
)
def test_a_wire_of_another_kind_is_refused(dtype: torch.dtype, wire: Any, words: str) -> None:
    with pytest.raises(ArgumentError, match=words) as caught:
        resolve("sum", dtype, wire_dtype=wire, rank=3)
    assert "rank 3" in str(caught.value)
    with pytest.raises(ArgumentError, match=words):
        resolve(UserOp(torch.add), dtype, wire_dtype=wire)


def test_integers_may_be_sent_as_they_are() -> None:
    assert resolve("sum", torch.int32, wire_dtype=torch.int32).wire_dtype is torch.int32


# --- operators ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "op, dtype",
    [
        ("avg", torch.bool),
        (premul_sum(2.0), torch.bool),
        ("band", torch.float32),
        ("bxor", torch.complex64),
        (premul_sum(2.0), torch.int32),
        (premul_sum(2.0), torch.uint16),
        ("sum", torch.float8_e8m0fnu),
        ("sum", torch.quint8),
    ],
)
def test_what_is_not_defined_is_refused(op: Any, dtype: torch.dtype) -> None:
    with pytest.raises(ArgumentError, match=f"is not defined for {dtype}"):
        resolve(op, dtype)


@pytest.mark.parametrize(
    "factor, dtype, is_right",
    [
        (2, torch.float32, True),
        (0.5, torch.complex64, True),
        (1j, torch.complex64, True),
        (1j, torch.float32, False),
        (np.complex128(1j), torch.float32, False),
        (np.complex64(1j), torch.float32, False),
        ("2", torch.float32, False),
        (None, torch.float32, False),
        (torch.ones(1), torch.complex64, True),
        (torch.ones(1, dtype=torch.complex64), torch.complex64, True),
        (torch.ones(1, dtype=torch.complex64), torch.float32, False),
        (torch.ones(2), torch.float32, False),
        (torch.ones(0), torch.float32, False),
    ],
)
def test_factors(factor: Any, dtype: torch.dtype, is_right: bool) -> None:
    if is_right:
        assert resolve(premul_sum(factor), dtype).scale is not None
        return
    with pytest.raises(ArgumentError, match="the factor of PREMUL_SUM") as caught:
        resolve(premul_sum(factor), dtype)
    assert ("complex or real" in str(caught.value)) == dtype.is_complex


@pytest.mark.parametrize("name", EXACT)
def test_an_operator_in_all_its_spellings(name: str) -> None:
    member = getattr(dist.ReduceOp, name.upper())
    (short,) = (short for short, own in OPERATORS.items() if own == name)
    words = (name, name.upper(), short, f"MPI_{short.upper()}", f"nccl{short.title()}", str(member))
    for op in (*words, f" ReduceOp.{name.upper()}", member, dist.ReduceOp(member), Operator(name)):
        assert as_operator(op) == Operator(name)
        assert resolve(op, torch.int32).operator == Operator(name)


def test_torchs_own_factor_is_kept() -> None:
    op = dist._make_nccl_premul_sum(3.0)
    assert as_operator(op) == Operator("premul_sum", factor=3.0)
    inputs = [torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])]
    assert reduced(resolve(op, torch.float32), inputs).tolist() == [33.0, 66.0]


@pytest.mark.parametrize(
    "op", ["mean", "MPI_LAND", "", "premul_sum", "user", 3, None, int, dist.ReduceOp.PREMUL_SUM]
)
def test_what_is_no_operator_is_refused(op: Any) -> None:
    names = "one of the names sum, product, max, min, avg, band, bor, bxor, premul_sum"
    with pytest.raises(ArgumentError, match=f"not a reduction operator .*{names}"):
        as_operator(op, rank=1)


@pytest.mark.parametrize(
    "commutative, associative, order",
    [
        (False, False, OperandOrder.LEFT_TO_RIGHT),
        (True, False, OperandOrder.LEFT_TO_RIGHT),
        (False, True, OperandOrder.RANK),
        (True, True, OperandOrder.ANY),
    ],
)
def test_the_order_that_an_operator_needs(
    commutative: bool, associative: bool, order: OperandOrder
) -> None:
    op = UserOp(torch.sub, commutative=commutative, associative=associative)
    assert as_operator(op).order is order


def test_a_plain_function_keeps_rank_order() -> None:
    def first(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return left

    operator = as_operator(first)
    assert operator.order is OperandOrder.RANK
    assert str(operator) == "user operator first"
    assert str(as_operator(UserOp(first, name="left"))) == "user operator left"
    assert str(UserOp(torch.nn.Identity())) == "user operator"
    assert as_operator("sum").order is OperandOrder.ANY
    assert str(as_operator("sum")) == "sum"
    assert reduced(resolve(first, torch.int8), [torch.tensor([1]), torch.tensor([2])]).item() == 1


def test_a_users_operator_meets_its_dtype_and_a_narrow_wire_is_rounded() -> None:
    plain = resolve(UserOp(torch.add), torch.bfloat16)
    assert (plain.work_dtype, plain.wire_dtype) == (torch.bfloat16, torch.bfloat16)
    narrow = resolve(UserOp(torch.add), torch.float32, wire_dtype=torch.bfloat16)
    assert (narrow.work_dtype, narrow.wire_dtype) == (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("extra", [-1, 0, 1])
@pytest.mark.parametrize("pieces", [0, 1, 2])
def test_pieces_are_short_and_complete(extra: int, pieces: int) -> None:
    numel = max(0, pieces * SERIAL_NUMEL + extra)
    sizes: list[int] = []

    def add(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> object:
        sizes.append(left.numel())
        return torch.add(left, right, out=out)

    plain = resolve("sum", torch.int64)
    reduction = Reduction(plain.operator, torch.int64, torch.int64, torch.int64, add).in_pieces()
    left, right = torch.arange(numel), torch.arange(numel) * 1000
    expected = left + right
    reduction.combine(left, right, out=left)
    assert torch.equal(left, expected)
    assert max(sizes) < 32_768
    assert len(sizes) == max(1, math.ceil(numel / SERIAL_NUMEL))
    user = resolve(UserOp(torch.add), torch.int64)
    assert user.in_pieces() is user


@pytest.mark.parametrize("factor", [math.nan, 2.0, -0.0, 3, 1j, True])
def test_a_call_with_a_factor_is_found_again_and_no_other(factor: complex) -> None:
    first, again = (premul_sum(torch.tensor(factor)).now() for _ in range(2))
    assert first == again
    assert hash(first) == hash(again)
    assert repr(first.factor) == repr(torch.tensor(factor).item())
    for other in (0.0, 1, 2, 5.0):
        assert premul_sum(other).now() != first
