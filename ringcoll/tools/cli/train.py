"""``ringcoll train``: training systems side by side, against torch's own.

Problem: that a system trains right, and what it costs, shows when a model is trained. All
contenders start from the same weights and see the same batches. Those in lock-step have to end with
the same model: exactly the same on all ranks, and that of torch's ``DistributedDataParallel`` on
gloo up to rounding. The others have to learn.

Contenders take turns epoch by epoch, in an order that changes, so that a machine that slows down
slows all of them. The time of a step is that of the slowest rank.

Pages of help need no torch: it is imported where a model is trained.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

import ringcoll.tools.bench as benchmarks
from ringcoll.errors import ArgumentError
from ringcoll.runtime import launch
from ringcoll.runtime.user_files import UserModule
from ringcoll.tools.bench import FEW_SAMPLES, NATIVE, as_size, spread_in_words, time_in_words
from ringcoll.tools.cli import measuring, options
from ringcoll.tools.cli.app import command, nearest
from ringcoll.tools.cli.output import echo, print_json, print_table, print_text, progress
from ringcoll.training import (
    LAYERS,
    LEARNING_RATES,
    MODELS,
    TRAINERS,
    TrainerEntry,
    check_trainer,
    find_trainer,
    trainer_names,
    usual_task,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from torch import Tensor

    from ringcoll.training import Gradients, ModelStates, Task

WIRE_NAMES = ("float16", "bfloat16")
"""Dtypes in which gradients may be sent."""
_EPOCHS, _BUCKET_BYTES = 5, 1 << 18
_SETTINGS = ("backend", "epochs", "wire", "bucket_bytes")
_TASK_SETTINGS = ("model", "layers", "width", "batch", "optimizer", "lr", "seed")
_RATES = ", ".join(f"{lr} for {name}" for name, lr in LEARNING_RATES.items())
_MOST_MARKERS = 12  # of a curve; more of them hide the line


class Contender(NamedTuple):
    """A trainer and an algorithm; ``None`` stands for the native all-reduce."""

    trainer: str
    algorithm: str | None = None

    @property
    def entry(self) -> TrainerEntry:
        """The system that trains."""
        return find_trainer(self.trainer)[0]

    def __str__(self) -> str:
        if self.algorithm is None:
            return "native"
        takes_algorithm = self.entry.takes_algorithm
        return (
            f"{self.trainer}, {benchmarks.label(self.algorithm)}"
            if takes_algorithm
            else self.trainer
        )


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
    epochs: int = _EPOCHS
    wire: str | None = None
    bucket_bytes: int = _BUCKET_BYTES
    modules: tuple[UserModule, ...] = ()

    def gradients(self, contender: Contender) -> Gradients:
        """How a contender averages gradients."""
        import torch

        from ringcoll.training import Gradients

        has_wire = self.wire is not None and contender != NATIVE_TRAINER
        wire_dtype = getattr(torch, str(self.wire)) if has_wire else None
        return Gradients(contender.algorithm, wire_dtype, self.bucket_bytes)


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

    def __str__(self) -> str:
        return f"{self.loss:.4f} {100 * self.accuracy:.1f}%"


class Comparison(NamedTuple):
    """Parameters at one moment: the largest absolute differences; NaN if a parameter is NaN.

    ``from_native`` is the difference from the native run, ``moved`` that from the first
    weights; ``largest`` is the largest parameter.
    """

    from_native: float
    moved: float
    largest: float


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
_ROUNDING = 2**-23  # of float32


@dataclass(frozen=True)
class TrainingResult:
    """The training of one contender; ``None`` for a number that there is not."""

    contender: Contender
    epochs: tuple[Epoch, ...]
    start_loss: float  # on the test set, before the first step
    steps_s: tuple[float, ...]  # the time of each step, on the slowest rank
    nbytes_sent: int  # in a step, on average, by the rank that sends most
    memory: ModelStates | None  # of the rank that holds most; needs two steps
    overlap: float | None  # communication hidden behind backward: median over rank 0's steps
    bubble: float | None  # wait for other stages: mean over ranks, median over steps
    between_ranks: float  # largest difference of a parameter between two ranks, at the end
    first: Comparison | None  # after the first step, if the ranks hold one model then
    end: Comparison

    @cached_property
    def summary(self) -> benchmarks.Summary:
        """Statistics of the times of the steps; the first epoch, which warms up, is left out."""
        warm = len(self.steps_s) // len(self.epochs) if len(self.epochs) > 1 else 0
        return benchmarks.summarize(self.steps_s[warm:])

    def tolerances(self, request: TrainingRequest) -> tuple[float, float]:
        """Limits on the difference from the native run, after the first step and at the end.

        A limit is a fraction of the way that parameters have gone, and their own rounding.
        """
        assert self.first is not None
        wire = request.wire if self.contender.entry.takes_wire else None
        return (
            _FIRST_STEP[request.task.optimizer][wire] * self.first.moved
            + _ROUNDING * self.first.largest,
            _AT_THE_END[wire] * self.end.moved + _ROUNDING * self.end.largest,
        )

    def complaints(self, request: TrainingRequest) -> Iterator[str]:
        """The mistakes in it; a difference of NaN is one."""
        if self.contender.entry.meets and self.between_ranks != 0:
            yield f"ranks differ by {self.between_ranks:.2g}"
        if not self.contender.entry.is_exact:
            if not self.epochs[-1].loss < self.start_loss:
                loss = f"loss {self.epochs[-1].loss:.4f}, at first {self.start_loss:.4f}"
                yield f"it has learned nothing: {loss}"
            return
        assert self.first is not None  # of a system that is exact
        moments, limits = ("after the first step", "at the end"), self.tolerances(request)
        for moment, compared, limit in zip(moments, (self.first, self.end), limits, strict=True):
            if not compared.from_native <= limit:
                yield f"{moment} {compared.from_native:.2g} from native, allowed {limit:.2g}"

    @property
    def row(self) -> tuple[str, ...]:
        """The line of the table."""
        summary, last = self.summary, self.epochs[-1]
        shares = (self.overlap, self.bubble)
        return (
            str(self.contender),
            f"{last.loss:.6f}",
            f"{100 * last.accuracy:.2f}%",
            f"{summary.p50_s * 1e3:.2f}",
            spread_in_words(summary),
            as_size(self.nbytes_sent) if self.nbytes_sent else "0",
            as_size(int(self.memory.total)) if self.memory else "-",
            *("-" if share is None else f"{100 * share:.0f}%" for share in shares),
            f"{self.between_ranks:.2g}",
            "-" if self.contender == NATIVE_TRAINER else f"{self.end.from_native:.2g}",
        )

    @property
    def record(self) -> dict[str, Any]:
        """The same as JSON has it."""
        epochs = [epoch._asdict() for epoch in self.epochs]
        return {
            "trainer": self.contender.trainer,
            "algorithm": self.contender.algorithm or "native",
            "epochs": [{name: epoch[name] for name in Epoch._fields[1:]} for epoch in epochs],
            "start_loss": self.start_loss,
            "step": asdict(self.summary) | {"spread": self.summary.spread},
            "nbytes_sent_per_step": self.nbytes_sent,
            "memory_nbytes": self.memory and asdict(self.memory),
            "overlap": self.overlap,
            "bubble": self.bubble,
            "between_ranks": self.between_ranks,
            "from_native": self.end.from_native,
            "from_native_after_one_step": self.first and self.first.from_native,
            "moved": self.end.moved,
            "moved_in_one_step": self.first and self.first.moved,
        }


# --- on the ranks -----------------------------------------------------------------------


class _ContenderOnRank:
    """One contender on this rank: its trainer, and measurements so far."""

    def __init__(self, request: TrainingRequest, contender: Contender) -> None:
        from ringcoll.training import make_trainer

        self.contender = contender
        self.trainer = make_trainer(contender.trainer, request.task, request.gradients(contender))
        self.start = _flat(self.trainer.untrained)
        self.first: Tensor | None = None  # all parameters after the first step
        self.start_loss, _ = self.trainer.test(self.trainer.untrained)
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
        from ringcoll.training import check_finite

        trainer, losses = self.trainer, list[float]()
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
            losses.append(float(loss))
            self.overlaps.append(trainer.overlap())
            self.bubbles.append(trainer.bubble())
            if trainer.meets and self.first is None:
                before = self._all_sent()  # what follows is not the system's
                self.first = _flat(trainer.whole())
                self.nbytes_sent -= trainer.nbytes_sent() - before
        next(steps, None)  # what follows the last step
        if not trainer.meets:
            check_finite(self.start.new_tensor(losses), first_step, group)
        self.nbytes_sent += self._all_sent()

    def _all_sent(self) -> int:
        """Bytes that the trainer has sent, when all that it has started is over."""
        from ringcoll.runtime.collectives import barrier

        for group in self.trainer.groups:
            barrier(group)
        return self.trainer.nbytes_sent()

    def test(self) -> Epoch:
        """Loss and accuracy on what was not trained on; all ranks call it."""
        tested = self.trainer.test(self.trainer.whole())
        steps = len(self.steps_s)
        self.epochs.append(
            Epoch(self.contender, len(self.epochs) + 1, *tested, steps, self.seconds)
        )
        return self.epochs[-1]

    def compared(self, flat: Tensor, native: Tensor | None) -> Comparison:
        """Compare parameters with those of the native run, and with the first weights."""
        assert native is not None
        differences = (flat - native, flat - self.start, flat)
        return Comparison(*(float(difference.abs().max()) for difference in differences))


def _flat(parameters: Mapping[str, Tensor]) -> Tensor:
    """Copies of parameters, end to end."""
    import torch

    return torch.cat([param.detach().flatten() for param in parameters.values()])


def train_on_rank(request: TrainingRequest) -> list[TrainingResult]:
    """Train all contenders, `NATIVE_TRAINER` last; called on all ranks of a default group.

    All ranks get one result. Rank 0 gives each `Epoch` to `ringcoll.runtime.launch.report` as it
    comes. A loss that is not finite raises `TrainingError`.
    """
    import torch.distributed as dist

    for module in request.modules:
        module.load()
    meeting = benchmarks.Meeting()
    checks = dist.new_group(backend="gloo")  # its messages are not counted
    contenders = [contender for contender in request.contenders if contender != NATIVE_TRAINER]
    runs = [_ContenderOnRank(request, contender) for contender in [*contenders, NATIVE_TRAINER]]
    for epoch in range(request.epochs):
        every_batch = list(request.task.epoch(epoch, meeting.world_size))
        turns = runs.copy()
        random.Random(epoch).shuffle(turns)  # noqa: S311  # the same order on all ranks
        for run in turns:
            meeting.barrier()
            run.train(every_batch, checks)
            tested = run.test()
            if meeting.rank == 0:
                launch.report(tested)
    results = _compare(runs, meeting)
    for run in runs:
        run.trainer.close()
    dist.destroy_process_group(checks)
    meeting.close()
    return results


def _compare(runs: Sequence[_ContenderOnRank], meeting: benchmarks.Meeting) -> list[TrainingResult]:
    """The results of rank 0, on every rank; the native run is the last one."""
    ends = [_flat(run.trainer.whole()) for run in runs]
    slowest = meeting.over_ranks([run.steps_s for run in runs], "max")
    results = []
    for run, steps_s, end in zip(runs, slowest, ends, strict=True):
        peaks = [peak for peak in meeting.gather(run.trainer.peak) if peak is not None]
        medians = meeting.gather(_median(run.bubbles))
        bubbles = [bubble for bubble in medians if bubble is not None]
        every_end = meeting.gather(end)
        highest = reduce(lambda one, other: one.maximum(other), every_end)
        lowest = reduce(lambda one, other: one.minimum(other), every_end)
        result = TrainingResult(
            contender=run.contender,
            epochs=tuple(run.epochs),
            start_loss=run.start_loss,
            steps_s=steps_s,
            nbytes_sent=max(meeting.gather(run.nbytes_sent)) // len(steps_s),
            memory=max(peaks, key=lambda peak: peak.total, default=None),
            overlap=_median(run.overlaps),
            bubble=sum(bubbles) / len(bubbles) if bubbles else None,
            between_ranks=float((highest - lowest).max()),
            first=None if run.first is None else run.compared(run.first, runs[-1].first),
            end=run.compared(end, ends[-1]),
        )
        results.append(meeting.gather(result)[0])
    return results


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return benchmarks.summarize(known).p50_s if known else None


# --- the command ------------------------------------------------------------------------


def _trainers(
    ctx: click.Context, param: click.Parameter, values: tuple[str, ...]
) -> tuple[str, ...]:
    """Read names that are separated by commas, or by repeating the option."""
    names = options.names_in(",".join(values))
    for name in names:
        try:
            find_trainer(name)
        except ArgumentError as error:
            text = f"{error.got!r} is none of {error.expected}{nearest(error)}"
            raise click.BadParameter(text) from error
    return tuple(dict.fromkeys(names))


def _taking(what: str) -> str:
    """The trainers that take an algorithm, or a wire dtype."""
    return ", ".join(name for name, entry in TRAINERS.items() if getattr(entry, f"takes_{what}"))


@command(
    examples="""
        ringcoll train
        ringcoll train -k 4 --epochs 20 --wire bfloat16
        ringcoll train --trainer per-parameter,bucketed,torch-ddp-hook
        ringcoll train --trainer bucketed --backend gloo
        ringcoll train --algorithms ring,star.py:star
        ringcoll train --trainer bucketed,tensor,pipeline:1f1b,one-process
        ringcoll train -k 4 --trainer gossip:exponential,local-sgd,server:async --picture loss.png
        ringcoll train -k 8 --trainer 3d:2x2x2,sharded:2
        torchrun --nproc-per-node 2 -m ringcoll train
    """,
    terms={
        "Trainers": {
            name + (f":{entry.placeholder}" if entry.placeholder else ""): entry.about
            for name, entry in TRAINERS.items()
        }
    },
)
@click.option("--trainer", "trainers", multiple=True, default=["bucketed,torch-ddp"],
              show_default=True, callback=_trainers, metavar="NAMES",
              help=f"Any of {', '.join(trainer_names())}; separated by commas, "
              "or repeated.")  # fmt: skip
@click.option("--algorithm", "--algorithms", "names", metavar="NAMES", default="ring,tree",
              show_default=True, shell_complete=options.complete_algorithms,
              help="Names from `ringcoll list`, auto, algorithms of your own, such as "
              f"star.py:star, or files such as best.txt; for {_taking('algorithm')}.")  # fmt: skip
@click.option("--backend", type=options.OneOf(["gloo", "ringcoll"]), default="ringcoll",
              show_default=True, help="Backend of the process group.")  # fmt: skip
@measuring.ranks_option(2)
@measuring.transport
@click.option("--model", type=options.OneOf(MODELS),
              help="A perceptron reads digits, a transformer continues text; without it the model "
              "that the trainers need, or the perceptron.")  # fmt: skip
@click.option("--optimizer", type=options.OneOf(list(LEARNING_RATES)),
              help="All contenders use it; without the option, the optimizer that the trainers "
              "need, or sgd, with momentum 0.9.")  # fmt: skip
@click.option("--epochs", type=click.IntRange(1, 10**6), default=_EPOCHS,
              show_default=True, help="Times that each sample is seen.")  # fmt: skip
@click.option("--batch", type=click.IntRange(1, 1 << 16),
              help="Samples in a step, for each rank; 32 pictures, or 8 pieces of "
              "text.")  # fmt: skip
@click.option("--layers", type=click.IntRange(1, 1 << 10), default=LAYERS, show_default=True,
              help="Linear layers of the perceptron, blocks of the transformer.")  # fmt: skip
@click.option("--width", type=click.IntRange(1, 1 << 14),
              help="Neurons between two layers, 256, or numbers for a token, 64.")  # fmt: skip
@click.option("--bucket-bytes", type=options.nbytes_of,
              default=as_size(_BUCKET_BYTES), show_default=True,
              help="Size of the buckets, for trainers that have buckets.")  # fmt: skip
@click.option("--wire", type=options.OneOf(list(WIRE_NAMES)),
              help=f"Send gradients in 16 bits; for {_taking('wire')}.")  # fmt: skip
@click.option("--seed", type=click.IntRange(0, (1 << 63) - 1), default=0, show_default=True,
              help="Seed of the weights and of the order of the samples.")  # fmt: skip
@click.option("--lr", type=options.FiniteRange(min=0, min_open=True),
              help=f"Learning rate; {_RATES}.")  # fmt: skip
@click.option("--picture", type=click.Path(dir_okay=False, path_type=Path),
              callback=options.new_picture, metavar="FILE",
              help="Draw the loss over steps and over time.")  # fmt: skip
@options.json_option
@click.pass_context
def train(
    ctx: click.Context,
    /,
    trainers: tuple[str, ...],
    names: str,
    backend: str,
    ranks: int | None,
    transport: str,
    picture: Path | None,
    as_json: bool,
    **settings: Any,
) -> None:
    """Train a small model with every trainer and algorithm, and natively.

    Ranks are processes on this machine. All contenders start from the same weights,
    see the same samples, and take turns epoch by epoch; native is torch's
    DistributedDataParallel on gloo.

    Loss and accuracy are those on the test set. Times are medians, of the slowest rank;
    the spread is the interquartile range over the median. Sent are the bytes of the rank
    that sends most; memory is that of parameters, gradients and optimizer state on the rank
    that holds most. Overlap is the share of the communication that was hidden behind
    backward; bubble the share of a step in which a rank waits for other stages.

    Exit status: 1 if ranks that train in lock-step ended with different parameters, if a
    contender that computes what native computes differs from it, or if another contender has
    learned nothing. After the first step parameters may differ by rounding, with AdamW by a
    twentieth of the way that they have gone; at the end by a tenth of the way, with --wire float16
    by a quarter, with bfloat16 by half of it.
    """
    world_size = measuring.ranks_to_use(ranks, 2)
    algorithms, modules = measuring.contenders("all_reduce", names, world_size)
    if NATIVE in algorithms and names.strip() != "all":
        raise click.BadParameter("native takes part in any case", param_hint="--algorithm")
    task = usual_task(trainers, **{name: settings.pop(name) for name in _TASK_SETTINGS})
    contenders = tuple(
        contender for trainer in trainers for contender in _contenders(trainer, algorithms, backend)
    )
    request = TrainingRequest(contenders, task, backend, modules=modules, **settings)
    task.epoch(0, world_size)  # raises if there are too few samples for a step
    for contender in contenders:  # before ranks are started
        check_trainer(contender.trainer, task, world_size, request.gradients(contender))
    facts = benchmarks.environment(world_size) | {"transport": transport}
    printing = measuring.is_first_rank()
    if printing and not as_json:
        _announce(request, facts)
    total = request.epochs * len({*request.contenders, NATIVE_TRAINER})
    with progress(total, "starting ranks", shown=printing) as advance:
        results: list[TrainingResult] = measuring.on_ranks(
            train_on_rank,
            request,
            world_size=world_size,
            backend=request.backend,
            on_report=lambda epoch: advance(f"epoch {epoch.number}: {epoch.contender} {epoch}"),
        )
    wrong = [
        f"WRONG: {result.contender}: {complaint}"
        for result in results
        for complaint in result.complaints(request)
    ]
    findings = [] if wrong else list(_findings(request, results))
    if printing and as_json:
        settings = {name: getattr(request, name) for name in _SETTINGS}
        settings |= {name: getattr(task, name) for name in _TASK_SETTINGS}
        print_json(
            {
                "environment": facts,
                "settings": settings,
                "world_size": world_size,
                "results": [result.record for result in results],
                "wrong": wrong,
                "findings": findings,
            }
        )
    elif printing:
        _print(results)
        print_text("", *benchmarks.oversubscribed(world_size))
        print_text("", *(wrong or findings))
    if printing and picture is not None:
        _draw_losses(results, picture)
    if wrong:
        ctx.exit(1)


def _contenders(trainer: str, algorithms: tuple[str, ...], backend: str) -> list[Contender]:
    if trainer == "torch-ddp" and backend == "gloo":
        return [NATIVE_TRAINER]
    if not find_trainer(trainer)[0].takes_algorithm:
        return [Contender(trainer, "auto")]
    return [Contender(trainer, name) for name in algorithms if name != NATIVE]


def _announce(request: TrainingRequest, facts: dict[str, Any]) -> None:
    task, world_size = request.task, facts["world_size"]
    if task.model == "perceptron":
        sizes = [64, *[task.width] * (task.layers - 1), 10]
        model, data = f"{'-'.join(map(str, sizes))} perceptron", "pictures of digits"
    else:
        model = f"transformer of {task.layers} blocks, {task.width} wide"
        data = f"pieces of text of {task.shape.context} characters"
    count = len(task.examples.train_targets)
    print_text(
        f"{model} on {count} {data}, {count // (world_size * task.batch)} steps an epoch of "
        f"{world_size} x {task.batch}, {task.optimizer} with learning rate {task.lr:g}",
        f"{request.backend}: {benchmarks.ran_on(facts)}",
        "",
    )


_COLUMNS = (
    "trainer\n", "test\nloss", "test\naccuracy", "step\n(ms)", "\nspread", "sent\na step",
    "\nmemory", "overlap\n", "bubble\n", "between\nranks", "from\nnative",
)  # fmt: skip


def _print(results: list[TrainingResult]) -> None:
    """Print a table of the epochs, and one of the results."""
    lines = zip(*(result.epochs for result in results), strict=True)
    rows = [(str(line[0].number), *map(str, line)) for line in lines]
    print_table(["epoch", *(str(result.contender) for result in results)], rows, left=1)
    echo()
    columns = zip(_COLUMNS, *(result.row for result in results), strict=True)
    shown = [column for column in columns if set(column[1:]) != {"-"}]
    titles, *cells = zip(*shown, strict=True)
    print_table(titles, cells, left=1)
    if any(result.summary.few for result in results):
        print_text(f"~ median and spread are {FEW_SAMPLES}")


def _findings(request: TrainingRequest, results: list[TrainingResult]) -> Iterator[str]:
    ours = [result for result in results if result.contender != NATIVE_TRAINER]
    if all(result.contender.entry.meets for result in results):
        yield "Parameters are the same on all ranks, to the last bit, for every contender."
    exact = [result for result in ours if result.contender.entry.is_exact]
    if exact:
        losses = [result.epochs[-1].loss for result in (*exact, results[-1])]
        worst = max(result.end.from_native for result in exact)
        every = "Every contender" if exact == ours else "Every contender that computes the same"
        if worst == 0:
            yield f"{every} ends with the parameters of native, to the last bit."
        else:
            limit = min(result.tolerances(request)[1] for result in exact)
            yield (
                f"Largest difference from native: {worst:.2g}, allowed {limit:.2g}; "
                f"losses differ by {max(losses) - min(losses):.2g} at most."
            )
    if ours:
        fastest = min(results, key=lambda result: result.summary.p50_s)
        took = time_in_words(fastest.summary.p50_s)
        yield f"Lowest median of a step: {fastest.contender}, {took}."


# --- the picture ------------------------------------------------------------------------


def loss_curves(
    panels: Sequence[Axes], curves: Mapping[str, Sequence[tuple[float, int, float]]]
) -> None:
    """Draw the loss of each run over steps and over time, into two axes with one scale.

    ``curves`` has the points of each run, by its name in the legend: seconds since its begin,
    number of the step, loss.
    """
    if len(panels) != 2:
        raise ArgumentError("one for steps, one for time", "panels", "2 axes", len(panels))
    over_steps, over_time = panels
    looks = benchmarks.styles(list(curves))
    for name, points in curves.items():
        every = max(1, len(points) // _MOST_MARKERS)
        look = looks[name] | {"markersize": 4, "linewidth": 1.5, "markevery": every}
        losses = [loss for _, _, loss in points]
        over_steps.plot([step for _, step, _ in points], losses, label=name, **look)
        over_time.plot([seconds for seconds, _, _ in points], losses, label=name, **look)
    over_time.sharey(over_steps)
    over_steps.set(xlabel="step", ylabel="loss", title="over steps")
    over_time.set(xlabel="time (s)", title="over time")
    for axes in panels:
        axes.grid(visible=True, alpha=0.3)
    over_steps.legend()


def _draw_losses(results: Sequence[TrainingResult], path: Path) -> None:
    from matplotlib.figure import Figure  # `--picture` has made sure that there is one

    figure = Figure(figsize=(11, 4.4), layout="constrained")
    loss_curves(
        figure.subplots(1, 2),
        {
            str(result.contender): [
                (0.0, 0, result.start_loss),
                *((epoch.seconds, epoch.steps, epoch.loss) for epoch in result.epochs),
            ]
            for result in results
        },
    )
    benchmarks.save(figure, path)
