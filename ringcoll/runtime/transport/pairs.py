"""Ranks of several hosts: a transport inside each host, and another one between hosts.

`PairsTransport` is made around the transport of a host, and makes another one between hosts when
the ranks have met and are on several hosts: the first that ``"auto"`` stands for beside it. On one
host it is out of the way. Where ranks cannot open each other's memory, the other transport carries
all messages, if nobody has asked for shared memory.

A rank that waits for a message inside its host also moves those between hosts (`Transport.move`),
as UCX's move only while their ranks wait; otherwise ranks could wait for each other in a circle.
Likewise messages inside the host have to be seen by their receivers before a rank waits for another
host (`SharedTransport.push`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ringcoll.errors import PeerLostError, TransportError
from ringcoll.runtime.transport import catalogue
from ringcoll.runtime.transport.base import (
    AroundTransport,
    Handle,
    Message,
    Start,
    Transport,
    left_s,
)

_log = logging.getLogger("ringcoll")


class OutOfReachError(TransportError):
    """Ranks of a host cannot use what its transport needs; all ranks of the group get the error."""


@dataclass(slots=True)
class _Far:
    handle: Handle
    tensor: Tensor
    is_complete: bool = False


class NearTransport(Transport, Protocol):
    """A transport inside a host, which can be beside another one."""

    beside: Callable[[], bool] | None
    """Moves the messages of the other one, and returns whether to do so soon again; whoever waits
    for long calls it now and then."""

    def push(self, timeout_s: float) -> None:
        """Let the messages that were posted be seen by their receivers, before a wait elsewhere."""


class PairsTransport(AroundTransport):
    """The transport ``below`` among the ranks of a host, another one between hosts.

    The transport below only knows the ranks of its host, when it has met all ranks. All ranks see
    the store, and nobody else uses it. ``timeout_s`` is the time limit in seconds to make the other
    transport.
    """

    def __init__(self, below: NearTransport, store: dist.Store, timeout_s: float) -> None:
        super().__init__(below)
        self._near = below
        self._num_far = 0  # messages between hosts on their way
        self._store, self._timeout_s = dist.PrefixStore("far", store), timeout_s
        self._far: Transport | None = None
        self._aborted = False

    @property
    def exchanges_to(self) -> int:
        """See `Transport.exchanges_to`; exchanges are inside a host only."""
        return self.below.exchanges_to if self._far is None else 0

    @exchanges_to.setter
    def exchanges_to(self, nbytes: int) -> None:
        self.below.exchanges_to = nbytes

    def connect(self, timeout_s: float) -> None:
        """Connect inside the hosts, and then between them."""
        deadline = time.monotonic() + timeout_s
        is_in_reach = True
        try:
            super().connect(timeout_s)
        except OutOfReachError as error:
            if not self.is_automatic:
                raise TransportError(str(error)) from error
            is_in_reach, self.hosts = False, self.below.hosts
            _log.warning('"auto" does not stand for %s here: %s', self.name, error)
        if len(set(self.hosts)) > 1 or not is_in_reach:
            far = self._far = catalogue.beside(self.name, "cpu").make(  # `abort` reaches it
                self._store, self.rank, self.world_size, torch.device("cpu"), self._timeout_s
            )
            far.is_far = is_in_reach
            if not is_in_reach:
                self.name, far.verifies = far.name, self.verifies
            if self._aborted:  # before there was anything to reach
                raise self._gave_up()
            far.connect(left_s(deadline))
            if is_in_reach:
                self._near.beside = self._move_far
            else:
                self.below, self._far = far, None
                self._near.close()
                if self._aborted:  # before the other one was in its place
                    raise self._gave_up()
        self.lends_from = self.below.lends_from
        if self._far is None:  # every call goes straight to the transport below
            self.waits_briefly = self.below.waits_briefly
            for name in ("bind", "bind_exchange", "interpret", "wait", "view", "read", "release"):
                setattr(self, name, getattr(self.below, name))

    def _gave_up(self) -> PeerLostError:
        return PeerLostError(f"rank {self.rank} gave up meeting the others")

    def bind(self, receives: Sequence[Message], sends: Sequence[Message]) -> Start:
        """Make messages ready; see `Transport.bind`."""
        assert self._far is not None
        hosts, own = self.hosts, self.hosts[self.rank]
        both = [*receives, *sends]
        is_far = [hosts[message.peer] != own for message in both]
        num_far = sum(is_far)
        post_near = self.below.bind(
            [message for message in receives if hosts[message.peer] == own],
            [message for message in sends if hosts[message.peer] == own],
        )
        post_far = self._far.bind(
            [message._replace(lent=False) for message in receives if hosts[message.peer] != own],
            [message for message in sends if hosts[message.peer] != own],
        )

        def post(mixed: int) -> list[Handle]:
            near, far = iter(post_near(mixed)), iter(post_far(mixed))
            self._num_far += num_far
            return [
                _Far(next(far), message.tensor) if travels else next(near)
                for message, travels in zip(both, is_far, strict=True)
            ]

        return post

    def wait(self, handle: Handle, timeout_s: float) -> None:
        """Wait for one message; see `Transport.wait`."""
        if isinstance(handle, _Far):
            assert self._far is not None
            self._near.push(timeout_s)
            self._far.wait(handle.handle, timeout_s)
            self._num_far -= not handle.is_complete
            handle.is_complete = True
        else:
            self.below.wait(handle, timeout_s)

    def _move_far(self) -> bool:
        """Move the messages between hosts on, if there are any; return whether that is needed."""
        assert self._far is not None
        return self._num_far > 0 and self._far.move()

    def view(self, handle: Handle, dtype: torch.dtype) -> Tensor | None:
        """The elements of a lent message in reach; see `Transport.view`."""
        return handle.tensor if isinstance(handle, _Far) else self.below.view(handle, dtype)

    def read(self, handle: Handle, start: int, into: Tensor) -> None:
        """Copy elements of a lent message; see `Transport.read`."""
        self.below.read(handle, start, into)

    def release(self, handle: Handle) -> None:
        """End the loan of a message; see `Transport.release`."""
        if not isinstance(handle, _Far):
            self.below.release(handle)

    def abort(self) -> None:
        """Abort both transports."""
        self._aborted, far = True, self._far
        super().abort()
        if far is not None:
            far.abort()

    def close(self) -> None:
        """Close both transports."""
        super().close()
        if self._far is not None:
            self._far.close()
