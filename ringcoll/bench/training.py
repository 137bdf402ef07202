"""A small real training run, in which every way of averaging gradients takes part.

Problem: that gradients are averaged right, and what it costs, shows when a model is
trained. The model is a perceptron with several layers, the data are scikit-learn's
handwritten digits (1797 pictures of 8 x 8). All contenders start from the same weights
and see the same batches, each rank its share of them, so they have to end with the same
model: exactly the same on all ranks, and that of torch's ``DistributedDataParallel`` on
gloo up to rounding.

Contenders take turns epoch by epoch, in an order that changes, so that a machine that
slows down slows all of them. The time of a step is that of the slowest rank.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

from ringcoll.bench.measure import Meeting
from ringcoll.bench.summary import Summary, summarize
from ringcoll.errors import ArgumentError
from ringcoll.launch.processes import report
from ringcoll.system.user_modules import UserModule
from ringcoll.training.data import Digits, batches
from ringcoll.training.data_parallel import (
    BucketedDataParallel,
    HookOptions,
    all_reduce_hook,
    average_gradients,
)
from ringcoll.training.models import mlp, stages
from ringcoll.training.pipeline import Pipeline
from ringcoll.training.pipeline_orders import SCHEDULES
from ringcoll.training.tensor_parallel import tensor_parallel
from ringcoll.training.whole import whole_parameters

__all__ = [
    "NATIVE",
    "SPLIT",
    "TRAINERS",
    "WIRE_DTYPES",
    "Comparison",
    "Contender",
    "Epoch",
    "TrainingRequest",
    "TrainingResult",
    "check_split",
    "on_rank",
    "tolerances",
]

REPLICATED = ("per-parameter", "bucketed", "torch-ddp", "torch-ddp-hook")
SPLIT = ("tensor", *(f"pipeline:{name}" for name in ("gpipe", "1f1b", "zero_bubble")))
TRAINERS = (*REPLICATED, *SPLIT)
"""Trainers whose ranks hold the whole model, and those whose ranks hold a part of the model."""
WIRE_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}

_MOMENTUM = 0.9
_MICROBATCHES = 4


class Contender(NamedTuple):
    """A trainer and an algorithm; ``None`` stands for the native all-reduce."""

    trainer: str
    algorithm: str | None = None

    def __str__(self) -> str:
        return "native" if self.algorithm is None else f"{self.trainer}, {self.algorithm}"


NATIVE = Contender("torch-ddp")
"""torch's DistributedDataParallel on gloo."""


@dataclass(frozen=True)
class TrainingRequest:
    """What to train.

    Parameters
    ----------
    contenders
        Trainers with their algorithms; `NATIVE` takes part in any case.
    backend
        Backend of the process group: ``"gloo"`` or ``"ringcoll"``.
    epochs, batch
        Times that each picture is seen, and pictures in a step of one rank.
    layers, width
        Linear layers, and neurons between them.
    wire
        A name in `WIRE_DTYPES`, or ``None``: how gradients are sent, except natively.
    seed, lr
        Seed of the weights and of the order of the pictures; learning rate of SGD with
        momentum 0.9.
    bucket_bytes
        Size of a bucket, for trainers that have buckets.
    modules
        Modules of the user, which register further algorithms.
    """

    contenders: tuple[Contender, ...]
    backend: str = "ringcoll"
    epochs: int = 5
    batch: int = 32
    layers: int = 4
    width: int = 256
    wire: str | None = None
    seed: int = 0
    lr: float = 0.02
    bucket_bytes: int = 1 << 18
    modules: tuple[UserModule, ...] = ()

    @property
    def wire_dtype(self) -> torch.dtype | None:
        """The dtype that is sent, if it is not that of the gradients."""
        return None if self.wire is None else WIRE_DTYPES[self.wire]


