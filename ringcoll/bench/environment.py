"""The facts that a measurement has to be read with: versions, machine, load, command."""

from __future__ import annotations

import os
import platform
import socket
import sys
from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ringcoll._version import __version__
from ringcoll.machine import cores, cpu

# Variables that change what is measured. Files of results are passed on, so no others are in them.
_VARIABLES = ("GLOO_", "KMP_", "MKL_", "NCCL_", "OMP_", "RINGCOLL_", "TORCH_", "UCX_")


def oversubscribed(world_size: int) -> tuple[str, ...]:
    """A sentence to print beside results if ranks have to share cores; otherwise nothing."""
    available = cores()
    if world_size <= available:
        return ()
    plural = "" if available == 1 else "s"
    return (
        f"{world_size} ranks share {available} core{plural}: "
        "times include waiting for the scheduler",
    )


def ran_on(facts: dict[str, Any]) -> str:
    """Say on how many processes, over which transport and on which machine something runs."""
    return (
        f"{facts['world_size']} processes over {facts['transport']}, {facts['cores']} cores "
        f"({facts['cpu']}), load {facts['load_average'][0]}"
    )


def environment(world_size: int) -> dict[str, Any]:
    """Describe software, machine and load, for JSON; called before anything is started.

    ``load_average`` is over 1, 5 and 15 minutes.
    """
    return {
        "ringcoll": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": cpu(),
        "cores": cores(),
        "world_size": world_size,
        "oversubscribed": world_size > cores(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": list(sys.argv),
        "variables": {
            name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)
        },
    }


def default_backend(kind: str) -> str:
    """The backend of a default group on whose tensors, ``"cpu"`` or ``"cuda"``, is measured."""
    return "cpu:gloo,cuda:nccl" if kind == "cuda" and dist.is_nccl_available() else "gloo"


def device_of(kind: str, rank: int) -> torch.device:
    """The device of a rank; ranks share GPUs where there are fewer."""
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", rank % torch.cuda.device_count())


def device(kind: str = "cpu") -> dict[str, Any]:
    """Describe where a rank of the default group runs, and its tensors are; called on it."""
    used = device_of(kind, dist.get_rank())
    return {
        "rank": dist.get_rank(),
        "group": 0,
        "pid": os.getpid(),
        "hostname": socket.gethostname().partition(".")[0],
        "device": used.index or 0,
        "device_kind": kind,
        "device_info": cpu() if kind == "cpu" else torch.cuda.get_device_name(used),
        "threads": torch.get_num_threads(),
    }
