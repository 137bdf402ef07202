"""torch's ``DistributedDataParallel`` on a group whose ranks may die."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ringcoll.backend import ProcessGroup
from ringcoll.resilient.group import ResilientGroup
from ringcoll.training import HookOptions, all_reduce_hook


def data_parallel(
    module: nn.Module, group: ResilientGroup, **options: Any
) -> DistributedDataParallel:
    """Let ``DistributedDataParallel`` average the gradients of a module over a resilient group.

    To torch, each rank trains alone: its own process group would break with the first rank that dies, and
    has a fixed number of ranks. Only the gradients travel, by `all_reduce_hook`; buffers such as those of
    batch norm stay each rank's own. Parameters are made alike by `ResilientGroup.send_state`.

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
    alone = ProcessGroup(dist.HashStore(), 0, 1, timedelta(seconds=group.communicator.timeout_s))
    # torch lays its buckets out anew after a rank's first step, unless it looks for unused parameters. A
    # new rank's buckets would be others than those of the ranks that were there before.
    options |= {"find_unused_parameters": True, "static_graph": False}
    model = DistributedDataParallel(module, process_group=alone, **options)
    model.register_comm_hook(HookOptions(group=group), all_reduce_hook)
    return model
