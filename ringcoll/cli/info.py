"""``ringcoll info``: versions and machine."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version

import click

from ringcoll import __version__
from ringcoll.cli.output import print_json
from ringcoll.cli.parameters import json_option

__all__ = ["environment", "info"]

_EXAMPLES = """\b
Example:
  ringcoll info
"""


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def environment() -> dict[str, object]:
    """Describe software and machine.

    Returns
    -------
    dict
        Values that JSON can hold. ``cores`` are those that this process may use,
        ``memory`` is in GiB; ``None`` stands for what is not known or not there.
    """
    import torch
    import torch.distributed as dist

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
        "cupy": next(
            (
                found
                for name in ("cupy", "cupy-cuda12x", "cupy-cuda13x")
                if (found := _version(name))
            ),
            None,
        ),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory": _memory(),
        "torch_threads": torch.get_num_threads(),
        "backends": [name for name, available in backends.items() if available],
        "cuda": torch.version.cuda,
        "devices": [
            torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())
        ],
    }


def _memory() -> float | None:
    try:
        nbytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
    return round(nbytes / 2**30, 1)


@click.command(epilog=_EXAMPLES)
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
