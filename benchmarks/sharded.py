"""Training step with sharded state: ringcoll's ShardedAdamW against torch's own ways.

A model of equal layers trains on k ranks with AdamW. The contenders are the three stages of
``ShardedAdamW``; torch's DistributedDataParallel with AdamW, which shards nothing, and with
ZeroRedundancyOptimizer (stage 1); and FSDP2, torch's ``fully_shard`` (stage 3), on the backend
``ringcoll`` and on gloo. All others run on the backend ``ringcoll``, in the same process.

A step is forward, backward and update. A turn is several steps, so that what a step sends can
overlap the next step; the wait for what the last step has sent is in the time. Memory is counted
between backward and update: storages of parameters, gradients and optimizer state. Wanted: the
bytes of the formula, within 2 %.

A contender that cannot run is named, with its error, and left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from common import Table, environment, introduce, parser, write
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ringcoll.runtime import Ranks
from ringcoll.tools.bench import Meeting, alternate, as_size, parse_size, summarize
from ringcoll.training import ModelStates, ShardedAdamW, model_state_bytes, storage_nbytes

LR = 1e-3


def network(layers: int, width: int) -> nn.Sequential:
    """Make a network of equal layers, with the same parameters on every call."""
    torch.manual_seed(0)
    items = [item for _ in range(layers) for item in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*items)


def local(tensor: Tensor | None) -> Tensor | None:
    """The elements of a tensor that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass
class Trainer:
    """A contender: training steps, called with their number."""

    model: nn.Module
    optimizer: Any
    inputs: Tensor
    stage: int  # that its memory is compared with

    def backward(self) -> None:
        """Compute the gradients."""
        self.model.zero_grad()
        torch.autograd.backward(self.model(self.inputs).square().mean())

    def __call__(self, times: int) -> None:
        """Do steps, and wait for the parameters that the last step has sent."""
        for _ in range(times):
            self.backward()
            self.optimizer.step()
        if isinstance(self.optimizer, ShardedAdamW) and self.stage < 3:
            self.optimizer.gather()

    def memory(self) -> ModelStates:
        """Do a step, and measure the memory before the update."""
        self.backward()
        if isinstance(self.optimizer, ShardedAdamW):
            self.optimizer.finish()
            held = self.optimizer.memory()
        else:
            inner = getattr(self.optimizer, "optim", self.optimizer)  # of ZeroRedundancyOptimizer
            params = list(self.model.parameters())
            grads = [param.grad for param in params]
            states = [value for state in inner.state.values() for value in state.values()]
            kinds = (params, grads, states)
            held = ModelStates(*(storage_nbytes(map(local, tensors)) for tensors in kinds))
        self.optimizer.step()
        return held

    def parameters(self) -> list[Tensor]:
        """The parameters, whole; called by all ranks alike."""
        if isinstance(self.optimizer, ShardedAdamW):
            self.optimizer.gather()
        params = [param.detach() for param in self.model.parameters()]
        return [item.full_tensor() if isinstance(item, DTensor) else item for item in params]


def sharded(options: Any, inputs: Tensor, stage: int) -> Trainer:
    """Make a contender with a stage of ShardedAdamW."""
    model = network(options.layers, options.width)
    optimizer = ShardedAdamW(model, stage=stage, lr=LR, bucket_bytes=options.bucket_bytes)
    return Trainer(model, optimizer, inputs, stage)


def data_parallel(options: Any, inputs: Tensor, zero: bool) -> Trainer:
    """Make a contender with DistributedDataParallel and AdamW, whole or sharded."""
    model = DistributedDataParallel(
        network(options.layers, options.width),
        bucket_cap_mb=options.bucket_bytes / (1 << 20),
        gradient_as_bucket_view=True,  # otherwise the gradients exist twice
    )
    params = model.parameters()
    if zero:
        optimizer = ZeroRedundancyOptimizer(params, optimizer_class=torch.optim.AdamW, lr=LR)
        return Trainer(model, optimizer, inputs, 1)
    return Trainer(model, torch.optim.AdamW(params, lr=LR), inputs, 0)


def fsdp(options: Any, inputs: Tensor, group: Any) -> Trainer:
    """Make a contender with FSDP2, which gathers layer by layer."""
    model = network(options.layers, options.width)
    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return Trainer(model, torch.optim.AdamW(model.parameters(), lr=LR), inputs, 3)


def started(meeting: Meeting, make: Callable[[], Trainer]) -> Trainer | str:
    """Make a contender and do its first step; on all ranks alike the error of a rank."""
    error = ""
    try:
        trainer = make()
        trainer(1)
    except Exception as caught:  # noqa: BLE001  # it is reported
        error = f"{type(caught).__name__}: {str(caught).splitlines()[0]}"
    errors = [each for each in meeting.gather(error) if each]
    return errors[0] if errors else trainer


