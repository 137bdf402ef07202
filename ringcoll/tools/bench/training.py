"""A small real training run, in which every training system takes part.

Problem: that a system trains right, and what it costs, shows when a model is trained. All
contenders start from the same weights and see the same batches. Those in lock-step have to end with
the same model: exactly the same on all ranks, and that of torch's ``DistributedDataParallel`` on
gloo up to rounding. The others have to learn.

Contenders take turns epoch by epoch, in an order that changes, so that a machine that
slows down slows all of them. The time of a step is that of the slowest rank.

`trace_on_rank` and `trace_training_on_rank` are the part of a rank of ``ringcoll trace``.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, count, islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.func import functional_call

import ringcoll
from ringcoll.runtime.collectives import barrier
from ringcoll.runtime.launch import report
from ringcoll.runtime.machine import UserModule
from ringcoll.tools.bench.contenders import Buffers, Workload, caller
from ringcoll.tools.bench.names import BUCKET_BYTES, EPOCHS, WIRE_NAMES
from ringcoll.tools.bench.rounds import Meeting
from ringcoll.tools.bench.units import Summary, summarize
from ringcoll.tools.tracing import PhaseTimes, Recording, Shares
from ringcoll.training import (
    Gradients,
    ModelStates,
    Task,
    batches,
    check_finite,
    check_trainer,
    find_trainer,
    make_trainer,
    next_token_loss,
)

_WIRE_DTYPES = {name: getattr(torch, name) for name in WIRE_NAMES}


class Contender(NamedTuple):
    """A trainer and an algorithm; ``None`` stands for the native all-reduce."""

    trainer: str
    algorithm: str | None = None

    def __str__(self) -> str:
        return "native" if self.algorithm is None else f"{self.trainer}, {self.algorithm}"


NATIVE_TRAINER = Contender("torch-ddp")
"""torch's DistributedDataParallel on gloo."""


@dataclass(frozen=True)
class TrainingRequest:
    """A request to train some contenders.

    `NATIVE_TRAINER` takes part in any case. ``wire`` is a name in `WIRE_NAMES`, or ``None``: how
    gradients are sent by the trainers that have the choice, except natively. ``modules`` of the
    user register further algorithms.
    """

    contenders: tuple[Contender, ...]
    task: Task
    backend: str = "ringcoll"
    epochs: int = EPOCHS
    wire: str | None = None
    bucket_bytes: int = BUCKET_BYTES
    modules: tuple[UserModule, ...] = ()

    def gradients(self, contender: Contender) -> Gradients:
        """How a contender averages gradients."""
        wire = None if self.wire is None or contender == NATIVE_TRAINER else _WIRE_DTYPES[self.wire]
        return Gradients(contender.algorithm, wire, self.bucket_bytes)


class Epoch(NamedTuple):
    """The report of rank 0 after an epoch of a contender.

    Loss and accuracy are those on the test set; ``steps`` and ``seconds`` count all steps so far,
    and the time that rank 0 spent on them.
    """

    contender: Contender
    number: int
    loss: float
    accuracy: float
    steps: int = 0
    seconds: float = 0.0


class Comparison(NamedTuple):
    """Parameters at one moment: the largest absolute differences; NaN if a parameter is NaN.

    ``from_native`` is the difference from the native run, ``moved`` that from the first
    weights; ``largest`` is the largest parameter.
    """

    from_native: float
    moved: float
    largest: float


@dataclass(frozen=True)
class TrainingResult:
    """The training of one contender.

    Parameters
    ----------
    epochs
        The reports, an epoch each.
    start_loss
        Loss on the test set before the first step.
    steps_s
        Time of each step, in seconds, on the slowest rank.
    nbytes_sent
        Bytes that the rank that sends most has sent in a step, on average.
    memory
        Bytes of the rank that holds most; ``None`` if there were fewer than two steps.
    overlap
        Share of the communication that is hidden behind backward, median over rank 0's
        steps; ``None`` if it cannot be measured.
    bubble
        Share of a step in which a rank waits for other stages, on average over ranks, median over
        steps; ``None`` if there are no stages.
    between_ranks
        Largest absolute difference of a parameter between two ranks, at the end.
    first, end
        The parameters after the first step, and at the end; ``first`` is ``None`` if the ranks do
        not hold one model then.
    """

    contender: Contender
    epochs: tuple[Epoch, ...]
    start_loss: float
    steps_s: tuple[float, ...]
    nbytes_sent: int
    memory: ModelStates | None
    overlap: float | None
    bubble: float | None
    between_ranks: float
    first: Comparison | None
    end: Comparison

    @cached_property
    def summary(self) -> Summary:
        """Statistics of the times of the steps; the first epoch, which warms up, is left out."""
        warm = len(self.steps_s) // len(self.epochs) if len(self.epochs) > 1 else 0
        return summarize(self.steps_s[warm:])

    def complaints(self, request: TrainingRequest) -> Iterator[str]:
        """The mistakes in it; a difference of NaN is one."""
        system, _ = find_trainer(self.contender.trainer)
        if system.meets and self.between_ranks != 0:
            yield f"ranks differ by {self.between_ranks:.2g}"
        if not system.is_exact:
            if not self.epochs[-1].loss < self.start_loss:
                loss = f"loss {self.epochs[-1].loss:.4f}, at first {self.start_loss:.4f}"
                yield f"it has learned nothing: {loss}"
            return
        assert self.first is not None  # of a system that is exact
        moments, limits = ("after the first step", "at the end"), tolerances(request, self)
        for moment, compared, limit in zip(moments, (self.first, self.end), limits, strict=True):
            if not compared.from_native <= limit:
                yield f"{moment} {compared.from_native:.2g} from native, allowed {limit:.2g}"


