"""Communication during backward: buckets of gradients against single parameters.

A model of many equal layers trains on k ranks. Three trainers average its gradients:
``average_gradients``, with one all-reduce for each parameter after backward;
``BucketedDataParallel``, with buckets that leave during backward; and natively torch's
DistributedDataParallel over gloo. A step is forward, backward and averaging.

Overlap is the share of the communication's time that was hidden behind backward. Ranks with
one core each take the time of communication from computing, so that much overlap need not be
much gain: the ratio of the steps is the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from common import Table, environment, introduce, parser, write
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ringcoll.runtime import Ranks
from ringcoll.tools.bench import Meeting, alternate, as_size, parse_size, summarize
from ringcoll.training import BucketedDataParallel, average_gradients

CONTENDERS = ("per parameter", "bucketed", "native DDP")


class Trainer:
    """A contender: training steps, called with their number."""

    def __init__(self, model: nn.Module, average: Callable[[], object], inputs: Any) -> None:
        self.model, self.average, self.inputs = model, average, inputs
        self.overlaps: list[float] = []

    def __call__(self, times: int) -> None:
        """Do steps."""
        for _ in range(times):
            self.model.zero_grad()
            torch.autograd.backward(self.model(self.inputs).square().mean())
            self.average()
            report = getattr(self.model, "last_step", None)
            if report is not None:
                self.overlaps.append(report.overlap)


def network(layers: int, width: int) -> nn.Module:
    """Make a network of equal layers, with the same parameters on every call."""
    torch.manual_seed(0)
    items = [item for _ in range(layers) for item in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*items)


def on_rank(options: Any) -> tuple[list[tuple[float, ...]], int, float]:
    """Compare the gradients of the trainers, then time the trainers."""
    meeting = Meeting()
    inputs = torch.randn(
        options.batch, options.width, generator=torch.Generator().manual_seed(meeting.rank)
    )
    single, inner, native = (network(options.layers, options.width) for _ in CONTENDERS)
    bucketed = BucketedDataParallel(
        inner, bucket_bytes=options.bucket_bytes, algorithm=options.algorithm
    )
    ddp = DistributedDataParallel(native, bucket_cap_mb=options.bucket_bytes / (1 << 20))
    trainers = [
        Trainer(single, partial(average_gradients, single, algorithm=options.algorithm), inputs),
        Trainer(bucketed, bucketed.finish, inputs),
        Trainer(ddp, lambda: None, inputs),
    ]
    for trainer in trainers:
        trainer(1)
    for params in zip(single.parameters(), inner.parameters(), native.parameters(), strict=True):
        first, *others = (param.grad for param in params)
        assert first is not None
        if not all(torch.allclose(first, other, 1e-5, 1e-7) for other in others):
            raise RuntimeError("the trainers have different gradients")
    samples = alternate(
        meeting, trainers, warmup=2, least=5, most=500, seconds=options.seconds, turn=1
    )
    meeting.close()
    return samples.times_s, samples.turns[0], summarize(trainers[1].overlaps).p50_s


def main() -> None:
    """Run, print, write."""
    arguments = parser(__doc__)
    arguments.add_argument("-k", "--ranks", type=int, default=2)
    arguments.add_argument("--layers", type=int, default=100)
    arguments.add_argument("--width", type=int, default=128)
    arguments.add_argument("--batch", type=int, default=64)
    arguments.add_argument("--bucket-bytes", type=parse_size, default="1M")
    arguments.add_argument("--algorithm", default="ring")
    arguments.add_argument("--seconds", type=float, default=20.0)
    options = arguments.parse_args()
    facts = environment(options.ranks)
    introduce(facts)
    nbytes = 4 * options.layers * (options.width + 1) * options.width
    caption = (
        f"{options.layers} layers Linear({options.width}, {options.width}), {as_size(nbytes)} of "
        f"gradients, buckets of {as_size(options.bucket_bytes)}, {options.ranks} ranks, "
        f"{options.algorithm}."
    )
    with Ranks(options.ranks, timeout_s=600.0) as ranks:
        times, _, overlap = ranks.run(on_rank, options)[0]
    summaries = dict(zip(CONTENDERS, map(summarize, times), strict=True))
    single = summaries["per parameter"].p50_s
    columns = {
        "trainer": "text",
        "median": "seconds",
        "spread": "share",
        "/ per parameter": "ratio",
        "overlap": "share",
        "steps": "count",
    }
    rows = [
        (
            name,
            summary.p50_s,
            summary.spread,
            summary.p50_s / single,
            overlap if name == "bucketed" else None,
            summary.samples,
        )
        for name, summary in summaries.items()
    ]
    table = Table(columns, rows, caption)
    table.show()
    write(options.json, __doc__, facts, [table])


if __name__ == "__main__":
    main()
