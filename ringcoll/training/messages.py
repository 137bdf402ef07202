"""Messages between two ranks, for training in which not all ranks meet.

Problem: a collective makes all ranks meet. In a pipeline and in gossip a rank meets its neighbours
only, and a parameter server talks to each worker by itself. They need a message between two ranks.

======================  =========================================================
group                   messages
======================  =========================================================
process group of torch  ``torch.distributed.isend`` and ``irecv``; on the backend
                        ``ringcoll``, or on gloo
`LocalGroup`            ``isend`` and ``irecv`` of the group
======================  =========================================================

The receiver knows the length of a message, and messages with the same tag arrive in the order in
which they were sent. Every wait has a time limit. A rank that waits for a process that has ended
gets `PeerLostError` at once; a thread that has returned is missed at the time limit. After an error
the group's messages should not be used any more: a late message may meet the next receive.

An all-to-all with empty blocks would be a public collective for gossip. But empty blocks are
messages too, so that each rank would wait for all others, which is what gossip avoids.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import reduce
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringcoll.errors import CollectiveTimeoutError, PeerLostError, TransportError
from ringcoll.runtime.collectives import OwnGroup, as_group, time_limit_s
from ringcoll.runtime.machine import seconds_of
from ringcoll.runtime.process import start_thread
from ringcoll.runtime.watch import phase, waiting
from ringcoll.training.arguments import require

__all__ = [
    "Arrivals",
    "Messages",
    "phase",
    "tie",
    "waiting",
]  # two of `runtime.watch`, for the door

_TAG = 0x6F55  # the first tag; any number that the user's own messages are unlikely to have


class Messages:
    """Point-to-point messages of one rank.

    Parameters
    ----------
    group
        A process group of torch, a `LocalGroup` that has run a
        collective, or ``None`` for the default group, which ``.group`` then is.
    timeout_s
        Time limit of each wait, in seconds; by default the group's.
    """

    def __init__(self, group: Any = None, timeout_s: float | None = None) -> None:
        self.group = member = as_group(group)
        self.rank, self.world_size = member.rank(), member.size()
        limit = time_limit_s(member) if timeout_s is None else timeout_s
        self._timeout_s = seconds_of(limit, "timeout_s", self.rank)

    def send(self, tensor: Tensor, dst: int, tag: int = 0) -> Callable[[], None]:
        """Start to send a contiguous tensor; return the function that waits until it was sent.

        The tensor stays as it is until then. The function raises as `recv`.
        """
        return self._started("isend", "dst", dst, tensor, tag)

    def receive(self, tensor: Tensor, src: int, tag: int = 0) -> Callable[[], None]:
        """Start to receive into a tensor; the function that is returned does the rest of `recv`."""
        return self._started("irecv", "src", src, tensor, tag)

    def recv(self, tensor: Tensor, src: int, tag: int = 0) -> None:
        """Receive into a contiguous tensor as many elements as a rank has sent, of the same dtype.

        A tensor that needs a gradient, or a peer that is no other rank, raises `ArgumentError`, and
        nothing is started. `CollectiveTimeoutError` is raised if no message comes within the time
        limit, `PeerLostError` if the rank's process has ended, or the connection to it.
        """
        self.receive(tensor, src, tag)()

    def _started(
        self, call: str, role: str, peer: int, tensor: Tensor, tag: int
    ) -> Callable[[], None]:
        """Start a message; return the function that waits for it."""
        is_peer = 0 <= peer < self.world_size and peer != self.rank
        others = f"another rank below {self.world_size}"
        require(is_peer, role, "cannot be used", others, peer, self.rank)
        is_plain = tensor.is_contiguous() and not (role == "src" and tensor.requires_grad)
        state = f"strides {tensor.stride()}, requires_grad={tensor.requires_grad}"
        plain = "a contiguous tensor without gradient"
        require(is_plain, "tensor", "cannot be used", plain, state, self.rank)
        purpose = f"{'send to' if role == 'dst' else 'receive from'} rank {peer}"
        with self._typed_errors(purpose, peer):
            if isinstance(self.group, OwnGroup):
                work = getattr(self.group, call)(tensor, peer, _TAG + tag)
            else:
                named = {"group": self.group, f"group_{role}": peer, "tag": _TAG + tag}
                work = getattr(dist, call)(tensor, **named)

        def wait() -> None:
            with waiting(peer, self.group), self._typed_errors(purpose, peer):
                work.wait(timedelta(seconds=self._timeout_s))

        return wait

    @contextmanager
    def _typed_errors(self, purpose: str, peer: int | None) -> Iterator[None]:
        """Raise the library's errors in place of gloo's: a rank is late, or has left."""
        begin_s = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            kind = type(error) if isinstance(error, TransportError) else PeerLostError
            if time.monotonic() - begin_s >= self._timeout_s:
                kind = CollectiveTimeoutError
            raise kind(
                f"rank {self.rank} waited to {purpose}, at most {self._timeout_s:g} s: {error}",
                peer=peer,
            ) from error


class Arrivals:
    """Receives messages of one length from several ranks, each as it comes.

    gloo has a receive from any rank, but does not notice in it that a rank has left. So each
    expected message, as long as ``like``, has a thread of its own, some 0.1 ms, which waits for its
    rank alone: it notices the end of the connection at once, and the messages of other ranks go on.
    """

    def __init__(self, messages: Messages, like: Tensor) -> None:
        self._messages, self._like = messages, like
        self._arrived: SimpleQueue[tuple[int, Tensor | Exception]] = SimpleQueue()

    def expect(self, peer: int, reply: Tensor | None = None) -> None:
        """Send a reply, which must not change any more; begin to wait for a rank's next message."""
        # A thread that still waits when the program ends does not hold up the program.
        start_thread(self._converse, "ringcoll-arrivals", peer, reply)

    def _converse(self, peer: int, reply: Tensor | None) -> None:
        message = torch.empty_like(self._like)
        try:
            if reply is not None:
                self._messages.send(reply, peer)()
            self._messages.recv(message, peer)
        except Exception as error:  # noqa: BLE001  # `take` hands it over
            self._arrived.put((peer, error))
        else:
            self._arrived.put((peer, message))

    def take(self) -> tuple[int, Tensor | Exception]:
        """Wait for the next message: its rank, and the message or the error of wait or reply."""
        with waiting(None, self._messages.group) as awaited:
            peer, message = self._arrived.get()
            awaited.peer = peer
        return peer, message


