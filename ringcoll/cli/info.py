"""``ringcoll info``: versions and machine."""

from __future__ import annotations

import os
import platform
import warnings
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

import click

from ringcoll._version import __version__
from ringcoll.cli.command import command
from ringcoll.cli.output import print_json
from ringcoll.cli.parameters import json_option
from ringcoll.errors import RingcollError
from ringcoll.machine import cores

_EXAMPLES = "ringcoll info"

_CUPY = ("cupy", "cupy-cuda12x", "cupy-cuda13x")


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def environment() -> dict[str, object]:
    """Describe software and machine, for JSON.

    ``cores`` are those that this process may use, ``memory`` is in GiB; ``None`` stands for a
    fact that is unknown, or does not apply.
    """
    import torch
    import torch.distributed as dist

    from ringcoll.cli import versions

    gpus = torch.cuda.device_count()
    backends = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
        "ucc": dist.is_ucc_available(),
    }
    return {
        "ringcoll": __version__,
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "torch": torch.__version__,
        "numpy": _version("numpy"),
        "cupy": next(filter(None, map(_version, _CUPY)), None),
        "ucxx": _if_there(versions.ucxx),
        "ucx": _if_there(versions.ucx),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cores": cores(),
        "memory": _memory(),
        "torch_threads": torch.get_num_threads(),
        "backends": [name for name, available in backends.items() if available],
        "cuda": torch.version.cuda,
        "driver": _if_there(versions.driver),
        "nccl": _if_there(versions.nccl),
        "devices": [torch.cuda.get_device_name(index) for index in range(gpus)],
        "gpu_reduction": _gpu_reduction() if gpus else None,
        "transport": _transport("cpu"),
        "cuda_transport": _transport("cuda") if gpus else None,
    }


def _if_there(version_of: Callable[[], str]) -> str | None:
    try:
        return version_of()
    except Exception:  # noqa: BLE001  # libraries raise anything on machines without GPU
        return None


def _transport(kind: str) -> str:
    """The transport that "auto" stands for, or the reason why there is no transport."""
    from ringcoll.transport import resolved

    try:
        return resolved(kind, "auto")
    except RingcollError as error:  # belongs into a bug report, too
        return str(error)


def _gpu_reduction() -> str:
    """The engine that reduces CUDA tensors, and the reason for it."""
    from ringcoll.machine import settings
    from ringcoll.reduction import gpu

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the reason is in the answer
        try:
            engine = gpu.engine(settings.reduction())
        except RingcollError as error:
            return str(error)
    return f"{engine.name}: {engine.reason}"


def _memory() -> float | None:
    try:
        nbytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
    return round(nbytes / 2**30, 1)


@command(examples=_EXAMPLES)
@json_option
def info(as_json: bool) -> None:
    """Print versions and machine, for a bug report."""
    facts = environment()
    if as_json:
        print_json(facts)
        return
    width = max(map(len, facts))
    for name, value in facts.items():
        text = ", ".join(value) if isinstance(value, list) else value
        unit = " GiB" if name == "memory" and value is not None else ""
        click.echo(f"{name:{width}}  {'-' if text in (None, '') else text}{unit}")
