"""The kernels on a GPU against torch on the CPU, bit for bit, and where and when they run."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ringcoll
from ringcoll import LocalGroup, run_threads
from ringcoll.runtime.reduction import MOST_SOURCES, bound, resolve
from tests.cases.engine_cases import DTYPES, engine_cases, wrong
from tests.cases.kernel_checks import (
    bits,
    check,
    check_rounding,
    check_widening,
    folded,
    wide,
)
from tests.cases.kernel_table import (
    COMPLEX,
    FLOATS,
    MANY,
    NARROW,
    SIGNED,
    TABLE,
    UNSIGNED,
    WIRES,
    on_the_wire,
    plain,
)
from tests.programs.gpu_kernels import cupy_engine, run

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("compiled")]

BUSY_CYCLES = 100_000_000  # some 50 ms


@pytest.mark.parametrize("op, dtype", TABLE, ids=str)
def test_every_operator_and_dtype(op: str, dtype: torch.dtype) -> None:
    """At every alignment, in and out of place; `check` looks at what is beside the results, too."""
    seen = set()
    kernel, work = plain(op, dtype), wide(dtype)
    pack = kernel.pack
    lengths = [0, 1, pack - 1, pack, pack + 1, 3 * pack + 2, 400]
    if dtype not in UNSIGNED[1:]:  # whose expected values Python's integers give, slowly
        lengths.append(3 * 256 * kernel.unroll * pack + 5)  # several blocks, and a tail
    for offset, numel in product(range(pack), lengths):
        for offsets in ([offset] * 3, [offset, 0, pack // 2]):
            chosen = check(
                run,
                kernel,
                (dtype,) * 3,
                numel,
                offsets,
                lambda sources: folded(op, sources, work),
                in_place=numel % 2 == 0,
                seed=offset + numel,
                device="cuda",
            )
            seen.add(chosen.run)
    assert pack in seen
    assert len(seen) > 1 or pack == 1


@pytest.mark.parametrize("sources", MANY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_several_sources(dtype: torch.dtype, sources: int) -> None:
    kernel = plain("Sum", dtype, sources)
    for offset, numel in product((0, 1, 2), (5, 10_007)):
        for offsets in ([offset] * (sources + 1), [*range(sources + 1)]):
            check(
                run,
                kernel,
                (dtype,) * 3,
                numel,
                offsets,
                lambda given: folded("Sum", given, torch.float32),
                device="cuda",
            )


@pytest.mark.parametrize("work, wire", WIRES, ids=str)
def test_a_wire_dtype(work: torch.dtype, wire: torch.dtype) -> None:
    """What is kept and what is sent are equal, and rounded once."""

    def expected(given: list[Tensor]) -> Tensor:
        return folded("Sum", given, work).to(wire).to(work)

    for sources in (1, 2, 3):
        kernel = on_the_wire(work, wire, sources)
        for offset, numel in product(range(kernel.pack + 1), (5, 10_007)):
            for offsets in ([offset] * (sources + 2), [*range(sources + 2)]):
                types = (work, wire, wire)
                check(run, kernel, types, numel, offsets, expected, device="cuda")


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_every_number_of_8_and_16_bits(dtype: torch.dtype) -> None:
    check_widening(run, dtype, "cuda")
    check_rounding(run, dtype, "cuda")


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_every_float32_is_rounded_as_torch_rounds_it(dtype: torch.dtype) -> None:
    """All 2^32 of them, a sixteenth at a time."""
    unit = torch.uint8 if dtype.itemsize == 1 else torch.int16
    for part in range(16):
        start = (part << 28) - (1 << 31)
        patterns = torch.arange(start, start + (1 << 28), dtype=torch.int32, device="cuda")
        given = patterns.view(torch.float32)
        kept, rounded = torch.empty_like(given), torch.empty_like(given, dtype=dtype)
        run(on_the_wire(torch.float32, dtype, 1), [kept, rounded], [given])
        expected = given.to(dtype)
        is_nan = expected.float().isnan()
        assert torch.equal(rounded.float().isnan(), is_nan)
        assert bool(((rounded.view(unit) == expected.view(unit)) | is_nan).all())
        assert bool(((kept == expected.float()) | is_nan).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
def test_a_second_copy(dtype: torch.dtype) -> None:
    kernel = replace(plain("Max", dtype, 2), results=2)
    for offset in range(5):
        check(
            run,
            kernel,
            (dtype,) * 3,
            7777,
            [offset, offset, offset, offset + 1],
            lambda given: folded("Max", given, dtype),
            in_place=offset % 2 == 0,
            device="cuda",
        )


@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX, *SIGNED, *UNSIGNED], ids=str)
def test_the_division_of_avg(dtype: torch.dtype) -> None:
    kernel, work = plain("Sum", dtype, 2, "Divide"), wide(dtype)

    def expected(given: list[Tensor]) -> Tensor:
        total = folded("Sum", given, work)
        if dtype.is_floating_point:
            return total / 3
        if dtype.is_complex:
            return torch.view_as_complex(torch.view_as_real(total) / 3)
        numbers = [abs(n) // 3 * (1 if n >= 0 else -1) for n in total.tolist()]
        return torch.tensor(numbers, dtype=dtype)

    check(run, kernel, (dtype,) * 3, 999, [1, 1, 1], expected, factor=3, device="cuda")


@pytest.mark.parametrize("op", ["Sum", "Product", "Min", "Max"])
def test_numbers_below_the_normal_range(op: str) -> None:
    """They are not flushed to zero, which CuPy asks the compiler for (``-ftz=true``)."""
    tiny = torch.tensor([2.0**-149, 2.0**-140, -(2.0**-130), 1e-39, -1e-39, 0.0])
    one = tiny.repeat_interleave(6)
    other = tiny.repeat(6) if op != "Product" else torch.full((36,), 0.5)
    found = torch.empty(36, device="cuda")
    run(plain(op, torch.float32), [found], [one.cuda(), other.cuda()])
    assert bits(found) == bits(folded(op, [one, other], torch.float32))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_that_is_reduced_is_what_torch_makes_of_it(dtype: torch.dtype) -> None:
    before = bound["torch"]
    for case in engine_cases(dtype):
        assert not wrong(cupy_engine(), case, "cuda")
    assert bound["torch"] == before, "a kernel is missing"


def test_as_many_sources_as_there_are_ranks() -> None:
    """More than a kernel takes are reduced by several, one after the other."""
    for count in (MOST_SOURCES, MOST_SOURCES + 1, 3 * MOST_SOURCES):
        sources = [torch.randn(5003) for _ in range(count)]
        into = torch.empty(5003, device="cuda")
        reduction = resolve("sum", torch.float32)
        cupy_engine().bind(reduction, [into], [one.cuda() for one in sources], None)()
        assert bits(into) == bits(folded("Sum", sources, torch.float32))


# --- streams, graphs, threads ---------------------------------------------------------


def result_behind_a_busy_stream(current: bool) -> float:
    """What a kernel gives whose input is written late, on the stream where it is launched or not."""
    stream = torch.cuda.Stream()
    given, one, into = (torch.zeros(1 << 16, device="cuda") for _ in range(3))
    launch = cupy_engine().launch(plain("Sum", torch.float32), [into], [given, one])
    assert launch is not None
    launch()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(BUSY_CYCLES)
        given.fill_(5)
        if current:
            launch()
    if not current:
        launch()
    assert not stream.query(), "the host has waited"
    torch.cuda.synchronize()
    return float(into.max())


def test_kernels_run_on_the_current_stream_and_the_host_does_not_wait() -> None:
    assert result_behind_a_busy_stream(current=True) == 5


def test_on_another_stream_the_test_above_would_fail() -> None:
    assert result_behind_a_busy_stream(current=False) == 0


def test_kernels_in_a_graph() -> None:
    given, other, into, sent = (torch.zeros(10_007, device="cuda") for _ in range(4))
    narrow = sent.bfloat16()
    reduction = resolve("avg", torch.float32, wire_dtype=torch.bfloat16)
    reduce = cupy_engine().bind(reduction, [into, narrow], [given, other], 2)
    reduce()  # compiled, and loaded
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        reduce()
    for turn in range(1, 5):
        given.fill_(turn)
        other.fill_(3 * turn)
        graph.replay()
        assert into.unique().tolist() == [2 * turn]
        assert narrow.unique().tolist() == [2 * turn]


def test_kernels_from_several_threads() -> None:
    """Each with a stream and a dtype of its own, some of which are compiled meanwhile."""
    dtypes = [torch.float32, torch.bfloat16, torch.int32, torch.float64]
    found: list[str] = []

    def main(dtype: torch.dtype) -> None:
        one, other = (torch.arange(n, n + 3001).to(dtype).cuda() for n in (0, 7))
        reduction = resolve("max", dtype)
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            for _ in range(200):
                into = torch.zeros_like(one)
                cupy_engine().bind(reduction, [into], [one, other], None)()
                if not torch.equal(into, other):
                    found.append(f"wrong: {dtype}")
        found.append("done")

    threads = [threading.Thread(target=main, args=(dtype,)) for dtype in dtypes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == ["done"] * len(dtypes)


def test_more_elements_than_32_bits_count() -> None:
    numel = (1 << 31) + 100_003
    if torch.cuda.mem_get_info()[0] < 4 * numel:
        pytest.skip("not enough memory on the GPU")
    memory = torch.empty(2 * numel + 64, dtype=torch.int8, device="cuda").random_(-128, 128)
    one, other = (
        memory[1 : numel + 1],
        memory[numel + 14 : 2 * numel + 14],
    )  # both 1 beyond a multiple of 16
    expected = torch.add(one, other)
    kernel = run(plain("Sum", torch.int8), [one], [one, other])
    assert kernel.run == 16
    assert torch.equal(one, expected)


# --- which engine it is ---------------------------------------------------------------


def sum_of_ranks(group: LocalGroup) -> list[float]:
    tensor = torch.full((1000,), group.rank() + 1.0, device="cuda", dtype=torch.bfloat16)
    ringcoll.all_reduce(tensor, group=group, algorithm="ring")
    found: list[float] = tensor.unique().tolist()
    return found


@pytest.mark.parametrize("wanted", ["cupy", "torch", ""])
def test_the_environment_chooses(monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    monkeypatch.setenv("RINGCOLL_REDUCTION", wanted)
    before = bound["cupy"]
    assert run_threads(sum_of_ranks, 3) == [[6.0]] * 3
    assert (bound["cupy"] > before) == (wanted != "torch")


def sum_on_the_second_gpu(group: LocalGroup) -> list[float]:
    torch.cuda.set_device(0)
    tensor = torch.full((5000,), group.rank() + 1.0, device="cuda:1")
    ringcoll.all_reduce(tensor, group=group, algorithm="ring")
    assert torch.cuda.current_device() == 0
    found: list[float] = tensor.unique().tolist()
    return found


@pytest.mark.gpu(count=2)
def test_a_device_that_is_not_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGCOLL_REDUCTION", "cupy")
    before = bound["cupy"]
    assert run_threads(sum_on_the_second_gpu, 3) == [[6.0]] * 3
    assert bound["cupy"] > before


def python(text: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own, with CuPy's cache in a folder."""
    return subprocess.run(
        [sys.executable, "-c", text],
        env={**os.environ, "CUPY_CACHE_DIR": str(folder), **environment},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def program(first: str, last: str) -> str:
    """An all-reduce on the GPU, by three threads, with more before and after it."""
    return f"""
import sys, warnings
{first}
import torch, ringcoll
from ringcoll.runtime.reduction import gpu

def main(group):
    tensor = torch.full((1000,), group.rank() + 1.0, device="cuda", dtype=torch.bfloat16)
    ringcoll.all_reduce(tensor, group=group, algorithm="ring")
    return tensor.unique().tolist()

with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    assert ringcoll.run_threads(main, 3) == [[6.0]] * 3
texts = [str(one.message) for one in told if "done by torch" in str(one.message)]
{last}
"""


def test_without_cupy_torch_reduces_and_says_so(tmp_path: Path) -> None:
    text = program(
        'sys.modules["cupy"] = None',
        'assert any("ringcoll[cuda1" in one for one in texts), texts\n'
        'assert gpu.engine().name == "torch"',
    )
    done = python(text, tmp_path, RINGCOLL_REDUCTION="auto")
    assert done.returncode == 0, done.stderr


def test_with_cupy_nothing_is_said(tmp_path: Path) -> None:
    text = program("", 'assert texts == [] and gpu.engine().name.startswith("cupy")')
    done = python(text, tmp_path, RINGCOLL_REDUCTION="auto")
    assert done.returncode == 0, done.stderr


def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    def files() -> dict[str, Any]:
        found = [(one, one.stat()) for one in tmp_path.rglob("*.cubin")]
        return {str(one): (about.st_ino, about.st_mtime_ns) for one, about in found}

    text = program("", 'assert gpu.bound["cupy"] > 0')
    seen: list[dict[str, Any]] = []
    for _ in range(2):
        done = python(text, tmp_path, RINGCOLL_REDUCTION="cupy")
        assert done.returncode == 0, done.stderr
        seen.append(files())
    assert seen[0]
    assert seen[1] == seen[0]
