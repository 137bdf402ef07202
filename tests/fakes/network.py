"""Ranks that are threads, whose messages take the time that a topology says.

A long message is in the queue of each link of its route from the moment at which it is sent. A link sends the
messages of its queue one after the other. The message arrives when the last of these links has sent it, and the
latencies of the route are over. A message as short as a packet does not wait: links are fair. Only this process may
make a message slower than the topology does.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from ringcoll.errors import CollectiveTimeoutError, PeerLostError
from ringcoll.lab.simulation import Topology
from ringcoll.runtime.transport import Handle, Hub, LocalTransport, Message

__all__ = ["NetworkHub"]

_PACKET = 1500  # bytes


class NetworkHub(Hub):
    """A hub with the links of a topology; messages on the ``lost`` ways never come."""

    def __init__(
        self,
        topology: Topology,
        hosts: Sequence[int],
        lost: Sequence[tuple[int, int]] = (),
    ) -> None:
        super().__init__(topology.world_size, hosts)
        self.topology, self.lost = topology, frozenset(lost)
        self.free_at = [0.0] * len(topology.links)
        self._due: dict[tuple[int, int], deque[float]] = {}

    def transports(self) -> list[LocalTransport]:
        return [NetworkTransport(self, rank) for rank in range(self.world_size)]

    def post(self, rank: int, receives: Sequence[Message], sends: Sequence[Message]) -> list[Any]:
        with self.condition:  # which the same thread may take again
            for message in sends:
                due = self._due.setdefault((rank, message.peer), deque())
                due.append(self._arrival(rank, message.peer, message.tensor.nbytes))
            return super().post(rank, receives, sends)

    def _arrival(self, source: int, target: int, nbytes: int) -> float:
        now = time.monotonic()
        if (source, target) in self.lost:
            return now + 1e9
        arrival, latency_s = now, 0.0
        for index in self.topology.route(source, target):
            link = self.topology.links[index]
            latency_s += float(link.latency_s)
            if nbytes > _PACKET:
                done = max(self.free_at[index], now) + nbytes / float(link.bandwidth)
                self.free_at[index], arrival = done, max(arrival, done)
        return arrival + latency_s

    def transfer(self, receive: Any, send: Any) -> None:
        super().transfer(receive, send)
        vars(receive)["due"] = self._due[receive.message.peer, send.message.peer].popleft()


class NetworkTransport(LocalTransport):
    """The transport of one rank: a message is there when it is due."""

    def wait(self, handle: Handle, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        super().wait(handle, timeout_s)
        due = vars(handle).get("due", 0.0)
        while (now := time.monotonic()) < due:
            if self.hub.aborted:
                raise PeerLostError(self.hub.aborted)
            if now > deadline:
                raise CollectiveTimeoutError(f"no message within {timeout_s:g} s")
            time.sleep(min(due - now, 0.05, max(deadline - now, 0.001)))
