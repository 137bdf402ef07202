"""The kernels as NVRTC compiles them, for the GPUs of three generations; no GPU is needed."""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from ringcoll.runtime.reduction.gpu import MOST_SOURCES, OPTIONS, Kernel, header
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
AMPERE, ADA, HOPPER, BLACKWELL = 80, 89, 90, 100
_MANY = (6, 8, MOST_SOURCES)  # beside those of the table
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64)


class Compiled(NamedTuple):
    """The assembler's report, the program in PTX, and in machine code."""

    report: str
    ptx: str
    code: bytes


def compiled(text: str, architecture: int, *more: str) -> Compiled:
    """Compile kernels for a kind of GPU."""

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
    code = bytes(bytearray(checked(nvrtc.nvrtcGetCUBINSize(program))))  # type: ignore[call-overload]
    checked(nvrtc.nvrtcGetCUBIN(program, code))
    return Compiled(found.decode(), ptx.decode(), code)


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


@pytest.mark.parametrize("architecture, share", [(AMPERE, 7), (HOPPER, 1), (BLACKWELL, 7)])
def test_vectorised_kernels_fit_in_registers(architecture: int, share: int) -> None:
    """All for one generation, one in so many for the others: to compile them takes half a minute."""
    kernels = vectorised()[::share]
    report = compiled(program(kernels), architecture).report
    assert spills(report, kernels) == []


def test_other_alignments_fit_in_registers() -> None:
    some = [plain("Sum", one) for one in _DTYPES]
    kernels = [one for kernel in some for one in runs(kernel)]
    report = compiled(program(kernels), HOPPER).report
    assert spills(report, kernels) == []


@pytest.mark.parametrize("architecture, share", [(AMPERE, 4), (HOPPER, 1), (BLACKWELL, 4)])
def test_as_many_sources_as_there_may_be(architecture: int, share: int) -> None:
    """Additions and comparisons of every width: all for one generation, one in four for the others."""
    forms = product(("Sum", "Max"), (torch.int8, *_DTYPES), _MANY)
    kernels = [plain(*form) for form in forms][::share]
    kernels = [replace(kernel, run=kernel.pack) for kernel in kernels]
    report = compiled(program(kernels), architecture).report
    assert spills(report, kernels) == []


def test_spills_are_found() -> None:
    kernel = replace(plain("Sum", torch.float32), run=4)
    text = program([kernel]).replace("__launch_bounds__(256, 3)", "")
    report = compiled(text, HOPPER, "--maxrregcount=16").report
    assert spills(report, [kernel]) == [kernel]


@pytest.mark.parametrize("architecture", [AMPERE, HOPPER, BLACKWELL])
def test_accesses_are_as_wide_as_they_can_be(architecture: int) -> None:
    for dtype, sources in product(_DTYPES, (2, 8)):
        kernel = replace(plain("Sum", dtype, sources), run=plain("Sum", dtype).pack)
        ptx = compiled(program([kernel]), architecture).ptx
        # The full tiles, and the packs after the last full one.
        times = kernel.unroll + 1
        assert ptx.count("ld.global.v4.u32") == sources * times
        assert ptx.count("st.global.v4.u32") == times


def test_no_multiply_add_in_one_rounding() -> None:
    kernel = replace(plain("Product", torch.complex64), run=2)
    ptx = compiled(program([kernel]), HOPPER).ptx
    assert "mul.rn.f32" in ptx or "mul.f32" in ptx
    assert "fma.rn.f32" not in ptx


def test_numbers_below_the_normal_range_are_none_of_cupys_business() -> None:
    """CuPy adds an option that takes them for zero; it must not matter."""
    kernels = [one for one in vectorised() if "float" in one.work or "complex" in one.work]
    assert flushing(compiled(program(kernels), HOPPER, "-ftz=true").ptx) == set()
    careless = header().replace("#ifdef __CUDA_ARCH__\n// CuPy always", "#if 0\n// CuPy always")
    assert careless != header()
    text = careless + plain("Sum", torch.float32).definition()
    assert flushing(compiled(text, HOPPER, "-ftz=true").ptx) == {"add.rn.ftz.f32"}


def flushing(ptx: str) -> set[str]:
    """Instructions that take small numbers for zero.

    Not those that ask for NaN, or whether a number is too large for 8 bits, as it then is not small.
    """
    found = re.findall(r"[\w.]*\.ftz[\w.]*", ptx)
    harmless = ("abs.", "setp.ge.", "setp.gt.")
    return {word for word in found if ".nan." not in word and not word.startswith(harmless)}


# ---- The machine code: what a warp issues -------------------------------------------------

# A GPU's memory is the limit only if it is asked often enough: 4.8 TB/s (the data sheet of an H200) are 3
# operands of 4 bytes 0.4e12 times a second, for which its 132 * 4 schedulers at 1.7 GHz issue 0.9e12
# * 32 / 0.4e12 = 72 instructions a thread; for 3 operands of one byte they issue 18.
BUDGET = {
    torch.float32: 6,
    torch.bfloat16: 7,
    torch.float16: 7,
    torch.float8_e4m3fn: 14,
    torch.float8_e5m2: 14,
}


