"""The part of a rank of ``ringcoll trace``: a collective, or a trainer, under `ringcoll.trace`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain, count, islice
from typing import Any

import torch.distributed as dist

import ringcoll
from ringcoll.runtime.user_files import UserModule
from ringcoll.tools.bench.contenders import Buffers, Workload, caller
from ringcoll.tools.tracing import PhaseTimes, Recording, Shares
from ringcoll.training import Gradients, Task, make_trainer


@dataclass(frozen=True)
class TraceRequest:
    """The operation to trace, how often it runs before the trace and in it, and the absolute path.

    The transport is that of CPU tensors; ``None`` for the transport that the group uses anyway.
    ``modules`` are those of the user, which register further algorithms.
    """

    workload: Workload
    algorithm: str
    path: str
    warmup: int = 2
    times: int = 5
    segment_bytes: int | None = None
    transport: str | None = None
    modules: tuple[UserModule, ...] = ()


def trace_on_rank(request: TraceRequest) -> dict[str, Any]:
    """Run the operation on the default group, and trace it.

    On rank 0 ``ranks`` and ``phases``, the summary of each rank as JSON has it, ``findings``,
    ``clocks`` and ``transport`` are returned; on the others nothing.
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
    return _summary(recording)


@dataclass(frozen=True)
class TrainerTraceRequest:
    """The trainer to trace, as for `make_trainer`; the rest as in `TraceRequest`, in steps."""

    trainer: str
    task: Task
    gradients: Gradients
    path: str
    warmup: int = 2
    times: int = 5
    modules: tuple[UserModule, ...] = ()


def trace_training_on_rank(request: TrainerTraceRequest) -> dict[str, Any]:
    """Train on the default group, and trace all groups of the trainer, as `trace_on_rank`."""
    for module in request.modules:
        module.load()
    task, world_size = request.task, dist.get_world_size()
    trainer = make_trainer(request.trainer, task, request.gradients)
    every = chain.from_iterable(task.epoch(number, world_size) for number in count())
    for _ in trainer.steps(islice(every, request.warmup)):
        pass
    further = [group for group in trainer.groups if group is not None]
    with ringcoll.trace(request.path, also=further) as recording:
        for _ in trainer.steps(islice(every, request.times)):
            pass
    trainer.close()
    return _summary(recording)


def _summary(recording: Recording) -> dict[str, Any]:
    """The summary that the command prints, on rank 0; empty on the others."""
    if not recording.summary:
        return {}

    def fields(by_name: Mapping[str, Shares | PhaseTimes]) -> dict[str, Any]:
        return {name: numbers.as_json() for name, numbers in by_name.items()}

    return {
        "ranks": [*map(fields, recording.summary)],
        "clocks": recording.clocks,
        "transport": recording.transport,
        "phases": [*map(fields, recording.phases)],
        "findings": recording.findings,
    }
