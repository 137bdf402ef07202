"""Pipelines: idle time against theory, activations, and 1F1B against torch's own.

An MLP of equal layers trains on k ranks that are processes, over gloo. Each schedule runs in
``ringcoll.training.Pipeline``; torch's is ``Schedule1F1B`` of
``torch.distributed.pipelining``. A step is forward and backward of a batch; all contenders take
turns in one run, and first show that they have the same gradients.

*idle, measured* is the share of a step in which a rank waits for other ranks, as the mean over the
ranks and the median over the steps. *(k-1)/(m+k-1)* is the formula for GPipe and 1F1B. Stages that
differ, messages, and ranks that share a core add to the measured share.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from common import Table, environment, introduce, parser, write
from torch import Tensor, nn

from ringcoll.runtime import Ranks
from ringcoll.tools.bench import Meeting, alternate, summarize
from ringcoll.training import SCHEDULES, Pipeline, mlp, peak_activations, stages

TORCH = "torch 1F1B"


class Trainer:
    """A contender: steps of one rank, and what its ranks waited."""

    def __init__(self, mine: nn.Module, step: Callable[[], object], pipeline: Any) -> None:
        self.mine, self.step, self.pipeline = mine, step, pipeline
        self.idle_shares: list[float] = []

    def __call__(self, times: int) -> None:
        """Do steps."""
        for _ in range(times):
            self.mine.zero_grad()
            self.step()
            if self.pipeline is not None:
                report = self.pipeline.last_step
                self.idle_shares.append(report.waited_s / report.total_s)

    def grads(self) -> Tensor:
        """The gradients of this rank, as one tensor."""
        grads = [param.grad for param in self.mine.parameters()]
        return torch.cat([grad.flatten() for grad in grads if grad is not None])


def network(options: Any) -> nn.Module:
    """Make a network of equal layers, with the same parameters on every call."""
    width = options.width
    return mlp(options.layers, width, seed=0, inputs=width, outputs=width)


def ours(name: str, options: Any, inputs: Tensor, targets: Tensor) -> Trainer:
    """Make a pipeline of this library with a schedule."""
    schedule = SCHEDULES[name](options.ranks, options.microbatches)
    mine = stages(network(options), options.ranks)[dist.get_rank()]
    pipeline = Pipeline(mine, nn.functional.mse_loss, schedule)
    return Trainer(mine, lambda: pipeline.step(inputs, targets), pipeline)


def of_torch(options: Any, inputs: Tensor, targets: Tensor) -> Trainer:
    """Make a pipeline of torch with 1F1B."""
    from torch.distributed import pipelining

    rank, last = dist.get_rank(), options.ranks - 1
    module = stages(network(options), options.ranks)[rank]
    stage = pipelining.PipelineStage(module, rank, options.ranks, torch.device("cpu"))
    schedule = pipelining.Schedule1F1B(stage, options.microbatches, loss_fn=nn.functional.mse_loss)
    arguments = (inputs,) if rank == 0 else ()
    options_of_last = {"target": targets} if rank == last else {}
    return Trainer(module, lambda: schedule.step(*arguments, **options_of_last), None)


def on_rank(options: Any) -> dict[str, tuple[tuple[float, ...], float | None, int | None]]:
    """Compare the gradients, then time the contenders: times, idle share, activations of each."""
    warnings.simplefilter("ignore")  # of torch's pipelining, about its own future
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(2, options.batch, options.width, generator=generator)
    trainers = {name: ours(name, options, inputs, targets) for name in options.schedules}
    trainers[TORCH] = of_torch(options, inputs, targets)
    meeting = Meeting()
    for trainer in trainers.values():
        trainer(1)
        trainer.idle_shares.clear()
    expected = trainers[TORCH].grads()
    for name, trainer in trainers.items():
        if not torch.allclose(trainer.grads(), expected, 1e-4, 1e-6):
            raise RuntimeError(f"{name} and {TORCH} have different gradients")
    samples = alternate(
        meeting, [*trainers.values()], warmup=2, least=5, most=500, seconds=options.seconds, turn=1
    )
    results = {}
    for (name, trainer), times_s in zip(trainers.items(), samples.times_s, strict=True):
        shares = meeting.gather(trainer.idle_shares)
        means = [sum(ranks) / len(ranks) for ranks in zip(*shares, strict=True)]
        peaks = meeting.gather(trainer.pipeline and trainer.pipeline.last_step.peak_activations)
        results[name] = (
            times_s,
            summarize(means).p50_s if means else None,
            max(peaks) if trainer.pipeline else None,
        )
    meeting.close()
    return results


def main() -> None:
    """Run, print, write."""
    arguments = parser(__doc__)
    arguments.add_argument("-k", "--ranks", type=int, default=2)
    arguments.add_argument("-m", "--microbatches", type=int, default=8)
    arguments.add_argument("--layers", type=int, default=16)
    arguments.add_argument("--width", type=int, default=512)
    arguments.add_argument("--batch", type=int, default=512)
    arguments.add_argument("--schedules", type=lambda text: text.split(","), default=[*SCHEDULES])
    arguments.add_argument("--seconds", type=float, default=30.0)
    options = arguments.parse_args()
    facts = environment(options.ranks, "gloo")
    introduce(facts)
    caption = (
        f"{options.layers} layers Linear({options.width}, {options.width}), {options.ranks} ranks, "
        f"batch {options.batch} in {options.microbatches} micro-batches."
    )
    with Ranks(options.ranks, timeout_s=600.0) as ranks:
        results = ranks.run(on_rank, options)[0]
    summaries = {name: summarize(times_s) for name, (times_s, _, _) in results.items()}
    formula = (options.ranks - 1) / (options.microbatches + options.ranks - 1)
    columns = {
        "schedule": "text",
        "median": "seconds",
        "spread": "share",
        f"/ {TORCH}": "ratio",
        "idle, measured": "share",
        "(k-1)/(m+k-1)": "share",
        "activations": "count",
        "counted": "count",
        "steps": "count",
    }
    rows = []
    for name, summary in summaries.items():
        is_ours = name in SCHEDULES
        schedule = SCHEDULES[name](options.ranks, options.microbatches) if is_ours else None
        rows.append(
            (
                name,
                summary.p50_s,
                summary.spread,
                summary.p50_s / summaries[TORCH].p50_s,
                results[name][1],
                formula,
                results[name][2],
                schedule and max(peak_activations(schedule)),
                summary.samples,
            )
        )
    table = Table(columns, rows, caption)
    table.show()
    write(options.json, __doc__, facts, [table])


if __name__ == "__main__":
    main()
