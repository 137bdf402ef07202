"""One shape for all training systems, so that they can be trained side by side.

A `Trainer` is one rank of a system. It takes batches of all ranks, picks what its rank computes,
and says what the rank holds, has sent, and has waited for. `ringcoll.training.trainers` has the
systems by name. A trainer is what a user would write around a system: make it, then step by step::

    trainer = make_trainer("sharded:2", task)
    for loss in trainer.steps(batches):      # of all ranks; each yields this rank's loss
        ...
    trainer.whole()                          # parameters of the whole model
    trainer.close()
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.func import functional_call

from ringcoll.runtime.collectives import bytes_sent
from ringcoll.runtime.watch import phase
from ringcoll.training.arguments import require
from ringcoll.training.model_on_ranks import check_same, storage_nbytes
from ringcoll.training.models import next_token_loss
from ringcoll.training.sharded.optimizer import ModelStates
from ringcoll.training.task import Task


@dataclass(frozen=True)
class Gradients:
    """How gradients are averaged, by the trainers that have a choice.

    ``algorithm`` and ``wire_dtype`` are as for `ringcoll.all_reduce`; the algorithm ``None`` is
    gloo's own all-reduce. ``bucket_bytes`` is for trainers that have buckets.
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


class Trainer:
    """One rank of data-parallel training; a system replaces what it does differently.

    ``option`` is what follows the colon in the system's name, and ``meets`` says whether all ranks
    hold the same model after each step, whole or in pieces. ``params`` are the parameters that this
    rank holds, ``untrained`` the first weights of the whole model by name, ``groups`` the groups
    whose bytes are counted, ``None`` for the default group. ``peak`` has the bytes that this rank
    held when the second step's backward was over.

    If the ranks begin with different models, all raise `MismatchError`.
    """

    def __init__(self, task: Task, option: str, gradients: Gradients, *, meets: bool) -> None:
        self.task, self.option, self.gradients, self.meets = task, option, gradients, meets
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.module, self._untrained_module = task.make(), task.make()
        check_same(self.module)
        self.untrained: dict[str, Tensor] = dict(self._untrained_module.named_parameters())
        self.params: Sequence[Tensor] = list(self.module.parameters())
        self.groups: list[Any] = [None]
        self.num_steps = 0
        self.peak: ModelStates | None = None
        self.optimizer: Any = None  # made of the parameters at last, unless the system makes one

        # Functions that a system may replace, in the order of a step.
        self.model: Callable[[Tensor], Tensor] = self.module
        # Train on batches of all ranks, indices of samples; yield this rank's loss of each step.
        self.steps: Callable[[Iterable[Tensor]], Iterator[Tensor]] = self.all_steps
        self.share: Callable[[Tensor], Tensor] = self._even_share  # of a batch, for this rank
        # Forget the gradients of the step before.
        self.forget: Callable[[], object] = lambda: self.optimizer.zero_grad()  # noqa: PLW0108
        # Compute the gradients of a share; return the loss.
        self.compute: Callable[[Tensor, Tensor], Tensor] = self.forward_and_backward
        self.average: Callable[[], object] = lambda: None  # gradients, over the whole batch
        # Do the optimizer's step, and what follows it.
        self.update: Callable[[], object] = lambda: self.optimizer.step()  # noqa: PLW0108

        # Functions that measure, and the end.
        self.memory: Callable[[], ModelStates] = self.states  # bytes that this rank holds
        # The parameters of the model by name, whole; all ranks call it.
        self.whole: Callable[[], dict[str, Tensor]] = lambda: {
            name: param.detach() for name, param in self.module.named_parameters()
        }
        self.nbytes_sent: Callable[[], int] = self.nbytes_of_groups  # so far, by this rank
        # Share of the last step's communication behind backward; ``None`` if unknown.
        self.overlap: Callable[[], float | None] = lambda: None
        # Share of the last step in which this rank waited for other stages; ``None`` if none.
        self.bubble: Callable[[], float | None] = lambda: None
        self.close: Callable[[], object] = lambda: None  # releases the groups of the system

    def all_steps(self, batches: Iterable[Tensor]) -> Iterator[Tensor]:
        """Train on batches of all ranks, indices of samples; yield this rank's loss of each step.

        If the ranks cannot share a batch, all raise `ArgumentError`, and the step was not begun.
        """
        examples = self.task.examples
        for batch in batches:
            with phase("step"):
                share = self.share(batch)
                self.forget()
                loss = self.compute(examples.train_inputs[share], examples.train_targets[share])
                if self.num_steps == 1:  # the optimizer has its state
                    self.peak = self.memory()
                with phase("update"):
                    self.update()
            self.num_steps += 1
            yield loss

    def _even_share(self, batch: Tensor) -> Tensor:
        fits, size = len(batch) % self.world_size == 0, self.world_size
        require(fits, "batches", "the ranks do not share it", f"a multiple of {size}", len(batch))
        return batch.chunk(self.world_size)[self.rank]

    def forward_and_backward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Compute the gradients of a share by autograd, and average them; return the loss."""
        with phase("forward"):
            loss = next_token_loss(self.model(inputs), targets)
        with phase("backward"):
            torch.autograd.backward(loss)
        with phase("average"):
            self.average()
        return loss.detach()

    @torch.no_grad()
    def test(self, weights: dict[str, Tensor]) -> tuple[float, float]:
        """Loss and accuracy of the whole model with some weights, on what is not trained on."""
        examples = self.task.examples
        outputs = functional_call(self._untrained_module, weights, examples.test_inputs)
        right = (outputs.argmax(-1) == examples.test_targets).float().mean()
        return float(next_token_loss(outputs, examples.test_targets)), float(right)

    def states(self) -> ModelStates:
        """Bytes of parameters, gradients and the state of a plain optimizer."""
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        return ModelStates(
            storage_nbytes(self.params),
            storage_nbytes(param.grad for param in self.params),
            storage_nbytes(value for value in states if isinstance(value, Tensor) and value.ndim),
        )

    def nbytes_of_groups(self) -> int:
        """Bytes that this rank has sent in collectives so far."""
        return sum(map(bytes_sent, self.groups))
