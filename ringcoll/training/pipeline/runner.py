"""Pipeline-parallel training: stages of a model on several ranks, micro-batch by micro-batch.

Problem: a model does not fit on one rank, or takes too long there. The model is cut into stages,
each rank holds one of the stages, and a batch passes through them in micro-batches. A schedule
(`ringcoll.training.pipeline.pipeline_schedule`) says in which order each rank works; `Pipeline`
runs it::

    schedule = one_f_one_b(world_size, num_microbatches=8)
    mine = stages(Transformer(shape), world_size)[rank]
    pipeline = Pipeline(mine, next_token_loss, schedule)
    optimizer = torch.optim.SGD(mine.parameters())
    for inputs, targets in batches:             # the same on all ranks
        optimizer.zero_grad()
        loss = pipeline.step(inputs, targets)   # .grad is that of the whole batch
        optimizer.step()

Cost of a step: for each micro-batch and each pair of neighbouring stages, an activation and its
gradient, sent while the ranks compute; an all-gather of 24 bytes per rank, by which the ranks agree
on the shapes; a broadcast of the loss; the gradient of a tied matrix in each direction. A rank that
raised alone would leave the others waiting. So each rank tells all others what it has, and if the
arguments of a rank are wrong, every rank raises.

Assumptions: a stage takes one tensor and returns one tensor of floating-point numbers, of the same
shape for each micro-batch. The loss is a mean over the samples; a batch norm sees micro-batches.
The transport moves all posted messages, in any order: gloo and threads do, NCCL does not.

Source: the papers of `ringcoll.training.pipeline.pipeline_schedule`.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ringcoll.errors import ArgumentError
from ringcoll.runtime.collectives import as_group
from ringcoll.runtime.collectives import functions as api
from ringcoll.runtime.watch import phase
from ringcoll.training.arguments import require
from ringcoll.training.messages import tie
from ringcoll.training.model_on_ranks import check_alike, gathered
from ringcoll.training.pipeline.mailbox import Mailbox
from ringcoll.training.pipeline.pipeline_schedule import Action, Kind, PipelineSchedule


def _agree_on_schedule(
    schedule: PipelineSchedule, stage: object, group: Any, device: torch.device
) -> None:
    """Raise, on all ranks, if a rank's schedule or stage is wrong, or the schedules differ."""
    error, rank, size = None, group.rank(), group.size()
    try:
        require(schedule.world_size == size, "schedule",
                "the number of ranks is wrong", size, schedule.world_size, rank)  # fmt: skip
        require(isinstance(stage, nn.Module), "stage", f"stage {rank} is no module",
                "a module", f"a {type(stage).__name__}", rank)  # fmt: skip
        require(bool(_parameters(stage)), "stage", f"stage {rank} has no layers",
                "a module with parameters", stage, rank)  # fmt: skip
    except ArgumentError as raised:
        error = raised
    own = [str(schedule), None if error is None else str(error)]
    schedules, failures = zip(*gathered(own, group, device), strict=True)
    if error is not None:
        raise error
    for peer, failure in enumerate(failures):
        if failure is not None:
            raise ArgumentError(f"rank {peer} cannot take part: {failure}", rank=rank)
    check_alike([text.split("\n") for text in schedules], "schedule", "schedule", rank)


def _parameters(stage: object) -> list[nn.Parameter]:
    """The parameters of a stage; none of what is no module."""
    return list(stage.parameters()) if isinstance(stage, nn.Module) else []


