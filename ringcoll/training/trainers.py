"""All training systems as trainers, by name.

========================  ====================================================================
name                      system
========================  ====================================================================
one-process               no messages: each rank trains on the batches of all ranks
per-parameter             an all-reduce for each parameter, after backward
bucketed                  an all-reduce for each bucket, while backward goes on
torch-ddp                 torch's ``DistributedDataParallel``
torch-ddp-hook            the same, with ringcoll in a hook
compressed:HOW            compressed gradients with error feedback
tensor                    each layer split over the ranks
sequence                  and activations between the layers by tokens
context                   sequences split over the ranks, with ring attention
pipeline:SCHEDULE         layers in stages, and batches in micro-batches
sharded:STAGE             AdamW with sharded state, gradients, parameters
3d:DxPxT                  data x pipeline x tensor
gossip:GRAPH              averages with neighbours
local-sgd, diloco         averages every 8 steps, without and with an outer optimizer
server:sync, server:async a parameter server on rank 0, and workers on all others
========================  ====================================================================
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

import torch.distributed as dist

from ringcoll.errors import ArgumentError
from ringcoll.training import free_trainers as free
from ringcoll.training import replicated_trainers as replicated
from ringcoll.training import split_trainers as split
from ringcoll.training.checks import require
from ringcoll.training.gossip import GRAPHS
from ringcoll.training.pipeline_orders import SCHEDULES
from ringcoll.training.task import LEARNING_RATES, MODELS, Task
from ringcoll.training.trainer import Gradients, Setup, Trainer

__all__ = [
    "TRAINERS",
    "TrainerEntry",
    "check_trainer",
    "find_trainer",
    "make_trainer",
    "trainer_names",
    "usual_task",
]

_SIZES = {"perceptron": (256, 32), "transformer": (64, 8)}  # width and batch, if none are given


class TrainerEntry(NamedTuple):
    """A system, and what may follow the colon in its name; ``None`` for the sizes of a mesh."""

    system: type[Trainer]
    options: tuple[str, ...] | None = ("",)


TRAINERS = {
    "one-process": TrainerEntry(replicated.OneProcessTrainer),
    "per-parameter": TrainerEntry(replicated.PerParameterTrainer),
    "bucketed": TrainerEntry(replicated.BucketedTrainer),
    "torch-ddp": TrainerEntry(replicated.DDPTrainer),
    "torch-ddp-hook": TrainerEntry(replicated.HookedDDPTrainer),
    "compressed": TrainerEntry(replicated.CompressedTrainer, tuple(replicated.COMPRESSORS)),
    "tensor": TrainerEntry(split.TensorTrainer),
    "sequence": TrainerEntry(split.SequenceTrainer),
    "context": TrainerEntry(replicated.ContextTrainer),
    "pipeline": TrainerEntry(split.PipelineTrainer, tuple(SCHEDULES)),
    "sharded": TrainerEntry(replicated.ShardedTrainer, ("1", "2", "3")),
    "3d": TrainerEntry(split.MeshTrainer, None),
    "gossip": TrainerEntry(free.GossipTrainer, GRAPHS),
    "local-sgd": TrainerEntry(free.LocalTrainer),
    "diloco": TrainerEntry(free.DiLoCoTrainer),
    "server": TrainerEntry(free.ServerTrainer, ("sync", "async")),
}
"""The systems by name, without what follows the colon."""


def trainer_names() -> list[str]:
    """All names, as help and errors list them: ``server:sync|async``."""
    return [
        name + ("" if options == ("",) else f":{'|'.join(options or ['2x2x2'])}")
        for name, (_, options) in TRAINERS.items()
    ]


def find_trainer(name: str) -> tuple[type[Trainer], str]:
    """The system of a name, and what follows the colon.

    Raises
    ------
    ArgumentError
        There is no such system, or it has no such option.

    Examples
    --------
    >>> system, option = find_trainer("pipeline:1f1b")
    >>> system.__name__, option
    ('PipelineTrainer', '1f1b')
    """
    base, _, option = name.partition(":")
    entry = TRAINERS.get(base)
    if entry is not None:
        is_mesh = entry.options is None and re.fullmatch(r"[1-9]\d*(x[1-9]\d*){2}", option)
        if is_mesh or option in (entry.options or ()):
            return entry.system, option
    raise ArgumentError(
        "no such trainer", argument="trainer", expected=", ".join(trainer_names()), got=name
    )


def check_trainer(name: str, task: Task, world_size: int, gradients: Gradients) -> None:
    """Make sure that a trainer can train a task on so many ranks; parameters as for `make_trainer`.

    Raises
    ------
    ArgumentError
        There is no such trainer, it needs another model or optimizer, it cannot split the model or
        the batch, or it cannot average gradients natively.
    """
    system, option = find_trainer(name)
    for what in ("model", "optimizer"):
        needed, chosen = getattr(system, f"needs_{what}"), getattr(task, what)
        require(needed in (None, chosen), what, f"{name} needs another", needed, chosen)
    is_native = gradients.algorithm is None
    can_run = not is_native or name == "torch-ddp"
    require(can_run, "algorithm", f"{name} does not average natively", "an algorithm", None)
    system.check(Setup(task, option, world_size))


def make_trainer(name: str, task: Task, gradients: Gradients | None = None) -> Trainer:
    """Make this rank's trainer; all ranks of the default group call it.

    Parameters
    ----------
    name
        A name of the table above.
    task
        What is trained; the same on all ranks.
    gradients
        How gradients are averaged, if the system leaves a choice.

    Raises
    ------
    ArgumentError
        As for `check_trainer`.
    MismatchError
        The ranks begin with different models.
    """
    gradients = gradients or Gradients()
    check_trainer(name, task, dist.get_world_size(), gradients)
    system, option = find_trainer(name)
    return system(task, option, gradients)


def usual_task(
    names: Iterable[str],
    *,
    model: str | None = None,
    optimizer: str | None = None,
    layers: int = Task.layers,
    width: int | None = None,
    batch: int | None = None,
    lr: float | None = None,
    seed: int = Task.seed,
) -> Task:
    """A task for some trainers, with the usual value in place of each ``None``.

    Parameters
    ----------
    names
        Names of trainers: model and optimizer are those that a trainer needs, or a perceptron
        and SGD.
    model, optimizer, layers, width, batch, lr, seed
        As for `Task`.

    Raises
    ------
    ArgumentError
        There is no such trainer.
    MissingExtraError
        What the data come with is not installed.
    """
    systems = [find_trainer(name)[0] for name in names]
    model = model or next(filter(None, (each.needs_model for each in systems)), MODELS[0])
    if optimizer is None:
        needs = (each.needs_optimizer for each in systems)
        optimizer = next(filter(None, needs), next(iter(LEARNING_RATES)))
    usual_width, usual_batch = _SIZES[model]
    return Task(
        model,
        Task.load(model),
        layers,
        width or usual_width,
        batch or usual_batch,
        optimizer,
        lr or LEARNING_RATES[optimizer],
        seed,
    )
