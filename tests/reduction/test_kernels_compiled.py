"""The kernels as NVRTC compiles them, for the GPUs of three generations; no GPU is needed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest
import torch

from ringcoll.reduction.kernels import MOST_SOURCES, OPTIONS, Kernel, header
from tests.cases.kernel_table import KERNELS, plain, runs

try:
    from cuda.bindings import nvrtc

    nvrtc.nvrtcVersion()  # it is there, and so is the library that it calls
    NVRTC = ""
except (ImportError, RuntimeError) as error:
    NVRTC = str(error)

pytestmark = [
    pytest.mark.skipif(bool(NVRTC), reason=f"NVRTC is not installed: {NVRTC}"),
    pytest.mark.slow,
]
AMPERE, HOPPER, BLACKWELL = 80, 90, 100
_MANY = (6, 8, MOST_SOURCES)  # beside those of the table
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64)


def compiled(text: str, architecture: int, *more: str) -> tuple[str, str]:
    """Machine code is made; returns the assembler's report and the PTX program."""

    def checked(answer: tuple[object, ...]) -> object:
        status, *values = answer
        assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS, status
        return values[0] if values else None

    program = checked(nvrtc.nvrtcCreateProgram(text.encode(), b"kernels.cu", 0, [], []))
    options = [*OPTIONS, f"--gpu-architecture=sm_{architecture}", "--ptxas-options=-v", *more]
    (status,) = nvrtc.nvrtcCompileProgram(
        program, len(options), [option.encode() for option in options]
    )
    log = bytearray(checked(nvrtc.nvrtcGetProgramLogSize(program)))  # type: ignore[call-overload]
    found = bytes(log)
    checked(nvrtc.nvrtcGetProgramLog(program, found))
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS, found.decode()[-4000:]
    ptx = bytes(bytearray(checked(nvrtc.nvrtcGetPTXSize(program))))  # type: ignore[call-overload]
    checked(nvrtc.nvrtcGetPTX(program, ptx))
    assert checked(nvrtc.nvrtcGetCUBINSize(program))
    return found.decode(), ptx.decode()


def program(kernels: Sequence[Kernel]) -> str:
    return header() + "".join(one.definition(f"kernel{i}") for i, one in enumerate(kernels))


def spills(report: str, kernels: Sequence[Kernel]) -> list[Kernel]:
    """Those whose values do not fit in registers."""
    found = re.findall(
        r"'kernel(\d+)'.*?(\d+) bytes stack frame, (\d+) bytes spill", report, re.DOTALL
    )
    assert len(found) == len(kernels), report[-2000:]
    return [kernels[int(n)] for n, frame, spilled in found if int(frame) or int(spilled)]


def vectorised() -> list[Kernel]:
    """Every kernel, for vectors that are aligned alike."""
    return [replace(kernel, run=kernel.pack) for kernel in KERNELS]


@pytest.mark.parametrize("architecture", [AMPERE, HOPPER, BLACKWELL])
def test_vectorised_kernels_fit_in_registers(architecture: int) -> None:
    kernels = vectorised()
    report, _ = compiled(program(kernels), architecture)
    assert spills(report, kernels) == []


def test_other_alignments_fit_in_registers() -> None:
    some = [plain("Sum", one) for one in _DTYPES]
    kernels = [one for kernel in some for one in runs(kernel)]
    report, _ = compiled(program(kernels), HOPPER)
    assert spills(report, kernels) == []


@pytest.mark.parametrize("architecture", [AMPERE, HOPPER, BLACKWELL])
def test_as_many_sources_as_there_may_be(architecture: int) -> None:
    """Additions and comparisons of every width."""
    forms = product(("Sum", "Max"), (torch.int8, *_DTYPES), _MANY)
    kernels = [plain(*form) for form in forms]
    kernels = [replace(kernel, run=kernel.pack) for kernel in kernels]
    report, _ = compiled(program(kernels), architecture)
    assert spills(report, kernels) == []


def test_spills_are_found() -> None:
    kernel = replace(plain("Sum", torch.float32), run=4)
    text = program([kernel]).replace("__launch_bounds__(256, 3)", "")
    report, _ = compiled(text, HOPPER, "--maxrregcount=16")
    assert spills(report, [kernel]) == [kernel]


@pytest.mark.parametrize("architecture", [AMPERE, HOPPER, BLACKWELL])
def test_accesses_are_as_wide_as_they_can_be(architecture: int) -> None:
    for dtype, sources in product(_DTYPES, (2, 8)):
        kernel = replace(plain("Sum", dtype, sources), run=plain("Sum", dtype).pack)
        _, ptx = compiled(program([kernel]), architecture)
        # The full tiles, and the packs after the last full one.
        times = kernel.unroll + 1
        assert ptx.count("ld.global.v4.u32") == sources * times
        assert ptx.count("st.global.v4.u32") == times


def test_no_multiply_add_in_one_rounding() -> None:
    kernel = replace(plain("Product", torch.complex64), run=2)
    _, ptx = compiled(program([kernel]), HOPPER)
    assert "mul.rn.f32" in ptx or "mul.f32" in ptx
    assert "fma.rn.f32" not in ptx


def test_numbers_below_the_normal_range_are_none_of_cupys_business() -> None:
    """CuPy adds an option that takes them for zero; it must not matter."""
    kernels = [one for one in vectorised() if "float" in one.work or "complex" in one.work]
    assert flushing(compiled(program(kernels), HOPPER, "-ftz=true")[1]) == set()
    careless = header().replace("#ifdef __CUDA_ARCH__\n// CuPy always", "#if 0\n// CuPy always")
    assert careless != header()
    text = careless + plain("Sum", torch.float32).definition()
    assert flushing(compiled(text, HOPPER, "-ftz=true")[1]) == {"add.rn.ftz.f32"}


def flushing(ptx: str) -> set[str]:
    """Instructions that take small numbers for zero; to ask for NaN is no such thing."""
    return {word for word in re.findall(r"[\w.]*\.ftz[\w.]*", ptx) if ".nan." not in word}
