"""All training systems as trainers, by name: the one table.

The table is read without torch, for pages of help; `make_trainer` imports `systems`. A check is a
function of the task, of what follows the colon in the system's name, and of the number of ranks; it
raises `ArgumentError` if the ranks cannot split the model or the batch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from ringcoll.errors import ArgumentError
from ringcoll.training.arguments import (
    GRAPHS,
    LAYERS,
    LEARNING_RATES,
    MICROBATCHES,
    MODELS,
    require,
)
from ringcoll.training.pipeline.pipeline_schedule import SCHEDULES

if TYPE_CHECKING:
    from ringcoll.training.task import Task
    from ringcoll.training.trainer import Gradients, Trainer

_SIZES = {"perceptron": (256, 32), "transformer": (64, 8)}  # width and batch, if none are given


def _check_tensor(task: Task, option: str, ranks: int) -> None:
    if task.model == "perceptron":
        require(task.layers == 1 or task.width % ranks == 0, "width", "the ranks do not divide it",
                f"a multiple of {ranks}", task.width)  # fmt: skip
    else:
        require(task.shape.heads % ranks == 0, "ranks", "they do not divide the heads",
                f"a divisor of {task.shape.heads}", ranks)  # fmt: skip


def _check_sequence(task: Task, option: str, ranks: int) -> None:
    _check_tensor(task, option, ranks)
    require(task.shape.context % ranks == 0, "ranks", "they do not divide the tokens",
            f"a divisor of {task.shape.context}", ranks)  # fmt: skip


def _check_context(task: Task, option: str, ranks: int) -> None:
    tokens = task.shape.context
    require(tokens % (2 * ranks) == 0, "ranks", "they do not share the sequences evenly",
            f"half a divisor of {tokens}", ranks)  # fmt: skip


def _check_stages(task: Task, num_stages: int, batch: int) -> None:
    require(task.layers >= num_stages, "layers", "a stage would have no layer",
            f"at least {num_stages}", task.layers)  # fmt: skip
    require(batch % MICROBATCHES == 0, "batch",
            f"the {MICROBATCHES} micro-batches do not divide it",
            f"a multiple of {MICROBATCHES}", batch)  # fmt: skip


def _check_mesh(task: Task, option: str, ranks: int) -> None:
    data, pipes, tensors = map(int, option.split("x"))
    places = data * pipes * tensors
    require(places == ranks, "ranks", "the mesh has other places", places, ranks)
    _check_tensor(task, option, tensors)
    _check_stages(task, pipes, task.batch * pipes * tensors)


class TrainerEntry(NamedTuple):
    """A system, and all that has to be known of it.

    ``options`` may follow the colon in its name, ``None`` for the sizes of a mesh; ``placeholder``
    stands for them in the help.
    """

    about: str
    system: str
    """Name of the function of `ringcoll.training.systems` that sets a trainer up."""
    options: tuple[str, ...] | None = ("",)
    placeholder: str = ""
    check: Callable[[Task, str, int], object] = lambda task, option, ranks: None
    """Raises `ArgumentError` if so many ranks cannot split the model or the batch."""
    meets: bool = True
    """Whether all ranks hold the same model after each step, whole or in pieces."""
    is_exact: bool = True
    """Whether the model is that of one process, up to rounding."""
    takes_algorithm: bool = False
    """Whether the algorithm of `Gradients` is used."""
    takes_wire: bool = False
    """Whether the wire dtype of `Gradients` is used."""
    needs_model: str | None = None
    needs_optimizer: str | None = None
    """The only model, and optimizer, that the system works with."""


TRAINERS = {
    "one-process": TrainerEntry(
        "no messages: each rank trains on the batches of all", "one_process"
    ),
    "per-parameter": TrainerEntry(
        "an all-reduce for each parameter, after backward",
        "per_parameter", takes_algorithm=True, takes_wire=True,
    ),
    "bucketed": TrainerEntry(
        "an all-reduce for each bucket, while backward goes on",
        "bucketed", takes_algorithm=True, takes_wire=True,
    ),
    "torch-ddp": TrainerEntry(
        "DistributedDataParallel on a group of --backend", "torch_ddp", takes_algorithm=True
    ),
    "torch-ddp-hook": TrainerEntry(
        "DistributedDataParallel that calls ringcoll in a hook",
        "torch_ddp_hook", takes_algorithm=True, takes_wire=True,
    ),
    "tensor": TrainerEntry(
        "each layer is split over the ranks; all see the samples of all",
        "tensor", check=_check_tensor,
    ),
    "sequence": TrainerEntry(
        "tensor, and activations between layers are split by tokens; transformer",
        "sequence", check=_check_sequence, needs_model="transformer",
    ),
    "context": TrainerEntry(
        "sequences are split over the ranks: ring attention; transformer",
        "context", check=_check_context, needs_model="transformer",
    ),
    "pipeline": TrainerEntry(
        "the layers are shared out; a batch passes in 4 micro-batches",
        "pipeline", tuple(SCHEDULES), "NAME",
        check=lambda task, option, ranks: _check_stages(task, ranks, task.batch * ranks),
    ),
    "sharded": TrainerEntry(
        "AdamW: each rank has a share of its state, 2: of gradients, 3: of parameters",
        "sharded", ("1", "2", "3"), "STAGE", needs_optimizer="adamw",
    ),
    "3d": TrainerEntry(
        "data x pipeline x tensor parallel; transformer",
        "mesh", None, "DxPxT", check=_check_mesh, needs_model="transformer",
    ),
    "gossip": TrainerEntry(
        "each rank averages its model with its neighbours'",
        "gossip", GRAPHS, "GRAPH", meets=False, is_exact=False,
    ),
    "local-sgd": TrainerEntry(
        "the ranks average their models every 8 steps",
        "local_sgd", meets=False, is_exact=False,
    ),
    "server": TrainerEntry(
        "rank 0 has the model, all others send gradients; sync or async",
        "server", ("sync", "async"), "HOW", meets=False, is_exact=False,
        check=lambda task, option, ranks: require(
            ranks > 1, "ranks", "a server needs workers", "at least 2", ranks
        ),
    ),
}  # fmt: skip
"""The systems by name, without what follows the colon."""


def trainer_names() -> list[str]:
    """All names, as help and errors list them: ``server:sync|async``."""
    options = {name: "|".join(entry.options or ["2x2x2"]) for name, entry in TRAINERS.items()}
    return [f"{name}:{known}" if known else name for name, known in options.items()]


def find_trainer(name: str) -> tuple[TrainerEntry, str]:
    """The system of a name, and what follows the colon; `ArgumentError` is raised for other names.

    >>> entry, option = find_trainer("pipeline:1f1b")
    >>> entry.is_exact, option
    (True, '1f1b')
    """
    base, _, option = name.partition(":")
    entry = TRAINERS.get(base)
    if entry is not None:
        is_mesh = entry.options is None and re.fullmatch(r"[1-9]\d*(x[1-9]\d*){2}", option)
        if is_mesh or option in (entry.options or ()):
            return entry, option
    raise ArgumentError(
        "no such trainer", argument="trainer", expected=", ".join(trainer_names()), got=name
    )


def check_trainer(name: str, task: Task, world_size: int, gradients: Gradients) -> None:
    """Raise `ArgumentError` unless a trainer can train a task on so many ranks.

    It may need another model or optimizer, be unable to split the model or the
    batch, or be unable to average gradients natively.
    """
    entry, option = find_trainer(name)
    for argument in ("model", "optimizer"):
        needed, chosen = getattr(entry, f"needs_{argument}"), getattr(task, argument)
        require(needed in (None, chosen), argument, f"{name} needs another", needed, chosen)
    can_run = gradients.algorithm is not None or name == "torch-ddp"
    require(can_run, "algorithm", f"{name} does not average natively", "an algorithm", None)
    entry.check(task, option, world_size)


def make_trainer(name: str, task: Task, gradients: Gradients | None = None) -> Trainer:
    """Make this rank's trainer; all ranks of the default group call it.

    It raises as `check_trainer`, and `MismatchError` if the ranks begin with different models.

    Parameters
    ----------
    name
        A name of `TRAINERS`, with an option behind a colon if it has options.
    task
        What is trained; the same on all ranks.
    gradients
        How gradients are averaged, if the system leaves a choice.
    """
    import torch.distributed as dist

    from ringcoll.training import systems
    from ringcoll.training.trainer import Gradients, Trainer

    gradients = gradients or Gradients()
    check_trainer(name, task, dist.get_world_size(), gradients)
    entry, option = find_trainer(name)
    trainer = Trainer(task, option, gradients, meets=entry.meets)
    getattr(systems, entry.system)(trainer)
    if trainer.optimizer is None:
        trainer.optimizer = task.make_optimizer(trainer.params)
    return trainer


def usual_task(
    names: Iterable[str],
    *,
    model: str | None = None,
    optimizer: str | None = None,
    layers: int = LAYERS,
    width: int | None = None,
    batch: int | None = None,
    lr: float | None = None,
    seed: int = 0,
) -> Task:
    """A task for some trainers, with the usual value in place of each ``None``.

    Model and optimizer are those that a trainer needs, or a perceptron and SGD; all else is as for
    `Task`.
    """
    from ringcoll.training.task import Task

    entries = [find_trainer(name)[0] for name in names]
    model = model or next(filter(None, (entry.needs_model for entry in entries)), MODELS[0])
    if optimizer is None:
        needs = (entry.needs_optimizer for entry in entries)
        optimizer = next(filter(None, needs), next(iter(LEARNING_RATES)))
    usual_width, usual_batch = _SIZES[model]
    width, batch, lr = width or usual_width, batch or usual_batch, lr or LEARNING_RATES[optimizer]
    return Task(model, Task.load(model), layers, width, batch, optimizer, lr, seed)