# Fractions of the way that the parameters have moved, by wire dtype. In the first step only
# the gradients' rounding differs: 1e-3 with float16, 4e-3 with bfloat16 on 4 ranks. The next
# steps enlarge the difference, more at a higher learning rate: after 20 epochs at 0.02 it
# was 1e-6 with float32 and 0.012 with bfloat16; at 0.1 it was 0.05 and 0.25.
#
# AdamW's first step divides each gradient by its own size: the rounding of a gradient near 0 moves
# its parameter by a part of the learning rate (5e-3 of it with float32 on 8 ranks), and a gradient
# whose sign a narrow dtype turns around by twice the learning rate: there only the end is bounded.
_FIRST_STEP: dict[str, dict[str | None, float]] = {
    "sgd": {None: 1e-5, "float16": 1e-2, "bfloat16": 5e-2},
    "adamw": {None: 5e-2, "float16": 2.0, "bfloat16": 2.0},
}
_AT_THE_END: dict[str | None, float] = {None: 0.1, "float16": 0.25, "bfloat16": 0.5}


def tolerances(request: TrainingRequest, result: TrainingResult) -> tuple[float, float]:
    """Limits on the difference from the native run, after the first step and at the end.

    A limit is a fraction of the way that parameters have gone, and their own rounding.
    """
    assert result.first is not None
    rounding = torch.finfo(torch.float32).eps
    system, _ = find_trainer(result.contender.trainer)
    wire = request.wire if system.takes_wire else None
    first = _FIRST_STEP[request.task.optimizer][wire]
    return (
        first * result.first.moved + rounding * result.first.largest,
        _AT_THE_END[wire] * result.end.moved + rounding * result.end.largest,
    )


def check_fit(request: TrainingRequest, world_size: int) -> None:
    """Raise `ArgumentError` unless all trainers can train the task, with samples for a step."""
    task = request.task
    batches(len(task.examples.train_inputs), task.batch, 0, 0, world_size)
    for contender in request.contenders:
        check_trainer(contender.trainer, task, world_size, request.gradients(contender))


class _Runner:
    """One contender on this rank: its trainer, and measurements so far."""

    def __init__(self, request: TrainingRequest, contender: Contender) -> None:
        self.contender, self.task = contender, request.task
        self.trainer = make_trainer(contender.trainer, request.task, request.gradients(contender))
        self.untrained = request.task.make()
        weights: dict[str, Tensor] = dict(self.untrained.named_parameters())
        self.start = _flat(weights)
        self.first: Tensor | None = None
        self.start_loss, _ = self._test(weights)
        self.epochs: list[Epoch] = []
        self.steps_s: list[float] = []
        self.overlaps: list[float | None] = []
        self.bubbles: list[float | None] = []
        self.seconds, self.nbytes_sent = 0.0, 0

    def train(self, every_batch: Sequence[Tensor], group: object) -> None:
        """Do the steps of an epoch; a loss that is not finite ends all ranks.

        In lock-step the ranks look at every loss together, within the time of the step: what a
        step has left on its way must not go on for free. Out of lock-step they do so at the end.
        """
        trainer, losses = self.trainer, list[Tensor]()
        first_step = len(self.steps_s) + 1
        self.nbytes_sent -= trainer.nbytes_sent()
        steps = trainer.steps(every_batch)
        for _ in every_batch:
            begin = time.perf_counter()
            loss = next(steps, None)  # a server has no steps: it serves until the epoch is over
            if loss is not None and trainer.meets:
                check_finite(loss, first_step + len(losses), group)
            took = time.perf_counter() - begin
            self.seconds += took
            self.steps_s.append(0.0 if loss is None else took)
            if loss is None:
                continue
            losses.append(loss)
            self.overlaps.append(trainer.overlap())
            self.bubbles.append(trainer.bubble())
            if trainer.meets and self.first is None:
                before = self._all_sent()  # what follows is not the system's
                self.first = _flat(trainer.whole())
                self.nbytes_sent -= trainer.nbytes_sent() - before
        next(steps, None)  # what follows the last step
        if not trainer.meets:
            check_finite(torch.stack(losses or [torch.zeros((), device="cpu")]), first_step, group)
        self.nbytes_sent += self._all_sent()

    def _all_sent(self) -> int:
        """Bytes that the trainer has sent, when all that it has started is over."""
        for group in self.trainer.groups:
            barrier(group)
        return self.trainer.nbytes_sent()

    def test(self) -> Epoch:
        """Loss and accuracy on what was not trained on; all ranks call it."""
        loss, accuracy = self._test(self.trainer.whole())
        number, steps = len(self.epochs) + 1, len(self.steps_s)
        self.epochs.append(Epoch(self.contender, number, loss, accuracy, steps, self.seconds))
        return self.epochs[-1]

    @torch.no_grad()
    def _test(self, whole: dict[str, Tensor]) -> tuple[float, float]:
        examples = self.task.examples
        outputs = functional_call(self.untrained, whole, examples.test_inputs)
        right = (outputs.argmax(-1) == examples.test_targets).float().mean()
        return float(next_token_loss(outputs, examples.test_targets)), float(right)


