"""Messages of a user's own on groups that torch does not know, as functions that the ranks of a pool run."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.distributed as dist

import ringcoll
from ringcoll.errors import GroupBrokenError, TransportError
from ringcoll.runtime.collectives import StoreGroup

_SHORT = timedelta(seconds=1)
_numbers = count()


def _group(transport: str) -> StoreGroup:
    store = dist.PrefixStore(f"own {next(_numbers)}", dist.distributed_c10d._get_default_store())
    group = StoreGroup(store, dist.get_rank(), dist.get_world_size(), 30.0, transport)
    ringcoll.barrier(group)
    return group


def messages(transport: str) -> list[object]:
    """Ranks send to the last rank under one tag, between operations; the last rank's results."""
    group = _group(transport)
    rank, last = group.rank(), group.size() - 1
    total = torch.full((3,), float(rank))
    kept = torch.full((2,), 10.0 + rank)
    got = torch.zeros(last, 2)
    if rank < last:
        sending = group.isend(kept, last, 5)
        ringcoll.all_reduce(total, group=group)
        sending.wait()
    else:
        ringcoll.all_reduce(total, group=group)
        for source in reversed(range(last)):  # the messages are there, in another order
            group.irecv(got[source], source, 5).wait()
    group.close()
    return [total.tolist(), got.tolist() if rank == last else None]


def lengths_that_differ(transport: str, sent: int, wanted: int) -> tuple[str, list[float]]:
    """What the receiver of a message of another length is told, and its tensor."""
    group = _group(transport)
    tensor, text = torch.full((wanted,), -1.0), "nothing"
    if group.rank() == 0:
        tensor = torch.zeros(sent)
        sending = group.isend(tensor, 1)
    try:
        (sending if group.rank() == 0 else group.irecv(tensor, 0)).wait(_SHORT)
    except TransportError as error:
        text = str(error)
    group.close()
    return text, tensor.tolist()


def forked(transport: str) -> list[str]:
    """What a process that was forked off rank 0 is told when it sends; and what rank 1 receives."""
    isend: Any
    irecv: Any
    close: Callable[[], object]
    if transport == "backend":
        group: Any = dist.new_group(backend="ringcoll")
        isend, irecv = partial(dist.isend, group=group), partial(dist.irecv, group=group)
        close = partial(dist.destroy_process_group, group)
    else:
        group = _group(transport)
        isend, irecv, close = group.isend, group.irecv, group.close
    tensor, told = torch.zeros(1), ""
    if dist.get_rank() == 0:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            text = "nothing"
            try:
                isend(torch.full((1,), 99.0), 1).wait(_SHORT)
            except GroupBrokenError as error:
                text = str(error)
            os.write(writing, text.encode())
            os._exit(0)
        told = os.read(reading, 1000).decode()
        os.waitpid(child, 0)
        os.close(reading)
        os.close(writing)
        isend(tensor.fill_(2), 1).wait()
    else:
        irecv(tensor, 0).wait()
    ringcoll.all_reduce(tensor, group=group)
    close()
    return [told, str(tensor.item())]
