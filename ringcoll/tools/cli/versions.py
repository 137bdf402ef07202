"""Versions and machine, for a bug report: ``ringcoll doctor --report``.

torch is imported as late as it can be.
"""

from __future__ import annotations

import os
import platform
import subprocess
import warnings
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ringcoll._package import __version__
from ringcoll.errors import RingcollError
from ringcoll.runtime.machine import cores
from ringcoll.runtime.transport import catalogue
from ringcoll.tools.cli.output import echo, print_json


def print_report(*, as_json: bool) -> None:
    """Print versions and machine."""
    facts = _environment()
    if as_json:
        print_json(facts)
        return
    width = max(map(len, facts))
    for name, value in facts.items():
        text = ", ".join(value) if isinstance(value, list) else value
        unit = " GiB" if name == "memory" and value is not None else ""
        echo(f"{name:{width}}  {'-' if text in (None, '') else text}{unit}")


def _environment() -> dict[str, object]:
    """Software and machine, for JSON; ``None`` is a fact that is unknown, or does not apply."""
    import torch
    import torch.distributed as dist

    gpus = torch.cuda.device_count()
    memory_gib = None
    with suppress(AttributeError, ValueError, OSError):
        memory_gib = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    return {
        "ringcoll": __version__,
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "torch": torch.__version__,
        "numpy": _version("numpy"),
        "cupy": _version("cupy", "cupy-cuda12x", "cupy-cuda13x"),
        "ucxx": _if_there(ucxx),
        "ucx": _if_there(ucx),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cores": cores(),  # that this process may use
        "memory": memory_gib,
        "torch_threads": torch.get_num_threads(),
        "backends": [
            name
            for name in ("gloo", "nccl", "mpi", "ucc")
            if getattr(dist, f"is_{name}_available")()
        ],
        "cuda": torch.version.cuda,
        "driver": _if_there(driver),
        "nccl": _if_there(nccl),
        "devices": [torch.cuda.get_device_name(index) for index in range(gpus)],
        "gpu_reduction": _gpu_reduction() if gpus else None,
        "transport": _automatic("cpu"),
        "cuda_transport": _automatic("cuda") if gpus else None,
    }


def _version(*distributions: str) -> str | None:
    """Version of the first distribution that is installed."""
    for name in distributions:
        with suppress(PackageNotFoundError):
            return version(name)
    return None


def _if_there(version_of: Callable[[], str]) -> str | None:
    try:
        return version_of()
    except Exception:  # noqa: BLE001  # libraries raise anything on machines without GPU
        return None


def _automatic(kind: str) -> str:
    """The transport that "auto" stands for, or the reason why there is no transport."""
    try:
        return catalogue.resolved(kind, "auto")
    except RingcollError as error:  # belongs into a bug report, too
        return str(error)


def _gpu_reduction() -> str:
    """The engine that reduces CUDA tensors, and the reason for it."""
    from ringcoll.runtime.machine import settings
    from ringcoll.runtime.reduction import gpu

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the reason is in the answer
        try:
            engine = gpu.engine(settings.reduction())
        except RingcollError as error:
            return str(error)
    return f"{engine.name}: {engine.reason}"


# --- versions of the software beside the package; a function raises if its software is missing


def output_of(*command: str, folder: str | None = None) -> str:
    """Output of a command, without white space around it."""
    done = subprocess.run(  # noqa: S603  # commands of this library
        command, capture_output=True, text=True, timeout=30, check=True, cwd=folder
    )
    return done.stdout.strip()


def ask_driver(fields: str) -> str:
    """Values of some fields of ``nvidia-smi --query-gpu``, for the first GPU."""
    return output_of(
        "nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits", "--id=0"
    )


def driver() -> str:
    """Version of the GPU's driver."""
    return ask_driver("driver_version")


def nccl() -> str:
    """Version of torch's NCCL."""
    from ringcoll.runtime.transport import nccl_version  # it imports torch

    return ".".join(map(str, nccl_version()))


def ucxx() -> str:
    """Name and version of the installed package of ucxx."""
    for name in ("ucxx-cu13", "ucxx-cu12", "ucxx"):
        with suppress(PackageNotFoundError):
            return f"{name} {version(name)}"
    raise RuntimeError("it is not installed")


def ucx() -> str:
    """Version of the UCX that ucxx uses."""
    module: Any = import_module("ucxx")
    return ".".join(map(str, module.get_ucx_version()))