def tie(param: Tensor, ranks: Sequence[int], group: Any = None) -> int:
    """Sum the gradients of a parameter that several ranks hold, such as a tied embedding.

    Call it on those ranks, after the step of the pipeline. With equal copies at first and the same
    optimizer, the copies stay equal to the last bit: each rank adds the gradients in the order of
    the ranks. It returns the bytes that this rank has sent.

    Parameters
    ----------
    param
        This rank's copy, of the same shape and dtype on all ranks that hold a copy. Its ``.grad``
        is overwritten; ``None`` counts as zeros.
    ranks
        The ranks of the group that hold a copy, each once and this one among them.
    """
    messages = Messages(group)
    rank, world_size, peers = messages.rank, messages.world_size, sorted(set(ranks))
    is_among = rank in peers and len(peers) == len(ranks)
    wanted = f"different ranks below {world_size}, among them {rank}"
    require(is_among and 0 <= peers[0] <= peers[-1] < world_size, "ranks",
            "the ranks cannot share a parameter", wanted, list(ranks), rank)  # fmt: skip
    grads = {peer: torch.zeros_like(param, memory_format=torch.contiguous_format) for peer in peers}
    if param.grad is not None:
        grads[rank].copy_(param.grad)
    others = [peer for peer in peers if peer != rank]
    waits = [messages.receive(grads[peer], peer) for peer in others]
    waits += [messages.send(grads[rank], peer) for peer in others]
    for wait in waits:
        wait()
    param.grad = reduce(torch.add, grads.values())
    return len(others) * param.nbytes
