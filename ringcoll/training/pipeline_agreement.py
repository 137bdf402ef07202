"""What the ranks of a pipeline agree on before they send: the schedule, and the shape of a batch.

A rank that raised alone would leave the others waiting. So each rank tells all others what it has,
and all ranks judge the same data: if the arguments of a rank are wrong, every rank raises.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from ringcoll.collectives import functions as api
from ringcoll.errors import ArgumentError, RingcollError
from ringcoll.training.pipeline_check import check
from ringcoll.training.pipeline_schedule import PipelineSchedule

__all__ = ["agree_on_batch", "agree_on_schedule"]


def agree_on_schedule(
    schedule: PipelineSchedule, stages: Sequence[nn.Module], group: Any, device: torch.device
) -> None:
    """Raise, on all ranks, if a rank's schedule or stages are wrong, or the schedules differ.

    Parameters
    ----------
    schedule, stages
        Schedule, and modules of this rank.
    group
        Group of the ranks, not ``None``.
    device
        Device of the tensors that are sent.

    Raises
    ------
    ArgumentError
        A rank has another number of stages than its schedule, a stage has no parameters, the group
        has another number of ranks than the schedule, or another rank cannot take part.
    ScheduleError
        The schedule of this rank is wrong.
    """
    error = None
    try:
        _check(schedule, stages, group)
    except RingcollError as raised:
        error = raised
    own = json.dumps([str(schedule), None if error is None else str(error)])
    text = torch.frombuffer(bytearray(own, "utf-8"), dtype=torch.uint8).to(device)
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(group.size())]
    api.all_gather(lengths, torch.tensor([text.numel()], device=device), group)
    texts = [text.new_empty(int(length)) for length in lengths]
    api.all_gather(texts, text, group)
    if error is not None:
        raise error
    rank = group.rank()
    schedules, failures = zip(*(json.loads(bytes(item.tolist())) for item in texts), strict=True)
    for peer, failure in enumerate(failures):
        if failure is not None:
            raise ArgumentError(f"rank {peer} cannot take part: {failure}", rank=rank)
    for peer, other in enumerate(schedules):
        lines = schedules[0].split("\n"), other.split("\n")
        for expected, got in zip_longest(*lines, fillvalue="nothing"):
            if expected != got:
                raise ArgumentError(
                    f"rank {peer} has another schedule than rank 0",
                    rank=rank,
                    argument="schedule",
                    expected=expected,
                    got=got,
                )


def _check(schedule: PipelineSchedule, stages: Sequence[nn.Module], group: Any) -> None:
    check(schedule)
    rank = group.rank()
    numbers = schedule.stages_of(rank)
    for got, expected, argument, what in (
        (schedule.world_size, group.size(), "schedule", "ranks"),
        (len(stages), len(numbers), "stages", "stages"),
    ):
        if got != expected:
            raise ArgumentError(
                f"the number of {what} is wrong",
                rank=rank,
                argument=argument,
                expected=expected,
                got=got,
            )
    for number, stage in zip(numbers, stages, strict=True):
        if next(stage.parameters(), None) is None:
            raise ArgumentError(
                f"stage {number} has no layers",
                rank=rank,
                argument="stages",
                expected="a module with parameters",
                got=stage,
            )


def agree_on_batch(
    inputs: Tensor | None,
    targets: Tensor | None,
    schedule: PipelineSchedule,
    group: Any,
    device: torch.device,
) -> int:
    """Raise, on all ranks, if the batch cannot be used.

    Parameters
    ----------
    inputs, targets
        Batch of this rank, each (batch, ...) or ``None``. Those of the ranks of the first and of
        the last stage count.
    schedule, group, device
        As for `agree_on_schedule`.

    Returns
    -------
    int
        Hash of the shape and dtype of the inputs, alike on all ranks.

    Raises
    ------
    ArgumentError
        The number of micro-batches does not divide the inputs, there are other numbers of inputs
        and targets, or a batch is missing.
    """
    layout = "" if inputs is None else f"{inputs.dtype} {tuple(inputs.shape)}"
    lengths = [0 if item is None or not item.ndim else len(item) for item in (inputs, targets)]
    own = torch.tensor([*lengths, zlib.crc32(layout.encode())], device=device)
    gathered = own.new_empty(group.size() * own.numel())
    api.all_gather_single(gathered, own, group)
    table = gathered.view(-1, own.numel()).tolist()
    num_inputs, _, layout_hash = table[0]
    num_targets = table[(schedule.num_stages - 1) % schedule.world_size][1]
    num_microbatches = schedule.num_microbatches
    for argument, expected, got, is_right in (
        (
            "inputs",
            f"a positive multiple of {num_microbatches} micro-batches",
            num_inputs,
            num_inputs and not num_inputs % num_microbatches,
        ),
        ("targets", f"{num_inputs}, as many as inputs", num_targets, num_targets == num_inputs),
    ):
        if not is_right:
            raise ArgumentError(
                "the number of samples is wrong",
                rank=group.rank(),
                argument=argument,
                expected=expected,
                got=got,
            )
    return int(layout_hash)