def on_rank(options: Any) -> tuple[dict[str, tuple[Any, ModelStates, int]], dict[str, str]]:
    """Compare the parameters of the contenders, then time them; returns also who cannot run."""
    meeting = Meeting()
    inputs = torch.randn(
        options.batch, options.width, generator=torch.Generator().manual_seed(meeting.rank)
    )
    gloo = dist.new_group(backend="gloo")
    makers: dict[str, Callable[[], Trainer]] = {
        "DDP + AdamW": partial(data_parallel, options, inputs, zero=False),
        "stage 1": partial(sharded, options, inputs, 1),
        "stage 2": partial(sharded, options, inputs, 2),
        "stage 3": partial(sharded, options, inputs, 3),
        "DDP + ZeRO": partial(data_parallel, options, inputs, zero=True),
        "FSDP2": partial(fsdp, options, inputs, dist.group.WORLD),
        "FSDP2, gloo": partial(fsdp, options, inputs, gloo),
    }
    made = {name: started(meeting, make) for name, make in makers.items()}
    failed = {name: trainer for name, trainer in made.items() if isinstance(trainer, str)}
    trainers = {name: item for name, item in made.items() if not isinstance(item, str)}
    expected = trainers["DDP + AdamW"].parameters()
    for name, trainer in trainers.items():
        # A step moves a parameter by LR at most; a gradient that is rounded otherwise hardly.
        pairs = zip(trainer.parameters(), expected, strict=True)
        if not all(torch.allclose(mine, theirs, 1e-4, LR / 10) for mine, theirs in pairs):
            raise RuntimeError(f"{name} has other parameters than DDP")
    held = {name: trainer.memory() for name, trainer in trainers.items()}
    samples = alternate(
        meeting,
        list(trainers.values()),
        warmup=2,
        least=5,
        most=500,
        seconds=options.seconds,
        turn=options.steps,
    )
    meeting.close()
    times = dict(zip(trainers, map(summarize, samples.times_s), strict=True))
    results = {name: (times[name], held[name], trainers[name].stage) for name in trainers}
    return results, failed


def main() -> None:
    """Run, print, write."""
    arguments = parser(__doc__)
    arguments.add_argument("-k", "--ranks", type=int, default=2)
    arguments.add_argument("--layers", type=int, default=16)
    arguments.add_argument("--width", type=int, default=512)
    arguments.add_argument("--batch", type=int, default=64)
    arguments.add_argument("--bucket-bytes", type=parse_size, default="1M")
    arguments.add_argument("--steps", type=int, default=4, metavar="N", help="in a turn")
    arguments.add_argument("--seconds", type=float, default=60.0)
    options = arguments.parse_args()
    facts = environment(options.ranks)
    introduce(facts)
    numel = options.layers * (options.width + 1) * options.width
    where = (
        f"{options.layers} layers Linear({options.width}, {options.width}), {as_size(4 * numel)} "
        f"of parameters in float32, buckets of {as_size(options.bucket_bytes)}, "
        f"{options.ranks} ranks."
    )
    with Ranks(options.ranks, backend="ringcoll", timeout_s=600.0) as ranks:
        results, failed = ranks.run(on_rank, options)[0]
    plain_s = results["DDP + AdamW"][0].p50_s
    names = {"trainer": "text", "median": "seconds", "spread": "share"}
    rows = [
        (name, times.p50_s, times.spread, times.p50_s / plain_s, times.samples)
        for name, (times, _, _) in results.items()
    ]
    steps = Table(names | {"/ DDP": "ratio", "turns": "count"}, rows, f"Step: {where}")
    memory_rows = []
    for name, (_, held, stage) in results.items():
        formula = model_state_bytes(numel, options.ranks, stage).total
        kinds = (held.parameters, held.gradients, held.optimizer, held.total)
        memory_rows.append((name, stage, *map(int, kinds), held.total / formula))
    kinds = dict.fromkeys(("parameters", "gradients", "optimizer", "total"), "bytes")
    columns = {"trainer": "text", "stage": "count"} | kinds | {"/ formula": "ratio"}
    memory = Table(columns, memory_rows, f"Bytes a rank, between backward and update: {where}")
    tables = [steps, memory]
    if failed:
        caption = "Contenders that cannot run here."
        tables.append(Table({"trainer": "text", "error": "text"}, list(failed.items()), caption))
    for table in tables:
        table.show()
    write(options.json, __doc__, facts, tables)


if __name__ == "__main__":
    main()
