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

from ringcoll.reduction.gpu import CupyEngine
from ringcoll.reduction.kernels import Kernel, header, launch_of

__all__ = ["COMPILER", "HOST_STREAM", "HostEngine", "HostKernels"]

COMPILER = next((found for name in ("g++", "clang++", "c++") if (found := shutil.which(name))), "")

# What CUDA has built in.
_SHIM = """
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
    """

    def __init__(
        self,
        folder: Path,
        kernels: Sequence[Kernel],
        change: Callable[[str], str] = lambda text: text,
    ) -> None:
        self._number = {kernel: number for number, kernel in enumerate(dict.fromkeys(kernels))}
        text = _SHIM + change(header())
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
