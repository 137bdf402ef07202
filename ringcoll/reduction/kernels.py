"""CUDA kernels for reductions: their types and sizes, and the arguments of a launch.

Problem: reduce vectors on a GPU as fast as its memory can be read and written, for every
operator and dtype, wherever the vectors start. The kernel itself is ``reduce.cuh``. This module
fills in types and sizes (`Kernel`), and looks at the places of the vectors (`aligned`). Nothing
here needs a GPU: tests compile every kernel, and run it on a CPU. `ringcoll.reduction.gpu`
compiles and launches.

Cost: a launch; each operand is read once, each result is written once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import resources
from typing import NamedTuple

import torch
from torch import Tensor

THREADS = 256
"""Threads of a block, unless a kernel says otherwise."""

MOST_SOURCES = 16
"""Largest number of operands of a launch, which holds all of them in registers at once."""

OPTIONS = ("--std=c++17", "--fmad=false")
"""Options of the compiler. Without fused multiply-add, results are those of a CPU bit for bit."""

# Number of accesses under way in a thread. Reckoned, not measured: 4.8 TB/s (the data sheet of an H200) for a
# latency of 1 us is 36 KiB for each of its 132 multiprocessors; 768 threads ask for 96 KiB.
_LOADS = 8
_MOST_UNROLLED = 4
_MOST_ELEMENTS = 32  # of a vector in a thread: more elements do not fit in its registers
_MOST_HELD = 64  # of all sources, so that three blocks find room; tried with NVRTC 13.0 and 13.5
_ACCESS_NBYTES = 16  # the widest access
_MOST_BLOCKS = (1 << 31) - 1

_NAMED = (
    "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 complex64 complex128 "
    "int8 int16 int32 int64 uint8 uint16 uint32 uint64"
)
_C_TYPES: dict[torch.dtype, str] = {getattr(torch, name): name for name in _NAMED.split()}
_C_TYPES[torch.bool] = "uint8"
_NARROW = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
_NBYTES = {name: dtype.itemsize for dtype, name in _C_TYPES.items()}


def c_type(dtype: torch.dtype) -> str | None:
    """Name of a dtype in the kernels; ``None`` if the kernels do not know the dtype."""
    return _C_TYPES.get(dtype)


@dataclass(frozen=True, slots=True)
class Kernel:
    """Types and sizes of a kernel; see the struct of that name in ``reduce.cuh``.

    Parameters
    ----------
    op
        ``Sum``, ``Product``, ``Min``, ``Max``, ``Band``, ``Bor`` or ``Bxor``.
    finish
        ``Plain``, ``Divide`` or ``Multiply``: the last operation on the total.
    first, rest
        Types of the first source, and of all other sources.
    into, copy
        Types of the first result, and of the second.
    sources, results
        Number of sources, at least 1, and of results, 1 or 2.
    rounded
        Type to which the total is rounded before it is stored; "" for no such rounding.
    run
        Elements of an access.
    """

    op: str
    finish: str
    first: str
    rest: str
    into: str
    copy: str
    sources: int
    results: int
    rounded: str = ""
    run: int = 1

    @property
    def work(self) -> str:
        """Type of the computation: the widest type of all, but no narrower than float32."""
        widest = max(
            (self.first, self.rest, self.into, self.copy),
            key=lambda name: (_NBYTES[name], name not in _NARROW),
        )
        return "float32" if widest in _NARROW else widest

    @property
    def pack(self) -> int:
        """Elements that a thread moves at a time."""
        used = {self.first, self.rest, self.into, self.copy}
        return _ACCESS_NBYTES // max(_NBYTES[name] for name in used)

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return THREADS

    @property
    def unroll(self) -> int:
        """Packs of each source that a thread has under way."""
        return max(1, min(_MOST_UNROLLED, _LOADS // self.sources, _MOST_ELEMENTS // self.pack))

    @property
    def resident(self) -> int:
        """Blocks for which a multiprocessor has to have room.

        The number is for the compiler, which would otherwise save registers for more blocks, and
        wait for a load before it asks for the next. For sm_100 NVRTC 13.5 even spilled registers
        of some kernels. Other kernels do not fit if there are to be three blocks, or even two.
        """
        elements = self.sources * self.pack
        is_float8 = self.first.startswith("float8") or self.rest.startswith("float8")
        if self.sources <= _LOADS and elements <= _MOST_HELD and not is_float8:
            return 3
        return 2 if elements <= 2 * _MOST_HELD else 1

    def parameters(self) -> list[str]:
        """Parameters of the kernel, in C++."""
        vectors = [f"const void* source{i}" for i in range(self.sources)]
        vectors += [f"void* into{i}" for i in range(self.results)]
        return [*vectors, "long long numel", "long long head", "double real", "double imag"]

    def definition(self, name: str = "ringcoll_reduce") -> str:
        """The kernel in CUDA C++; `header` comes before it."""
        types = (self.work, self.first, self.rest, self.into, self.copy, self.rounded or self.work)
        words = ", ".join(f"ringcoll::{word}" for word in (self.op, self.finish, *types))
        sizes = (self.sources, self.results, self.pack, self.run, self.unroll, self.threads)
        sources = ", ".join(f"source{i}" for i in range(self.sources))
        results = ", ".join(f"into{i}" for i in range(self.results))
        return f"""
