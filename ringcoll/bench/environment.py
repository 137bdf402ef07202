"""What a measurement has to be read with: versions, machine, load, command."""

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

from ringcoll import __version__
from ringcoll.machine import cores, cpu

__all__ = ["cores", "device", "environment", "oversubscribed"]

# Variables that change what is measured. Others are nobody's business: files of
# results are passed on.
_VARIABLES = ("GLOO_", "KMP_", "MKL_", "NCCL_", "OMP_", "RINGCOLL_", "TORCH_", "UCX_")


def oversubscribed(world_size: int) -> str | None:
    """A sentence to print beside results, if ranks have to share cores; otherwise ``None``."""
    available = cores()
    if world_size <= available:
        return None
    plural = "" if available == 1 else "s"
    return (
        f"{world_size} ranks share {available} core{plural}: "
        "times include waiting for the scheduler"
    )


def environment(world_size: int) -> dict[str, Any]:
    """Describe software, machine and load; to be called before anything is started.

    Returns
    -------
    dict
        Values that JSON can hold. ``load_average`` is over 1, 5 and 15 minutes.
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


def device() -> dict[str, Any]:
    """Describe where a rank of the default group runs; called on it."""
    return {
        "rank": dist.get_rank(),
        "group": 0,
        "pid": os.getpid(),
        "hostname": socket.gethostname().partition(".")[0],
        "device": 0,
        "device_info": cpu(),
        "threads": torch.get_num_threads(),
    }
