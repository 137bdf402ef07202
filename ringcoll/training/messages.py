"""Messages between two ranks, for training that is out of lock-step.

Problem: a collective makes all ranks meet. In gossip a rank meets its neighbours only, and a
parameter server talks to the worker that is ready. Both need a message between two ranks, and the
server needs a receive from whichever rank sends first.

============================ ===========================================================
group                        messages
============================ ===========================================================
process group of torch       ``torch.distributed.isend`` and ``irecv``, with a tag of
                             their own; on the backend ``ringcoll``, or on gloo
`LocalGroup` (`run_threads`) a mailbox for each rank, in memory
============================ ===========================================================

The receiver knows the length of a message, and messages from one rank to another arrive in the order
in which they were sent. Every wait has a time limit. A rank that waits for a peer that has left gets
`PeerLostError` at once, or `CollectiveTimeoutError` at the time limit: gloo notices the end of a
connection, but not in a receive from any rank. After an error the group's messages are over.

An all-to-all with empty blocks would be a public collective for gossip. But empty blocks are
messages too, so that each rank would wait for all others, which is what gossip avoids.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor

from ringcoll.collectives.groups import as_group
from ringcoll.errors import ArgumentError, CollectiveTimeoutError, PeerLostError
from ringcoll.training.phases import waiting
from ringcoll.transport.local import Hub, LocalTransport

__all__ = ["LocalMessages", "Messages", "TorchMessages", "messages_of"]

_TAG = 0x6F55  # any number that the user's own messages are unlikely to have


class Messages(Protocol):
    """Point-to-point messages of one rank.

    Attributes
    ----------
    rank, world_size
        This rank, and the number of ranks.
    """

    rank: int
    world_size: int

    def send(self, tensor: Tensor, dst: int) -> Callable[[], None]:
        """Start to send a tensor; the tensor stays as it is until the returned function was called.

        Parameters
        ----------
        tensor
            Any shape, contiguous.
        dst
            Rank in the group that receives the tensor.

        Returns
        -------
        callable
            Waits until the tensor was sent; raises as `recv`.
        """
        ...

    def recv(self, tensor: Tensor, src: int | None = None) -> int:
        """Receive into a tensor; return the rank in the group that has sent it.

        Parameters
        ----------
        tensor
            As many elements as were sent, of the same dtype; contiguous.
        src
            Rank in the group that sends; ``None`` for the rank whose message comes first.

        Raises
        ------
        CollectiveTimeoutError
            No message came within the time limit.
        PeerLostError
            A rank has left.
        """
        ...


def messages_of(group: Any, timeout_s: float) -> Messages:
    """The messages of this rank in a group.

    Parameters
    ----------
    group
        A process group of torch, a `LocalGroup`, or ``None`` for the default group.
    timeout_s
        Time limit of each wait, in seconds.

    Raises
    ------
    ArgumentError
        The time limit is not positive, or the group has no messages between two ranks.
    """
    member = as_group(group)
    if timeout_s <= 0:
        raise ArgumentError(
            "must be positive",
            rank=member.rank(),
            argument="timeout_s",
            expected="> 0 s",
            got=timeout_s,
        )
    if isinstance(member, dist.ProcessGroup):
        return TorchMessages(member, timeout_s)
    transport = member.communicator.transport
    if isinstance(transport, LocalTransport):
        return LocalMessages(transport, timeout_s)
    raise ArgumentError(
        "the group has no messages between two ranks",
        rank=member.rank(),
        argument="group",
        expected="a process group of torch, or a LocalGroup",
        got=type(group).__name__,
    )


class TorchMessages:
    """Messages over a process group of torch; see `Messages` and `messages_of`."""

    def __init__(self, group: dist.ProcessGroup, timeout_s: float) -> None:
        self._group, self._timeout_s = group, timeout_s
        self.rank, self.world_size = group.rank(), group.size()

    def send(self, tensor: Tensor, dst: int) -> Callable[[], None]:
        """Start to send; see `Messages.send`."""
        with self._typed_errors(f"send to rank {dst}", dst):
            work = dist.isend(tensor, group=self._group, group_dst=dst, tag=_TAG)

        def wait() -> None:
            self._wait(work, f"send to rank {dst}", dst)

        return wait

    def recv(self, tensor: Tensor, src: int | None = None) -> int:
        """Receive; see `Messages.recv`."""
        what = "receive from " + ("any rank" if src is None else f"rank {src}")
        with self._typed_errors(what, src):
            work: Any = dist.irecv(tensor, group=self._group, group_src=src, tag=_TAG)
        return self._wait(work, what, src)

    def _wait(self, work: Any, what: str, peer: int | None) -> int:
        """Wait for a message; return the rank at its other end."""
        with waiting(peer, self._group) as awaited, self._typed_errors(what, peer):
            work.wait(timedelta(seconds=self._timeout_s))
            awaited.peer = other = int(work._source_rank()) if peer is None else peer
        return other

    @contextmanager
    def _typed_errors(self, what: str, peer: int | None) -> Iterator[None]:
        """Raise the library's errors in place of gloo's: a rank is late, or has left."""
        begin_s = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            is_late = time.monotonic() - begin_s >= self._timeout_s
            kind = CollectiveTimeoutError if is_late else PeerLostError
            raise kind(
                f"rank {self.rank} waited to {what}, at most {self._timeout_s:g} s: {error}",
                peer=peer,
            ) from error


_mailboxes: WeakKeyDictionary[Hub, list[list[tuple[int, Tensor]]]] = WeakKeyDictionary()


class LocalMessages:
    """Messages between threads of a process; see `Messages` and `messages_of`."""

    def __init__(self, transport: LocalTransport, timeout_s: float) -> None:
        self._hub, self._timeout_s = transport.hub, timeout_s
        self.rank, self.world_size = transport.rank, transport.world_size
        with self._hub.condition:
            empty: list[list[tuple[int, Tensor]]] = [[] for _ in range(self.world_size)]
            self._boxes = _mailboxes.setdefault(self._hub, empty)

    def send(self, tensor: Tensor, dst: int) -> Callable[[], None]:
        """Put a copy into the mailbox of a rank; see `Messages.send`."""
        with self._hub.condition:
            self._boxes[dst].append((self.rank, tensor.detach().clone()))
            self._hub.condition.notify_all()
        return lambda: None

    def recv(self, tensor: Tensor, src: int | None = None) -> int:
        """Take the first message that fits out of the own mailbox; see `Messages.recv`."""
        box, hub = self._boxes[self.rank], self._hub

        def first() -> int | None:
            fits = (i for i, (sender, _) in enumerate(box) if src in (None, sender))
            return next(fits, None)

        with waiting(src) as awaited, hub.condition:
            hub.condition.wait_for(
                lambda: first() is not None or bool(hub.aborted), self._timeout_s
            )
            index = first()
            if index is not None:
                sender, message = box.pop(index)
                awaited.peer = sender
        if index is None:
            peer = "any rank" if src is None else f"rank {src}"
            if hub.aborted:
                raise PeerLostError(hub.aborted, peer=src)
            raise CollectiveTimeoutError(
                f"rank {self.rank} received nothing from {peer} within {self._timeout_s:g} s",
                peer=src,
            )
        tensor.copy_(message)
        return sender
