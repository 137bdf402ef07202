"""One shape for all training systems, so that they can be trained side by side.

A `Trainer` is one rank of a system. It takes batches of all ranks, picks what its rank computes,
and says what the rank holds, has sent, and has waited for. `ringcoll.training.trainers` has the
systems by name. A trainer is what a user would write around a system: make it, then step by step::

    trainer = make_trainer("sharded:2", task)
    for loss in trainer.steps(batches):      # of all ranks; each yields this rank's loss
        ...
    trainer.whole()                          # parameters of the whole model
    trainer.close()

A system is a function that sets a trainer up: it does what differs from plain data parallelism. A
check is a function of the task, of what follows the colon in the system's name, and of the number
of ranks; it raises `ArgumentError` if the system cannot split the model or the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ringcoll.runtime.collectives import bytes_sent
from ringcoll.runtime.watch import phase, waiting
from ringcoll.training.backend import Options
from ringcoll.training.data.hooks import HookOptions, all_reduce_hook
from ringcoll.training.data.parallel import BucketedDataParallel, average_gradients
from ringcoll.training.free.model_averages import Gossip, LocalSGD
from ringcoll.training.free.server import SERVER, ParameterServer, ServerWorker
from ringcoll.training.model_on_ranks import check_same, require, whole_parameters
from ringcoll.training.pipeline.pipeline_schedule import SCHEDULES
from ringcoll.training.pipeline.runner import Pipeline
from ringcoll.training.sharded.optimizer import ModelStates, ShardedAdamW, storage_nbytes
from ringcoll.training.split.context import context_parallel
from ringcoll.training.split.mesh import Mesh, ParallelTransformer
from ringcoll.training.split.tensor import tensor_parallel
from ringcoll.training.task import Task, Transformer, next_token_loss, stages

_MICROBATCHES = 4
_EVERY = 8  # steps between two meetings
_STALENESS = 4


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
    rank holds, ``groups`` the groups whose bytes are counted, ``None`` for the default group.
    ``peak`` has the bytes that this rank held when the second step's backward was over.

    If the ranks begin with different models, all raise `MismatchError`.
    """

    def __init__(self, task: Task, option: str, gradients: Gradients, *, meets: bool) -> None:
        self.task, self.option, self.gradients, self.meets = task, option, gradients, meets
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.module = task.make()
        check_same(self.module)
        self.shapes = dict(task.make().named_parameters())
        self.params: Sequence[Tensor] = list(self.module.parameters())
        self.groups: list[Any] = [None]
        self.num_steps = 0
        self.peak: ModelStates | None = None
        self.optimizer: Any = None  # made of the parameters at last, unless the system makes one

        # What a system may replace, in the order of a step.
        self.model: Callable[[Tensor], Tensor] = self.module
        # Train on batches of all ranks, indices of samples; yield this rank's loss of each step.
        self.steps: Callable[[Iterable[Tensor]], Iterator[Tensor]] = self.all_steps
        self.share: Callable[[Tensor], Tensor] = self._even_share  # of a batch, for this rank
        # Forget the gradients of the step before.
        self.forget: Callable[[], object] = lambda: self.optimizer.zero_grad()  # noqa: PLW0108
        # Compute the gradients of a share; return the loss.
        self.compute: Callable[[Tensor, Tensor], Tensor] = self.forward_and_backward
        self.loss: Callable[[Tensor, Tensor], Tensor] = next_token_loss  # the mean of outputs
        self.average: Callable[[], object] = lambda: None  # gradients, over the whole batch
        # Do the optimizer's step, and what follows it.
        self.update: Callable[[], object] = lambda: self.optimizer.step()  # noqa: PLW0108

        # What it holds, has sent, and has waited for.
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
            loss = self.loss(self.model(inputs), targets)
        with phase("backward"):
            torch.autograd.backward(loss)
        with phase("average"):
            self.average()
        return loss.detach()

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
            loss = trainer.loss(model(inputs), targets)
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


def hooked_ddp(trainer: Trainer) -> None:
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


def check_context(task: Task, option: str, world_size: int) -> None:
    """The ranks have to share the sequences evenly."""
    tokens = task.shape.context
    require(tokens % (2 * world_size) == 0, "ranks", "they do not share the sequences evenly",
            f"half a divisor of {tokens}", world_size)  # fmt: skip


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
        return whole_parameters(pieces, trainer.shapes, None, piece)

    trainer.share, trainer.whole = lambda batch: batch, whole