def _flat(whole: dict[str, Tensor]) -> Tensor:
    return torch.cat([param.detach().flatten() for param in whole.values()])


def train_on_rank(request: TrainingRequest) -> list[TrainingResult]:
    """Train all contenders, `NATIVE_TRAINER` last; called on all ranks of a default group.

    All ranks get one result. Rank 0 gives each `Epoch` to `ringcoll.runtime.launch.report` as it
    comes. A loss that is not finite raises `TrainingError`.
    """
    for module in request.modules:
        module.load()
    task, meeting = request.task, Meeting()
    check_fit(request, meeting.world_size)
    checks = dist.new_group(backend="gloo")  # its messages are not counted
    contenders = [contender for contender in request.contenders if contender != NATIVE_TRAINER]
    runners = [_Runner(request, contender) for contender in [*contenders, NATIVE_TRAINER]]
    for epoch in range(request.epochs):
        every_batch = list(_batches_of_all(task, task.seed + 1000 * epoch, meeting.world_size))
        turns = runners.copy()
        random.Random(epoch).shuffle(turns)  # noqa: S311  # the same order on all ranks
        for runner in turns:
            meeting.barrier()
            runner.train(every_batch, checks)
            tested = runner.test()
            if meeting.rank == 0:
                report(tested)
    results = _compare(runners, meeting)
    for runner in runners:
        runner.trainer.close()
    dist.destroy_process_group(checks)
    meeting.close()
    return results


def _batches_of_all(task: Task, seed: int, world_size: int) -> Tensor:
    """The batches of an epoch, with the samples of all ranks."""
    num_samples = len(task.examples.train_inputs)
    ranks = range(world_size)
    return torch.cat(
        [batches(num_samples, task.batch, seed, rank, world_size) for rank in ranks], 1
    )


def _compare(runners: Sequence[_Runner], meeting: Meeting) -> list[TrainingResult]:
    ends = [_flat(runner.trainer.whole()) for runner in runners]
    native_first = runners[-1].first
    slowest = meeting.over_ranks([runner.steps_s for runner in runners], "max")
    results = []
    for runner, steps_s, end in zip(runners, slowest, ends, strict=True):
        peaks = [peak for peak in meeting.gather(runner.trainer.peak) if peak is not None]
        medians = meeting.gather(_median(runner.bubbles))
        bubbles = [bubble for bubble in medians if bubble is not None]
        result = TrainingResult(
            contender=runner.contender,
            epochs=tuple(runner.epochs),
            start_loss=runner.start_loss,
            steps_s=steps_s,
            nbytes_sent=max(meeting.gather(runner.nbytes_sent)) // len(steps_s),
            memory=max(peaks, key=lambda peak: peak.total, default=None),
            overlap=_median(runner.overlaps),
            bubble=sum(bubbles) / len(bubbles) if bubbles else None,
            between_ranks=_largest_difference(end, meeting),
            first=None
            if runner.first is None
            else _comparison(runner.first, native_first, runner.start),
            end=_comparison(end, ends[-1], runner.start),
        )
        results.append(meeting.gather(result)[0])
    return results


def _comparison(flat: Tensor, native: Tensor | None, start: Tensor) -> Comparison:
    assert native is not None
    differences = (flat - native, flat - start, flat)
    return Comparison(*(float(difference.abs().max()) for difference in differences))


def _largest_difference(flat: Tensor, meeting: Meeting) -> float:
    """Largest difference between the parameters of any two ranks."""
    stacked = torch.stack(meeting.gather(flat))
    return float((stacked.amax(0) - stacked.amin(0)).max())


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return summarize(known).p50_s if known else None


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
    epochs = (_batches_of_all(task, task.seed + epoch, world_size) for epoch in count())
    every = chain.from_iterable(epochs)
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
