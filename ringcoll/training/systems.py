"""The systems: each a function that sets a `Trainer` up.

It does what differs from plain data parallelism; `ringcoll.training.trainers` has the systems by
name, and checks beforehand that a system can split the model and the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ringcoll.runtime.watch import phase, waiting
from ringcoll.training.arguments import MICROBATCHES, require
from ringcoll.training.backend import Options
from ringcoll.training.data.averages import average_gradients
from ringcoll.training.data.bucketed import BucketedDataParallel
from ringcoll.training.data.hooks import HookOptions, all_reduce_hook
from ringcoll.training.free.gossip import Gossip
from ringcoll.training.free.local_sgd import LocalSGD
from ringcoll.training.free.server import SERVER, ParameterServer, ServerWorker
from ringcoll.training.model_on_ranks import storage_nbytes, whole_parameters
from ringcoll.training.models import Transformer, next_token_loss, stages
from ringcoll.training.pipeline.pipeline_schedule import SCHEDULES
from ringcoll.training.pipeline.runner import Pipeline
from ringcoll.training.sharded.optimizer import ModelStates, ShardedAdamW
from ringcoll.training.split.context import context_parallel
from ringcoll.training.split.mesh import Mesh, ParallelTransformer
from ringcoll.training.split.tensor import tensor_parallel
from ringcoll.training.trainer import Trainer

_EVERY = 8  # steps between two meetings of local SGD
_STALENESS = 4


def one_process(trainer: Trainer) -> None:
    """Each rank trains on the batches of all ranks, without messages."""
    trainer.share, trainer.nbytes_sent = lambda batch: batch, lambda: 0


# --- data parallel --------------------------------------------------------------------


def per_parameter(trainer: Trainer) -> None:
    """Each gradient is averaged after backward, and nothing is sent before."""
    trainer.average = lambda: average_gradients(trainer.module, **trainer.gradients.options)
    trainer.overlap = lambda: 0.0


def bucketed(trainer: Trainer) -> None:
    """Buckets are averaged while backward goes on."""
    gradients = trainer.gradients
    trainer.model = model = BucketedDataParallel(
        trainer.module, bucket_bytes=gradients.bucket_bytes, **gradients.options
    )
    trainer.average = model.finish
    trainer.overlap = lambda: model.last_step.overlap if model.last_step else None


def _wrapped(trainer: Trainer, group: Any) -> DistributedDataParallel:
    """The module in torch's wrapper, which averages its gradients in backward."""
    megabytes = trainer.gradients.bucket_bytes / (1 << 20)
    model = DistributedDataParallel(trainer.module, process_group=group, bucket_cap_mb=megabytes)

    def compute(inputs: Tensor, targets: Tensor) -> Tensor:
        with phase("forward"):
            loss = next_token_loss(model(inputs), targets)
        with phase("backward"), ExitStack() as ends:
            # torch waits for the all-reduces in a callback of backward; this callback precedes it.
            engine: Any = torch.autograd.Variable._execution_engine
            wait = lambda: ends.enter_context(waiting(None))  # noqa: E731
            loss.register_hook(lambda _: engine.queue_callback(wait))  # type: ignore[no-untyped-call]
            torch.autograd.backward(loss)
        return loss.detach()

    trainer.model, trainer.compute = model, compute
    return model


