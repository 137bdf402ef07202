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

How messages travel:

- A rank posts the next receive from each neighbour before it computes, and waits for no send that
  may be incomplete. So the transport moves data while the rank computes.
- A message that arrives proves that its sender has received all that its earlier actions needed.
  The sends to that rank are then complete, and their memory is released.
- The tag of a message is its micro-batch, and a rank posts its receives in the order in which the
  peer sends.
- The first activation between two stages follows a message with its shape and dtype.

Assumptions: a stage takes one tensor and returns one tensor of floating-point numbers, of the same
shape for each micro-batch. The loss is a mean over the samples; a batch norm sees micro-batches.
The transport moves all posted messages, in any order: gloo and threads do, NCCL does not.

Source: the papers of `ringcoll.training.pipeline.pipeline_schedule`.
"""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ringcoll.errors import ArgumentError, RingcollError
from ringcoll.runtime.collectives import as_group
from ringcoll.runtime.collectives import functions as api
from ringcoll.runtime.watch import phase
from ringcoll.training.messages import Messages, tie
from ringcoll.training.model_on_ranks import check_alike, gathered, require
from ringcoll.training.pipeline.pipeline_schedule import (
    Action,
    Kind,
    PipelineSchedule,
)

_Completion = Callable[[], None]  # waits until a message is complete

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)  # their index is sent
_MOST_DIMENSIONS = 8


class _Pending(NamedTuple):
    """A send that may be incomplete, and the place of the action that receives it."""

    peer: int
    place: int
    wait: _Completion


def _neighbour(action: Action, step: int) -> Action:
    """The action of a neighbour that takes what an action hands on (1), or gives what it needs."""
    direction = step if action.kind is Kind.FORWARD else -step
    return Action(action.kind, action.stage + direction, action.microbatch)


class Mailbox:
    """The messages of a rank to and from its neighbours: activations and gradients."""

    def __init__(self, schedule: PipelineSchedule, group: Any, device: torch.device) -> None:
        self._messages, self._device = Messages(group), device
        self._rank = self._messages.rank
        self._program = schedule.program(self._rank)
        self._header_tag = schedule.num_microbatches  # those of other messages are below
        peers = {self._rank - 1, self._rank + 1} & {*range(schedule.world_size)}
        # By neighbour: the places of its actions in its program.
        self._places = {
            peer: {action: place for place, action in enumerate(schedule.program(peer))}
            for peer in peers
        }
        self._layouts: dict[int, tuple[torch.Size, torch.dtype]] = {}  # by neighbour
        self.waited_s = 0.0  # time in which this rank waited for messages, in this step
        self.nbytes_sent = 0  # in all steps

    def begin(self, *, has_new_shapes: bool) -> None:
        """Begin a step; whether shapes are new is alike on all ranks."""
        if has_new_shapes:
            self._layouts.clear()
        self._posted: dict[Action, tuple[Tensor, _Completion]] = {}
        self._pending: list[_Pending] = []
        # By neighbour: the actions that need its messages, in the order in which it sends.
        self._incoming: dict[int, deque[Action]] = {peer: deque() for peer in self._places}
        for action in self._program:
            if (source := _neighbour(action, -1)).stage in self._places:
                self._incoming[source.stage].append(action)
        self.waited_s = 0.0
        for peer in self._incoming:
            self._post_early(peer)

    def send(self, action: Action, tensor: Tensor) -> None:
        """Start to send what an action has produced to the rank that needs it."""
        receiver = _neighbour(action, 1)
        peer, tensor = receiver.stage, tensor.contiguous()
        boundary = min(self._rank, peer)
        can_be_sent = tensor.dtype in _DTYPES and tensor.ndim <= _MOST_DIMENSIONS
        require(can_be_sent, "stage", f"the result of stage {boundary} cannot be sent",
                f"one of {_DTYPES}, at most {_MOST_DIMENSIONS} dimensions",
                f"{tensor.dtype}, {tensor.ndim} dimensions", self._rank)  # fmt: skip
        is_first, layout = peer not in self._layouts, (tensor.shape, tensor.dtype)
        expected = self._layouts.setdefault(peer, layout)
        require(layout == expected, "stage",
                f"the result of stage {boundary} is not as for the micro-batch before",
                expected, layout, self._rank)  # fmt: skip
        messages = [(tensor, action.microbatch)]
        if is_first:
            padding = [0] * (_MOST_DIMENSIONS - tensor.ndim)
            numbers = [_DTYPES.index(tensor.dtype), tensor.ndim, *tensor.shape, *padding]
            messages.insert(0, (torch.tensor(numbers, device=self._device), self._header_tag))
        self.nbytes_sent += tensor.nbytes
        place = self._places[peer][receiver]
        for message, tag in messages:
            self._pending.append(_Pending(peer, place, self._messages.send(message, peer, tag)))

    def take(self, action: Action) -> Tensor | None:
        """Wait for what an action needs, if anything, and post the next receive from that peer."""
        sender = _neighbour(action, -1)
        peer = sender.stage
        if peer not in self._places:
            return None
        begin_s = time.perf_counter()
        while action not in self._posted:
            self._post(peer)
        tensor, wait = self._posted.pop(action)
        wait()
        place = self._places[peer][sender]
        for item in [item for item in self._pending if item.peer == peer and item.place <= place]:
            item.wait()
            self._pending.remove(item)
        self.waited_s += time.perf_counter() - begin_s
        self._post_early(peer)
        return tensor

    def finish(self) -> None:
        """Wait for all sends."""
        for item in self._pending:
            item.wait()
        self._pending.clear()

    def _post_early(self, peer: int) -> None:
        """Post the next receive from a peer, if there is another and its shape is known."""
        if self._incoming[peer] and peer in self._layouts:
            self._post(peer)

    def _post(self, peer: int) -> None:
        """Post the next receive from a peer; wait for the shape if it is not known."""
        action = self._incoming[peer].popleft()
        if peer not in self._layouts:
            header = torch.empty(2 + _MOST_DIMENSIONS, dtype=torch.int64, device=self._device)
            self._messages.recv(header, peer, self._header_tag)
            index, ndim, *lengths = header.tolist()
            self._layouts[peer] = torch.Size(lengths[:ndim]), _DTYPES[index]
        shape, dtype = self._layouts[peer]
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        self._posted[action] = tensor, self._messages.receive(tensor, peer, action.microbatch)


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
    require(bool(_parameters(stage)), "stage", f"stage {rank} has no layers",
            "a module with parameters", stage, rank)  # fmt: skip


def _parameters(stage: object) -> list[nn.Parameter]:
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
        agree_on_schedule(schedule, stage, self.group, self._device)
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
        layout = agree_on_batch(inputs, targets, self.schedule, self.group, self._device)
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
