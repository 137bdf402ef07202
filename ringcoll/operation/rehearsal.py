"""A plan's local work, done once on a little memory: all its kernels are loaded before its first message.

Problem: CUDA loads a kernel when it is first launched, and may wait for all kernels on the GPU before it
does. Messages of NCCL are kernels that wait for a peer. Say this rank has sent the first message of a plan,
and loads the plan's next kernel: the host waits until a peer has taken the message. The peer may load a kernel,
too, and wait for a message of another group, which this rank sends after it. So both wait for ever.

Cost: a launch for each instruction, once an operation, and some hundred elements a region.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from ringcoll.operation.executor import bind, drive
from ringcoll.operation.instructions import Wait
from ringcoll.operation.plan import Plan
from ringcoll.operation.regions import ALIGNMENT, Region
from ringcoll.reduction import Engine, Reduction
from ringcoll.transport import AroundTransport, Handle, Message, Transport

_MOST = 256  # elements of a region: kernels do not depend on the length, but on the alignment
_ROOM = _MOST + ALIGNMENT


class Silent(AroundTransport):
    """Sends nothing, and receives nothing."""

    def bind(
        self, receives: Sequence[Message], sends: Sequence[Message]
    ) -> Callable[[int], list[Handle]]:
        """Make nothing ready."""
        count = len(receives) + len(sends)
        return lambda mixed: [None] * count

    def wait(self, handle: Handle, timeout_s: float) -> None:
        """Wait for nothing."""


class _Unwatched:
    wait: Wait | None = None


def rehearse(
    plan: Plan,
    silent: Transport,
    dtype: torch.dtype,
    result_dtype: torch.dtype,
    device: torch.device,
    reduction: Reduction | None,
    engine: Engine,
) -> None:
    """Do a plan's local work on zeros."""
    regions = tuple(
        Region(
            region.space, 0, number * _ROOM + region.offset % ALIGNMENT, min(region.numel, _MOST)
        )
        for number, region in enumerate(plan.regions)
    )
    numel = len(regions) * _ROOM
    inputs, outputs = (torch.zeros(numel, dtype=dtype, device=device) for _ in range(2))
    workspace = torch.zeros(numel + ALIGNMENT, dtype=dtype, device=device)
    small = replace(plan, regions=regions, arriving_numel=numel, workspace_numel=numel)
    program = bind(
        small, [inputs], [outputs], workspace, silent, reduction=reduction, engine=engine
    )
    drive(program, 0, silent.wait, math.inf, _Unwatched())
    results = outputs.view(result_dtype) if reduction is None else reduction.decode(outputs)
    torch.empty(numel, 2, dtype=results.dtype, device=device)[:, 0].copy_(results)  # with a stride
