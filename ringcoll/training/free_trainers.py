"""Trainers out of lock-step: each rank holds a model of its own, or works for a server."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ringcoll.training.checks import require
from ringcoll.training.gossip import Gossip
from ringcoll.training.local_sgd import LocalSGD, diloco
from ringcoll.training.phases import phase
from ringcoll.training.server import SERVER, ParameterServer, ServerWorker
from ringcoll.training.state_bytes import ModelStates, storage_nbytes
from ringcoll.training.trainer import Setup, Trainer

__all__ = ["DiLoCoTrainer", "GossipTrainer", "LocalTrainer", "ServerTrainer"]

_EVERY = 8  # steps between two meetings; the paper of DiLoCo has 500, of some 90,000
_STALENESS = 4


class GossipTrainer(Trainer):
    """Averages with neighbours."""

    meets = is_exact = False

    def prepare(self) -> None:
        """Begin with rank 0's parameters."""
        self._gossip = Gossip(self.module, graph=self.option)

    def update(self) -> None:
        """Step, and average with the neighbours."""
        self.optimizer.step()
        with phase("average"):
            self._gossip.mix()

    def nbytes_sent(self) -> int:
        """Bytes to the neighbours."""
        return self._gossip.nbytes_sent


class LocalTrainer(Trainer):
    """Averages every few steps."""

    meets = is_exact = False

    def prepare(self) -> None:
        """Begin with rank 0's parameters."""
        self._averaging = LocalSGD(self.module, every=_EVERY)

    def update(self) -> None:
        """Step, and meet the others every few steps."""
        self.optimizer.step()
        with phase("average"):
            self._averaging.step()

    def memory(self) -> ModelStates:
        """With the parameters of the last meeting, and the outer optimizer's state."""
        states = super().memory()
        outer = storage_nbytes(self._averaging.kept())
        return replace(states, optimizer=states.optimizer + outer)


class DiLoCoTrainer(LocalTrainer):
    """Averages every few steps, with an outer optimizer."""

    def prepare(self) -> None:
        """Begin with rank 0's parameters."""
        self._averaging = diloco(self.module, every=_EVERY)


class ServerTrainer(Trainer):
    """A parameter server on rank 0; all other ranks are workers, and share its part of the batch."""

    meets = is_exact = False

    @classmethod
    def check(cls, setup: Setup) -> None:
        """There has to be a worker."""
        size = setup.world_size
        require(size > 1, "ranks", "a server needs workers", "at least 2", size)

    def prepare(self) -> None:
        """Count what was sent in earlier calls of `steps`."""
        self._sent = 0

    def make_optimizer(self) -> torch.optim.Optimizer:
        """With bounded staleness, each worker's step counts for its share."""
        is_async = self.option == "async"
        lr = self.task.learning_rate
        return self.task.make_optimizer(self.params, lr / (self.world_size - 1) if is_async else lr)

    def share(self, batch: Tensor) -> Tensor:
        """The workers share the batch."""
        workers = self.world_size - 1
        fits, least = len(batch) >= workers, f"at least {workers}"
        require(fits, "batches", "there is not a sample for each worker", least, len(batch))
        return batch.tensor_split(self.world_size - 1)[self.rank - 1]

    def steps(self, batches: Iterable[Tensor]) -> Iterator[Tensor]:
        """Serve, or work until the batches are over; only workers have steps."""
        if self.rank == SERVER:
            staleness = _STALENESS if self.option == "async" else None
            return self._serve(ParameterServer(self.module, self.optimizer, staleness=staleness))
        self._worker = ServerWorker(self.module)
        return self._work(super().steps(batches))

    def _serve(self, server: ParameterServer) -> Iterator[Tensor]:
        with phase("serve"):
            server.serve(self._look)
        self._sent += server.nbytes_sent
        yield from ()

    def _work(self, steps: Iterator[Tensor]) -> Iterator[Tensor]:
        try:
            with self._worker:
                yield from steps
        finally:
            self._sent += self._worker.nbytes_sent

    def _look(self) -> None:
        """Measure the server's memory, when the optimizer has its state."""
        self.num_steps += 1
        if self.num_steps == 2:
            self.peak = self.memory()

    def update(self) -> None:
        """Send gradients, and get parameters."""
        self._worker.step()

    def nbytes_sent(self) -> int:
        """Bytes between server and workers."""
        return self._sent
