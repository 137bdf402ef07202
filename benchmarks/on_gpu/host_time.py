"""Time of the host for a small reduction: for launching a bound reduction, and for binding it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.on_gpu.clock import host_samples
from benchmarks.on_gpu.rows import Row, Settings, missing
from ringcoll.errors import MissingExtraError
from ringcoll.runtime.reduction import TORCH, Engine, gpu, resolve

__all__ = ["LAUNCH", "TABLE", "host_time"]

TABLE = "Host time of a reduction of 4 KiB"
LAUNCH = "launch of a bound kernel"

_TORCH, _STREAM = "torch.add(out=)", "asking for the current stream"
_NUMEL = 1024
_CALLS, _ROUNDS = 200, 30


def host_time(settings: Settings) -> Iterator[Row]:
    """Time launching and binding, by the kernels and by torch."""
    device, reduction = settings.place, resolve("sum", torch.float32)
    ours: Engine = TORCH
    if not settings.rehearsal:
        try:
            ours = gpu.engine("cupy")
        except MissingExtraError as error:
            yield missing(TABLE, LAUNCH, error)
    left, right, copy = (torch.ones(_NUMEL, device=device) for _ in range(3))
    with_copy = [left, copy]
    binding = partial(ours.bind, reduction, [left], [left, right], None)
    measured: dict[str, Callable[[], object]] = {
        LAUNCH: binding(),
        "launch of a bound kernel that also copies": ours.bind(
            reduction, with_copy, [left, right], None
        ),
        _TORCH: partial(torch.add, left, right, out=left),
        "binding": binding,
        _STREAM: partial(_current_stream, device),
    }
    calls, rounds = (5, 3) if settings.rehearsal else (_CALLS, _ROUNDS)
    for what, run in measured.items():
        summary = host_samples(run, device, calls=calls, rounds=rounds)
        cells = {
            "what": what,
            "by": "torch" if what in (_TORCH, _STREAM) else ours.name,
            "median (us)": summary.p50_s * 1e6,
            "spread": summary.spread,
            "95 % below (us)": summary.p95_s * 1e6,
        }
        yield Row(TABLE, cells)


def _current_stream(device: torch.device) -> object:
    """The stream, for which every launch has to ask."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None
