"""Training out of lock-step: time to a target loss, without and with a slow rank.

A perceptron learns scikit-learn's digits on k ranks, of which the last one, or in each step another
one (``--wandering``), may compute several times slower than the others. Ways to train: *lock-step*,
an all-reduce of the gradients in each step; *gossip* with the neighbours on a ring, or with one peer
on an exponential graph; *local SGD* and *DiLoCo*, which meet every H steps; and a *server* on rank 0
with k - 1 workers, synchronous, or asynchronous with a bounded staleness.

A step computes for at least ``--step-ms`` milliseconds, mostly asleep, so that ranks that share a
core are as fast as ranks with a core each. The target is a loss on the pictures that are not
trained on, by the model of rank 0. All ways have the same learning rate, batch and number of steps;
the asynchronous server takes k - 1 steps of 1/(k - 1) of the learning rate where the others take
one step. Momentum is in DiLoCo's outer steps alone. Bytes are those of the rank that sends most,
until the target is reached.

Gossip and a bounded staleness hide a rank that is late for a few steps. A rank that stays slow
holds up all ranks in the end, unless ``--staleness`` is the number of steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import Table, environment, introduce, parser, write
from torch import nn
from torch.nn import functional

from ringcoll.bench import Meeting, summarize
from ringcoll.bench.plot import check_matplotlib, save, styles
from ringcoll.launch.processes import Ranks
from ringcoll.training.data import Examples, batches, load_digits
from ringcoll.training.data_parallel import average_gradients
from ringcoll.training.gossip import Gossip
from ringcoll.training.local_sgd import LocalSGD, diloco
from ringcoll.training.models import mlp
from ringcoll.training.server import ParameterServer, ServerWorker
from ringcoll.training.straggler import slowed

WAYS = (
    "lock-step",
    "gossip ring",
    "gossip exponential",
    "local SGD",
    "DiLoCo",
    "server sync",
    "server async",
)


@dataclass(frozen=True, slots=True)
class Run:
    """A training run: times in seconds and losses as they were looked at, and bytes in all."""

    curve: tuple[tuple[float, int, float], ...]  # time, steps, loss
    num_steps: int
    nbytes: int

    def at_target(self, target: float) -> tuple[float, int] | None:
        """Time and steps to the target; ``None`` if the run ended before."""
        reached = ((seconds, steps) for seconds, steps, loss in self.curve if loss <= target)
        return next(reached, None)


class Look:
    """Looks at the loss every few steps, on rank 0."""

    def __init__(self, module: nn.Module, digits: Examples, every: int, per_step: int) -> None:
        self.module, self.digits = module, digits
        self.every, self.per_step = every * per_step, per_step
        self.calls, self.begin_s = 0, time.perf_counter()
        self.curve: list[tuple[float, int, float]] = []

    @torch.no_grad()
    def __call__(self) -> None:
        """Count a step, or the share of a step that one worker does."""
        self.calls += 1
        if self.calls % self.every == 0:
            outputs = self.module(self.digits.test_inputs)
            loss = float(functional.cross_entropy(outputs, self.digits.test_targets))
            passed_s = time.perf_counter() - self.begin_s
            self.curve.append((passed_s, self.calls // self.per_step, loss))


class LockStep:
    """Data-parallel training, with the members that the other ways have."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        k, nbytes = dist.get_world_size(), sum(p.nbytes for p in module.parameters())
        self.nbytes_a_step, self.nbytes_sent = 2 * (k - 1) * nbytes // k, 0

    def average(self) -> None:
        """Average the gradients."""
        average_gradients(self.module)
        self.nbytes_sent += self.nbytes_a_step


def nothing() -> None:
    """Do nothing."""


