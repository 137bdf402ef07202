"""Peaks of memory between two moments.

On the CPU the kernel keeps the largest resident size of a process, and begins again when ``5`` is
written to ``clear_refs`` (Linux, ``proc_pid_clear_refs(5)``). It is the size of the whole process,
torch's libraries included; the kernel counts in batches of pages, so it is right to some 100 KiB.
``ru_maxrss`` begins again with it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import torch

__all__ = ["Peaks", "peaks_of"]

Peaks = Callable[[], int]
"""Returns the peak since the call before, in bytes, and begins again."""

_PROCESS = Path("/proc/self")


def _resident() -> int:
    size = re.search(rb"VmHWM:\s*(\d+) kB", (_PROCESS / "status").read_bytes())
    assert size is not None
    (_PROCESS / "clear_refs").write_bytes(b"5")
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
    except (OSError, AssertionError):
        return None
    return _resident
