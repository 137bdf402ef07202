"""Exact sums are those of fractions, rounded once."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from fractions import Fraction
from math import inf, nan
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ringcoll.runtime.reduction.reproducible import exact_sum
from tests.cases.effort import effort

# Bits of the significand, exponent of the smallest number, exponent above the largest number.
FORMATS = {torch.float32: (24, -149, 128), torch.float64: (53, -1074, 1024)}
both = pytest.mark.parametrize("dtype", FORMATS, ids=str)


def rounded(exact: Fraction, dtype: torch.dtype) -> float:
    """The nearest number of a format, ties to even; +0 for zero."""
    precision, least, above = FORMATS[dtype]
    if not exact:
        return 0.0
    size = abs(exact)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()  # or one more
    exponent -= size < Fraction(2) ** exponent
    unit = Fraction(2) ** max(exponent - precision + 1, least)
    nearest = round(size / unit) * unit  # Python's ties are to even, too
    value = inf if nearest >= Fraction(2) ** above else float(nearest)
    return value if exact > 0 else -value


def sums(columns: Sequence[Sequence[float]], dtype: torch.dtype) -> list[float]:
    sources = list(torch.tensor(columns, dtype=dtype).t().contiguous())
    before = [source.clone() for source in sources]
    out = torch.empty(len(columns), dtype=dtype)
    exact_sum(sources, out)
    for source, old in zip(sources, before, strict=True):
        assert torch.equal(source.isnan(), old.isnan())
        assert torch.equal(source.nan_to_num(), old.nan_to_num())
    numbers: list[float] = out.tolist()
    return numbers


def bits(number: float) -> bytes:
    return b"nan" if math.isnan(number) else struct.pack("d", number)


@st.composite
def column(draw: st.DrawFn, dtype: torch.dtype, k: int) -> list[float]:
    """Numbers of all sizes, or of few; some cancel, some are just beside the middle of others."""
    precision, least, above = FORMATS[dtype]
    any_number = st.floats(
        width=32 if dtype is torch.float32 else 64, allow_nan=False, allow_infinity=False
    )
    base = draw(st.integers(least, above - 1))
    near = st.sampled_from([0, 0, 1, 2, precision - 1, precision, precision + 1, 54, 80, 170])
    numbers: list[float] = []
    while len(numbers) < k:
        kind = draw(st.sampled_from(["any", "near", "opposite"]))
        if kind == "any":
            numbers.append(draw(any_number))
        elif kind == "opposite" and numbers:
            numbers.append(-draw(st.sampled_from(numbers)))
        else:
            sign, below = draw(st.sampled_from([1.0, -1.0])), draw(near)
            more = draw(st.sampled_from([0.0, 2.0 ** (1 - precision), 0.5]))
            numbers.append(sign * math.ldexp(1 + more, max(base - below, least + 1)))
    as_kept: list[float] = torch.tensor(numbers, dtype=torch.float64).to(dtype).tolist()
    return [number if math.isfinite(number) else 1.0 for number in as_kept]


@st.composite
def tables(draw: st.DrawFn) -> tuple[torch.dtype, list[list[float]]]:
    dtype = draw(st.sampled_from(list(FORMATS)))
    k = draw(st.integers(2, 9))
    return dtype, draw(st.lists(column(dtype, k), min_size=1, max_size=5))


@given(tables(), st.randoms(use_true_random=False))
@effort(40)
def test_sums_are_those_of_fractions_in_every_order_and_at_every_place(
    case: tuple[torch.dtype, list[list[float]]], random: Random
) -> None:
    dtype, columns = case
    wanted = [bits(rounded(sum(map(Fraction, column), Fraction()), dtype)) for column in columns]
    assert [*map(bits, sums(columns, dtype))] == wanted
    for column in columns:
        random.shuffle(column)
    assert [*map(bits, sums(columns[::-1], dtype))] == wanted[::-1]
    assert [bits(*sums([column], dtype)) for column in columns] == wanted
    # Further ranks that have nothing to add.
    wider = [[*column[:1], 0.0, *column[1:], 0.0] for column in columns]
    assert [*map(bits, sums(wider, dtype))] == wanted


@given(st.floats(width=64, allow_nan=False, allow_infinity=False), st.integers(0, 400))
@effort(30)
def test_the_expected_values_are_right(number: float, shift: int) -> None:
    exact = Fraction(number) / 3**shift
    assert rounded(exact, torch.float64) == float(exact)  # which Python rounds once
    (single,) = struct.unpack("f", struct.pack("f", number)) if abs(number) < 1e38 else (0.0,)
    assert rounded(Fraction(number if single else 0), torch.float32) == single or not single


@both
def test_sums_that_additions_get_wrong(dtype: torch.dtype) -> None:
    precision, least, above = FORMATS[dtype]
    one, half = 1.0, 2.0**-precision  # of the last bit of numbers from 1 on
    tiny, huge = math.ldexp(1.0, least), math.ldexp(2 - 2.0 ** (1 - precision), above - 1)
    cases = [
        ([huge, one, -huge], one),
        ([one, half, tiny], one + 2 * half),  # one bit, 149 or 1074 places below, decides
        ([one, half, -tiny], one),
        ([one, half, 0.0], one),  # a tie, to even
        ([one, 3 * half, 0.0], one + 4 * half),  # a tie, to even
        ([-one, -half, -tiny], -one - 2 * half),
        ([huge, huge, -huge], huge),
        ([huge, huge, huge], inf),
        ([huge, math.ldexp(1.0, above - precision - 1), 0.0], inf),  # the middle beyond the largest
        ([huge, math.ldexp(1.0, above - precision - 1), -tiny], huge),
        ([tiny, tiny, tiny], 3 * tiny),
        ([tiny, -tiny, 0.0], 0.0),
    ]
    found = sums([column for column, _ in cases], dtype)
    assert [*map(bits, found)] == [bits(wanted) for _, wanted in cases]
    from_left = []
    for column, _ in cases:
        total = torch.tensor(column[0], dtype=dtype)
        for number in column[1:]:
            total = total + torch.tensor(number, dtype=dtype)
        from_left.append(total.item())
    wrong = [
        index for index, pair in enumerate(zip(found, from_left, strict=True)) if len({*pair}) > 1
    ]
    assert wrong == [0, 1, 5, 6, 9]


@both
@pytest.mark.parametrize("k", [2, 3, 5])
def test_infinities_nan_and_zeros(dtype: torch.dtype, k: int) -> None:
    def of(*numbers: float, rest: float = 0.0) -> list[float]:
        return [*numbers, *[rest] * (k - len(numbers))]

    huge = math.ldexp(1.5, FORMATS[dtype][2] - 1)
    cases = [
        (of(inf, 1.0), inf),
        (of(-inf, -inf), -inf),
        (of(inf, -inf), nan),
        (of(nan, 1.0), nan),
        (of(-inf, huge, rest=huge), -inf),  # the finite ones alone would be infinite
        (of(-0.0, rest=-0.0), 0.0),
        (of(-0.0, 0.0), 0.0),
        (of(1.0, 2.0), 3.0),  # beside the others
    ]
    found = sums([column for column, _ in cases], dtype)
    assert [*map(bits, found)] == [bits(wanted) for _, wanted in cases]


def test_long_vectors_narrow_sources_complex_numbers_and_places() -> None:
    generator = torch.Generator().manual_seed(5)
    rows = [torch.randn(40_001, generator=generator, dtype=torch.float64) for _ in range(4)]
    wanted = (rows[0] + rows[1] + rows[2] + rows[3]).float()
    out = torch.empty(40_001)
    exact_sum([row.float() for row in rows], out)
    assert not torch.equal(out, wanted)  # the inputs have been rounded
    single = [row.float().double() for row in rows]
    exact = torch.tensor(
        [math.fsum(column) for column in zip(*map(Tensor.tolist, single), strict=True)]
    )
    assert torch.equal(out, exact.double().float())
    narrow = [row.bfloat16() for row in rows]
    exact_sum(narrow, out)
    halves = [row.double() for row in narrow]
    assert torch.equal(out, (halves[0] + halves[1] + halves[2] + halves[3]).float())

    numbers = [torch.complex(row.float(), -3 * row.float()) for row in rows]
    total = torch.empty(40_001, dtype=torch.complex64)
    exact_sum(numbers, total)
    for part in ("real", "imag"):
        exact_sum([getattr(number, part).contiguous() for number in numbers], out)
        assert torch.equal(getattr(total, part), out)

    exact_sum(numbers, numbers[1])  # into a source
    assert torch.equal(numbers[1], total)
    empty: Tensor = torch.empty(0)
    exact_sum([empty] * 3, empty)


@pytest.mark.parametrize("k", [3, 5, 9, 17])
def test_digits_of_so_many_sources_have_room_for_their_sum(k: int) -> None:
    """The largest digits there are, from one more source than a power of two."""
    last = [2.0**53 - 1, 2.0**53 - 3, 2.0**53 - 3]  # a digit too many rounds their sum up
    for numbers in (
        last + [0.0] * (k - 3),
        [2.0**53 - 1] * k,
        [2.0**52 - 1] * k,
        [2.0**53 - 1] * (k - 1) + [2.0**52 + 1],
    ):
        total = torch.empty(1, dtype=torch.float64)
        exact_sum([torch.tensor([number], dtype=torch.float64) for number in numbers], total)
        assert Fraction(total.item()) == Fraction(float(sum(map(Fraction, numbers))))