def _agree_on_batch(
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


@dataclass(frozen=True, slots=True)
class PipelineReport:
    """Cost of a step on this rank: its time, and its waits for other ranks, in seconds.

    ``peak_activations`` is the largest number of activations that the rank kept at a time.
    """

    total_s: float
    waited_s: float
    peak_activations: int


class Pipeline:
    """The stage of one rank, and the steps that train it.

    Parameters
    ----------
    stage
        The module of this rank. If that of a rank is no module (a list of modules, for example),
        or has no parameters, all ranks raise `ArgumentError`.
    loss
        Function of the last stage's result and of the targets of a micro-batch; the result is the
        mean over the micro-batch, without dimensions.
    schedule
        Schedule of all ranks, the same on each.
    group
        Group of the ranks. It carries no other messages during a step.
    tied
        Parameter that first and last stage share; it is read on the ranks of these stages only.

    Examples
    --------
    >>> import torch, ringcoll
    >>> from ringcoll.training import one_f_one_b
    >>> def rank_main(group):
    ...     stage = torch.nn.Linear(1, 1, bias=False)
    ...     torch.nn.init.constant_(stage.weight, group.rank() + 2.0)
    ...     pipeline = Pipeline(stage, lambda x, _: x.mean(), one_f_one_b(2, 2), group)
    ...     loss = pipeline.step(torch.tensor([[1.0], [3.0]]), torch.zeros(2))
    ...     return loss.item(), stage.weight.grad.item()
    >>> ringcoll.run_threads(rank_main, 2)  # the mean of 2 * 3 * x, and its derivatives
    [(12.0, 6.0), (12.0, 4.0)]
    """

    def __init__(
        self,
        stage: nn.Module,
        loss: Callable[[Tensor, Tensor], Tensor],
        schedule: PipelineSchedule,
        group: Any = None,
        *,
        tied: Tensor | None = None,
    ) -> None:
        self.group = as_group(group)
        self.rank = self.group.rank()
        self.stage, self.loss, self.schedule = stage, loss, schedule
        params = _parameters(stage)
        self._device = params[0].device if params else torch.device("cpu")
        _agree_on_schedule(schedule, stage, self.group, self._device)
        self._mailbox = Mailbox(schedule, self.group, self._device)
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}  # by micro-batch: input and result
        self._layout: int | None = None  # hash of the inputs' layout in the step before
        self._last_rank = schedule.world_size - 1
        self._ends = sorted({0, self._last_rank})
        self._tied = tied if self.rank in self._ends and len(self._ends) > 1 else None
        self._tied_nbytes = 0
        self.last_step = PipelineReport(0.0, 0.0, 0)

    @property
    def nbytes_sent(self) -> int:
        """Bytes of activations and gradients that this rank has sent to other ranks so far."""
        return self._mailbox.nbytes_sent + self._tied_nbytes

    def step(self, inputs: Tensor | None = None, targets: Tensor | None = None) -> Tensor:
        """Do forward and backward of a batch; all ranks of the group call it.

        The result is the mean of the loss over the batch, float64 without dimensions, the same on
        all ranks. Gradients are added to ``.grad`` of the parameters. If the batch is missing or
        cannot be divided, all ranks raise `ArgumentError`, and nothing was sent; if a stage
        returned something that cannot be sent, its rank does. After an error that not all ranks
        raise, group and pipeline cannot be used any more.

        Parameters
        ----------
        inputs
            (batch, ...), equally many per micro-batch; only the first stage's rank reads them.
        targets
            (batch, ...); only the last stage's rank reads them. What is not read may be ``None``.
        """
        begin_s = time.perf_counter()
        layout = _agree_on_batch(inputs, targets, self.schedule, self.group, self._device)
        peak, num_microbatches = 0, self.schedule.num_microbatches
        if inputs is not None and self.rank == 0:
            self._inputs = inputs.chunk(num_microbatches)
        if targets is not None and self.rank == self._last_rank:
            self._targets = targets.chunk(num_microbatches)
        self._losses: list[Tensor] = []
        agreed_s = time.perf_counter()
        self._mailbox.begin(has_new_shapes=layout != self._layout)
        self._layout = layout
        for action in self.schedule.program(self.rank):
            with phase(action.kind.name.lower(), stage=action.stage, microbatch=action.microbatch):
                (self._forward if action.kind is Kind.FORWARD else self._backward)(action)
            peak = max(peak, len(self._kept))
        done_s = time.perf_counter()
        self._mailbox.finish()
        if self._tied is not None:
            with phase("average"):
                self._tied_nbytes += tie(self._tied, self._ends, self.group)
        loss = sum(self._losses, torch.zeros((), dtype=torch.float64, device=self._device))
        api.broadcast(loss, group=self.group, group_src=self._last_rank)
        end_s = time.perf_counter()
        waited_s = agreed_s - begin_s + self._mailbox.waited_s + end_s - done_s
        self.last_step = PipelineReport(end_s - begin_s, waited_s, peak)
        return loss

    # --- actions ------------------------------------------------------------------------

    def _forward(self, action: Action) -> None:
        arriving = self._mailbox.take(action)
        inputs = self._inputs[action.microbatch] if arriving is None else arriving.requires_grad_()
        result = self.stage(inputs)
        if self.rank == self._last_rank:
            result = self.loss(result, self._targets[action.microbatch])
            result = result / self.schedule.num_microbatches
            self._losses.append(result.detach())
        else:
            message, got = f"stage {action.stage} returned no tensor", type(result).__name__
            is_tensor = isinstance(result, Tensor)
            require(is_tensor, "stage", message, "a tensor", got, self.rank)
            self._mailbox.send(action, result.detach())
        self._kept[action.microbatch] = inputs, result

    def _backward(self, action: Action) -> None:
        inputs, result = self._kept[action.microbatch]
        gradient = self._mailbox.take(action)  # None of the loss
        if result.requires_grad:  # the first stage may be frozen
            torch.autograd.backward(result, gradient)
        if self.rank > 0:  # zeros if the stage does not use its input
            of_inputs = torch.zeros_like(inputs) if inputs.grad is None else inputs.grad
            self._mailbox.send(action, of_inputs)
        del self._kept[action.microbatch]
