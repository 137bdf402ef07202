"""Trainers whose ranks hold the whole model, and compute its gradients together."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ringcoll.training.checks import require
from ringcoll.training.compression import CompressedGradients, Compressor
from ringcoll.training.compressors import Int8, PowerSGD, TopK
from ringcoll.training.data_parallel import (
    BucketedDataParallel,
    HookOptions,
    all_reduce_hook,
    average_gradients,
)
from ringcoll.training.models import Transformer
from ringcoll.training.phases import phase, waiting
from ringcoll.training.ring_attention import context_parallel
from ringcoll.training.sharded import ShardedAdamW
from ringcoll.training.state_bytes import ModelStates
from ringcoll.training.trainer import Setup, Trainer

__all__ = [
    "COMPRESSORS",
    "BucketedTrainer",
    "CompressedTrainer",
    "ContextTrainer",
    "DDPTrainer",
    "HookedDDPTrainer",
    "OneProcessTrainer",
    "PerParameterTrainer",
    "ShardedTrainer",
]

COMPRESSORS: dict[str, Callable[[], Compressor]] = {
    "topk": lambda: TopK(0.1),
    "int8": Int8,
    "powersgd": lambda: PowerSGD(4),
}
"""The compressors by name, with usual options."""


class OneProcessTrainer(Trainer):
    """No messages: each rank trains on the batches of all ranks."""

    def share(self, batch: Tensor) -> Tensor:
        """All samples."""
        return batch

    def nbytes_sent(self) -> int:
        """Nothing is sent."""
        return 0


# --- data parallel --------------------------------------------------------------------


class PerParameterTrainer(Trainer):
    """An all-reduce for each parameter, after backward."""

    takes_algorithm = takes_wire = True

    def average(self) -> None:
        """Average each gradient."""
        average_gradients(self.module, **self.gradients.options)

    def overlap(self) -> float:
        """Nothing is sent before backward is over."""
        return 0.0


class BucketedTrainer(Trainer):
    """An all-reduce for each bucket, while backward goes on."""

    takes_algorithm = takes_wire = True
    model: BucketedDataParallel

    def prepare(self) -> None:
        """Wrap the module."""
        options = self.gradients.options
        self.model = BucketedDataParallel(
            self.module, bucket_bytes=self.gradients.bucket_bytes, **options
        )

    def average(self) -> None:
        """Wait for the buckets."""
        self.model.finish()

    def overlap(self) -> float | None:
        """The overlap that the buckets report."""
        return self.model.last_step.overlap if self.model.last_step else None


class DDPTrainer(Trainer):
    """torch's ``DistributedDataParallel``, on a group of its own."""

    takes_algorithm = True

    def prepare(self) -> None:
        """Wrap the module."""
        algorithm = self.gradients.algorithm
        if algorithm is None:
            group = dist.new_group(backend="gloo")
        else:
            options = import_module("ringcoll").Options(algorithm=algorithm)
            group = dist.new_group(backend="ringcoll", pg_options=options)
        self.groups = [group]
        self.model = self.wrapped(group)

    def wrapped(self, group: Any) -> DistributedDataParallel:
        """The module in torch's wrapper."""
        return DistributedDataParallel(
            self.module,
            process_group=group,
            bucket_cap_mb=self.gradients.bucket_bytes / (1 << 20),
        )

    def compute(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Compute the gradients; torch averages them."""
        with phase("forward"):
            loss = self.loss(self.model(inputs), targets)
        with phase("backward"), ExitStack() as ends:
            # torch waits for the all-reduces in a callback of backward; this callback precedes it.
            engine: Any = torch.autograd.Variable._execution_engine
            wait = lambda: ends.enter_context(waiting(None))  # noqa: E731
            loss.register_hook(lambda _: engine.queue_callback(wait))  # type: ignore[no-untyped-call]
            torch.autograd.backward(loss)
        return loss.detach()

    def nbytes_sent(self) -> int:
        """Counted on ringcoll's group; on gloo, what a ring sends."""
        if self.gradients.algorithm is not None:
            return super().nbytes_sent()
        k, nbytes = self.world_size, sum(param.nbytes for param in self.params)
        return self.num_steps * (2 * (k - 1) * nbytes // k)

    def close(self) -> None:
        """Destroy the group."""
        dist.destroy_process_group(self.groups[0])


class HookedDDPTrainer(DDPTrainer):
    """``DistributedDataParallel`` on the default group, which calls ringcoll in a hook."""

    takes_wire = True

    def prepare(self) -> None:
        """Wrap the module, and register the hook."""
        self.model = self.wrapped(None)
        self.model.register_comm_hook(HookOptions(**self.gradients.options), all_reduce_hook)

    def close(self) -> None:
        """The default group is not this trainer's."""


class CompressedTrainer(Trainer):
    """Compressed gradients with error feedback."""

    is_exact = False

    def prepare(self) -> None:
        """Make a compressor for each parameter."""
        self._compressed = CompressedGradients(self.module, COMPRESSORS[self.option])

    def average(self) -> None:
        """Average what the ranks send."""
        self._compressed.average()


class ContextTrainer(Trainer):
    """Sequences split over the ranks, with ring attention."""

    needs_model = "transformer"

    @classmethod
    def check(cls, setup: Setup) -> None:
        """The ranks have to share the sequences evenly."""
        context, world_size = setup.task.shape.context, setup.world_size
        require(context % (2 * world_size) == 0, "ranks", "they do not share the sequences evenly",
                f"half a divisor of {context}", world_size)  # fmt: skip

    def prepare(self) -> None:
        """Let attention go round the ring."""
        assert isinstance(self.module, Transformer)
        self._places = context_parallel(self.module).embedding.places

    def share(self, batch: Tensor) -> Tensor:
        """All samples."""
        return batch

    def compute(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Compute the gradients of this rank's places."""
        return super().compute(inputs[:, self._places], targets[:, self._places])

    def average(self) -> None:
        """The loss is the average of the ranks' losses."""
        average_gradients(self.module)


class ShardedTrainer(Trainer):
    """AdamW with sharded state, gradients, parameters."""

    needs_optimizer = "adamw"

    optimizer: ShardedAdamW

    def make_optimizer(self) -> ShardedAdamW:
        """AdamW of this rank's shards."""
        return ShardedAdamW(
            self.module,
            stage=int(self.option),
            lr=self.task.learning_rate,
            bucket_bytes=self.gradients.bucket_bytes,
        )

    def average(self) -> None:
        """Wait for the shards of the gradients."""
        self.optimizer.finish()

    def forget(self) -> None:
        """Each step forgets its gradients."""

    def memory(self) -> ModelStates:
        """Bytes of the shards."""
        return self.optimizer.memory()

    def whole(self) -> dict[str, Tensor]:
        """The parameters of this rank's module, gathered."""
        self.optimizer.gather()
        return {name: param.detach().clone() for name, param in self.module.named_parameters()}

    def close(self) -> None:
        """Wait for what is on its way."""
        self.optimizer.gather()
