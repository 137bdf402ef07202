"""Tensor parallel: a step of a perceptron against torch's own, DTensor, in the same run.

Layers of a perceptron are split in turn by column and by row over k ranks that are processes.
Contenders: ``ringcoll.training.tensor_parallel``; and torch's ``parallelize_module`` with
``ColwiseParallel`` and ``RowwiseParallel``, on the backend ``ringcoll`` and on gloo. A step is
forward and backward of a batch that all ranks have. All contenders take turns, and first show that
they have the same gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from common import Table, environment, introduce, parser, write
from torch import Tensor, nn

from ringcoll.runtime import Ranks
from ringcoll.tools.bench import Meeting, alternate, summarize
from ringcoll.training import mlp, tensor_parallel

OURS, TORCH, NATIVE = "ringcoll", "DTensor on ringcoll", "DTensor on gloo"


def network(options: Any) -> nn.Sequential:
    """Make a network of equal layers, with the same parameters on every call."""
    width = options.width
    return mlp(options.layers, width, seed=0, inputs=width, outputs=width)


def of_torch(options: Any, backend: str) -> nn.Module:
    """Split the network by torch's own means."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import parallel

    group = dist.new_group(backend=backend)
    model = network(options)
    linear = [name for name, layer in model.named_children() if isinstance(layer, nn.Linear)]
    styles = (parallel.ColwiseParallel(), parallel.RowwiseParallel())
    plan = {name: styles[number % 2] for number, name in enumerate(linear)}
    mesh = DeviceMesh.from_group(group, "cpu")
    return parallel.parallelize_module(model, mesh, plan)  # type: ignore[no-any-return]


def gradient(model: nn.Module) -> Tensor:
    """Gradient of the first layer on this rank."""
    grad: Any = next(model.parameters()).grad
    local: Tensor = grad.to_local() if hasattr(grad, "to_local") else grad
    return local


def on_rank(options: Any) -> dict[str, tuple[float, ...]]:
    """Compare the gradients, then time the contenders."""
    inputs = torch.randn(options.batch, options.width, generator=torch.Generator().manual_seed(1))
    models = {
        OURS: tensor_parallel(network(options)),
        TORCH: of_torch(options, "ringcoll"),
        NATIVE: of_torch(options, "gloo"),
    }

    def trainer(model: nn.Module) -> Callable[[int], None]:
        def steps(times: int) -> None:
            for _ in range(times):
                model.zero_grad()
                torch.autograd.backward(model(inputs).square().mean())

        return steps

    trainers = {name: trainer(model) for name, model in models.items()}
    meeting = Meeting()
    for steps in trainers.values():
        steps(1)
    expected = gradient(models[NATIVE])
    for name, model in models.items():
        if not torch.allclose(gradient(model), expected, 1e-3, 1e-7):
            raise RuntimeError(f"{name} and {NATIVE} have different gradients")
    samples = alternate(
        meeting, [*trainers.values()], warmup=2, least=5, most=2000, seconds=options.seconds, turn=1
    )
    meeting.close()
    return dict(zip(trainers, samples.times_s, strict=True))


def main() -> None:
    """Run, print, write."""
    arguments = parser(__doc__)
    arguments.add_argument("-k", "--ranks", type=int, default=2)
    arguments.add_argument("--layers", type=int, default=8)
    arguments.add_argument("--width", type=int, default=512)
    arguments.add_argument("--batch", type=int, default=64)
    arguments.add_argument("--seconds", type=float, default=20.0)
    options = arguments.parse_args()
    facts = environment(options.ranks)
    introduce(facts)
    with Ranks(options.ranks, backend="ringcoll", timeout_s=600.0) as ranks:
        times = ranks.run(on_rank, options)[0]
    summaries = {name: summarize(times_s) for name, times_s in times.items()}
    columns = {
        "contender": "text",
        "median": "seconds",
        "spread": "share",
        f"/ {TORCH}": "ratio",
        "steps": "count",
    }
    rows = [
        (name, each.p50_s, each.spread, each.p50_s / summaries[TORCH].p50_s, each.samples)
        for name, each in summaries.items()
    ]
    caption = (
        f"{options.layers} layers Linear({options.width}, {options.width}), {options.ranks} ranks, "
        f"batch {options.batch}."
    )
    table = Table(columns, rows, caption)
    table.show()
    write(options.json, __doc__, facts, [table])


if __name__ == "__main__":
    main()
