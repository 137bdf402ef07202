"""Programs that run a collective that is not this library's: all but the last."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_CPU = torch.device("cpu")


def _world() -> Any:
    return dist.group.WORLD


def through_the_inner_group(rank: int, world_size: int) -> dict[str, Tensor]:
    tensor = torch.ones(2)
    _world()._get_backend(_CPU).allreduce([tensor]).wait()
    return {"tensor": tensor}


def through_the_base_class(rank: int, world_size: int) -> dict[str, Tensor]:
    """What torch's C++ does when its trampoline does not know a method."""
    tensor, before = torch.ones(2), _world()._get_sequence_number_for_group()
    dist.ProcessGroup.reduce(_world(), tensor, 0).wait()
    return {"own": torch.tensor(_world()._get_sequence_number_for_group() - before)}


def in_a_sub_group(rank: int, world_size: int) -> dict[str, Tensor]:
    group: Any = dist.new_group([1])
    if rank == 1:
        group._get_backend(_CPU).barrier().wait()
    dist.barrier()
    return {"tensor": torch.ones(1)}


def in_a_group_that_is_gone(rank: int, world_size: int) -> dict[str, Tensor]:
    group: Any = dist.new_group([0, 1])
    group._get_backend(_CPU).broadcast([torch.ones(1)]).wait()
    dist.barrier()
    dist.destroy_process_group(group)
    return {"tensor": torch.ones(1)}


def in_a_group_of_another_backend(rank: int, world_size: int) -> dict[str, Tensor]:
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=dist.new_group(backend="gloo"))
    return {"tensor": tensor}


def messages_only(rank: int, world_size: int) -> dict[str, Tensor]:
    """Every way to send and to receive, beside collectives."""
    peer = 1 - rank
    got, one = torch.zeros(1), torch.full((1,), rank + 1.0)
    for _ in range(3):
        works = [dist.irecv(got, peer), dist.isend(one, peer)]
        dist.barrier()
        for work in works:
            assert work is not None
            work.wait()
    work = dist.isend(one, peer)
    assert work is not None
    dist.recv(got, None)
    work.wait()
    pair = [dist.P2POp(dist.isend, one, peer), dist.P2POp(dist.irecv, got, peer)]
    for work in dist.batch_isend_irecv(pair):
        work.wait()
    return {"got": got}
