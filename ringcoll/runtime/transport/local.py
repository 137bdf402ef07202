"""k ranks inside one process.

A `Hub` carries the messages of all ranks, which are threads: for notebooks, examples and tests.

Threads may have current streams of their own. So for CUDA tensors the host waits twice: a post
waits for its stream, and the copy, by the thread whose post completes the pair, waits for its
end. Whichever thread copies, on whichever stream, reads and writes memory that nothing else is
using. Events would do without the waits, but the messages of notebooks and tests cost more.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ringcoll.errors import CollectiveTimeoutError, PeerLostError, TransportError
from ringcoll.runtime.rendezvous import absent_error
from ringcoll.runtime.transport.base import Handle, Message, Start, Transport, devices_of, settle


@dataclass(eq=False)
class Half:
    """One end of a message: a posted send or receive."""

    message: Message
    done: bool = False
    error: TransportError | None = None  # of a receive


class Hub:
    """Carries the messages among k ranks of one process.

    ``hosts`` has a host number for every rank, to pretend that there are several hosts.
    """

    def __init__(self, world_size: int, hosts: Sequence[int] | None = None) -> None:
        self.world_size = world_size
        self.hosts = (0,) * world_size if hosts is None else tuple(hosts)
        assert len(self.hosts) == world_size
        self.condition = threading.Condition()
        self.aborted = ""
        self.arrived: set[int] = set()  # ranks that have connected
        self.left: set[int] = set()  # ranks that have closed their transport
        # Only what waits: each call has a tag of its own, and nobody comes back to it.
        self._sends: dict[tuple[int, int, int], deque[Half]] = {}
        self._receives: dict[tuple[int, int, int], deque[Half]] = {}

    def transports(self) -> list[LocalTransport]:
        """One transport for each rank."""
        return [LocalTransport(self, rank) for rank in range(self.world_size)]

    def post(self, rank: int, receives: Sequence[Message], sends: Sequence[Message]) -> list[Half]:
        """Start messages of one rank."""
        arriving, leaving = [*map(Half, receives)], [*map(Half, sends)]
        with self.condition:
            for half in arriving:
                key = half.message.peer, rank, half.message.tag
                self._match(half, key, self._sends, self._receives)
            for half in leaving:
                key = rank, half.message.peer, half.message.tag
                self._match(half, key, self._receives, self._sends)
            self.condition.notify_all()
        return arriving + leaving

    def _match(
        self,
        half: Half,
        key: tuple[int, int, int],
        others: dict[tuple[int, int, int], deque[Half]],
        own: dict[tuple[int, int, int], deque[Half]],
    ) -> None:
        waiting = others.get(key)
        if waiting is None:
            own.setdefault(key, deque()).append(half)
            return
        other = waiting.popleft()
        if not waiting:
            del others[key]
        receive, send = (half, other) if own is self._receives else (other, half)
        if receive.message.tensor.numel() != send.message.tensor.numel():
            receive.error = TransportError(
                f"a message of {send.message.tensor.numel()} elements met a receive of "
                f"{receive.message.tensor.numel()}",
                peer=receive.message.peer,
            )
            receive.done = send.done = True
        else:
            self.transfer(receive, send)

    def transfer(self, receive: Half, send: Half) -> None:
        """Move a message between two ends that match."""
        receive.message.tensor.copy_(send.message.tensor)
        settle(devices_of((receive.message, send.message)))
        receive.done = send.done = True

    def abort(self, reason: str) -> None:
        """Wake all that wait, with an error."""
        with self.condition:
            self.aborted = self.aborted or reason
            self.condition.notify_all()
        lock: Any = self.condition
        while lock._is_owned():  # an interrupt between two steps of Python has left it taken
            lock.release()


class LocalTransport(Transport):
    """The transport of one rank of a `Hub`."""

    name = "local"
    ordered = False
    shares_process = True

    def __init__(self, hub: Hub, rank: int) -> None:
        self.hub, self.rank, self.world_size = hub, rank, hub.world_size
        self.hosts = hub.hosts

    def connect(self, timeout_s: float) -> None:
        """Wait for the other ranks; see `Transport.connect`."""
        hub, rank = self.hub, self.rank
        with hub.condition:
            hub.arrived.add(rank)
            hub.condition.notify_all()
            hub.condition.wait_for(
                lambda: (
                    len(hub.arrived) == self.world_size or hub.aborted or hub.left - hub.arrived
                ),
                timeout_s,
            )
            if hub.aborted:
                raise PeerLostError(hub.aborted)
            if gone := sorted(hub.left - hub.arrived):
                raise PeerLostError(f"rank {gone[0]} has left", peer=gone[0])
            missing = sorted({*range(self.world_size)} - hub.arrived)
        if missing:
            raise absent_error(rank, missing, timeout_s)

    def bind(self, receives: Sequence[Message], sends: Sequence[Message]) -> Start:
        """Make messages ready; see `Transport.bind`."""
        devices = devices_of((*receives, *sends))

        def post(mixed: int) -> list[Handle]:
            settle(devices)
            both = (
                [message._replace(tag=message.tag ^ mixed) for message in messages]
                for messages in (receives, sends)
            )
            return [*self.hub.post(self.rank, *both)]

        return post

    def wait(self, handle: Handle, timeout_s: float) -> None:
        """Wait for one message; see `Transport.wait`."""
        assert isinstance(handle, Half)
        with self.hub.condition:
            hub, peer = self.hub, handle.message.peer
            hub.condition.wait_for(
                lambda: handle.done or hub.aborted or peer in hub.left, timeout_s
            )
            if handle.error is not None:
                raise handle.error
            if handle.done:
                return
            if hub.aborted:
                raise PeerLostError(hub.aborted, peer=peer)
            if peer in hub.left:
                raise PeerLostError(f"rank {peer} has left", peer=peer)
            raise CollectiveTimeoutError(f"no message within {timeout_s:g} s", peer=peer)

    def abort(self) -> None:
        """Wake all ranks of the hub."""
        self.hub.abort(f"rank {self.rank} broke the connection")

    def close(self) -> None:
        """Let no rank wait for messages of this rank that it has not posted."""
        with self.hub.condition:
            self.hub.left.add(self.rank)
            self.hub.condition.notify_all()
