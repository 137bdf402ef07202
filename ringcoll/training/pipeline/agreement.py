"""What the ranks of a pipeline agree on before they send: the schedule, and the shape of a batch.

A rank that raised alone would leave the others waiting. So each rank tells all others what it has,
and all ranks judge the same data: if the arguments of a rank are wrong, every rank raises.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ringcoll.collectives import functions as api
from ringcoll.errors import ArgumentError, RingcollError
from ringcoll.training.checks import check_alike, gathered, require
from ringcoll.training.pipeline.check import check
from ringcoll.training.pipeline.schedule import PipelineSchedule

__all__ = ["agree_on_batch", "agree_on_schedule"]


def agree_on_schedule(
    schedule: PipelineSchedule, stages: Sequence[nn.Module], group: Any, device: torch.device
) -> None:
    """Raise, on all ranks, if a rank's schedule or stages are wrong, or the schedules differ."""
    error, rank = None, group.rank()
    try:
        _check(schedule, stages, group)
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


def _check(schedule: PipelineSchedule, stages: Sequence[nn.Module], group: Any) -> None:
    check(schedule)
    rank = group.rank()
    numbers = schedule.stages_of(rank)
    for got, expected, argument, what in (
        (schedule.world_size, group.size(), "schedule", "ranks"),
        (len(stages), len(numbers), "stages", "stages"),
    ):
        message = f"the number of {what} is wrong"
        require(got == expected, argument, message, expected, got, rank)
    for number, stage in zip(numbers, stages, strict=True):
        is_trained = next(stage.parameters(), None) is not None
        wanted = "a module with parameters"
        require(is_trained, "stages", f"stage {number} has no layers", wanted, stage, rank)


def agree_on_batch(
    inputs: Tensor | None,
    targets: Tensor | None,
    schedule: PipelineSchedule,
    group: Any,
    device: torch.device,
) -> int:
    """Raise, on all ranks, if the batch cannot be used; return a hash of the inputs' layout.

    The inputs of the rank of the first stage count, and the targets of that of the last stage. The
    hash is that of the inputs' shape and dtype, alike on all ranks.
    """
    layout = "" if inputs is None else f"{inputs.dtype} {tuple(inputs.shape)}"
    lengths = [0 if item is None or not item.ndim else len(item) for item in (inputs, targets)]
    own = torch.tensor([*lengths, zlib.crc32(layout.encode())], device=device)
    table = own.new_empty(group.size() * own.numel())
    api.all_gather_single(table, own, group)
    rows = table.view(-1, own.numel()).tolist()
    num_inputs, _, layout_hash = rows[0]
    num_targets = rows[(schedule.num_stages - 1) % schedule.world_size][1]
    m, wrong, rank = schedule.num_microbatches, "the number of samples is wrong", group.rank()
    require(num_inputs > 0 and num_inputs % m == 0, "inputs", wrong,
            f"a positive multiple of {m} micro-batches", num_inputs, rank)  # fmt: skip
    require(num_targets == num_inputs, "targets", wrong,
            f"{num_inputs}, as many as inputs", num_targets, rank)  # fmt: skip
    return int(layout_hash)