def without_server(
    way: str, module: nn.Module, optimizer: torch.optim.Optimizer, every: int
) -> tuple[Any, Callable[[], None]]:
    """Return what counts bytes, and what follows backward."""
    before: Callable[[], object] = nothing
    after: Callable[[], object] = nothing
    trainer: Any
    if way == "lock-step":
        trainer = LockStep(module)
        before = trainer.average
    elif way.startswith("gossip "):
        trainer = Gossip(module, graph=way.removeprefix("gossip "))
        after = trainer.mix
    else:
        trainer = (LocalSGD if way == "local SGD" else diloco)(module, every=every)
        after = trainer.step

    def step() -> None:
        before()
        optimizer.step()
        after()

    return trainer, step


def on_rank(options: Any, way: str, factor: float) -> Run:
    """Train once; called on each rank."""
    meeting, digits = Meeting(), load_digits()
    rank, k = meeting.rank, meeting.world_size
    module = mlp(options.layers, options.width, seed=0)
    has_server, is_async = way.startswith("server"), way == "server async"
    workers = k - 1 if has_server else k
    lr = options.lr / workers if is_async else options.lr
    optimizer = torch.optim.SGD(module.parameters(), lr=lr)
    meeting.barrier()
    look = Look(module, digits, options.look_every, workers if is_async else 1)
    if has_server and rank == 0:
        staleness = options.staleness if is_async else None
        trainer: Any = ParameterServer(module, optimizer, staleness=staleness)
        look.begin_s = time.perf_counter()
        trainer.serve(look)
    else:
        if has_server:
            trainer = ServerWorker(module)
            step: Callable[[], None] = trainer.step
        else:
            trainer, step = without_server(way, module, optimizer, options.every)
        look.begin_s = time.perf_counter()
        slow = slow_ranks(options, k)
        for indices, slow_rank in zip(
            samples(options, rank - has_server, workers), slow, strict=True
        ):
            with slowed(factor if rank == slow_rank else 1.0, least_s=options.step_ms / 1e3):
                module.zero_grad()
                outputs = module(digits.train_inputs[indices])
                loss = functional.cross_entropy(outputs, digits.train_targets[indices])
                torch.autograd.backward(loss)
            step()
            if rank == 0:
                look()
        if has_server:
            trainer.leave()
    nbytes = max(meeting.gather(trainer.nbytes_sent))
    curve: Sequence[tuple[float, int, float]] = meeting.gather(tuple(look.curve))[0]
    meeting.close()
    return Run(tuple(curve), options.steps, nbytes)


def slow_ranks(options: Any, world_size: int) -> list[int]:
    """The slow rank of each step: the last rank, or another rank each time, but never rank 0."""
    if not options.wandering:
        return [world_size - 1] * options.steps
    generator = torch.Generator().manual_seed(0)
    ranks: list[int] = torch.randint(1, world_size, (options.steps,), generator=generator).tolist()
    return ranks


def samples(options: Any, worker: int, workers: int) -> torch.Tensor:
    """The samples of a worker: indices, (steps, batch)."""
    epochs: list[torch.Tensor] = []
    while sum(map(len, epochs)) < options.steps:
        epochs.append(batches(1438, options.batch, len(epochs), worker, workers))
    return torch.cat(epochs)[: options.steps]


def row(way: str, factor: float, runs: Sequence[Run], target: float) -> tuple[object, ...]:
    """A row of the table: medians over the runs that have reached the target."""
    reached = [place for run in runs if (place := run.at_target(target)) is not None]
    lowest = min(loss for run in runs for _, _, loss in run.curve)
    if not reached:
        return way, factor, None, None, None, None, lowest, 0
    times, steps = (summarize(column) for column in zip(*reached, strict=True))
    nbytes = int(runs[0].nbytes * steps.p50_s / runs[0].num_steps)
    return way, factor, times.p50_s, times.spread, int(steps.p50_s), nbytes, lowest, len(reached)


