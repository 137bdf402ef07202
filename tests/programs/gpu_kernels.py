"""The CUDA kernels on a GPU, as `tests.cases.kernel_checks` runs them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib import import_module
from itertools import chain

import torch
from torch import Tensor

from ringcoll.runtime.launch import Ranks, rendezvous
from ringcoll.runtime.machine import cores
from ringcoll.runtime.reduction import CupyEngine, Kernel, gpu, launch_of
from tests.cases.engine_cases import listing
from tests.cases.kernel_table import KERNELS, runs

__all__ = ["compile_all", "cupy_engine", "run"]

_MOST_PROCESSES = 12  # of some 0.5 GB on the GPU
_MOST_S = 60.0  # half of a test's time limit


def cupy_engine() -> CupyEngine:
    """The engine, which has to work where there is a GPU."""
    found = gpu.engine("cupy")
    assert isinstance(found, CupyEngine)
    return found


def run(
    kernel: Kernel,
    into: Sequence[Tensor],
    sources: Sequence[Tensor],
    factor: complex = 0.0,
    most_blocks: int | None = None,
) -> Kernel:
    """Run a kernel; returns it with the run that was chosen."""
    fitted = launch_of(kernel, into, sources, factor)
    launch = cupy_engine().launch(kernel, into, sources, factor)
    assert fitted is not None
    assert launch is not None
    launch()
    return fitted.kernel


def compile_all() -> int:
    """Compile the kernels that tests ask for, by several processes at once, into CuPy's cache.

    On few cores the time is not enough for all; tests compile the others when they run them.

    Returns
    -------
    int
        How many kernels there are.
    """
    kernels = [*dict.fromkeys(chain(*map(runs, KERNELS), sorted(listing().seen, key=str)))]
    with Ranks(min(_MOST_PROCESSES, cores()), backend=None) as ranks:
        ranks.run(compile_share, kernels)
    return len(kernels)


def compile_share(kernels: Sequence[Kernel]) -> None:
    """Compile this rank's share, as far as there is time."""
    deadline = time.monotonic() + _MOST_S
    _, rank, world_size = rendezvous()
    made, device = CupyEngine(import_module("cupy"), required=True), torch.device("cuda", 0)
    torch.zeros(1, device=device)  # CUDA is there from here on
    for kernel in kernels[rank::world_size]:
        if time.monotonic() > deadline:
            break
        made._function(kernel, device)
