"""What the ranks of a pipeline agree on before they compute: the schedule, and each batch.

A rank that raised alone would leave the others waiting. So each rank tells all others what it has,
and if the arguments of a rank are wrong, every rank raises.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor, nn

from ringcoll.errors import ArgumentError, RingcollError
from ringcoll.runtime.collectives import functions as api
from ringcoll.training.arguments import require
from ringcoll.training.model_on_ranks import check_alike, gathered
from ringcoll.training.pipeline.pipeline_schedule import PipelineSchedule


def agree_on_schedule(
    schedule: PipelineSchedule, stage: object, group: Any, device: torch.device
) -> None:
    """Raise, on all ranks, if a rank's schedule or stage is wrong, or the schedules differ."""
    error, rank = None, group.rank()
    try:
        _check(schedule, stage, group)
    except RingcollError as raised:
        error = raised
    own = [str(schedule), None if error is None else str(error)]
    schedules, failures = zip(*gathered(own, group, device), strict=True)
    if error is not None:
        raise error
    for peer, failure in enumerate(failures):
        if failure is not None:
            raise ArgumentError(f"rank {peer} cannot take part: {failure}", rank=rank)
    check_alike([text.split("\n") for text in schedules], "schedule", "schedule", rank)


def _check(schedule: PipelineSchedule, stage: object, group: Any) -> None:
    rank, size = group.rank(), group.size()
    require(schedule.world_size == size, "schedule",
            "the number of ranks is wrong", size, schedule.world_size, rank)  # fmt: skip
    require(isinstance(stage, nn.Module), "stage", f"stage {rank} is no module",
            "a module", f"a {type(stage).__name__}", rank)  # fmt: skip
    require(bool(parameters_of(stage)), "stage", f"stage {rank} has no layers",
            "a module with parameters", stage, rank)  # fmt: skip


def parameters_of(stage: object) -> list[nn.Parameter]:
    """The parameters of a stage; none of what is no module."""
    return list(stage.parameters()) if isinstance(stage, nn.Module) else []


def agree_on_batch(
    inputs: Tensor | None,
    targets: Tensor | None,
    schedule: PipelineSchedule,
    group: Any,
    device: torch.device,
) -> int:
    """Raise, on all ranks, if the batch cannot be used; return a hash of its shape and dtype."""
    layout = "" if inputs is None else f"{inputs.dtype} {tuple(inputs.shape)}"
    lengths = [0 if item is None or not item.ndim else len(item) for item in (inputs, targets)]
    own = torch.tensor([*lengths, zlib.crc32(layout.encode())], device=device)
    table = own.new_empty(group.size() * own.numel())
    api.all_gather_single(table, own, group)
    rows = table.view(-1, own.numel()).tolist()
    num_inputs, _, layout_hash = rows[0]  # of the first stage; the targets of the last one
    num_targets = rows[-1][1]
    m, wrong, rank = schedule.num_microbatches, "the number of samples is wrong", group.rank()
    require(num_inputs > 0 and num_inputs % m == 0, "inputs", wrong,
            f"a positive multiple of {m} micro-batches", num_inputs, rank)  # fmt: skip
    require(num_targets == num_inputs, "targets", wrong,
            f"{num_inputs}, as many as inputs", num_targets, rank)  # fmt: skip
    return int(layout_hash)