def check_tensor(task: Task, option: str, ranks: int) -> None:
    """Each rank needs a piece of each layer."""
    if task.model == "perceptron":
        require(task.layers == 1 or task.width % ranks == 0, "width", "the ranks do not divide it",
                f"a multiple of {ranks}", task.width)  # fmt: skip
    else:
        require(task.shape.heads % ranks == 0, "ranks", "they do not divide the heads",
                f"a divisor of {task.shape.heads}", ranks)  # fmt: skip


def check_sequence(task: Task, option: str, ranks: int) -> None:
    """The ranks have to divide the tokens, too."""
    check_tensor(task, option, ranks)
    require(task.shape.context % ranks == 0, "ranks", "they do not divide the tokens",
            f"a divisor of {task.shape.context}", ranks)  # fmt: skip


def tensor(trainer: Trainer, *, sequence: bool = False) -> None:
    """Each layer is split over the ranks."""
    tensor_parallel(trainer.module, sequence=sequence)
    trainer.params = list(trainer.module.parameters())
    _hold_pieces(trainer, trainer.rank)


def _check_stages(task: Task, num_stages: int, batch: int) -> None:
    require(task.layers >= num_stages, "layers", "a stage would have no layer",
            f"at least {num_stages}", task.layers)  # fmt: skip
    require(batch % _MICROBATCHES == 0, "batch",
            f"the {_MICROBATCHES} micro-batches do not divide it",
            f"a multiple of {_MICROBATCHES}", batch)  # fmt: skip


def _run_stages(trainer: Trainer, runner: Pipeline) -> None:
    """Count what goes from stage to stage, and the waits for other stages."""
    trainer.nbytes_sent = lambda: trainer.nbytes_of_groups() + runner.nbytes_sent
    trainer.bubble = lambda: runner.last_step.waited_s / runner.last_step.total_s


def check_pipeline(task: Task, option: str, world_size: int) -> None:
    """Each stage needs a layer, and each micro-batch a sample."""
    _check_stages(task, world_size, task.batch * world_size)


def pipeline(trainer: Trainer) -> None:
    """Each rank has a stage of the layers, through which micro-batches pass."""
    model, k = trainer.module, trainer.world_size
    schedule = SCHEDULES[trainer.option](k, _MICROBATCHES)
    stage = stages(model, k)[trainer.rank]
    trainer.params = list(stage.parameters())
    _hold_pieces(trainer, trainer.rank)
    tied = model.head.scores.weight if isinstance(model, Transformer) else None
    runner = Pipeline(stage, trainer.loss, schedule, tied=tied)
    trainer.compute = runner.step
    _run_stages(trainer, runner)


def check_mesh(task: Task, option: str, world_size: int) -> None:
    """The sizes have to make up the ranks, and each rank needs its part."""
    data, pipes, tensors = map(int, option.split("x"))
    places = data * pipes * tensors
    require(places == world_size, "ranks", "the mesh has other places", places, world_size)
    check_tensor(task, option, tensors)
    _check_stages(task, pipes, task.batch * pipes * tensors)


def mesh(trainer: Trainer) -> None:
    """Data, pipeline and tensor parallel at once."""
    box = Mesh(*map(int, trainer.option.split("x")))
    assert isinstance(trainer.module, Transformer)
    parallel = ParallelTransformer(trainer.module, box, num_microbatches=_MICROBATCHES)
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


def mixing(trainer: Trainer) -> None:
    """Parameters are averaged with those of neighbours."""
    gossip = Gossip(trainer.module, graph=trainer.option)
    _then(trainer, gossip.mix)
    trainer.nbytes_sent = lambda: gossip.nbytes_sent


def local(trainer: Trainer) -> None:
    """Parameters are averaged every few steps; parameters and outer state of then are kept."""
    averaging = LocalSGD(trainer.module, every=_EVERY)
    _then(trainer, averaging.step)

    def memory() -> ModelStates:
        states = trainer.states()
        return replace(states, optimizer=states.optimizer + storage_nbytes(averaging.kept()))

    trainer.memory = memory


def check_server(task: Task, option: str, world_size: int) -> None:
    """There has to be a worker."""
    require(world_size > 1, "ranks", "a server needs workers", "at least 2", world_size)


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
