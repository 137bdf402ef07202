"""GPU, driver and versions of a run; a fact that does not exist is a row with the reason."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.on_gpu import mps
from benchmarks.on_gpu.rows import Row, Settings
from ringcoll._package import __version__
from ringcoll.runtime import cores
from ringcoll.runtime.machine import cpu
from ringcoll.runtime.reduction import gpu
from ringcoll.tools.cli import ask_driver, driver, nccl, output_of, ucx, ucxx

__all__ = ["TABLE", "facts"]

TABLE = "Where it ran"
_HERE = str(Path(__file__).parent)


def facts(settings: Settings) -> Iterator[Row]:
    """Describe machine and software, a row each."""
    questions: dict[str, Callable[[], object]] = {
        "date": lambda: datetime.now(UTC).isoformat(timespec="minutes"),
        "what": lambda: "a rehearsal on the CPU" if settings.rehearsal else "a measurement",
        "commit": lambda: settings.commit or _commit(),
        "ringcoll": lambda: __version__,
        "GPU": _gpus,
        "GPU memory": _memory,
        "driver": driver,
        "clocks (SM, memory; MHz)": lambda: ask_driver("clocks.max.sm,clocks.max.memory"),
        "compute mode": lambda: ask_driver("compute_mode"),
        "MPS": mps.state,
        "torch": lambda: torch.__version__,
        "CUDA of torch": lambda: torch.version.cuda or _absent("torch is built without CUDA"),
        "NCCL": nccl,
        "NCCL in torch.distributed": dist.is_nccl_available,
        "CuPy": lambda: _module("cupy").__version__,
        "CUDA of CuPy": lambda: str(_module("cupy").cuda.runtime.runtimeGetVersion()),
        "NVRTC of CuPy": lambda: ".".join(map(str, _module("cupy").cuda.nvrtc.getVersion())),
        "ucxx": ucxx,
        "UCX": ucx,
        "reductions on the GPU by": lambda: gpu.engine("cupy").name,
        "processor": lambda: f"{cpu()}, {cores()} cores",
        "Python": platform.python_version,
        "system": platform.platform,
    }
    for what, ask in questions.items():
        try:
            yield Row(TABLE, {"what": what, "found": str(ask())})
        except Exception as error:  # noqa: BLE001  # a library may raise anything if it is not installed
            reason = " ".join(str(error).split()) or type(error).__name__
            yield Row(TABLE, {"what": what, "found": f"none: {reason}"})


def _absent(reason: str) -> str:
    raise RuntimeError(reason)


def _module(name: str) -> Any:
    return import_module(name)


def _commit() -> str:
    commit = output_of("git", "rev-parse", "HEAD", folder=_HERE)
    changed = output_of("git", "status", "--porcelain", "--untracked-files=no", folder=_HERE)
    return f"{commit}, with changes" if changed else commit


def _gpus() -> str:
    count = torch.cuda.device_count()
    if not count:
        return _absent("torch finds none")
    names = {torch.cuda.get_device_name(index) for index in range(count)}
    return f"{count} x {', '.join(sorted(names))}"


def _memory() -> str:
    properties = torch.cuda.get_device_properties(0)
    total, cached = properties.total_memory, properties.L2_cache_size
    return f"{total / 2**30:.0f} GiB, L2 cache {cached / 2**20:.0f} MiB"
