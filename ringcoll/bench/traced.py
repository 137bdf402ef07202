"""One collective under `ringcoll.trace`: what runs on every rank of ``ringcoll trace``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

import ringcoll
from ringcoll.bench.contenders import Buffers, Workload, caller
from ringcoll.system.user_modules import UserModule

__all__ = ["TraceRequest", "on_rank"]


@dataclass(frozen=True)
class TraceRequest:
    """What to trace.

    Parameters
    ----------
    workload, algorithm, segment_bytes
        The operation.
    transport
        The transport of CPU tensors; ``None`` for the transport that the group uses anyway.
    warmup, times
        How often it runs before the trace, and in it.
    path
        Of the file, absolute.
    modules
        Modules of the user, which register further algorithms.
    """

    workload: Workload
    algorithm: str
    path: str
    segment_bytes: int | None = None
    transport: str | None = None
    warmup: int = 2
    times: int = 5
    modules: tuple[UserModule, ...] = ()


def on_rank(request: TraceRequest) -> dict[str, Any]:
    """Run the operation on the default group, and trace it.

    Returns
    -------
    dict
        On rank 0 ``ranks``, the summary of each rank as JSON has it, ``clocks`` and
        ``transport``; empty on the others.
    """
    for module in request.modules:
        module.load()
    if request.transport is not None:
        ringcoll.use(transport=request.transport)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    buffers = Buffers.make(request.workload, world_size, rank, in_place=False)
    run = caller(
        request.algorithm, request.workload, buffers, rank, world_size, request.segment_bytes
    )
    for _ in range(request.warmup):
        run(False)
    with ringcoll.trace(request.path) as recording:
        for _ in range(request.times):
            run(False)
    if rank:
        return {}
    return {
        "ranks": [
            {call: shares.as_json() for call, shares in calls.items()}
            for calls in recording.summary
        ],
        "clocks": recording.clocks,
        "transport": recording.transport,
    }
