"""What the transport and the memory allow: the limits that a collective is measured against.

Three more contenders, timed in the same rounds as the others, on tensors of their own:

``exchange``
    What the collective has to send, sent to the next rank and received from the previous
    rank, in one message over the transport of the run: 2(k-1)/k of the data for all-reduce.
``add``
    What a rank has to add, added to a tensor in place: (k-1)/k of the data.
``copy``
    A copy of the data in memory.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

import ringcoll
from ringcoll.bench.contenders import DTYPES, Workload, shape
from ringcoll.collectives.groups import communicator
from ringcoll.errors import ArgumentError
from ringcoll.schedule.contracts import contract
from ringcoll.transport.base import Message

__all__ = ["LIMITS", "added_numel", "exchanged_nbytes", "limit_caller"]

LIMITS = ("exchange", "add", "copy")
"""Names of the limits among the contenders."""

_TAG = 1
_LIMIT_S = 300.0


def exchanged_nbytes(workload: Workload, world_size: int) -> int:
    """Bytes that a rank has to send: the data times the collective's bandwidth factor.

    >>> exchanged_nbytes(Workload("all_reduce", 1000), 4)
    1500
    """
    factor = contract(workload.collective).busbw_factor(world_size)
    return int(shape(workload, world_size).nbytes * factor)


def added_numel(workload: Workload, world_size: int) -> int:
    """Elements that a rank has to add; none where nothing is reduced.

    >>> added_numel(Workload("all_reduce", 4000), 4)
    750
    """
    if not contract(workload.collective).reduces:
        return 0
    sizes = shape(workload, world_size)
    return sizes.nbytes // DTYPES[workload.dtype].itemsize * (world_size - 1) // world_size


def limit_caller(
    name: str, workload: Workload, world_size: int, device: torch.device
) -> Callable[[int], object]:
    """Make the function that does a limit so many times; called by all ranks alike.

    Parameters
    ----------
    name
        One of `LIMITS`.
    workload
        What is measured against it.
    world_size
        Size of the default group.
    device
        Of this rank's tensors.

    Raises
    ------
    ArgumentError
        torch cannot add tensors of that dtype.
    """
    if name == "exchange":
        return _exchange(exchanged_nbytes(workload, world_size), world_size, device)
    dtype = DTYPES[workload.dtype]
    adds = name == "add"
    numel = added_numel(workload, world_size) if adds else 0
    numel = numel if adds else shape(workload, world_size).nbytes // dtype.itemsize
    here, there = (torch.ones(numel, device=device).to(dtype) for _ in range(2))
    if not adds:
        return lambda times: [here.copy_(there) for _ in range(times)]
    there.zero_()  # the sum of thousands of additions stays what it is
    try:
        here.add_(there)
    except RuntimeError as error:
        raise ArgumentError(f"torch cannot add {workload.dtype}") from error
    return lambda times: [here.add_(there) for _ in range(times)]


def _exchange(nbytes: int, world_size: int, device: torch.device) -> Callable[[int], object]:
    out, into = (torch.ones(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    rank = dist.get_rank()
    ringcoll.all_reduce(torch.ones(1, device=device))  # the ranks have met
    transport = communicator(None, out.device).transport
    receives = [Message((rank - 1) % world_size, into, _TAG)]
    sends = [Message((rank + 1) % world_size, out, _TAG)]
    if world_size == 1:
        receives = sends = []

    def exchange(times: int) -> None:
        for _ in range(times):
            for handle in transport.post(receives, sends):
                transport.wait(handle, _LIMIT_S)

    return exchange
