"""Gradients of torch's own ``DistributedDataParallel``, averaged by ringcoll."""

# Annotations stay objects in this file: torch looks at those of a hook.

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringcoll.collectives import functions as api
from ringcoll.collectives.groups import as_group
from ringcoll.collectives.sharing import share_for
from ringcoll.reduction import Reproducible
from ringcoll.schedule.ir import Schedule
from ringcoll.training.average import average_op

__all__ = ["HookOptions", "all_reduce_hook"]


@dataclass(frozen=True, slots=True)
class HookOptions:
    """Options of `all_reduce_hook`: its ``state``.

    Parameters
    ----------
    group
        Group of the ranks that train together, the same as of ``DistributedDataParallel``;
        ``None`` for the default group.
    algorithm, segment_bytes, wire_dtype, reproducible
        As for `ringcoll.all_reduce`.
    share
        Whether the buckets move to shared memory at their first use: see `ringcoll.share`. For the
        ranks of one host.
    """

    group: Any = None
    algorithm: str | Schedule = "auto"
    segment_bytes: int | None = None
    wire_dtype: torch.dtype | None = None
    reproducible: Reproducible = False
    share: bool = False


def all_reduce_hook(state: HookOptions, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket of ``DistributedDataParallel`` with ringcoll instead of natively.

    ::

        model = DistributedDataParallel(module)
        options = ringcoll.training.data_parallel.HookOptions(algorithm="tree", wire_dtype=torch.bfloat16)
        model.register_comm_hook(options, ringcoll.training.data_parallel.all_reduce_hook)

    If an operation fails, ``backward`` raises a ``RuntimeError`` with the text of the
    operation's error.

    Parameters
    ----------
    state
        The options.
    bucket
        Bucket that ``DistributedDataParallel`` passes: a flat tensor of gradients.

    Returns
    -------
    Future
        A future of the same tensor, averaged.

    Raises
    ------
    ArgumentError
        Buckets are to be shared, and the ranks are on several hosts.
    """
    if state.share:
        share_for(as_group(state.group), bucket.buffer())
    work = api.all_reduce(
        bucket.buffer(),
        average_op(state.wire_dtype, as_group(state.group).size()),
        state.group,
        True,
        algorithm=state.algorithm,
        segment_bytes=state.segment_bytes,
        wire_dtype=state.wire_dtype,
        reproducible=state.reproducible,
    )
    assert work is not None
    # C++ understands an exception that the callback raises. C++ would take a Python future's
    # exception, passed on as it is, for the tensor.
    return work.get_future().then(_only_result)


def _only_result(future: torch.futures.Future[list[Tensor]]) -> Tensor:
    (tensor,) = future.value()
    return tensor
