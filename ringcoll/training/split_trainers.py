"""Trainers whose ranks hold a part of the model each."""

from __future__ import annotations

from torch import Tensor

from ringcoll.training.checks import require
from ringcoll.training.mesh import Mesh, ParallelTransformer
from ringcoll.training.models import Transformer, next_token_loss, stages
from ringcoll.training.pipeline import Pipeline
from ringcoll.training.pipeline_orders import SCHEDULES
from ringcoll.training.task import Task
from ringcoll.training.tensor_parallel import tensor_parallel, vocabulary_loss
from ringcoll.training.trainer import Setup, Trainer
from ringcoll.training.whole import whole_parameters

__all__ = ["MeshTrainer", "PipelineTrainer", "SequenceTrainer", "SplitTrainer", "TensorTrainer"]

_MICROBATCHES = 4


class SplitTrainer(Trainer):
    """The base of systems whose ranks hold a part of the model each."""

    def share(self, batch: Tensor) -> Tensor:
        """All samples: each rank computes a part of the model on them."""
        return batch

    def piece(self) -> int:
        """Place of this rank's pieces among the pieces of a parameter, from 0."""
        return self.rank

    def whole(self) -> dict[str, Tensor]:
        """The parameters, put together from the ranks'."""
        held = {id(param) for param in self.params}
        named = {name: param for name, param in self.module.named_parameters() if id(param) in held}
        return whole_parameters(named, self.shapes, None, self.piece())


def _check_tensor(task: Task, ranks: int) -> None:
    """Each of some ranks needs a piece of each layer."""
    if task.model == "perceptron":
        require(task.layers == 1 or task.width % ranks == 0, "width", "the ranks do not divide it",
                f"a multiple of {ranks}", task.width)  # fmt: skip
    else:
        require(task.shape.heads % ranks == 0, "ranks", "they do not divide the heads",
                f"a divisor of {task.shape.heads}", ranks)  # fmt: skip


def _check_pipeline(task: Task, num_stages: int, batch: int) -> None:
    """Each stage needs a layer, and each micro-batch a sample."""
    require(task.layers >= num_stages, "layers", "a stage would have no layer",
            f"at least {num_stages}", task.layers)  # fmt: skip
    require(batch % _MICROBATCHES == 0, "batch",
            f"the {_MICROBATCHES} micro-batches do not divide it",
            f"a multiple of {_MICROBATCHES}", batch)  # fmt: skip


class TensorTrainer(SplitTrainer):
    """Each layer split over the ranks."""

    sequence = False

    @classmethod
    def check(cls, setup: Setup) -> None:
        """The ranks have to divide heads and widths."""
        _check_tensor(setup.task, setup.world_size)

    def prepare(self) -> None:
        """Keep this rank's pieces."""
        tensor_parallel(self.module, sequence=self.sequence)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The vocabulary is split over the ranks; digits are not."""
        is_split = self.task.model == "transformer"
        return (vocabulary_loss if is_split else next_token_loss)(outputs, targets)


class SequenceTrainer(TensorTrainer):
    """Each layer split over the ranks, and activations between the layers by tokens."""

    sequence, needs_model = True, "transformer"

    @classmethod
    def check(cls, setup: Setup) -> None:
        """The ranks have to divide the tokens, too."""
        super().check(setup)
        context, size = setup.task.shape.context, setup.world_size
        require(context % size == 0, "ranks", "they do not divide the tokens",
                f"a divisor of {context}", size)  # fmt: skip


class StagesTrainer(SplitTrainer):
    """The base of systems with a pipeline, which `prepare` makes."""

    pipeline: Pipeline

    def nbytes_sent(self) -> int:
        """Bytes of the collectives, and of the messages between the stages."""
        return super().nbytes_sent() + self.pipeline.nbytes_sent

    def bubble(self) -> float:
        """Share of the step in which this rank waited for other stages."""
        report = self.pipeline.last_step
        return report.waited_s / report.total_s


class PipelineTrainer(StagesTrainer):
    """Layers in stages, and batches in micro-batches."""

    @classmethod
    def check(cls, setup: Setup) -> None:
        """Each stage needs a layer, and each micro-batch a sample."""
        task, option, world_size = setup
        num_stages = SCHEDULES[option](world_size, _MICROBATCHES).num_stages
        _check_pipeline(task, num_stages, task.batch * world_size)

    def prepare(self) -> None:
        """Keep this rank's stages."""
        schedule = SCHEDULES[self.option](self.world_size, _MICROBATCHES)
        own_stages = stages(self.module, schedule.num_stages)[self.rank :: self.world_size]
        self.params = [param for stage in own_stages for param in stage.parameters()]
        model = self.module
        tied = model.head.scores.weight if isinstance(model, Transformer) else None
        self.pipeline = Pipeline(own_stages, next_token_loss, schedule, tied=tied)

    def compute(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Run the schedule."""
        return self.pipeline.step(inputs, targets)


class MeshTrainer(StagesTrainer):
    """Data x pipeline x tensor at once."""

    needs_model = "transformer"

    @classmethod
    def check(cls, setup: Setup) -> None:
        """The sizes have to make up the ranks, and each rank needs its part."""
        task, option, world_size = setup
        data, pipeline, tensor = map(int, option.split("x"))
        require(data * pipeline * tensor == world_size, "ranks", "the mesh has other places",
                data * pipeline * tensor, world_size)  # fmt: skip
        _check_tensor(task, tensor)
        _check_pipeline(task, pipeline, task.batch * pipeline * tensor)

    def prepare(self) -> None:
        """Make the groups, and keep this rank's part."""
        self.mesh = Mesh(*map(int, self.option.split("x")))
        assert isinstance(self.module, Transformer)
        self._parallel = ParallelTransformer(self.module, self.mesh, num_microbatches=_MICROBATCHES)
        self.params, self.pipeline = self._parallel.params, self._parallel.pipeline
        self.groups = [*self.mesh.groups.values()]

    def piece(self) -> int:
        """The place along the tensor axis."""
        place: int = self.mesh.place["tensor"]
        return place

    def compute(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Let each axis do its work."""
        return self._parallel.step(inputs, targets)

    def close(self) -> None:
        """Destroy the groups."""
        self.mesh.close()
