"""Training out of lock-step: time to a target loss with a slow rank, a slow link, a lost rank.

A perceptron learns scikit-learn's digits on k ranks, of which the last one, or in each step another
one (``--wandering``), may compute several times slower than the others. Ways to train: *lock-step*,
an all-reduce of the gradients in each step; *gossip* with the neighbours on a ring, or with one peer
on an exponential graph; *local SGD*, which meets every H steps; and a *server* on rank 0 with k - 1
workers, synchronous, or asynchronous with a bounded staleness.

A step computes for at least ``--step-ms`` milliseconds, mostly asleep, so that ranks that share a
core are as fast as ranks with a core each. The target is a loss on the pictures that are not
trained on, by the model of rank 0. All ways have the same learning rate, batch and number of steps;
the asynchronous server takes k - 1 steps of 1/(k - 1) of the learning rate where the others take
one step. Bytes are those of the rank that sends most, until the target is reached.

Gossip and a bounded staleness hide a rank that is late for a few steps. A rank that stays slow
holds up all ranks in the end, unless ``--staleness`` is the number of steps.

``--throttle RATE`` also trains with each rank on a host of its own, a name space, where the link of
the last one has RATE Mbit/s; this needs root, ``ip`` and ``tc``. ``--leaves STEP`` also lets the
last rank leave in that step: its process ends, or, with a server, it says so before. A rank that
gets an error ends its process, as a program would.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for tests.fakes

import torch
import torch.distributed as dist
from common import Table, environment, introduce, parser, write
from torch import nn
from torch.nn import functional

import ringcoll
from ringcoll.errors import RingcollError
from ringcoll.runtime import RankError, Ranks, report
from ringcoll.tools.bench import Meeting, check_matplotlib, save, styles, summarize
from ringcoll.training import (
    Examples,
    Gossip,
    LocalSGD,
    ParameterServer,
    ServerWorker,
    average_gradients,
    batches,
    load_digits,
    mlp,
    slowed,
)
from tests.fakes.hosts import HostRanks, Hosts, reason_why_not_slow

WAYS = (
    "lock-step",
    "gossip ring",
    "gossip exponential",
    "local SGD",
    "server sync",
    "server async",
)
LIMIT_S = 2.0  # of the waits for a rank that has left
STEPS_AFTER = 100  # so many steps the others do after it, if they can


class Condition(NamedTuple):
    """What is slow: the computing of a rank, or the link of the last one, in Mbit/s."""

    factor: float = 1.0
    mbit_per_s: float | None = None

    def __str__(self) -> str:
        if self.mbit_per_s is not None:
            return f"link of {self.mbit_per_s:g} Mbit/s"
        return "as all" if self.factor == 1 else f"{self.factor:g} x slower"


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
    options: Namespace, way: str, module: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[Any, Callable[[], None]]:
    """Return what counts bytes, and what follows backward."""
    before: Callable[[], object] = nothing
    after: Callable[[], object] = nothing
    trainer: Any
    if way == "lock-step":
        trainer = LockStep(module)
        before = trainer.average
    elif way.startswith("gossip "):
        graph = way.removeprefix("gossip ")
        trainer = Gossip(module, graph=graph, timeout_s=options.limit_s)
        after = trainer.mix
    else:
        trainer = LocalSGD(module, every=options.every)
        after = trainer.step

    def step() -> None:
        before()
        optimizer.step()
        after()

    return trainer, step


def train(
    options: Namespace,
    way: str,
    factor: float,
    begin: Callable[[], object],
    leave: Callable[[int, Any], bool] = lambda step, trainer: False,
) -> tuple[int, Look]:
    """Train this rank; return the bytes that it has sent, and the losses.

    All ranks ``begin`` together. ``leave(step, trainer)`` says whether this rank has left.
    """
    rank, k = dist.get_rank(), dist.get_world_size()
    digits = Examples(*map(torch.from_numpy, options.digits))
    module = mlp(options.layers, options.width, seed=0)
    has_server, is_async = way.startswith("server"), way == "server async"
    workers = k - 1 if has_server else k
    lr = options.lr / workers if is_async else options.lr
    optimizer = torch.optim.SGD(module.parameters(), lr=lr)
    ringcoll.all_reduce(torch.zeros(1))  # connects the ranks, and measures their links
    begin()
    look = Look(module, digits, options.look_every, workers if is_async else 1)
    if has_server and rank == 0:
        trainer: Any = ParameterServer(
            module,
            optimizer,
            staleness=options.staleness if is_async else None,
            forgets_lost=options.forgets_lost,
            timeout_s=options.limit_s,
        )
        look.begin_s = time.perf_counter()
        trainer.serve(look)
        return trainer.nbytes_sent, look
    if has_server:
        trainer = ServerWorker(module, timeout_s=options.limit_s)
        step: Callable[[], None] = trainer.step
    else:
        trainer, step = without_server(options, way, module, optimizer)
    look.begin_s = time.perf_counter()
    indices, slow = samples(options, rank - has_server, workers), slow_ranks(options, k)
    for number, (chosen, slow_rank) in enumerate(zip(indices, slow, strict=True)):
        if leave(number, trainer):
            return trainer.nbytes_sent, look
        with slowed(factor if rank == slow_rank else 1.0, least_s=options.step_ms / 1e3):
            module.zero_grad()
            outputs = module(digits.train_inputs[chosen])
            loss = functional.cross_entropy(outputs, digits.train_targets[chosen])
            torch.autograd.backward(loss)
        step()
        if rank == 0:
            look()
    if has_server:
        trainer.leave()
    return trainer.nbytes_sent, look


def on_rank(options: Namespace, way: str, factor: float) -> Run:
    """Train once; called on each rank."""
    meeting = Meeting()
    nbytes_sent, look = train(options, way, factor, meeting.barrier)
    nbytes = max(meeting.gather(nbytes_sent))
    curve: Sequence[tuple[float, int, float]] = meeting.gather(tuple(look.curve))[0]
    meeting.close()
    return Run(tuple(curve), options.steps, nbytes)


def slow_ranks(options: Namespace, world_size: int) -> list[int]:
    """The slow rank of each step: the last rank, or another rank each time, but never rank 0."""
    if not options.wandering:
        return [world_size - 1] * options.steps
    generator = torch.Generator().manual_seed(0)
    ranks: list[int] = torch.randint(1, world_size, (options.steps,), generator=generator).tolist()
    return ranks


def samples(options: Namespace, worker: int, workers: int) -> torch.Tensor:
    """The samples of a worker: indices, (steps, batch)."""
    epochs: list[torch.Tensor] = []
    while sum(map(len, epochs)) < options.steps:
        epochs.append(batches(1438, options.batch, len(epochs), worker, workers))
    return torch.cat(epochs)[: options.steps]


# --- a rank that leaves -----------------------------------------------------------------


def until_a_rank_leaves(options: Namespace, way: str, says_so: bool) -> None:
    """Train while the last rank leaves; report what came of it, and when."""
    rank = dist.get_rank()

    def leave(step: int, trainer: Any) -> bool:
        if rank != dist.get_world_size() - 1 or step < options.leaves:
            return False
        report((rank, "leaves", time.monotonic()))
        if says_so:
            trainer.leave()
            return True
        os._exit(3)

    try:
        train(options, way, 1.0, dist.barrier, leave)
    except RingcollError as error:
        report((rank, type(error).__name__, time.monotonic()))
        os._exit(1)
    report((rank, "goes on", time.monotonic()))


def leaving(options: Namespace, way: str, says_so: bool, forgets_lost: bool) -> tuple[object, ...]:
    """A row of the table: what the others do, and the times until the first and the last notice."""
    changes = {
        "steps": options.leaves + STEPS_AFTER,
        "forgets_lost": forgets_lost,
        "limit_s": LIMIT_S,
    }
    reports: list[tuple[int, str, float]] = []
    pool = Ranks(options.ranks, backend="ringcoll", timeout_s=60.0, threads=1)
    with contextlib.suppress(RankError), pool as ranks:  # the rank that has left
        changed = Namespace(**vars(options) | changes)
        ranks.run(until_a_rank_leaves, changed, way, says_so, on_report=reports.append)
    kinds = dict.fromkeys(range(options.ranks - 1), "waits")
    kinds.update((rank, kind) for rank, kind, _ in reports if rank < options.ranks - 1)
    together: dict[str, list[str]] = defaultdict(list)
    for rank, kind in kinds.items():
        together[kind].append(str(rank))
    others = "; ".join(f"{kind}: {', '.join(ranks)}" for kind, ranks in together.items())
    (left_s,) = (when for _, kind, when in reports if kind == "leaves")
    noticed = sorted(when - left_s for _, kind, when in reports if kind.endswith("Error"))
    return (
        way,
        "says so" if says_so else "dies, is forgotten" if forgets_lost else "dies",
        others,
        noticed[0] if noticed else None,
        noticed[-1] if noticed else None,
    )


def leaving_table(options: Namespace, ways: Sequence[str]) -> Table:
    """What follows when the last rank leaves."""
    rows = []
    for way in ways:
        rows.append(leaving(options, way, says_so=False, forgets_lost=False))
        if way.startswith("server"):
            rows.append(leaving(options, way, says_so=False, forgets_lost=True))
            rows.append(leaving(options, way, says_so=True, forgets_lost=False))
    columns = {
        "way": "text",
        "last rank": "text",
        "other ranks": "text",
        "first notice": "seconds",
        "last notice": "seconds",
    }
    caption = (
        f"The last of {options.ranks} ranks leaves in step {options.leaves}; the others go on for "
        f"{STEPS_AFTER} steps if they can. Waits of gossip and servers end after {LIMIT_S:g} s."
    )
    return Table(columns, rows, caption)


# --- tables and pictures ----------------------------------------------------------------


def row(way: str, condition: Condition, runs: Sequence[Run], target: float) -> tuple[object, ...]:
    """A row of the table: medians over the runs that have reached the target."""
    reached = [place for run in runs if (place := run.at_target(target)) is not None]
    lowest = min(loss for run in runs for _, _, loss in run.curve)
    if not reached:
        return way, str(condition), None, None, None, None, lowest, 0
    times, steps = (summarize(column) for column in zip(*reached, strict=True))
    nbytes = int(runs[0].nbytes * steps.p50_s / runs[0].num_steps)
    medians = times.p50_s, times.spread, int(steps.p50_s), nbytes
    return way, str(condition), *medians, lowest, len(reached)


def draw(path: Path, runs: dict[tuple[str, Condition], list[Run]], target: float) -> None:
    """Draw the loss over time: a panel for each condition, the last run of each way."""
    from matplotlib.figure import Figure

    conditions = list(dict.fromkeys(condition for _, condition in runs))
    ways = [way for way in WAYS if any(way == other for other, _ in runs)]
    figure = Figure(figsize=(4.8 * len(conditions), 4.2), layout="constrained")
    (panels,) = figure.subplots(1, len(conditions), sharey=True, squeeze=False)
    looks = styles(["native", *ways[1:]])
    looks[ways[0]] = looks["native"]
    for panel, condition in zip(panels, conditions, strict=True):
        for way in ways:
            if (way, condition) in runs:
                times, _, losses = zip(*runs[way, condition][-1].curve, strict=True)
                panel.plot(times, losses, label=way, markevery=0.2, linewidth=1.5, **looks[way])
        panel.axhline(target, color="grey", linewidth=0.8)
        panel.set(xlabel="time (s)", title=f"slow rank: {condition}", yscale="log")
        panel.grid(visible=True, alpha=0.3)
    panels[0].set_ylabel("loss on the test set")
    panels[-1].legend()
    save(figure, path)


def measure(
    options: Namespace, ways: Sequence[str], conditions: Sequence[Condition]
) -> dict[tuple[str, Condition], list[Run]]:
    """Train each way under each condition, in turns."""
    runs: dict[tuple[str, Condition], list[Run]] = {}
    last = options.ranks - 1
    with contextlib.ExitStack() as stack:
        pools: dict[float | None, Ranks] = {}
        for rate in dict.fromkeys(condition.mbit_per_s for condition in conditions):
            if rate is None:
                ranks = Ranks(options.ranks, backend="ringcoll", timeout_s=600.0, threads=1)
            else:
                hosts = stack.enter_context(Hosts(options.ranks, mbit_per_s={last: rate}))
                where = range(options.ranks)
                ranks = HostRanks(hosts, where, backend="ringcoll", timeout_s=600.0)
            pools[rate] = stack.enter_context(ranks)
        for _ in range(options.runs):
            for condition in conditions:
                for way in ways:
                    pool = pools[condition.mbit_per_s]
                    run = pool.run(on_rank, options, way, condition.factor)[0]
                    runs.setdefault((way, condition), []).append(run)
    return runs


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
    arguments.add_argument("--every", type=int, default=8, help="H of local SGD")
    arguments.add_argument("--staleness", type=int, default=4)
    arguments.add_argument("--look-every", type=int, default=4, help="steps between two losses")
    arguments.add_argument("--layers", type=int, default=3)
    arguments.add_argument("--width", type=int, default=64)
    arguments.add_argument("--batch", type=int, default=32)
    arguments.add_argument("--lr", type=float, default=0.1)
    arguments.add_argument("--picture", type=Path, metavar="FILE", help="draw the loss over time")
    arguments.add_argument("--throttle", type=float, metavar="RATE", help="Mbit/s of a slow link")
    arguments.add_argument("--leaves", type=int, metavar="STEP", help="step of a rank that leaves")
    arguments.set_defaults(forgets_lost=False, limit_s=600.0)
    options = arguments.parse_args()
    ways = options.ways.split(",")
    if not set(ways) <= set(WAYS):
        arguments.error(f"--ways: expected some of {', '.join(WAYS)}, got {options.ways}")
    if options.picture is not None:
        check_matplotlib()
    if options.throttle is not None and (reason := reason_why_not_slow()):
        sys.exit(f"--throttle: {reason}")
    conditions = [Condition(float(factor)) for factor in options.slower.split(",")]
    if options.throttle is not None:
        conditions.append(Condition(mbit_per_s=options.throttle))
    facts = environment(options.ranks)
    introduce(facts)
    # For the ranks: each would import scikit-learn, and torch sends a tensor as shared memory.
    options.digits = [tensor.numpy() for tensor in load_digits()]
    runs = measure(options, ways, conditions)
    columns = {
        "way": "text",
        "slow rank": "text",
        "to the target": "seconds",
        "spread": "share",
        "steps": "count",
        "sent": "bytes",
        "lowest loss": "number",
        "reached": "count",
    }
    rows = [row(*key, repeated, options.target) for key, repeated in runs.items()]
    slow = "another one in each step" if options.wandering else "the last one"
    caption = (
        f"Loss {options.target:g}, {options.ranks} ranks; the slow rank is {slow}; "
        f"{options.runs} runs of {options.steps} steps of {options.step_ms:g} ms, "
        f"batch {options.batch}, SGD with learning rate {options.lr:g}, H = {options.every}, "
        f"staleness {options.staleness}."
    )
    tables = [Table(columns, rows, caption)]
    tables[0].show()
    if options.leaves is not None:
        tables.append(leaving_table(options, ways))
        tables[1].show()
    pictures = []
    if options.picture is not None:
        draw(options.picture, runs, options.target)
        pictures.append(options.picture.name)
    write(options.json, __doc__, facts, tables, pictures=pictures)


if __name__ == "__main__":
    main()
