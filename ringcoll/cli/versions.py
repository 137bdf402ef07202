"""Versions of the software beside the package; a function raises if its software is missing."""

from __future__ import annotations

import subprocess
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ringcoll.transport import nccl_version


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
    return ".".join(map(str, nccl_version()))


def ucxx() -> str:
    """Name and version of the installed package of ucxx."""
    for name in ("ucxx-cu13", "ucxx-cu12", "ucxx"):
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    raise RuntimeError("it is not installed")


def ucx() -> str:
    """Version of the UCX that ucxx uses."""
    module: Any = import_module("ucxx")
    return ".".join(map(str, module.get_ucx_version()))