def torch_ddp(trainer: Trainer) -> None:
    """Torch's ``DistributedDataParallel`` averages, on a group of its own."""
    algorithm, k = trainer.gradients.algorithm, trainer.world_size
    if algorithm is None:
        group = dist.new_group(backend="gloo")
        nbytes = sum(param.nbytes for param in trainer.params)
        # gloo's bytes are not counted: they are taken to be those of a ring.
        trainer.nbytes_sent = lambda: trainer.num_steps * (2 * (k - 1) * nbytes // k)
    else:
        options = Options(algorithm=algorithm)
        group = dist.new_group(backend="ringcoll", pg_options=options)
    trainer.groups = [group]
    _wrapped(trainer, group)
    trainer.close = lambda: dist.destroy_process_group(group)


def torch_ddp_hook(trainer: Trainer) -> None:
    """``DistributedDataParallel`` on the default group calls ringcoll in a hook."""
    options = HookOptions(**trainer.gradients.options)
    _wrapped(trainer, None).register_comm_hook(options, all_reduce_hook)


def sharded(trainer: Trainer) -> None:
    """The optimizer averages, and keeps shards of state, gradients and parameters."""
    trainer.optimizer = optimizer = ShardedAdamW(
        trainer.module,
        stage=int(trainer.option),
        lr=trainer.task.learning_rate,
        bucket_bytes=trainer.gradients.bucket_bytes,
    )
    trainer.average, trainer.memory = optimizer.finish, optimizer.memory
    trainer.forget = lambda: None  # each step forgets its gradients

    def whole() -> dict[str, Tensor]:
        optimizer.gather()
        return {name: param.detach().clone() for name, param in trainer.module.named_parameters()}

    trainer.whole, trainer.close = whole, optimizer.gather  # which waits for what is on its way


# --- split models ---------------------------------------------------------------------


def context(trainer: Trainer) -> None:
    """Attention goes round a ring; the loss is the average of the ranks' losses."""
    assert isinstance(trainer.module, Transformer)
    own = context_parallel(trainer.module).embedding.places
    trainer.share = lambda batch: batch
    trainer.compute = lambda inputs, targets: trainer.forward_and_backward(
        inputs[:, own], targets[:, own]
    )
    trainer.average = lambda: average_gradients(trainer.module)


def _hold_pieces(trainer: Trainer, piece: int) -> None:
    """Each rank computes a part of the model on all samples; ``piece`` is its place, from 0."""

    def whole() -> dict[str, Tensor]:
        held = {id(param) for param in trainer.params}
        named = trainer.module.named_parameters()
        pieces = {name: param for name, param in named if id(param) in held}
        return whole_parameters(pieces, trainer.untrained, None, piece)

    trainer.share, trainer.whole = lambda batch: batch, whole


def tensor(trainer: Trainer, *, by_tokens: bool = False) -> None:
    """Each layer is split over the ranks."""
    tensor_parallel(trainer.module, sequence=by_tokens)
    trainer.params = list(trainer.module.parameters())
    _hold_pieces(trainer, trainer.rank)


def sequence(trainer: Trainer) -> None:
    """Each layer is split over the ranks, and activations between layers by tokens."""
    tensor(trainer, by_tokens=True)


def _run_stages(trainer: Trainer, runner: Pipeline) -> None:
    """Count what goes from stage to stage, and the waits for other stages."""
    trainer.nbytes_sent = lambda: trainer.nbytes_of_groups() + runner.nbytes_sent
    trainer.bubble = lambda: runner.last_step.waited_s / runner.last_step.total_s


def pipeline(trainer: Trainer) -> None:
    """Each rank has a stage of the layers, through which micro-batches pass."""
    model, k = trainer.module, trainer.world_size
    schedule = SCHEDULES[trainer.option](k, MICROBATCHES)
    stage = stages(model, k)[trainer.rank]
    trainer.params = list(stage.parameters())
    _hold_pieces(trainer, trainer.rank)
    tied = model.head.scores.weight if isinstance(model, Transformer) else None
    runner = Pipeline(stage, next_token_loss, schedule, tied=tied)
    trainer.compute = runner.step
    _run_stages(trainer, runner)


def mesh(trainer: Trainer) -> None:
    """Data, pipeline and tensor parallel at once."""
    box = Mesh(*map(int, trainer.option.split("x")))
    assert isinstance(trainer.module, Transformer)
    parallel = ParallelTransformer(trainer.module, box, num_microbatches=MICROBATCHES)
    trainer.params, trainer.groups = parallel.params, [*box.groups.values()]
    _hold_pieces(trainer, box.place["tensor"])
    trainer.compute, trainer.close = parallel.step, box.close
    _run_stages(trainer, parallel.pipeline)


# --- out of lock-step: each rank holds a model of its own, or works for a server ----------


def _then(trainer: Trainer, meet: Callable[[], object]) -> None:
    """After its own step of the optimizer, a rank meets others."""

    def update() -> None:
        trainer.optimizer.step()
        with phase("average"):
            meet()

    trainer.update = update


def gossip(trainer: Trainer) -> None:
    """Parameters are averaged with those of neighbours."""
    neighbours = Gossip(trainer.module, graph=trainer.option)
    _then(trainer, neighbours.mix)
    trainer.nbytes_sent = lambda: neighbours.nbytes_sent


def local_sgd(trainer: Trainer) -> None:
    """Parameters are averaged every few steps; parameters and outer state of then are kept."""
    averaging = LocalSGD(trainer.module, every=_EVERY)
    _then(trainer, averaging.step)

    def memory() -> ModelStates:
        states = trainer.states()
        return replace(states, optimizer=states.optimizer + storage_nbytes(averaging.kept()))

    trainer.memory = memory


def server(trainer: Trainer) -> None:
    """Rank 0 has the model; all other ranks are workers, and share its part of the batch."""
    staleness = _STALENESS if trainer.option == "async" else None
    workers, nbytes = trainer.world_size - 1, [0]  # sent in the calls of `steps` so far
    # With bounded staleness, each worker's step counts for its share.
    lr = trainer.task.learning_rate / (1 if staleness is None else workers)
    trainer.optimizer = trainer.task.make_optimizer(trainer.params, lr)

    def share(batch: Tensor) -> Tensor:
        fits, least = len(batch) >= workers, f"at least {workers}"
        require(fits, "batches", "there is not a sample for each worker", least, len(batch))
        return batch.tensor_split(workers)[trainer.rank - 1]

    def serve(parameters: ParameterServer) -> Iterator[Tensor]:
        """Serve until the batches are over; only workers have steps."""

        def count() -> None:
            trainer.num_steps += 1
            if trainer.num_steps == 2:  # the optimizer has its state
                trainer.peak = trainer.memory()

        with phase("serve"):
            parameters.serve(count)
        nbytes[0] += parameters.nbytes_sent
        yield from ()

    def work(worker: ServerWorker, batches: Iterable[Tensor]) -> Iterator[Tensor]:
        trainer.update = worker.step  # sends gradients, and gets parameters
        try:
            with worker:
                yield from trainer.all_steps(batches)
        finally:
            nbytes[0] += worker.nbytes_sent

    def steps(batches: Iterable[Tensor]) -> Iterator[Tensor]:
        module = trainer.module  # all ranks begin alike in the call, before the first step
        if trainer.rank == SERVER:
            return serve(ParameterServer(module, trainer.optimizer, staleness=staleness))
        return work(ServerWorker(module), batches)

    trainer.share, trainer.steps, trainer.nbytes_sent = share, steps, lambda: nbytes[0]
