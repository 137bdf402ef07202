"""One shape for all training systems, so that they can be trained side by side.

A `Trainer` is one rank of a system. It takes batches of all ranks, picks what its rank computes, and
says what the rank holds, has sent, and has waited for. `ringcoll.training.trainers` has the
systems by name. A trainer is what a user would write around a system: make it, then step by step::

    trainer = make_trainer("sharded:2", task)
    for loss in trainer.steps(batches):      # of all ranks; each yields this rank's loss
        ...
    trainer.whole()                          # parameters of the whole model
    trainer.close()
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringcoll.collectives.groups import bytes_sent
from ringcoll.training.checks import check_same, require
from ringcoll.training.models import next_token_loss
from ringcoll.training.phases import phase
from ringcoll.training.state_bytes import ModelStates, storage_nbytes
from ringcoll.training.task import Task

__all__ = ["Gradients", "Setup", "Trainer"]


@dataclass(frozen=True)
class Gradients:
    """How gradients are averaged, by the trainers that have a choice.

    Parameters
    ----------
    algorithm, wire_dtype
        As for `ringcoll.all_reduce`; the algorithm ``None`` is gloo's own all-reduce.
    bucket_bytes
        Bytes of a bucket, for trainers that have buckets.
    """

    algorithm: str | None = "auto"
    wire_dtype: torch.dtype | None = None
    bucket_bytes: int = 1 << 18

    def __post_init__(self) -> None:
        nbytes = self.bucket_bytes
        require(nbytes > 0, "bucket_bytes", "must be positive", "> 0", nbytes)

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of `ringcoll.all_reduce`."""
        return {"algorithm": self.algorithm, "wire_dtype": self.wire_dtype}


class Setup(NamedTuple):
    """A task, what follows the colon in a system's name, and the number of ranks."""

    task: Task
    option: str
    world_size: int


class Trainer:
    """One rank of data-parallel training; other systems change what they do differently.

    Parameters
    ----------
    task
        What is trained.
    option
        What follows the colon in the system's name.
    gradients
        How gradients are averaged, if the system leaves a choice.

    Attributes
    ----------
    peak : ModelStates or None
        Bytes of parameters, gradients and optimizer state that this rank held when the second
        step's backward was over.

    Raises
    ------
    MismatchError
        The ranks begin with different models.
    """

    meets: ClassVar[bool] = True
    """Whether all ranks hold the same model after each step, whole or in pieces."""
    is_exact: ClassVar[bool] = True
    """Whether the model is that of one process, up to rounding."""
    takes_algorithm: ClassVar[bool] = False
    """Whether the algorithm of `Gradients` is used."""
    takes_wire: ClassVar[bool] = False
    """Whether the wire dtype of `Gradients` is used."""
    needs_model: ClassVar[str | None] = None
    needs_optimizer: ClassVar[str | None] = None
    """The only model, and optimizer, that the system works with."""
    params: Sequence[Tensor] = ()
    """The parameters that this rank holds."""

    def __init__(self, task: Task, option: str, gradients: Gradients) -> None:
        self.task, self.option, self.gradients = task, option, gradients
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.module = task.make()
        check_same(self.module)
        self.shapes = dict(task.make().named_parameters())
        self.model: nn.Module = self.module
        self.groups: list[Any] = [None]
        self.num_steps = 0
        self.peak: ModelStates | None = None
        self.prepare()
        self.params = self.params or list(self.module.parameters())
        self.optimizer = self.make_optimizer()

    @classmethod
    def check(cls, setup: Setup) -> None:
        """Raise `ArgumentError` if the system cannot split the model or the batch."""

    # --- what systems change --------------------------------------------------------------

    def prepare(self) -> None:
        """Set the system up around ``module``."""

    def make_optimizer(self) -> Any:
        """The optimizer of what this rank holds."""
        return self.task.make_optimizer(self.params)

    def share(self, batch: Tensor) -> Tensor:
        """The samples of a batch that this rank computes."""
        fits, size = len(batch) % self.world_size == 0, self.world_size
        require(fits, "batches", "the ranks do not share it", f"a multiple of {size}", len(batch))
        return batch.chunk(self.world_size)[self.rank]

    def compute(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Compute the gradients of a share; return the loss."""
        with phase("forward"):
            loss = self.loss(self.model(inputs), targets)
        with phase("backward"):
            torch.autograd.backward(loss)
        with phase("average"):
            self.average()
        return loss.detach()

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of some outputs."""
        return next_token_loss(outputs, targets)

    def average(self) -> None:
        """Let gradients be those of the whole batch."""

    def update(self) -> None:
        """Do the optimizer's step, and what follows it."""
        self.optimizer.step()

    def forget(self) -> None:
        """Forget the gradients of the step before."""
        self.optimizer.zero_grad()

    def memory(self) -> ModelStates:
        """Bytes that this rank holds."""
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        return ModelStates(
            storage_nbytes(self.params),
            storage_nbytes(param.grad for param in self.params),
            storage_nbytes(value for value in states if isinstance(value, Tensor) and value.ndim),
        )

    def whole(self) -> dict[str, Tensor]:
        """The parameters of the model by name, whole; all ranks call it."""
        return {name: param.detach() for name, param in self.module.named_parameters()}

    def nbytes_sent(self) -> int:
        """Bytes that this rank has sent so far."""
        return sum(map(bytes_sent, self.groups))

    def overlap(self) -> float | None:
        """Share of the last step's communication behind backward; ``None`` if unknown."""
        return None

    def bubble(self) -> float | None:
        """Share of the last step in which this rank waited for other stages; ``None`` if none."""
        return None

    def close(self) -> None:
        """Release the groups of the system."""

    # --- the loop -------------------------------------------------------------------------

    def steps(self, batches: Iterable[Tensor]) -> Iterator[Tensor]:
        """Train on batches of all ranks, indices of samples; yield this rank's loss of each step.

        Raises
        ------
        ArgumentError
            The ranks cannot share a batch; all ranks raise it, and the step was not begun.
        RingcollError
            A message or a collective failed.
        """
        for batch in batches:
            with phase("step"):
                share = self.share(batch)
                self.forget()
                loss = self.compute(
                    self.task.examples.train_inputs[share], self.task.examples.train_targets[share]
                )
                if self.num_steps == 1:  # the optimizer has its state
                    self.peak = self.memory()
                with phase("update"):
                    self.update()
            self.num_steps += 1
            yield loss
