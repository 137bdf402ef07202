"""What overlapping communication with backward is worth: buckets against single parameters.

A model of many equal layers trains on k ranks; gradients are averaged by
`ringcoll.ddp.average_gradients`, one all-reduce for each parameter after backward, by
`ringcoll.ddp.BucketedDataParallel`, and natively by torch's DistributedDataParallel
over gloo. A step is forward, backward and averaging; the trainers take turns in one run.

Overlap is the part of the time of communication that was hidden behind backward. Where
ranks have a core each, communication takes time from computing, so that much overlap
does not mean much gain: the ratio of the steps is what counts.

::

    python benchmarks/overlap.py -k 2 --seconds 20 --json overlap.json
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from common import environment, introduce, parser, table, write
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ringcoll.bench import Meeting, alternate, summarize
from ringcoll.bench.units import as_size, parse_size
from ringcoll.ddp import BucketedDataParallel, average_gradients
from ringcoll.launch import Ranks

CONTENDERS = ("per parameter", "bucketed", "native DDP")


class Trainer:
    """One contender: steps that are called so many times."""

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
    """Equal layers, the same on every call."""
    torch.manual_seed(0)
    items = [item for _ in range(layers) for item in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*items)


def on_rank(options: Any) -> tuple[list[tuple[float, ...]], int, float]:
    """Compare the gradients of the trainers, then time them."""
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
    print(
        f"{options.layers} x Linear({options.width}, {options.width}), {as_size(nbytes)} of "
        f"gradients, buckets of {as_size(options.bucket_bytes)}, {options.ranks} ranks, "
        f"{options.algorithm}"
    )
    with Ranks(options.ranks, timeout_s=600.0) as ranks:
        times, _, overlap = ranks.run(on_rank, options)[0]
    found = dict(zip(CONTENDERS, map(summarize, times), strict=True))
    single = found["per parameter"].p50_s
    results = [
        {
            "contender": name,
            "median_s": summary.p50_s,
            "spread": summary.spread,
            "times_per_parameter": summary.p50_s / single,
            "steps": summary.samples,
            "overlap": overlap if name == "bucketed" else None,
        }
        for name, summary in found.items()
    ]
    rows = [
        (
            one["contender"],
            f"{one['median_s'] * 1e3:.2f}",
            f"{100 * one['spread']:.0f}%",
            f"{one['times_per_parameter']:.3f}",
            "-" if one["overlap"] is None else f"{100 * one['overlap']:.0f}%",
            one["steps"],
        )
        for one in results
    ]
    table(("trainer", "median (ms)", "spread", "/per parameter", "overlap", "steps"), rows)
    write(options.json, facts, results)


if __name__ == "__main__":
    main()
