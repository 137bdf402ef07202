"""Training systems on the public functions, and one table of trainers that run them by name.

=============  =================================================================================
What is trained
------------------------------------------------------------------------------------------------
`models`       a perceptron and a small transformer, and stages of them
`task`         a model, its data, and how it learns
`checks`       what all ranks look at together before and during training
`flat`         parameters end to end in a flat tensor, and put together from pieces
`messages`     messages between two ranks, and from several ranks as they come
-------------  ---------------------------------------------------------------------------------
Systems
------------------------------------------------------------------------------------------------
`data`         data parallel: samples of each rank, averages of gradients, also compressed
`sharded`      AdamW whose state, gradients and parameters are sharded (ZeRO)
`split`        layers, tokens and sequences split over the ranks, and a mesh of all axes
`pipeline`     schedules of a pipeline as data (pure: no torch), and the runner of them
`free`         out of lock-step: gossip, local SGD and DiLoCo, a parameter server
-------------  ---------------------------------------------------------------------------------
All of them by name
------------------------------------------------------------------------------------------------
`trainer`      one rank of a system: the loop of its steps
`systems`      what each system does differently
`trainers`     the table of all trainers
=============  =================================================================================

A ``group`` is everywhere the group of the ranks that take part: a process group of torch, a
`LocalGroup`, or ``None`` for the default group.

May be imported from outside: ``__all__``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # isort: off
    from ringcoll.training.checks import check_finite, check_same
    from ringcoll.training.data.buckets import StepReport, assign_buckets
    from ringcoll.training.data.compression import (
        CompressedGradients, Compressor, Int8, PowerSGD, Sent, TopK,
    )  # fmt: skip
    from ringcoll.training.data.hooks import (
        CompressedBuckets, HookOptions, all_reduce_hook, compressed_hook,
    )  # fmt: skip
    from ringcoll.training.data.parallel import BucketedDataParallel, average_gradients
    from ringcoll.training.data.samples import (
        Examples, Text, batches, load_digits, load_text, text_examples, windows,
    )  # fmt: skip
    from ringcoll.training.flat import whole_parameters
    from ringcoll.training.free.gossip import (
        Gossip, check_mixing, gap_table, mixing_matrix, period, spectral_gap,
    )  # fmt: skip
    from ringcoll.training.free.local_sgd import LocalSGD, diloco
    from ringcoll.training.free.server import ParameterServer, ServerWorker
    from ringcoll.training.free.straggler import slowed
    from ringcoll.training.messages import Messages, tie
    from ringcoll.training.models import (
        Transformer, TransformerShape, causal_attention, mlp, next_token_loss, stages,
    )  # fmt: skip
    from ringcoll.tracing.phases import phase, waiting
    from ringcoll.training.pipeline.check import bubble, check, grid, peak_activations
    from ringcoll.training.pipeline.orders import (
        SCHEDULES, gpipe, interleaved, one_f_one_b, zero_bubble,
    )  # fmt: skip
    from ringcoll.training.pipeline.runner import Pipeline, PipelineReport
    from ringcoll.training.pipeline.schedule import UNIT_COSTS, Action, Kind, PipelineSchedule
    from ringcoll.training.sharded.optimizer import ShardedAdamW
    from ringcoll.training.sharded.state import ModelStates, model_state_bytes, storage_nbytes
    from ringcoll.training.split import conjugate
    from ringcoll.training.split.mesh import Mesh, ParallelTransformer
    from ringcoll.training.split.ring import context_parallel, places, ring_attention
    from ringcoll.training.split.tensor import tensor_parallel, vocabulary_loss
    from ringcoll.training.task import LEARNING_RATES, MODELS, Task
    from ringcoll.training.trainer import Gradients, Trainer
    from ringcoll.training.trainers import (
        TRAINERS, TrainerEntry, check_trainer, find_trainer, make_trainer, trainer_names,
        usual_task,
    )  # fmt: skip
    # isort: on

__all__ = [
    "LEARNING_RATES", "MODELS", "SCHEDULES", "TRAINERS", "UNIT_COSTS", "Action",
    "BucketedDataParallel", "CompressedBuckets", "CompressedGradients", "Compressor",
    "Examples", "Gossip", "Gradients", "HookOptions", "Int8", "Kind", "LocalSGD", "Mesh",
    "Messages", "ModelStates", "ParallelTransformer", "ParameterServer", "Pipeline",
    "PipelineReport", "PipelineSchedule", "PowerSGD", "Sent", "ServerWorker", "ShardedAdamW",
    "StepReport", "Task", "Text", "TopK", "Trainer", "TrainerEntry", "Transformer",
    "TransformerShape", "all_reduce_hook", "assign_buckets", "average_gradients", "batches",
    "bubble", "causal_attention", "check", "check_finite", "check_mixing", "check_same",
    "check_trainer", "compressed_hook", "conjugate", "context_parallel", "diloco",
    "find_trainer", "gap_table", "gpipe", "grid", "interleaved", "load_digits", "load_text",
    "make_trainer", "mixing_matrix", "mlp", "model_state_bytes", "next_token_loss",
    "one_f_one_b", "peak_activations", "period", "phase", "places", "ring_attention", "slowed",
    "spectral_gap", "stages", "storage_nbytes", "tensor_parallel", "text_examples", "tie",
    "trainer_names", "usual_task", "vocabulary_loss", "waiting", "whole_parameters", "windows",
    "zero_bubble",
]  # fmt: skip

_HOME = {
    name: module
    for module, names in {
        "checks": "check_finite check_same",
        "data.buckets": "StepReport assign_buckets",
        "data.compression": "CompressedGradients Compressor Int8 PowerSGD Sent TopK",
        "data.hooks": "CompressedBuckets HookOptions all_reduce_hook compressed_hook",
        "data.parallel": "BucketedDataParallel average_gradients",
        "data.samples": "Examples Text batches load_digits load_text text_examples windows",
        "flat": "whole_parameters",
        "free.gossip": "Gossip check_mixing gap_table mixing_matrix period spectral_gap",
        "free.local_sgd": "LocalSGD diloco",
        "free.server": "ParameterServer ServerWorker",
        "free.straggler": "slowed",
        "messages": "Messages tie",
        "models": "Transformer TransformerShape causal_attention mlp next_token_loss stages",
        "ringcoll.tracing.phases": "phase waiting",
        "pipeline.check": "bubble check grid peak_activations",
        "pipeline.orders": "SCHEDULES gpipe interleaved one_f_one_b zero_bubble",
        "pipeline.runner": "Pipeline PipelineReport",
        "pipeline.schedule": "UNIT_COSTS Action Kind PipelineSchedule",
        "sharded.optimizer": "ShardedAdamW",
        "sharded.state": "ModelStates model_state_bytes storage_nbytes",
        "split.mesh": "Mesh ParallelTransformer",
        "split.ring": "context_parallel places ring_attention",
        "split.tensor": "tensor_parallel vocabulary_loss",
        "task": "LEARNING_RATES MODELS Task",
        "trainer": "Gradients Trainer",
        "trainers": "TRAINERS TrainerEntry check_trainer find_trainer"
        " make_trainer trainer_names usual_task",
    }.items()
    for name in names.split()
}


def __getattr__(name: str) -> Any:
    if name == "conjugate":  # a module
        return import_module(f"{__name__}.split.conjugate")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOME[name]
    return getattr(
        import_module(home if home.startswith("ringcoll.") else f"{__name__}.{home}"), name
    )