extern "C" __global__ void __launch_bounds__({self.threads}, {self.resident}) {name}(
    {", ".join(self.parameters())}) {{
    typedef ringcoll::Kernel<
        {words},
        {", ".join(map(str, sizes))}> Chosen;
    ringcoll::Arguments<Chosen> arguments = {{
        {{{sources}}}, {{{results}}}, numel, head, real, imag}};
    ringcoll::reduce<Chosen>(arguments);
}}
"""


@lru_cache(maxsize=1)
def header() -> str:
    """The common source of all kernels, in CUDA C++: ``reduce.cuh``."""
    large = torch.tensor([1000.0], device="cpu").to(torch.float8_e4m3fn).view(torch.uint8).item()
    text = resources.files(__package__).joinpath("reduce.cuh").read_text(encoding="utf-8")
    return f"#define RINGCOLL_LARGE_E4M3 {large}\n{text}"


class Place(NamedTuple):
    """Start of a vector, and size of its elements, in bytes."""

    address: int
    itemsize: int


def aligned(places: Sequence[Place], pack: int) -> tuple[int, int] | None:
    """The longest run that fits all vectors, and the number of elements before the first run.

    Examples
    --------
    >>> aligned([Place(4096, 4), Place(8192, 4)], 4)
    (4, 0)
    >>> aligned([Place(4100, 4), Place(8196, 4)], 4)  # both one element off
    (4, 3)
    >>> aligned([Place(4096, 4), Place(8200, 4)], 4)  # two elements apart
    (2, 0)
    """
    if any(address % itemsize for address, itemsize in places):
        return None
    run = pack
    while True:
        heads = {-(address // itemsize) % run for address, itemsize in places}
        if len(heads) == 1:
            return run, heads.pop()
        run //= 2


class Launch(NamedTuple):
    """A kernel that fits its vectors, and the numbers for its launch."""

    kernel: Kernel
    blocks: int
    arguments: tuple[int | float, ...]


def launch_of(
    kernel: Kernel, into: Sequence[Tensor], sources: Sequence[Tensor], factor: complex = 0.0
) -> Launch | None:
    """Fit a kernel to vectors.

    Parameters
    ----------
    kernel
        Kernel with any run.
    into, sources
        Flat contiguous tensors, all with the same number of elements.
    factor
        Number by which the total is divided, or multiplied.

    Returns
    -------
    Launch or None
        ``None`` if a vector is not aligned to its own elements.
    """
    vectors = (*sources, *into)
    pack = kernel.pack
    fit = aligned([Place(vector.data_ptr(), vector.itemsize) for vector in vectors], pack)
    if fit is None:
        return None
    run, head = fit
    numel = into[0].numel()
    assert all(vector.numel() == numel for vector in vectors)
    head = min(head, numel)
    tile = kernel.threads * kernel.unroll
    blocks = max(1, min(-(-((numel - head) // pack) // tile), _MOST_BLOCKS))
    pointers = [vector.data_ptr() for vector in vectors]
    numbers = (float(factor.real), float(factor.imag))
    return Launch(replace(kernel, run=run), blocks, (*pointers, numel, head, *numbers))
