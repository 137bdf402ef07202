"""The kernels' arithmetic and indices, run on the CPU against torch: every operator and dtype."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, product
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ringcoll.runtime.reduction.gpu import aligned, header
from tests.cases.effort import effort
from tests.cases.kernel_checks import (
    bits,
    check,
    check_rounding,
    check_widening,
    every_number,
    folded,
    wide,
)
from tests.cases.kernel_table import (
    COMPLEX,
    FLOATS,
    KERNELS,
    NARROW,
    SIGNED,
    TABLE,
    UNSIGNED,
    WIRES,
    on_the_wire,
    plain,
    runs,
    widening,
)
from tests.fakes.host_kernels import COMPILER, HostKernels

pytestmark = [pytest.mark.skipif(not COMPILER, reason="there is no C++ compiler"), pytest.mark.slow]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> HostKernels:
    return HostKernels(tmp_path_factory.mktemp("kernels"), [*chain(*map(runs, KERNELS))])


@pytest.mark.parametrize("op, dtype", TABLE, ids=str)
def test_every_operator_and_dtype(kernels: HostKernels, op: str, dtype: torch.dtype) -> None:
    seen = set()
    kernel, work = plain(op, dtype), wide(dtype)
    lengths = [0, 1, kernel.pack - 1, kernel.pack, kernel.pack + 1, 3 * kernel.pack + 2, 400]
    for offset, numel in product(range(kernel.pack), lengths):
        same, apart = [offset] * 3, [offset, 0, kernel.pack // 2]
        for offsets in (same, apart):
            seen.add(
                check(
                    kernels,
                    kernel,
                    (dtype,) * 3,
                    numel,
                    offsets,
                    lambda sources: folded(op, sources, work),
                    in_place=numel % 2 == 0,
                    seed=offset + numel,
                ).run
            )
    assert kernel.pack in seen
    assert len(seen) > 1 or kernel.pack == 1  # both the vectorised and some other access


@given(data=st.data())
@effort(100)
def test_heads_tails_and_tiles_of_any_length(kernels: HostKernels, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    sources = data.draw(st.sampled_from([1, 2, 3, 8]))
    kernel = plain("Sum", dtype, sources)
    tile = 256 * kernel.unroll * kernel.pack
    near = st.builds(
        lambda tiles, off: max(0, tiles * tile + off), st.integers(0, 3), st.integers(-40, 40)
    )
    numel = data.draw(st.one_of(st.integers(0, 40), near))
    offsets = data.draw(
        st.lists(st.integers(0, kernel.pack), min_size=sources + 1, max_size=sources + 1)
    )
    if data.draw(st.booleans()):
        offsets = [offsets[0]] * (sources + 1)
    check(
        kernels,
        kernel,
        (dtype,) * 3,
        numel,
        offsets,
        lambda given: folded("Sum", given, torch.float32),
        most_blocks=data.draw(st.sampled_from([1, 2, None])),
    )


@pytest.mark.parametrize("work, wire", WIRES, ids=str)
@pytest.mark.parametrize("sources", [1, 2, 3])
def test_a_wire_dtype(
    kernels: HostKernels, work: torch.dtype, wire: torch.dtype, sources: int
) -> None:
    """What is kept and what is sent are equal, and rounded once."""
    kernel = on_the_wire(work, wire, sources)

    def expected(given: list[Tensor]) -> Tensor:
        return folded("Sum", given, work).to(wire).to(work)

    for offset in range(kernel.pack + 1):
        same, apart = [offset] * (sources + 2), [*range(sources + 2)]
        for offsets, numel in product((same, apart), (5, 1000)):
            check(kernels, kernel, (work, wire, wire), numel, offsets, expected)


def test_a_second_copy(kernels: HostKernels) -> None:
    for dtype in (torch.float32, torch.int8):
        kernel = replace(plain("Max", dtype, 2), results=2)
        for offset in range(5):
            offsets = [offset, offset, offset, offset + 1]
            check(
                kernels,
                kernel,
                (dtype,) * 3,
                777,
                offsets,
                lambda given, dtype=dtype: folded("Max", given, dtype),  # type: ignore[misc]
                in_place=offset % 2 == 0,
            )


@pytest.mark.parametrize("world_size", [1, 3, 8])
@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX, *SIGNED, *UNSIGNED], ids=str)
def test_the_division_of_avg(kernels: HostKernels, dtype: torch.dtype, world_size: int) -> None:
    kernel, work = plain("Sum", dtype, 2, "Divide"), wide(dtype)

    def expected(given: list[Tensor]) -> Tensor:
        total = folded("Sum", given, work)
        if dtype.is_floating_point:
            return total / world_size
        if dtype.is_complex:
            return torch.view_as_complex(torch.view_as_real(total) / world_size)
        numbers = [abs(n) // world_size * (1 if n >= 0 else -1) for n in total.tolist()]
        return torch.tensor(numbers, dtype=dtype)

    check(kernels, kernel, (dtype,) * 3, 999, [1, 1, 1], expected, factor=world_size)


@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
def test_the_complex_factor_of_premul_sum(kernels: HostKernels, dtype: torch.dtype) -> None:
    kernel, work, factor = plain("Sum", dtype, 1, "Multiply"), wide(dtype), 0.5 - 4j

    def expected(given: list[Tensor]) -> Tensor:
        return given[0].to(work) * torch.tensor(factor, dtype=work)

    check(kernels, kernel, (dtype,) * 3, 999, [3, 3], expected, factor=factor)


@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX], ids=str)
def test_a_real_factor_scales_both_parts(kernels: HostKernels, dtype: torch.dtype) -> None:
    kernel, work = plain("Sum", dtype, 1, "Scale"), wide(dtype)

    def expected(given: list[Tensor]) -> Tensor:
        parts = torch.view_as_real(given[0]) if dtype.is_complex else given[0].to(work)
        return (parts * 0.3).view(work).view(given[0].shape)

    check(kernels, kernel, (dtype,) * 3, 999, [3, 3], expected, factor=0.3)


@pytest.fixture(scope="module", params=[False, True], ids=["software", "instructions"])
def converting(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> HostKernels:
    """Kernels that convert, without and with a GPU's instructions for it."""
    some = [
        *(on_the_wire(torch.float32, dtype, 1) for dtype in NARROW),
        *map(widening, NARROW),
        *(plain("Sum", dtype) for dtype in NARROW),
    ]
    every = [*chain(*map(runs, some))]
    return HostKernels(tmp_path_factory.mktemp("converting"), every, converts=request.param)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_sums_of_what_is_converted(converting: HostKernels, dtype: torch.dtype) -> None:
    kernel = plain("Sum", dtype)
    for offset in range(kernel.pack):
        for offsets in ([offset] * 3, [offset, 0, kernel.pack // 2]):
            check(
                converting,
                kernel,
                (dtype,) * 3,
                400 + offset,
                offsets,
                lambda sources: folded("Sum", sources, torch.float32),
                seed=offset,
            )


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_every_number_of_8_and_16_bits(converting: HostKernels, dtype: torch.dtype) -> None:
    check_widening(converting, dtype)
    check_rounding(converting, dtype)


def test_torch_may_take_nan_for_what_is_too_large(tmp_path: Path) -> None:
    """As some versions do for the float8 without infinity."""
    kernel = on_the_wire(torch.float32, torch.float8_e4m3fn, 1)
    line, _, _ = header().partition("\n")
    for converts in (False, True):
        folder = tmp_path / str(converts)
        folder.mkdir()
        change = lambda text: text.replace(line, "#define RINGCOLL_LARGE_E4M3 127")  # noqa: E731
        kernels = HostKernels(folder, [replace(kernel, run=4)], change, converts=converts)
        last = torch.nextafter(torch.tensor(464.0), torch.tensor(465.0)).item()
        given = torch.tensor([464.0, last, -last, -464.0, 1e30, float("inf"), 448.0, float("nan")])
        wide, narrow = torch.empty(8), torch.empty(8, dtype=torch.float8_e4m3fn)
        kernels(kernel, [wide, narrow], [given])
        nan = float("nan")
        expected = torch.tensor([448.0, nan, nan, -448.0, nan, nan, 448.0, nan])
        assert bits(wide) == bits(expected)
        assert bits(narrow) == bits(expected)


WRONG_CONVERSIONS = [
    ("float16_pair(from[1], from[0])", "float16_pair(from[0], from[1])", torch.float16),
    ("bfloat16_pair(from[1], from[0])", "bfloat16_pair(from[0], from[1])", torch.bfloat16),
    ("fabsf(from[0]) >= 61440.0f", "fabsf(from[0]) > 61440.0f", torch.float8_e5m2),
    ("fabsf(from[1]) >= 61440.0f ? 0x100", "fabsf(from[1]) >= 61440.0f ? 1", torch.float8_e5m2),
    ("(uint16)(halves >> 16)", "(uint16)halves", torch.float8_e4m3fn),
]


@pytest.mark.parametrize("old, new, dtype", WRONG_CONVERSIONS, ids=[str(i) for i in range(5)])
def test_wrong_conversions_are_found(
    tmp_path: Path, old: str, new: str, dtype: torch.dtype
) -> None:
    assert old in header()
    some = [widening(dtype), on_the_wire(torch.float32, dtype, 1)]
    every = [*chain(*map(runs, some))]
    for change, is_right in ((str, True), (lambda text: text.replace(old, new), False)):
        (tmp_path / str(is_right)).mkdir()
        kernels = HostKernels(tmp_path / str(is_right), every, change, converts=True)
        narrow = every_number(dtype)
        wide = torch.empty(narrow.numel())
        kernels(widening(dtype), [wide], [narrow])
        middle = torch.tensor([61440.0, -61440.0, 61440.0, 1.0])
        given, back = torch.cat([narrow.float(), middle]), torch.empty(narrow.numel() + 4)
        rounded = torch.empty_like(back, dtype=dtype)
        kernels(on_the_wire(torch.float32, dtype, 1), [back, rounded], [given])
        expected = given.to(dtype)
        assert (
            bits(wide) == bits(narrow.float())
            and bits(rounded) == bits(expected)
            and bits(back) == bits(expected.float())
        ) is is_right


@given(
    starts=st.lists(
        st.tuples(st.integers(0, 64), st.sampled_from([1, 2, 4, 8, 16])), min_size=1, max_size=6
    ),
    pack=st.sampled_from([1, 2, 4, 8, 16]),
)
def test_the_longest_run(starts: list[tuple[int, int]], pack: int) -> None:
    places = [(4096 + start * itemsize, itemsize) for start, itemsize in starts]
    found = aligned(places, pack)
    assert found is not None
    run, head = found
    assert 0 <= head < run <= pack

    def fits(length: int, skipped: int) -> bool:
        return all((at + skipped * size) % (length * size) == 0 for at, size in places)

    assert fits(run, head)
    longer = 2 * run
    while longer <= pack:
        assert not any(fits(longer, skipped) for skipped in range(longer))
        longer *= 2


def test_vectors_that_are_not_aligned_to_their_elements() -> None:
    assert aligned([(4098, 4)], 4) is None
