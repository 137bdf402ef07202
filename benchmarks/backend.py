"""What ``init_process_group("ringcoll")`` costs and gains, against gloo, in one run.

Three questions: what one small all-reduce through torch.distributed costs (1 and 2 ranks),
how long a step of torch's DistributedDataParallel takes on an MLP of 25 MiB of gradients,
and what 10,000 asynchronous operations issued at once cost.

Wanted: a small all-reduce at most 2 times gloo's on one rank and 1.3 times on two; the
step at most 1.1 times gloo's.
"""

from __future__ import annotations

import resource
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import environment, introduce, parser, table, write
from torch import nn

from ringcoll.bench import Meeting, alternate, summarize
from ringcoll.launch import Ranks

WIDTH, LAYERS, BATCH = 1280, 4, 64  # 4 x 1280 x 1281 parameters of 4 bytes: 25.0 MiB
PENDING = 10_000


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
    groups = {"ringcoll": None, "gloo": dist.new_group(backend="gloo")}
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
    pairs = zip(*(steps.model.parameters() for steps in trainers.values()), strict=True)
    if not all(torch.equal(ours, theirs) for ours, theirs in pairs):
        raise RuntimeError("the backends have trained different models")
    meeting.close()
    return list(trainers), samples.times_s, samples.turns[0]


def resident_nbytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def pending() -> dict[str, tuple[float, int]]:
    """Issue many operations at once: seconds, and growth of the process in bytes."""
    found = {}
    for name, group in (("gloo", dist.new_group(backend="gloo")), ("ringcoll", None)):
        tensors = [torch.full((100,), float(index)) for index in range(PENDING)]
        dist.barrier(group)
        before, begin = resident_nbytes(), time.perf_counter()
        works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
        grown = resident_nbytes() - before
        for work in works:
            work.wait()
        seconds = time.perf_counter() - begin
        size = dist.get_world_size()
        if any(tensor[0] != size * index for index, tensor in enumerate(tensors)):
            raise RuntimeError("wrong result")
        found[name] = (seconds, grown)
    return found


def main() -> None:
    """Run, print, write."""
    arguments = parser(__doc__)
    arguments.add_argument("--seconds", type=float, default=20.0, help="for each part")
    options = arguments.parse_args()
    facts = environment(2)
    introduce(facts)
    rows, results = [], []

    def report(part: str, found: tuple[list[str], list[tuple[float, ...]], int]) -> None:
        names, times, turn = found
        summaries = dict(zip(names, map(summarize, times), strict=True))
        for name, summary in summaries.items():
            native = summaries[name.replace("ringcoll", "gloo")]
            ratio = summary.p50_s / native.p50_s
            rows.append(
                (
                    part,
                    name,
                    f"{summary.p50_s * 1e6:.1f}",
                    f"{100 * summary.spread:.0f}%",
                    f"{ratio:.2f}",
                    summary.samples * turn,
                )
            )
            results.append(
                {
                    "part": part,
                    "contender": name,
                    "median_s": summary.p50_s,
                    "spread": summary.spread,
                    "times_gloo": ratio,
                    "operations": summary.samples * turn,
                }
            )

    for world_size in (1, 2):
        with Ranks(world_size, backend="ringcoll", timeout_s=600.0) as ranks:
            found = ranks.run(small, options.seconds / 2)[0]
            report(f"32 B, {world_size} rank{'s'[: world_size - 1]}", found)
            if world_size == 2:
                report("DDP step, 25 MiB", ranks.run(ddp_step, options.seconds)[0])
                waiting = ranks.run(pending)[0]
    table(("what", "contender", "median (us)", "spread", "/gloo", "operations"), rows)
    for name, (seconds, grown) in waiting.items():
        print(
            f"{PENDING} operations at once on {name}: {seconds:.2f} s, "
            f"{grown / 2**20:.1f} MiB more once they were issued"
        )
    write(options.json, facts, {"alternating": results, "pending": waiting})


if __name__ == "__main__":
    main()
