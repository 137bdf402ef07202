"""Averages inside torch's ``DistributedDataParallel``, as a communication hook.

torch calls the hook with each bucket of gradients, a vector, as backward fills the bucket. For
hooks that send less, torch has its own, which run on the backend ``"ringcoll"``: PowerSGD, and
gradients of 16 bits, in ``torch.distributed.algorithms.ddp_comm_hooks``.
"""

# Annotations stay objects in this file: torch looks at those of a hook.

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ringcoll.runtime.collectives import OwnGroup, as_group, share_for
from ringcoll.runtime.collectives import functions as api
from ringcoll.runtime.reduction import Reproducible
from ringcoll.schedules import Schedule
from ringcoll.training.data.averages import Weighing, average_op


@dataclass(frozen=True, slots=True)
class HookOptions:
    """Options of `all_reduce_hook`: its ``state``.

    Parameters
    ----------
    group
        The same group as that of ``DistributedDataParallel``.
    algorithm, segment_bytes, wire_dtype, reproducible
        As for `ringcoll.all_reduce`.
    share
        Whether the buckets move to shared memory at their first use: see `ringcoll.share`. For the
        ranks of one host; others raise `ArgumentError`.
    weight
        As for `average_gradients`. A tensor is read anew in each step: write into it before
        backward.
    """

    group: Any = None
    algorithm: str | Schedule = "auto"
    segment_bytes: int | None = None
    wire_dtype: torch.dtype | None = None
    reproducible: Reproducible = False
    share: bool = False
    weight: float | Tensor | None = None
    of_step: list[Weighing] = field(default_factory=list, init=False, repr=False, compare=False)


def all_reduce_hook(state: HookOptions, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket of ``DistributedDataParallel`` with ringcoll instead of natively.

    ::

        model = DistributedDataParallel(module)
        options = ringcoll.ddp.HookOptions(algorithm="tree", wire_dtype=torch.bfloat16)
        model.register_comm_hook(options, ringcoll.ddp.all_reduce_hook)

    The future has the same tensor, averaged. If an operation fails, ``backward`` raises a
    ``RuntimeError`` with the text of the operation's error.
    """
    if state.share:
        share_for(as_group(state.group), bucket.buffer())
    if state.weight is not None and bucket.index() == 0:
        state.of_step[:] = [Weighing(state.weight, state.group)]
    op = average_op(state.wire_dtype, as_group(state.group).size())
    for weighing in state.of_step:
        op = weighing.weigh(bucket.buffer())
    work = api.all_reduce(
        bucket.buffer(), op, state.group, True, algorithm=state.algorithm,
        segment_bytes=state.segment_bytes, wire_dtype=state.wire_dtype,
        reproducible=state.reproducible,
    )  # fmt: skip
    assert work is not None
    # C++ understands an exception that the callback raises. C++ would take a Python future's
    # exception, passed on as it is, for the tensor.
    return work.get_future().then(lambda future: future.value()[0])


def data_parallel(module: nn.Module, group: OwnGroup, **options: Any) -> DistributedDataParallel:
    """Let ``DistributedDataParallel`` average gradients over a resilient group.

    To torch, each rank trains alone: its own process group would break with the first rank that
    dies, and has a fixed number of ranks. Only the gradients travel, by `all_reduce_hook`; buffers
    such as those of batch norm stay each rank's own. Parameters are made alike by the group's
    `send_state`.

    Parameters
    ----------
    module, **options
        As for ``DistributedDataParallel``; no ``process_group``, ``find_unused_parameters`` or
        ``static_graph``.
    group
        The ranks that train together.

    Returns
    -------
    DistributedDataParallel
        The module, to be called as any other.
    """
    from ringcoll.training.backend import ProcessGroup  # most programs with a hook have their own

    alone = ProcessGroup(dist.HashStore(), 0, 1, timedelta(seconds=group.communicator.timeout_s))
    # torch lays its buckets out anew after a rank's first step, unless it looks for unused
    # parameters. A new rank's buckets would be others than those of the ranks before it.
    options |= {"find_unused_parameters": True, "static_graph": False}
    model = DistributedDataParallel(module, process_group=alone, **options)
    model.register_comm_hook(HookOptions(group=group), all_reduce_hook)
    return model
