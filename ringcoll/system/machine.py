"""Facts of a machine, and which processes share a machine."""

from __future__ import annotations

import functools
import os
import platform
import uuid
from collections.abc import Sequence
from pathlib import Path

__all__ = ["cores", "cpu", "hosts_of", "place"]


def cores() -> int:
    """Number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu() -> str:
    """Name of the processor."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@functools.cache
def _machine() -> str:
    """Identity of the kernel that runs, another after each boot; never the host's name."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    if boot.exists():
        return boot.read_text().strip()
    return f"{platform.node()} {uuid.getnode()}"  # macOS, which has no name spaces


def place() -> str:
    """Place of this process: processes of equal places share memory, process ids and network.

    Host names do not say so: the containers of a machine have different names, or all have the
    same name. Equal must be the kernel and, of its name spaces, those of process ids (a ``pidfd``
    is opened by number, and the memory of another process is copied by number), of System V
    shared memory and of the network. The name space of mounts may differ, as long as ``/dev/shm``
    is the same file system, which has the same device number.
    """
    spaces = [Path(f"/proc/self/ns/{kind}") for kind in ("net", "ipc", "pid")]
    parts = [str(space.readlink()) for space in spaces if space.is_symlink()]
    memory = Path("/dev/shm")  # noqa: S108  # nothing is written there
    parts += [f"shm:[{memory.stat().st_dev}]"] if memory.exists() else []
    return " ".join([_machine(), *parts])


def hosts_of(places: Sequence[str]) -> tuple[int, ...]:
    """Number the hosts of all ranks by their lowest rank.

    Examples
    --------
    >>> hosts_of(["oak", "elm", "elm", "oak", "ash"])
    (0, 1, 1, 0, 2)
    """
    numbers = {where: number for number, where in enumerate(dict.fromkeys(places))}
    return tuple(numbers[where] for where in places)
