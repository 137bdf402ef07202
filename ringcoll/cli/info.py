"""``ringcoll info``: versions and machine."""

from __future__ import annotations

import os
import platform
import warnings
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

import click

from ringcoll import __version__
from ringcoll.cli.output import print_json
from ringcoll.cli.parameters import json_option
from ringcoll.errors import RingcollError
from ringcoll.machine import cores

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

    from ringcoll.bench.gpu import facts

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
        "cupy": next(
            (
                found
                for name in ("cupy", "cupy-cuda12x", "cupy-cuda13x")
                if (found := _version(name))
            ),
            None,
        ),
        "ucxx": _if_there(facts.ucxx),
        "ucx": _if_there(facts.ucx),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cores": cores(),
        "memory": _memory(),
        "torch_threads": torch.get_num_threads(),
        "backends": [name for name, available in backends.items() if available],
        "cuda": torch.version.cuda,
        "driver": _if_there(facts.driver),
        "nccl": _if_there(facts.nccl),
        "devices": [torch.cuda.get_device_name(index) for index in range(gpus)],
        "gpu_reduction": _gpu_reduction() if gpus else None,
        "transport": _transport("cpu"),
        "cuda_transport": _transport("cuda") if gpus else None,
    }


def _if_there(version_of: Callable[[], str]) -> str | None:
    try:
        return version_of()
    except Exception:  # noqa: BLE001  # whatever a library raises where it is not at home
        return None


def _transport(kind: str) -> str:
    """What carries tensors where nobody chooses, or why nothing does."""
    from ringcoll.groups import transport_name

    try:
        return transport_name(kind, "auto")
    except RingcollError as error:  # also to be told in a bug report
        return str(error)


def _gpu_reduction() -> str:
    """What reduces CUDA tensors, and why."""
    from ringcoll import select
    from ringcoll.reduction import gpu

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the reason is in the answer
        try:
            engine = gpu.engine(select.reduction())
        except RingcollError as error:
            return str(error)
    return f"{engine.name}: {engine.reason}"


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
