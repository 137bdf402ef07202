"""Messages with faults and checksums, on the ranks of a pool of processes."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

import ringcoll
from ringcoll.runtime.machine.settings import FAULTS, VERIFY_MESSAGES
from tests.programs.faults import Caught, catch
from tests.programs.ranks import fresh_group

__all__ = ["corrupted", "differently", "undisturbed"]

_OPERATIONS = 5


def _total(numel: int) -> torch.Tensor:
    """The right result of `_all_reduced`."""
    world_size = dist.get_world_size()
    return torch.arange(numel) * world_size + world_size * (world_size - 1) // 2


def _all_reduced(group: Any, numel: int) -> list[bool]:
    """Whether the results of some operations are right."""
    right = []
    for _ in range(_OPERATIONS):
        tensor = torch.arange(numel) + dist.get_rank()
        ringcoll.all_reduce(tensor, group=group, algorithm="ring")
        right.append(torch.equal(tensor, _total(numel)))
    return right


def _verified(transport: str, timeout_s: float = 60.0) -> Any:
    group = fresh_group(timeout_s)
    ringcoll.use(group, transport=transport, verify_messages=True)
    return group


def corrupted(
    transport: str, numel: int, faults: str, timeout_s: float
) -> tuple[Caught, list[bool]]:
    """All-reduce where rank 0's messages have faults; what a rank met, and its results until then."""
    group, right = _verified(transport, timeout_s), []
    if dist.get_rank() == 0:
        os.environ[FAULTS] = faults
    try:
        caught = catch(lambda: right.extend(_all_reduced(group, numel)))
    finally:
        os.environ.pop(FAULTS, None)
    return caught, right


def undisturbed(transport: str, numel: int, faults: str) -> list[bool]:
    """Results with checksums, of tensors in shared memory, too; ``faults`` only disturb the order."""
    group = _verified(transport)
    os.environ[FAULTS] = faults
    try:
        right = _all_reduced(group, numel)
    finally:
        del os.environ[FAULTS]
    for _ in range(2):
        tensor = ringcoll.empty_shared(numel, dtype=torch.int64)
        tensor.copy_(torch.arange(numel) + dist.get_rank())
        ringcoll.all_reduce(tensor, group=group)
        right.append(torch.equal(tensor, _total(numel)))
    return right


def differently(transport: str, by_variable: bool) -> tuple[Caught, Caught]:
    """What ranks meet of which only rank 1 verifies messages, and whether a choice may come late."""
    group, is_odd = fresh_group(), dist.get_rank() == 1
    if by_variable:
        ringcoll.use(group, transport=transport)
        os.environ[VERIFY_MESSAGES] = str(int(is_odd))
    else:
        ringcoll.use(group, transport=transport, verify_messages=is_odd)
    try:
        caught = catch(lambda: ringcoll.all_reduce(torch.ones(3), group=group))
    finally:
        os.environ.pop(VERIFY_MESSAGES, None)
    return caught, catch(lambda: ringcoll.use(group, verify_messages=True))