class Epoch(NamedTuple):
    """What rank 0 reports after each epoch of a contender: loss and accuracy on the test set."""

    contender: Contender
    number: int
    loss: float
    accuracy: float


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
    contender
        The trainer and the algorithm.
    epochs
        The reports, an epoch each.
    steps_s
        Time of each step, in seconds, on the slowest rank.
    nbytes
        Bytes of gradients that are all-reduced in one step; 0 if the ranks split the model.
    overlap
        Share of the communication that is hidden behind backward, median over rank 0's
        steps; ``None`` if it cannot be measured.
    between_ranks
        Largest absolute difference of a parameter between two ranks, at the end.
    first, end
        The parameters after the first step, and at the end.
    """

    contender: Contender
    epochs: tuple[Epoch, ...]
    steps_s: tuple[float, ...]
    nbytes: int
    overlap: float | None
    between_ranks: float
    first: Comparison
    end: Comparison

    @cached_property
    def summary(self) -> Summary:
        """Statistics of the times of the steps; the first epoch, which warms up, is left out."""
        warm = len(self.steps_s) // len(self.epochs) if len(self.epochs) > 1 else 0
        return summarize(self.steps_s[warm:])


# Fractions of the way that the parameters have moved, by wire dtype. In the first step only
# the gradients' rounding differs: 1e-3 with float16, 4e-3 with bfloat16 on 4 ranks. The next
# steps enlarge the difference, more at a higher learning rate: after 20 epochs at 0.02 it
# was 1e-6 with float32 and 0.012 with bfloat16; at 0.1 it was 0.05 and 0.25.
_FIRST_STEP: dict[str | None, float] = {None: 1e-5, "float16": 1e-2, "bfloat16": 5e-2}
_AT_THE_END: dict[str | None, float] = {None: 0.1, "float16": 0.25, "bfloat16": 0.5}


def tolerances(request: TrainingRequest, result: TrainingResult) -> tuple[float, float]:
    """Limits on the difference from the native run, after the first step and at the end.

    A limit is a fraction of the way that parameters have gone, and their own rounding.
    """
    rounding = torch.finfo(torch.float32).eps
    return (
        _FIRST_STEP[request.wire] * result.first.moved + rounding * result.first.largest,
        _AT_THE_END[request.wire] * result.end.moved + rounding * result.end.largest,
    )


def check_split(request: TrainingRequest, world_size: int) -> None:
    """Make sure that the trainers can split the model and the batch.

    Parameters
    ----------
    request
        What to train.
    world_size
        Number of ranks.

    Raises
    ------
    ArgumentError
        They cannot.
    """
    trainers = {contender.trainer.partition(":")[0] for contender in request.contenders}
    if "tensor" in trainers and request.layers > 1 and request.width % world_size:
        raise ArgumentError(
            "the ranks do not divide it",
            argument="width",
            expected=f"a multiple of {world_size}",
            got=request.width,
        )
    if "pipeline" in trainers and request.layers < world_size:
        raise ArgumentError(
            "a stage would have no layer",
            argument="layers",
            expected=f"at least {world_size}",
            got=request.layers,
        )
    if "pipeline" in trainers and request.batch * world_size % _MICROBATCHES:
        raise ArgumentError(
            f"the {_MICROBATCHES} micro-batches do not divide it for {world_size} ranks",
            argument="batch",
            expected=f"a multiple of {_MICROBATCHES}",
            got=request.batch,
        )


# --- contenders -----------------------------------------------------------------------


class _Runner:
    """One contender on this rank: its model, optimizer, and measurements so far."""

    def __init__(self, request: TrainingRequest, contender: Contender, groups: _Groups) -> None:
        self.contender = contender
        self.module = mlp(request.layers, request.width, request.seed)
        self.whole = mlp(request.layers, request.width, request.seed)
        self.start = self.first = torch.cat(
            [param.detach().flatten() for param in self.module.parameters()]
        )
        self.model: nn.Module = self.module
        self.average: Callable[[], None] = lambda: None
        self.overlap: Callable[[], float | None] = lambda: None
        self.compute: Callable[[Tensor, Tensor], object] = self._compute
        self.shapes = {name: torch.empty_like(p) for name, p in self.module.named_parameters()}
        self.is_split = contender.trainer in SPLIT
        self.params = list(self.module.parameters())
        wire_dtype = request.wire_dtype
        if self.is_split:
            self._split()
        else:
            self._wrap(request, groups)
        self.nbytes = 0 if self.is_split else self.start.nbytes
        if wire_dtype is not None and self.nbytes and contender.trainer != "torch-ddp":
            self.nbytes = self.start.numel() * wire_dtype.itemsize
        self.optimizer = torch.optim.SGD(self.params, lr=request.lr, momentum=_MOMENTUM)
        self.epochs: list[Epoch] = []
        self.steps_s: list[float] = []
        self.overlaps: list[float | None] = []

    def _wrap(self, request: TrainingRequest, groups: _Groups) -> None:
        trainer, algorithm = self.contender
        options: dict[str, Any] = {"algorithm": algorithm, "wire_dtype": request.wire_dtype}
        if trainer == "per-parameter":
            self.average = partial(average_gradients, self.module, **options)
            self.overlap = lambda: 0.0  # nothing is sent before backward is over
        elif trainer == "bucketed":
            model = BucketedDataParallel(self.module, bucket_bytes=request.bucket_bytes, **options)
            self.model, self.average = model, model.finish
            self.overlap = lambda: model.last_step.overlap if model.last_step else None
        else:
            hooked = trainer == "torch-ddp-hook"
            ddp = DistributedDataParallel(
                self.module,
                process_group=None if hooked else groups.of(algorithm),
                bucket_cap_mb=request.bucket_bytes / (1 << 20),
            )
            if hooked:
                ddp.register_comm_hook(HookOptions(**options), all_reduce_hook)
            self.model = ddp

    def _split(self) -> None:
        """Keep this rank's part of the model."""
        system, _, schedule = self.contender.trainer.partition(":")
        if system == "tensor":
            tensor_parallel(self.module)
            self.params = list(self.module.parameters())
            return
        rank, world_size = dist.get_rank(), dist.get_world_size()
        stage = stages(self.module, world_size)[rank]
        self.params = list(stage.parameters())
        pipeline = Pipeline(
            [stage],
            nn.functional.cross_entropy,
            SCHEDULES[schedule](world_size, _MICROBATCHES),
        )
        self.compute = pipeline.step

    def _compute(self, inputs: Tensor, targets: Tensor) -> None:
        """Compute the gradients of a batch."""
        loss = nn.functional.cross_entropy(self.model(inputs), targets)
        torch.autograd.backward(loss)
        self.average()

    def train(self, digits: Digits, shares: Sequence[Tensor], rank: int) -> None:
        """Do the steps of an epoch, with the pictures of a rank, or those of all ranks."""
        for share in torch.cat(list(shares), 1) if self.is_split else shares[rank]:
            begin = time.perf_counter()
            self.optimizer.zero_grad()
            self.compute(digits.train_inputs[share], digits.train_targets[share])
            self.optimizer.step()
            self.steps_s.append(time.perf_counter() - begin)
            if len(self.steps_s) == 1:
                self.first = self.flat()
            self.overlaps.append(self.overlap())

    @torch.no_grad()
    def test(self, digits: Digits) -> Epoch:
        """Loss and accuracy on what was not trained on."""
        outputs = functional_call(self.whole, self._whole(), digits.test_inputs)
        loss = float(nn.functional.cross_entropy(outputs, digits.test_targets))
        right = (outputs.argmax(1) == digits.test_targets).float().mean()
        self.epochs.append(Epoch(self.contender, len(self.epochs) + 1, loss, float(right)))
        return self.epochs[-1]

    def flat(self) -> Tensor:
        """All parameters of the whole model, one after the other; all ranks call it."""
        return torch.cat([param.flatten() for param in self._whole().values()])

    def _whole(self) -> dict[str, Tensor]:
        held = {id(param) for param in self.params}
        named = {
            name: param.detach()
            for name, param in self.module.named_parameters()
            if id(param) in held
        }
        if not self.is_split:
            return named
        return whole_parameters(named, self.shapes, None, dist.get_rank())


