"""Data, pipeline and tensor parallel at once: a box of ranks.

Problem: a model is too large for one rank, and there is more
data than one copy of the model can take. The ranks stand in a box of data x pipeline x tensor, a
`Mesh`. A rank's lines along the three axes are its groups::

    2 x 2 x 2                 tensor: the ranks that share each layer
     data 0     data 1        pipeline: the ranks that hold the stages, one behind the other
    0 1  2 3   4 5  6 7       data: the ranks that hold the same parameters
    stage:0  1    0    1

Ranks beside each other share a tensor axis: that axis sends most, and with k ranks on a host it
stays inside the host. Each axis is a system of its own, unchanged: layers are split by
`tensor_parallel`, the split model is cut into `stages` that a `Pipeline` runs, and gradients are
averaged along the data axis. Embedding and scores share one matrix: its gradients of the first and
the last stage are added up.

Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", SC 2021.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringcoll.runtime.collectives import functions as api
from ringcoll.runtime.watch import phase
from ringcoll.training.arguments import require
from ringcoll.training.data.averages import average_gradients
from ringcoll.training.models import Transformer, next_token_loss, stages
from ringcoll.training.pipeline.pipeline_schedule import SCHEDULES
from ringcoll.training.pipeline.runner import Pipeline
from ringcoll.training.split.tensor import tensor_parallel

AXES = ("data", "pipeline", "tensor")
_USES = {
    "data": "all-reduce of gradients, and of the loss",
    "pipeline": "messages of activations and their gradients, broadcast of the loss",
    "tensor": "all-reduce of activations forward and backward, in each layer",
}


class Mesh:
    """The groups of one rank in a box of data x pipeline x tensor ranks.

    ``sizes`` and ``place`` have the number of ranks, and the place of this rank, by the name of the
    axis; ``groups`` has the group of the ranks along each axis through this rank.

    Parameters
    ----------
    data, pipeline, tensor
        Number of ranks along each axis. Their product is the size of the default group, of which
        all ranks make a mesh alike; otherwise `ArgumentError` is raised.
    backend
        Backend of the groups; that of the default group if ``None``.
    """

    def __init__(
        self, data: int, pipeline: int, tensor: int, *, backend: str | None = None
    ) -> None:
        self.sizes = dict(zip(AXES, (data, pipeline, tensor), strict=True))
        world_size = dist.get_world_size()
        require(data * pipeline * tensor == world_size, "data, pipeline, tensor",
                "the mesh has another number of places than there are ranks",
                f"a product of {world_size}", f"{data} x {pipeline} x {tensor}",
                dist.get_rank())  # fmt: skip
        box = torch.arange(world_size, device="cpu").view(data, pipeline, tensor)
        place = (box == dist.get_rank()).nonzero()[0].tolist()
        self.place = dict(zip(AXES, place, strict=True))
        self.groups: dict[str, Any] = {}
        self.lines: dict[str, list[list[int]]] = {}
        for dim, axis in enumerate(AXES):  # all ranks make all groups, in the same order
            self.lines[axis] = box.movedim(dim, -1).flatten(0, 1).tolist()
            for line in self.lines[axis]:
                group = dist.new_group(line, backend=backend)
                if dist.get_rank() in line:
                    self.groups[axis] = group

    def table(self) -> str:
        """Which collectives run in which groups, in words."""
        lines = [
            (axis, "  ".join(" ".join(map(str, line)) for line in self.lines[axis]), _USES[axis])
            for axis in AXES
        ]
        widths = [max(len(row[column]) for row in lines) for column in range(2)]
        return "\n".join(
            f"{axis:{widths[0]}}  {ranks:{widths[1]}}  {use}" for axis, ranks, use in lines
        )

    def close(self) -> None:
        """Destroy the groups."""
        for group in self.groups.values():
            dist.destroy_process_group(group)


class ParallelTransformer:
    """A rank's share of a transformer that is trained on a mesh.

    With eight ranks::

        mesh = Mesh(2, 2, 2)
        trained = ParallelTransformer(Transformer(shape), mesh)
        optimizer = torch.optim.AdamW(trained.params)
        for inputs, targets in batches:  # the same on all ranks
            optimizer.zero_grad()
            loss = trained.step(inputs, targets)
            optimizer.step()

    Parameters
    ----------
    model
        The whole model, the same on all ranks; it is split in place.
    num_microbatches
        Micro-batches of a step, on each place of the data axis.
    schedule
        Name of the pipeline's schedule, one of `SCHEDULES`.
    sequence
        As for `tensor_parallel`.
    """

    def __init__(
        self,
        model: Transformer,
        mesh: Mesh,
        *,
        num_microbatches: int = 4,
        schedule: str = "1f1b",
        sequence: bool = False,
    ) -> None:
        self.model, self.mesh = model, mesh
        require(schedule in SCHEDULES, "schedule", "there is no such schedule",
                ", ".join(SCHEDULES), schedule, dist.get_rank())  # fmt: skip
        size, place = mesh.sizes["pipeline"], mesh.place["pipeline"]
        plan = SCHEDULES[schedule](size, num_microbatches)
        tensor_parallel(model, mesh.groups["tensor"], sequence=sequence)
        self.stage = stages(model, size)[place]
        self.params = list(self.stage.parameters())
        self.pipeline = Pipeline(
            self.stage,
            next_token_loss,
            plan,
            mesh.groups["pipeline"],
            tied=model.head.scores.weight,
        )

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Compute the gradients of a batch; an optimizer's step on ``params`` follows.

        The batch is that of all ranks, (batch, tokens); each place of the data axis takes a share,
        and `ArgumentError` is raised if there is none. The loss is the mean over the whole batch,
        the same on all ranks.
        """
        size, place = self.mesh.sizes["data"], self.mesh.place["data"]
        require(len(inputs) % size == 0, "inputs", "the data axis does not divide the batch",
                f"a multiple of {size}", len(inputs), dist.get_rank())  # fmt: skip
        loss = self.pipeline.step(inputs.chunk(size)[place], targets.chunk(size)[place])
        with phase("average"):
            average_gradients(self.params, self.mesh.groups["data"])
            api.all_reduce(loss, dist.ReduceOp.AVG, self.mesh.groups["data"])
        return loss
