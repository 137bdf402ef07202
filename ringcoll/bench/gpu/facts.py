"""Where it ran: GPU, driver, versions. What is not there is a row that says so."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ringcoll import __version__
from ringcoll.bench.gpu.rows import Row, Settings
from ringcoll.machine import cores, cpu
from ringcoll.reduction import gpu
from ringcoll.streams import nccl_version

__all__ = ["TABLE", "driver", "facts", "nccl", "ucx", "ucxx"]

TABLE = "Where it ran"


def facts(settings: Settings) -> Iterator[Row]:
    """Describe machine and software, a row each."""
    found: dict[str, Callable[[], object]] = {
        "date": lambda: datetime.now(UTC).isoformat(timespec="minutes"),
        "what": lambda: "a rehearsal on the CPU" if settings.rehearsal else "a measurement",
        "commit": lambda: settings.commit or _commit(),
        "ringcoll": lambda: __version__,
        "GPU": _gpus,
        "GPU memory": _memory,
        "driver": driver,
        "clocks (SM, memory; MHz)": lambda: _asked("clocks.max.sm,clocks.max.memory"),
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
    for what, ask in found.items():
        try:
            yield Row(TABLE, {"what": what, "found": str(ask())})
        except Exception as error:  # noqa: BLE001  # whatever a library raises where it is not at home
            reason = " ".join(str(error).split()) or type(error).__name__
            yield Row(TABLE, {"what": what, "found": f"none: {reason}"})


def _absent(reason: str) -> str:
    raise RuntimeError(reason)


def _module(name: str) -> Any:
    return import_module(name)


def _distribution(*names: str) -> str:
    for name in names:
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return _absent("it is not installed")


def _output(*command: str) -> str:
    done = subprocess.run(  # noqa: S603  # commands of this module
        command,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
        cwd=Path(__file__).parent,
    )
    return done.stdout.strip()


def _commit() -> str:
    commit = _output("git", "rev-parse", "HEAD")
    changed = _output("git", "status", "--porcelain", "--untracked-files=no")
    return f"{commit}, with changes" if changed else commit


def driver() -> str:
    """The version of the GPU's driver; this and the following raise where there is none."""
    return _asked("driver_version")


def nccl() -> str:
    """The version of torch's NCCL."""
    return ".".join(map(str, nccl_version()))


def ucxx() -> str:
    """The package that is installed, and its version."""
    return _distribution("ucxx-cu13", "ucxx-cu12", "ucxx")


def ucx() -> str:
    """The version of the UCX that ucxx has found."""
    return ".".join(map(str, _module("ucxx").get_ucx_version()))


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


def _asked(fields: str) -> str:
    return _output("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits", "--id=0")
