"""The CUDA kernels on the CPU: compiled as C++, and run thread by thread.

A kernel's threads neither wait for each other nor share memory, so one loop over blocks and
threads does what a GPU does, as far as indices and arithmetic go.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ringcoll.runtime.reduction import CupyEngine, Kernel, launch_of
from ringcoll.runtime.reduction.gpu import header

__all__ = ["COMPILER", "HOST_STREAM", "HostEngine", "HostKernels"]

COMPILER = next((found for name in ("g++", "clang++", "c++") if (found := shutil.which(name))), "")

# What CUDA has built in.
_SHIM = """
#include <cmath>
#include <cstdint>
#include <cstring>

#define __device__
#define __global__ static
#define __launch_bounds__(...)

static thread_local struct { unsigned x; } threadIdx, blockIdx, blockDim, gridDim;

static inline unsigned __float_as_uint(float value) {
    unsigned bits;
    memcpy(&bits, &value, 4);
    return bits;
}
static inline float __uint_as_float(unsigned bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
static inline float host_half_to_float(unsigned short bits) {
    _Float16 half;
    memcpy(&half, &bits, 2);
    return (float)half;
}
static inline unsigned short host_float_to_half(float value) {
    _Float16 half = (_Float16)value;
    unsigned short bits;
    memcpy(&bits, &half, 2);
    return bits;
}
"""

# A GPU's instructions that convert two numbers, by their definition (PTX ISA 8.8, `cvt`): the nearest
# number, of two the even one; `satfinite` takes the largest number for what is too large.
_INSTRUCTIONS = """
#include <algorithm>
#include <vector>

#define RINGCOLL_CONVERTS_TO_16_BITS
#define RINGCOLL_CONVERTS_8_BITS

struct Format {
    int exponent, mantissa;     // bits
    unsigned largest, nan;      // of all patterns without a sign
    bool saturates;
    std::vector<double> values; // of the patterns, up to the one after the largest

    Format(int exponent, int mantissa, unsigned largest, bool saturates)
        : exponent(exponent), mantissa(mantissa), largest(largest),
          nan((1u << (exponent + mantissa)) - 1), saturates(saturates) {
        const int bias = (1 << (exponent - 1)) - 1;
        for (unsigned bits = 0; bits <= largest + 1; ++bits) {
            const int power = bits >> mantissa, step = std::max(power, 1) - bias - mantissa;
            const unsigned fraction = bits & ((1u << mantissa) - 1);
            values.push_back(std::ldexp(fraction + (power ? 1u << mantissa : 0u), step));
        }
    }
    unsigned nearest(float value) const {
        if (value != value) return nan;
        const unsigned sign = std::signbit(value) ? nan + 1 : 0;
        const double magnitude = std::fabs((double)value);
        if (saturates && magnitude > values[largest]) return sign | largest;
        if (magnitude >= values[largest + 1]) return sign | (largest + 1);
        const unsigned above = std::upper_bound(values.begin(), values.end(), magnitude) - values.begin();
        const double up = values[above] - magnitude, down = magnitude - values[above - 1];
        return sign | (up < down || (up == down && above % 2 == 0) ? above : above - 1);
    }
    float value(unsigned bits) const {
        const unsigned magnitude = bits & nan;
        const float sign = bits > nan ? -1.0f : 1.0f;
        if (magnitude <= largest) return sign * (float)values[magnitude];
        return magnitude == largest + 1 && magnitude != nan ? sign * INFINITY : NAN;
    }
};
static const Format FLOAT16(5, 10, 0x7BFF, false), BFLOAT16(8, 7, 0x7F7F, false);
static const Format E4M3(4, 3, 0x7E, true), E5M2(5, 2, 0x7B, true);

static unsigned pair(const Format& format, float upper, float lower) {
    return format.nearest(upper) << (1 + format.exponent + format.mantissa) | format.nearest(lower);
}
static unsigned float16_pair_of(const Format& format, unsigned short both) {
    return pair(FLOAT16, format.value(both >> 8), format.value(both & 0xFF));
}
namespace ringcoll {
static unsigned float16_pair(float upper, float lower) { return pair(FLOAT16, upper, lower); }
static unsigned bfloat16_pair(float upper, float lower) { return pair(BFLOAT16, upper, lower); }
static unsigned short e4m3_pair(float upper, float lower) { return pair(E4M3, upper, lower); }
static unsigned short e5m2_pair(float upper, float lower) { return pair(E5M2, upper, lower); }
static unsigned float16_pair_of_e4m3(unsigned short both) { return float16_pair_of(E4M3, both); }
static unsigned float16_pair_of_e5m2(unsigned short both) { return float16_pair_of(E5M2, both); }
}
"""


def _with_loop(kernel: Kernel, name: str) -> str:
    """A kernel, and a function that runs all its threads."""
    names = ", ".join(one.rpartition(" ")[2].lstrip("*") for one in kernel.parameters())
    return f"""
{kernel.definition(name).replace('extern "C" ', "")}
extern "C" void run_{name}(
    unsigned blocks, unsigned threads, {", ".join(kernel.parameters())}) {{
    gridDim.x = blocks;
    blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) {name}({names});
}}
"""


class HostKernels:
    """Kernels that are compiled together, once.

    Parameters
    ----------
    folder
        Where to put what the compiler makes.
    kernels
        All that will be run.
    change
        Applied to the kernels' source, to make wrong ones.
    converts
        Whether there are a GPU's instructions that convert numbers.
    """

    def __init__(
        self,
        folder: Path,
        kernels: Sequence[Kernel],
        change: Callable[[str], str] = lambda text: text,
        *,
        converts: bool = False,
    ) -> None:
        self._number = {kernel: number for number, kernel in enumerate(dict.fromkeys(kernels))}
        text = _SHIM + (_INSTRUCTIONS if converts else "") + change(header())
        text += "".join(_with_loop(one, f"kernel{i}") for one, i in self._number.items())
        source, library = folder / "kernels.cpp", folder / "kernels.so"
        source.write_text(text, encoding="utf-8")
        flags = [
            "-std=c++17",
            "-O0",
            "-ffp-contract=off",
            "-shared",
            "-fPIC",
            "-Wno-unknown-pragmas",
        ]
        done = subprocess.run(
            [COMPILER, *flags, "-o", str(library), str(source)],
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        self._library = ctypes.CDLL(str(library))

    def __call__(
        self,
        kernel: Kernel,
        into: Sequence[Tensor],
        sources: Sequence[Tensor],
        factor: complex = 0.0,
        most_blocks: int | None = None,
    ) -> Kernel:
        """Run a kernel; returns it with the run that was chosen."""
        fitted = launch_of(kernel, into, sources, factor)
        assert fitted is not None
        blocks = fitted.blocks if most_blocks is None else min(fitted.blocks, most_blocks)
        self.launch(fitted.kernel, blocks, fitted.arguments)
        return fitted.kernel

    def launch(self, kernel: Kernel, blocks: int, arguments: Sequence[float]) -> None:
        """Run all threads of a kernel that was compiled, with its run."""
        run: Any = getattr(self._library, f"run_kernel{self._number[kernel]}")
        *integers, real, imag = arguments
        run(
            ctypes.c_uint(blocks),
            ctypes.c_uint(kernel.threads),
            *(ctypes.c_longlong(int(one)) for one in integers),
            ctypes.c_double(real),
            ctypes.c_double(imag),
        )


class HostEngine(CupyEngine):
    """The engine of a GPU, whose kernels run on CPU tensors.

    Parameters
    ----------
    folder, change
        See `HostKernels`.
    """

    def __init__(self, folder: Path, change: Callable[[str], str] = lambda text: text) -> None:
        super().__init__(None)
        self._folder, self._change = folder, change
        self._made: dict[Kernel, HostKernels] = {}
        self.kernels: set[Kernel] = set()

    def _function(self, kernel: Kernel, device: torch.device) -> Callable[..., None]:
        self.kernels.add(kernel)
        with self._loading:
            if kernel not in self._made:
                folder = self._folder / str(len(self._made))
                folder.mkdir()
                self._made[kernel] = HostKernels(folder, [kernel], self._change)
            made = self._made[kernel]

        def function(
            grid: tuple[int], block: tuple[int], arguments: Any, shared: int, stream: Any
        ) -> None:
            assert block == (kernel.threads,)
            assert not shared
            assert stream.ptr == HOST_STREAM
            made.launch(kernel, grid[0], arguments)

        return function


HOST_STREAM = 4711
"""The handle of the stream that is current, as `HostEngine` is told."""
