"""Peaks of memory between two moments.

On the CPU the kernel keeps the largest resident size of a process, and begins again when ``5`` is
written to ``clear_refs`` (Linux, ``proc_pid_clear_refs(5)``). It is the size of the whole process,
torch's libraries included; the kernel counts in batches of pages, so it is right to some 100 KiB. Memory
that was freed, and that malloc has kept and gives out again, does not show.
``ru_maxrss`` begins again with it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable

import torch

Peaks = Callable[[], int]
"""Returns the peak since the call before, in bytes, and begins again."""

_PROCESS = "/proc/self"


def _resident() -> int:
    """Without `pathlib`, which takes as long as the kernel does: 20 us instead of 40."""
    file = os.open(f"{_PROCESS}/status", os.O_RDONLY)
    try:
        size = re.search(rb"VmHWM:\s*(\d+) kB", os.read(file, 1 << 14))
    finally:
        os.close(file)
    if size is None:
        raise OSError("the kernel does not tell VmHWM")
    file = os.open(f"{_PROCESS}/clear_refs", os.O_WRONLY)
    try:
        os.write(file, b"5")
    finally:
        os.close(file)
    return 1024 * int(size[1])


def peaks_of(device: torch.device) -> Peaks | None:
    """A function that measures peaks on a device; ``None`` where they cannot be measured.

    On CUDA it is the memory of torch's tensors (not run on a GPU yet).
    """
    if device.type == "cuda":

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
