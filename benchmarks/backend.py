"""The backend of torch.distributed: ``init_process_group("ringcoll")`` against gloo.

Three questions: the cost of one small all-reduce through torch.distributed (1 and 2 ranks),
the time of a step of torch's DistributedDataParallel on an MLP with 25 MiB of gradients (2 and 4 ranks; also
with buckets in shared memory, by ``Options(share=True)``), and the time and memory of 10,000 asynchronous
operations that are issued at once.

Wanted: a small all-reduce at most 2 times gloo's on one rank and 1.3 times on two; the
step at most 0.75 times gloo's.
"""

from __future__ import annotations

import resource
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import Table, environment, introduce, parser, write
from torch import nn

import ringcoll
from ringcoll.runtime import Ranks
from ringcoll.tools.bench import Meeting, alternate, summarize

WIDTH, LAYERS, BATCH = 1280, 4, 64  # 4 x 1280 x 1281 parameters of 4 bytes: 25.0 MiB


def small(seconds: float) -> tuple[list[str], list[tuple[float, ...]], int]:
    """Time ``dist.all_reduce`` of 8 numbers, waited for at once, on both backends."""
    tensor = torch.ones(8)

    def waited(group: Any, times: int) -> None:
        for _ in range(times):
            dist.all_reduce(tensor, group=group)

    def asynchronous(group: Any, times: int) -> None:
        for _ in range(times):
            dist.all_reduce(tensor, group=group, async_op=True).wait()

    groups = {"ringcoll": None, "gloo": dist.new_group(backend="gloo")}
    contenders = {
        f"{name} {how}": partial(function, group)
        for how, function in (("blocking", waited), ("async_op", asynchronous))
        for name, group in groups.items()
    }
    meeting = Meeting()
    samples = alternate(
        meeting, list(contenders.values()), warmup=3, least=7, most=2000, seconds=seconds
    )
    meeting.close()
    return list(contenders), samples.times_s, samples.turns[0]


def ddp_step(seconds: float) -> tuple[list[str], list[tuple[float, ...]], int]:
    """Time a training step of torch's own DDP, forward to optimizer, on both backends."""
    share = ringcoll.Options(share=True)
    groups = {
        "ringcoll": None,
        "ringcoll, shared buckets": dist.new_group(backend="ringcoll", pg_options=share),
        "gloo": dist.new_group(backend="gloo"),
    }
    inputs = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))

    def trainer(group: Any) -> Any:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)]
        model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers), process_group=group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def steps(times: int) -> None:
            for _ in range(times):
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                optimizer.step()

        steps.model = model  # type: ignore[attr-defined]
        return steps

    trainers = {name: trainer(group) for name, group in groups.items()}
    meeting = Meeting()
    samples = alternate(
        meeting, list(trainers.values()), warmup=3, least=7, most=400, seconds=seconds, turn=1
    )
    same = (
        torch.equal if dist.get_world_size() == 2 else torch.allclose
    )  # more may add in other orders
    models = zip(*(steps.model.parameters() for steps in trainers.values()), strict=True)
    if not all(same(ours, theirs) for *both, theirs in models for ours in both):
        raise RuntimeError("the backends have trained different models")
    meeting.close()
    return list(trainers), samples.times_s, samples.turns[0]


def resident_nbytes() -> int:
    """Resident memory of this process, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def pending(number: int) -> list[tuple[str, float, int]]:
    """Issue many operations at once: seconds, and growth of the process in bytes."""
    rows = []
    for name, group in (("gloo", dist.new_group(backend="gloo")), ("ringcoll", None)):
        tensors = [torch.full((100,), float(index)) for index in range(number)]
        dist.barrier(group)
        before, begin = resident_nbytes(), time.perf_counter()
        works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
        growth = resident_nbytes() - before
        for work in works:
            work.wait()
        seconds = time.perf_counter() - begin
        size = dist.get_world_size()
        if any(tensor[0] != size * index for index, tensor in enumerate(tensors)):
            raise RuntimeError("wrong result")
        rows.append((name, seconds, growth))
    return rows


def main() -> None:
    """Run, print, write."""
    arguments = parser(__doc__)
    arguments.add_argument("-k", "--ranks", type=int, nargs="+", default=[1, 2, 4])
    arguments.add_argument("--seconds", type=float, default=20.0, help="for each part")
    arguments.add_argument("--pending", type=int, default=10_000, help="operations issued at once")
    options = arguments.parse_args()
    facts = environment(max(options.ranks))
    introduce(facts)
    rows: list[tuple[object, ...]] = []
    pending_rows: list[tuple[object, ...]] = []

    def add(what: str, measured: tuple[list[str], list[tuple[float, ...]], int]) -> None:
        names, times, turn = measured
        summaries = dict(zip(names, map(summarize, times), strict=True))
        for name, summary in summaries.items():
            native = name.partition(",")[0].replace("ringcoll", "gloo")
            ratio = summary.p50_s / summaries[native].p50_s
            operations = summary.samples * turn
            rows.append((what, name, summary.p50_s, summary.spread, ratio, operations))

    for world_size in options.ranks:
        with Ranks(world_size, backend="ringcoll", timeout_s=600.0) as ranks:
            plural = "s"[: world_size - 1]
            add(f"32 B, {world_size} rank{plural}", ranks.run(small, options.seconds / 2)[0])
            if world_size > 1:
                where = f"DDP step, 25 MiB, {world_size} ranks"
                add(where, ranks.run(ddp_step, options.seconds)[0])
            if world_size == 2:
                pending_rows += ranks.run(pending, options.pending)[0]
    tables = [
        Table(
            {
                "what": "text",
                "contender": "text",
                "median": "seconds",
                "spread": "share",
                "/ gloo": "ratio",
                "operations": "count",
            },
            rows,
        ),
        Table(
            {"contender": "text", "time": "seconds", "growth of the process": "bytes"},
            pending_rows,
            f"{options.pending} operations issued at once on 2 ranks, then waited for.",
        ),
    ]
    for table in tables:
        table.show()
    write(options.json, __doc__, facts, tables)


if __name__ == "__main__":
    main()