def disassembled(code: bytes, folder: Path) -> list[list[str]]:
    """The instructions of a program, in blocks that run from their first to their last."""
    beside_torch = Path(sysconfig.get_paths()["purelib"]) / "nvidia" / "cu13" / "bin"
    disassembler = shutil.which("nvdisasm", path=str(beside_torch)) or shutil.which("nvdisasm")
    assert disassembler is not None, "nvdisasm comes with the extra ringcoll[test]"
    (folder / "kernel.cubin").write_bytes(code)
    done = subprocess.run(
        [disassembler, "-c", str(folder / "kernel.cubin")],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    blocks: list[list[str]] = [[]]
    for line in done.stdout.splitlines():
        instruction = re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line)
        if instruction is not None:
            blocks[-1].append(instruction[1])
        if instruction is None or re.search(r"\b(BRA|EXIT|BSYNC)\b", instruction[1]):
            blocks.append([])
    return [block for block in blocks if block]


def whole_tile(kernel: Kernel, architecture: int, folder: Path) -> list[str]:
    """What a thread does for a tile that is full: the block with most loads."""
    blocks = disassembled(compiled(program([kernel]), architecture).code, folder)
    return max(blocks, key=lambda block: sum("LDG" in one for one in block))


def load_registers(instruction: str) -> set[int]:
    """The registers that a load fills."""
    found = re.search(r"LDG(\S*) R(\d+),", instruction)
    if found is None:
        return set()
    width = 4 if ".128" in found[1] else 2 if ".64" in found[1] else 1
    return {int(found[2]) + i for i in range(width)}


def loads_before_first_use(block: Sequence[str]) -> int:
    """How many loads have gone out when the first value that was loaded is needed."""
    arriving: set[int] = set()
    loads = 0
    for instruction in block:
        filled = load_registers(instruction)
        loads += bool(filled)
        operands = instruction.partition(",")[2] if filled else instruction
        read = {int(number) for number in re.findall(r"\bR(\d+)\b", operands)}
        if read & arriving:
            return loads
        arriving |= filled
    return loads


@pytest.mark.parametrize("dtype", BUDGET, ids=str)
@pytest.mark.parametrize("architecture", [HOPPER, BLACKWELL])
def test_instructions_per_element(dtype: torch.dtype, architecture: int, tmp_path: Path) -> None:
    kernel = plain("Sum", dtype)
    block = whole_tile(replace(kernel, run=kernel.pack), architecture, tmp_path)
    assert len(block) / (kernel.unroll * kernel.pack) <= BUDGET[dtype]


def test_instructions_per_element_where_what_is_too_large_becomes_nan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line, _, rest = header().partition("\n")
    name, value = line.rsplit(" ", 1)
    assert value in ("126", "127")
    text = f"{name} {253 - int(value)}\n{rest}"
    monkeypatch.setattr(f"{__name__}.header", lambda: text)
    test_instructions_per_element(torch.float8_e4m3fn, HOPPER, tmp_path)


def test_too_many_instructions_are_found(tmp_path: Path) -> None:
    """A GPU without instructions for 8-bit floats takes three times as many."""
    kernel = replace(plain("Sum", torch.float8_e4m3fn), run=16)
    assert len(whole_tile(kernel, AMPERE, tmp_path)) / (kernel.unroll * 16) > 28


@pytest.mark.parametrize("dtype", [*BUDGET, torch.float64, torch.int64, torch.int8], ids=str)
def test_all_loads_go_out_before_the_first_is_used(dtype: torch.dtype, tmp_path: Path) -> None:
    for sources in (2, 3, 8):
        kernel = plain("Sum", dtype, sources)
        block = whole_tile(replace(kernel, run=kernel.pack), HOPPER, tmp_path)
        assert loads_before_first_use(block) == sources * kernel.unroll, sources


def test_a_load_after_the_first_use_is_found() -> None:
    early = ["LDG.E.128 R4, desc[UR4][R2.64]", "LDG.E.64 R8, desc[UR4][R2.64+0x10]"]
    assert loads_before_first_use([*early, "FADD R1, R7, R9"]) == 2
    late = [early[0], "FADD R1, R7, R0", early[1]]
    assert loads_before_first_use(late) == 1


@pytest.mark.parametrize(
    "architecture, instructions",
    [
        (AMPERE, {"f16x2.f32", "bf16x2.f32"}),
        (ADA, {"f16x2.f32", "bf16x2.f32", "e4m3x2.f32", "e5m2x2.f32", "f16x2.e4m3x2", "f16x2.e5m2x2"}),
    ],
)  # fmt: skip
def test_a_gpus_own_conversions_are_used(architecture: int, instructions: set[str]) -> None:
    narrow = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
    ptx = compiled(program([plain("Sum", dtype) for dtype in narrow]), architecture).ptx
    found = re.findall(r"cvt\.rn\.(?:satfinite\.)?(\w+x2\.\w+)", ptx)
    assert set(found) == instructions


def test_the_second_operand_is_the_lower_half() -> None:
    """As `tests.fakes.host_kernels` takes it, where all numbers are tried."""
    text = header()
    of_two = re.findall(r'asm\("(cvt\.rn\S*) %0, %1, %2;" : "=\w"\(pair\) : (.*?)\);', text)
    assert of_two == [
        (f"cvt.rn.{into}.f32", '"f"(upper), "f"(lower)')
        for into in ("f16x2", "bf16x2", "satfinite.e4m3x2", "satfinite.e5m2x2")
    ]
