"""Which tensors' versions move in the calls of an interface: torch's own, or the library's."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import ringcoll
from ringcoll.training.backend import ProcessGroup

ROOT = 1


def moves(
    api: Any, rank: int, group: Any, new: Callable[[int], Tensor], *, is_async: bool
) -> dict[str, list[bool]]:
    """Make every call several times on 2 ranks; of each, whether all its tensors' versions move."""
    found: dict[str, list[bool]] = {}

    def call(name: str, tensors: list[Tensor], *arguments: Any, **options: Any) -> None:
        before, runs = [tensor._version for tensor in tensors], 5  # until places are known
        for _ in range(runs):
            function = getattr(api, name.split(",", maxsplit=1)[0])
            work = function(*arguments, group=group, async_op=is_async, **options)
            if is_async:
                work.wait()
        moved = [tensor._version - old for tensor, old in zip(tensors, before, strict=True)]
        assert all(number == 0 or number >= runs for number in moved), (name, moved)
        found[name] = [number > 0 for number in moved]

    here = rank == ROOT
    one, two, four = new(4), [new(4), new(4)], [new(4) for _ in range(4)]
    whole, source = new(8), new(8)
    call("all_reduce", [one], one)
    call("all_reduce, max", [one], one, dist.ReduceOp.MAX)
    call("reduce", [one], one, ROOT)
    call("broadcast", [one], one, ROOT)
    call("all_reduce_coalesced", two, two)
    call("all_reduce_coalesced, of one", [one], [one])
    call("all_reduce_coalesced, of long ones", [long := new(12), one], [long, one])
    call("all_gather", [one, *two], two, one)
    call("all_gather, in its place", two, two, two[rank])
    call("all_gather_coalesced", [one, *two], [[two[0]], [two[1]]], [one])
    call("all_gather_single", [one, whole], whole, one)
    call("gather", [one, *two], one, two if here else None, ROOT)
    call("scatter", [one, *two], one, two if here else None, ROOT)
    call("reduce_scatter", [one, *two], one, two)
    call("reduce_scatter_single", [one, source], one, source)
    call("all_to_all", four, four[:2], four[2:])
    if whole.is_contiguous():  # gloo needs that
        call("all_to_all_single", [whole, source], whole, source)
    return found


def strided(numel: int) -> Tensor:
    """A vector with a stride."""
    return torch.zeros(2 * numel)[::2]


def moves_here() -> list[dict[str, list[bool]]]:
    """What moves on this rank in the default group, in each of several ways of calling.

    On a group of torch's the library's functions are called, too.
    """
    rank, tables = dist.get_rank(), []
    is_ours = isinstance(dist.group.WORLD, ProcessGroup)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some names of torch's are older ones
        for api in (dist,) if is_ours else (dist, ringcoll):
            for new in (torch.zeros, strided):
                for is_async in (False, True):
                    table = moves(api, rank, None, new, is_async=is_async)
                    sparse = torch.eye(3).to_sparse()
                    dist.all_reduce(sparse) if api is dist else ringcoll.all_reduce(sparse)
                    table["sparse"] = [sparse._version > 0]
                    tables.append(table)
    return tables