class _Groups:
    """The process groups of torch's own trainers: gloo, and a group for each algorithm."""

    def __init__(self) -> None:
        self._groups: dict[str | None, Any] = {}

    def of(self, algorithm: str | None) -> Any:
        """The group in which an algorithm is used; all ranks ask in the same order."""
        if algorithm not in self._groups:
            if algorithm is None:
                group = dist.new_group(backend="gloo")
            else:
                options = import_module("ringcoll").Options(algorithm=algorithm)
                group = dist.new_group(backend="ringcoll", pg_options=options)
            self._groups[algorithm] = group
        return self._groups[algorithm]

    def close(self) -> None:
        for group in self._groups.values():
            dist.destroy_process_group(group)


def on_rank(request: TrainingRequest, digits: Digits) -> list[TrainingResult]:
    """Train all contenders; called on all ranks of a default group.

    Parameters
    ----------
    request
        What to train.
    digits
        See `ringcoll.training.data.load_digits`.

    Returns
    -------
    list of TrainingResult
        The same on all ranks, `NATIVE` last. Rank 0 gives each `Epoch` to
        `ringcoll.launch.processes.report` as it comes.

    Raises
    ------
    ArgumentError
        There are fewer pictures than in one step of all ranks.
    """
    for module in request.modules:
        module.load()
    meeting, groups = Meeting(), _Groups()
    contenders = [contender for contender in request.contenders if contender != NATIVE]
    runners = [_Runner(request, contender, groups) for contender in [*contenders, NATIVE]]
    for epoch in range(request.epochs):
        shares = [
            batches(
                len(digits.train_targets),
                request.batch,
                request.seed + 1000 * epoch,
                rank,
                meeting.world_size,
            )
            for rank in range(meeting.world_size)
        ]
        turns = runners.copy()
        random.Random(epoch).shuffle(turns)  # noqa: S311  # the same order on all ranks
        for runner in turns:
            meeting.barrier()
            runner.train(digits, shares, meeting.rank)
            tested = runner.test(digits)
            if meeting.rank == 0:
                report(tested)
    results = _compare(runners, meeting)
    groups.close()
    meeting.close()
    return results


def _compare(runners: Sequence[_Runner], meeting: Meeting) -> list[TrainingResult]:
    native = runners[-1]
    slowest = meeting.over_ranks([runner.steps_s for runner in runners], "max")
    results = []
    for runner, steps_s in zip(runners, slowest, strict=True):
        flat = runner.flat()
        result = TrainingResult(
            contender=runner.contender,
            epochs=tuple(runner.epochs),
            steps_s=steps_s,
            nbytes=runner.nbytes,
            overlap=_median(runner.overlaps),
            between_ranks=_largest_difference(flat, meeting),
            first=_comparison(runner.first, native.first, runner.start),
            end=_comparison(flat, native.flat(), runner.start),
        )
        results.append(meeting.gather(result)[0])
    return results


def _comparison(flat: Tensor, native: Tensor, start: Tensor) -> Comparison:
    differences = (flat - native, flat - start, flat)
    return Comparison(*(float(difference.abs().max()) for difference in differences))


def _largest_difference(flat: Tensor, meeting: Meeting) -> float:
    """Largest difference between the parameters of any two ranks."""
    stacked = torch.stack(meeting.gather(flat))
    return float((stacked.amax(0) - stacked.amin(0)).max())


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return summarize(known).p50_s if known else None
