"""Point-to-point messages over torch's NCCL, for CUDA tensors.

NCCL ignores tags: messages between two ranks match by order, and operations
posted one by one can hang. So all messages of a wave are posted as one group. A
group must stay under 256 operations, and both ends of a message must put it in the
same group; that is decided by values which both compute alike: how far the
receiver is from the sender, and which of the messages of that pair it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ringcoll.errors import PeerLostError
from ringcoll.transport.base import Handle, Message, Transport, meet

__all__ = ["NcclTransport", "grouped"]

# Distances in one group; each gives one send and one receive, so half of 256 at most.
_DISTANCES = 64


def grouped(
    rank: int, world_size: int, receives: Sequence[Message], sends: Sequence[Message]
) -> list[tuple[list[int], list[int]]]:
    """Divide the messages of a wave into groups that all ranks form alike.

    Returns
    -------
    list of (receives, sends)
        Indices into the arguments, in the order in which they are to be posted.
    """
    groups: dict[tuple[int, int], tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for kind, messages in enumerate((receives, sends)):
        seen: dict[int, int] = defaultdict(int)
        for index, message in enumerate(messages):
            ahead = message.peer - rank if kind else rank - message.peer
            key = (seen[message.peer], ahead % world_size // _DISTANCES)
            seen[message.peer] += 1
            groups[key][kind].append(index)
    return [groups[key] for key in sorted(groups)]


class NcclTransport(Transport):
    """Messages over a private group of NCCL.

    Completion is ordered by the stream: after `wait`, later work on the current
    stream sees the data; the host does not block.

    Parameters
    ----------
    group
        A ``ProcessGroupNCCL`` that nobody else uses.
    device
        The CUDA device of this rank.
    store
        Seen by all ranks of the group, and used by nobody else.
    """

    name = "nccl"
    ordered = True

    def __init__(self, group: Any, device: torch.device, store: dist.Store) -> None:
        self._group, self.device = group, device
        self._store = store
        self.rank, self.world_size = group.rank(), group.size()
        self.hosts: tuple[int, ...] = ()

    def connect(self, timeout_s: float) -> None:
        """Connect all ranks; see `Transport.connect`."""
        self.hosts = meet(self._store, self.rank, self.world_size, timeout_s, self.name)
        # The first batched call must be joined by all ranks; connecting is such a call.
        self._group.eager_connect_single_device(self.device)

    def bind(
        self, receives: Sequence[Message], sends: Sequence[Message]
    ) -> Callable[[int], list[Handle]]:
        """Make messages ready; see `Transport.bind`."""
        groups = grouped(self.rank, self.world_size, receives, sends)

        def post(mixed: int) -> list[Handle]:  # tags are ignored
            handles: list[Handle] = [None] * (len(receives) + len(sends))
            for incoming, outgoing in groups:
                self._group._start_coalescing(self.device)
                for index in incoming:
                    peer, tensor, tag = receives[index]
                    self._group.recv([tensor], peer, tag)
                for index in outgoing:
                    peer, tensor, tag = sends[index]
                    self._group.send([tensor], peer, tag)
                work = self._group._end_coalescing(self.device)
                for index in incoming:
                    handles[index] = work
                for index in outgoing:
                    handles[len(receives) + index] = work
            return handles

        return post

    def wait(self, handle: Handle, timeout_s: float) -> None:
        """Order the current stream after the message; see `Transport.wait`."""
        try:
            handle.wait()  # type: ignore[attr-defined]
        except RuntimeError as error:
            raise PeerLostError(str(error)) from error

    def abort(self) -> None:
        """Abort the group's communicators."""
        self._group.abort()

    def close(self) -> None:
        """Shut the group down."""
        self._group.shutdown()
