"""Facts of a machine: processes, cores, memory, its address, and which processes share it."""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import math
import os
import platform
import re
import socket
import stat
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # some commands ask for facts, and do without torch
    import torch


Peaks = Callable[[], int]
"""Returns the peak since the call before, in bytes, and begins again."""

FUTEX: int = -1
"""Number of the system call futex(2); -1 where it is not known."""
if sys.platform == "linux":
    FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), -1)
_PROCESS = "/proc/self"
# By the controllers of a hierarchy of control groups: its folder, the files of limit and use, and
# what of the use makes room for others. The hierarchy of version 2 lists no controllers.
_GROUPS = {
    "": (".", "memory.max", "memory.current", ("active_file", "inactive_file", "slab_reclaimable")),
    "memory": (
        *("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
        ("total_active_file", "total_inactive_file"),
    ),
}
_NO_LIMIT = 1 << 62  # bytes; version 1 writes the largest number of pages for it


class ProcessState(NamedTuple):
    """A process: the letter of its state, the number of its parent, and the time of its start.

    The kernel shifts the time by the offset of the reader's time name space, which follows it:
    ``"4711 time:[4026531834]"``. Two such times may be compared if their name spaces are equal.
    """

    state: str
    parent: int
    start: str


def process_state(pid: int) -> ProcessState:
    """The state of a process. Raises ``OSError`` if there is no such process."""
    text = Path(f"/proc/{pid:d}/stat").read_text(encoding="utf-8", errors="replace")
    fields = text.rpartition(")")[2].split()  # the name before the last parenthesis holds anything
    clock = Path("/proc/self/ns/time")
    start = f"{fields[19]} {clock.readlink()}" if clock.is_symlink() else fields[19]
    return ProcessState(fields[0], int(fields[1]), start)


def cores() -> int:
    """Number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@functools.cache
def cpu() -> str:
    """Name of the processor, with family and model, if known: a name may stand for several."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        pairs = (line.partition(":")[::2] for line in lines if ":" in line)
        fields = {key.strip(): value.strip() for key, value in pairs}
        if name := fields.get("model name"):
            if not {"cpu family", "model"} <= fields.keys():
                return name
            return f"{name} (family {fields['cpu family']}, model {fields['model']})"
    return platform.processor() or platform.machine()


def free_bytes() -> float:
    """Bytes that the machine and its control groups leave to this process; infinite if unknown."""
    free = [math.inf]
    with contextlib.suppress(OSError, ValueError):
        info = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free.append(1024 * int(info["MemAvailable"].split()[0]))
    with contextlib.suppress(OSError):
        free += _free_of_groups(Path("/proc/self/cgroup").read_text(), Path("/sys/fs/cgroup"))
    return min(free)


def _free_of_groups(own: str, root: Path) -> list[float]:
    """Free bytes by each limit of a process's control groups, which are ``own`` in ``/proc``."""
    free: list[float] = []
    for line in own.splitlines():
        _, controllers, name = line.split(":", 2)
        known = [_GROUPS[each] for each in controllers.split(",") if each in _GROUPS]
        if not known:
            continue
        ((top, limit, use, kinds),) = known
        folder = root / top / name.lstrip("/")
        for group in (folder, *folder.parents):
            if not group.is_relative_to(root / top):
                break
            with contextlib.suppress(OSError, ValueError):  # a number is missing: no limit
                most = int((group / limit).read_text())
                if most >= _NO_LIMIT:  # to read the rest takes the kernel long
                    continue
                used = int((group / use).read_text())
                lines = (group / "memory.stat").read_text().splitlines()
                numbers = {kind: int(number) for kind, number in map(str.split, lines)}
                free.append(most - used + sum(numbers.get(kind, 0) for kind in kinds))
    return free


@functools.cache  # a name server may be slow
def own_address(peer: str) -> str:
    """Address of this machine on the way to another one. Raises ``OSError`` if there is no way."""
    # As bytes, so that no tables for the names of all scripts are loaded.
    name = peer.encode() if peer.isascii() else peer
    family, kind, _, _, target = socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as way:
        way.connect(target)  # nothing is sent
        return str(way.getsockname()[0])


def is_address(host: str) -> bool:
    """Whether a text is the address of a host, and no name, alike on all hosts."""
    if "%" in host:
        return False  # of an interface, whose name only one host knows
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether a text is an address that other hosts cannot reach."""
    return is_address(host) and ipaddress.ip_address(host).is_loopback


def family_of(host: str) -> socket.AddressFamily:
    """The family of addresses to which one belongs; a name counts as IPv4."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def sockets() -> Iterator[socket.socket]:
    """The process's sockets for the internet, one at a time."""
    opened = Path("/proc/self/fd")
    for entry in opened.iterdir() if opened.exists() else ():
        try:
            if not stat.S_ISSOCK(os.fstat(int(entry.name)).st_mode):
                continue
            connection = socket.socket(fileno=os.dup(int(entry.name)))
        except OSError:
            continue  # closed meanwhile
        with connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                yield connection


@functools.cache
def _machine() -> str:
    """Identity of the kernel that runs, another after each boot; never the host's name."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    if boot.exists():
        return boot.read_text().strip()
    return f"{platform.node()} {uuid.getnode()}"  # macOS, which has no name spaces


def place() -> str:
    """Place of this process: processes of equal places share memory, process ids and network.

    Host names do not say so: the containers of a machine have different names, or all have the same
    name. Equal must be the kernel and, of its name spaces, those of process ids (a ``pidfd`` is
    opened by number, and the memory of another process is copied by number), of System V shared
    memory and of the network. The name space of mounts may differ, as long as ``/dev/shm`` is the
    same file system, which has the same device number.
    """
    parts = [_machine()]
    with contextlib.suppress(OSError):  # there are no name spaces
        # Groups ask often, and a `Path` would take three times as long.
        parts += [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "ipc", "pid")]  # noqa: PTH115
    with contextlib.suppress(OSError):
        parts.append(f"shm:[{os.stat('/dev/shm').st_dev}]")  # noqa: PTH116, S108
    return " ".join(parts)


def hosts_of(places: Sequence[str]) -> tuple[int, ...]:
    """Number the hosts of all ranks by their lowest rank.

    Examples
    --------
    >>> hosts_of(["oak", "elm", "elm", "oak", "ash"])
    (0, 1, 1, 0, 2)
    """
    numbers = {where: number for number, where in enumerate(dict.fromkeys(places))}
    return tuple(numbers[where] for where in places)


def _resident() -> int:
    """The largest resident size of the process since the last call, to some 100 KiB.

    The kernel counts in batches of pages (Linux, ``proc_pid_clear_refs(5)``). Memory that malloc
    has kept, and gives out again, does not show. ``ru_maxrss`` begins again with it.
    """
    # Without `pathlib`, which takes as long as the kernel does: 20 us instead of 40.
    with FileIO(f"{_PROCESS}/status") as file:
        size = re.search(rb"VmHWM:\s*(\d+) kB", file.read(1 << 14))
    if size is None:
        raise OSError("the kernel does not tell VmHWM")
    with FileIO(f"{_PROCESS}/clear_refs", "w") as file:
        file.write(b"5")
    return 1024 * int(size[1])


def peaks_of(device: torch.device) -> Peaks | None:
    """A function that measures peaks on a device; ``None`` where they cannot be measured.

    On CUDA it is the memory of torch's tensors (not run on a GPU yet).
    """
    if device.type == "cuda":
        import torch

        def allocated() -> int:
            peak = torch.cuda.max_memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
            return peak

        return allocated
    try:
        _resident()
    except OSError:
        return None
    return _resident