def draw(path: Path, runs: dict[tuple[str, float], list[Run]], target: float) -> None:
    """Draw the loss over time: a panel for each slowness, and the last run of each way."""
    from matplotlib.figure import Figure

    factors = sorted({factor for _, factor in runs})
    figure = Figure(figsize=(5.5 * len(factors), 4.8), layout="constrained")
    panels = figure.subplots(1, len(factors), sharey=True, squeeze=False)[0]
    looks = styles(["native", *WAYS[1:]])
    looks["lock-step"] = looks["native"]
    for panel, factor in zip(panels, factors, strict=True):
        for (way, other), repeated in runs.items():
            if other == factor:
                times, _, losses = zip(*repeated[-1].curve, strict=True)
                panel.plot(times, losses, label=way, markevery=0.2, linewidth=1.5, **looks[way])
        panel.axhline(target, color="grey", linewidth=0.8)
        title = "all ranks alike" if factor == 1 else f"one rank {factor:g} times slower"
        panel.set(xlabel="time (s)", title=title, yscale="log")
        panel.grid(visible=True, alpha=0.3)
    panels[0].set_ylabel("loss on the test set")
    panels[-1].legend()
    save(figure, path)


def main() -> None:
    """Run, print, write."""
    arguments = parser(__doc__)
    arguments.add_argument("-k", "--ranks", type=int, default=4)
    arguments.add_argument("--ways", default=",".join(WAYS))
    arguments.add_argument("--slower", default="1,2,4", help="factors of the slow rank")
    arguments.add_argument("--wandering", action="store_true", help="another slow rank each step")
    arguments.add_argument("--target", type=float, default=0.2, help="loss on the test set")
    arguments.add_argument("--steps", type=int, default=400)
    arguments.add_argument("--step-ms", type=float, default=10.0)
    arguments.add_argument("--runs", type=int, default=3)
    arguments.add_argument("--every", type=int, default=8, help="H of local SGD and DiLoCo")
    arguments.add_argument("--staleness", type=int, default=4)
    arguments.add_argument("--look-every", type=int, default=4, help="steps between two losses")
    arguments.add_argument("--layers", type=int, default=3)
    arguments.add_argument("--width", type=int, default=64)
    arguments.add_argument("--batch", type=int, default=32)
    arguments.add_argument("--lr", type=float, default=0.1)
    arguments.add_argument("--picture", type=Path, metavar="FILE", help="draw the loss over time")
    options = arguments.parse_args()
    ways = options.ways.split(",")
    if not set(ways) <= set(WAYS):
        arguments.error(f"--ways: expected some of {', '.join(WAYS)}, got {options.ways}")
    if options.picture is not None:
        check_matplotlib()
    factors = [float(factor) for factor in options.slower.split(",")]
    facts = environment(options.ranks)
    introduce(facts)
    runs: dict[tuple[str, float], list[Run]] = {}
    with Ranks(options.ranks, backend="ringcoll", timeout_s=600.0, threads=1) as ranks:
        for _ in range(options.runs):
            for factor in factors:
                for way in ways:
                    run = ranks.run(on_rank, options, way, factor)[0]
                    runs.setdefault((way, factor), []).append(run)
    columns = {
        "way": "text",
        "slower": "number",
        "to the target": "seconds",
        "spread": "share",
        "steps": "count",
        "sent": "bytes",
        "lowest loss": "number",
        "reached": "count",
    }
    rows = [row(*key, repeated, options.target) for key, repeated in runs.items()]
    slow = "in each step another rank" if options.wandering else "the last one"
    caption = (
        f"Loss {options.target:g}, {options.ranks} ranks, {slow} so many times slower; "
        f"{options.runs} runs of {options.steps} steps of {options.step_ms:g} ms, "
        f"batch {options.batch}, SGD with learning rate {options.lr:g}, H = {options.every}, "
        f"staleness {options.staleness}."
    )
    table = Table(columns, rows, caption)
    table.show()
    pictures = []
    if options.picture is not None:
        draw(options.picture, runs, options.target)
        pictures.append(options.picture.name)
    write(options.json, __doc__, facts, [table], pictures=pictures)


if __name__ == "__main__":
    main()
