"""Messages with faults on purpose, to test algorithms, programs and the library itself.

A transport around another transport: the sender draws a fault for each of its messages, or none, from a
random generator of its own, so that a seed repeats a run.

=============  ===========================================================================
``delay``      the message is sent a while later
``reorder``    messages of other tags or to other peers, posted at the same time, overtake it
``drop``       it is not sent
``duplicate``  it is sent twice
``truncate``   the elements from a random place on are not sent
``flip``       a random bit is sent inverted
=============  ===========================================================================

Messages to a peer under one tag stay in order, as transports promise. A rank sends what it has held back
before it waits for anything. Messages by which ranks meet and agree, and those of a user's own, have no faults: their
tags have nothing mixed in.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from random import Random

import torch

from ringcoll.errors import ArgumentError
from ringcoll.transport.around import AroundTransport
from ringcoll.transport.base import Handle, Message, Transport

_KINDS = ("delay", "reorder", "drop", "duplicate", "truncate", "flip")
_log = logging.getLogger("ringcoll")


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """The faults of messages, and how often each happens; a message has one at most.

    Each fault is logged (level ``info``).

    Parameters
    ----------
    seed
        Seed of the random generators; each rank has its own.
    delay, reorder, drop, duplicate, truncate, flip
        Probability that a message has this fault; see `ringcoll.transport.faulty`.
    longest_s
        Longest delay in seconds.
    most
        Number of faults after which a rank has no more.

    Raises
    ------
    ArgumentError
        A probability is negative, or their sum is more than 1; or a limit is no number from 0 on.

    Examples
    --------
    >>> import torch, ringcoll
    >>> def rank_main(group):
    ...     tensor = torch.ones(1000)
    ...     ringcoll.all_reduce(tensor, group=group)
    ...     return tensor.sum().item()
    >>> ringcoll.run_threads(rank_main, 2, faults=ringcoll.Faults(delay=0.5, reorder=0.5))
    [2000.0, 2000.0]
    """

    seed: int = 0
    delay: float = 0.0
    reorder: float = 0.0
    drop: float = 0.0
    duplicate: float = 0.0
    truncate: float = 0.0
    flip: float = 0.0
    longest_s: float = 0.01
    most: float = math.inf

    def __post_init__(self) -> None:
        odds = self.odds
        if min(odds) < 0 or not sum(odds) < 1 + 1e-9:
            raise ArgumentError(
                "not probabilities of faults of which a message has one at most",
                argument=", ".join(_KINDS),
                expected="numbers from 0 on, with a sum of 1 at most",
                got=odds,
            )
        if not (0 <= self.longest_s < math.inf and self.most >= 0):
            raise ArgumentError(
                "not the longest delay and the largest number of faults",
                argument="longest_s, most",
                expected="finite seconds, and a number, from 0 on",
                got=(self.longest_s, self.most),
            )

    @property
    def odds(self) -> tuple[float, ...]:
        """Probability of each kind of fault."""
        return tuple(getattr(self, kind) for kind in _KINDS)

    @classmethod
    def parse(cls, text: str) -> Faults:
        """Read faults such as ``seed=1,flip=0.01``.

        Raises
        ------
        ArgumentError
            The text cannot be read.
        """
        known = {field.name for field in fields(cls)}
        values = dict(item.strip().partition("=")[::2] for item in text.split(","))
        try:
            if values.keys() <= known:
                seed = int(values.pop("seed", "0"))
                return cls(seed=seed, **{name: float(value) for name, value in values.items()})
        except ValueError:
            pass
        raise ArgumentError(
            "not faults",
            argument="faults",
            expected=f"NAME=NUMBER,..., with the names {', '.join(sorted(known))}",
            got=text,
        )


class _Sending:
    """A send: held back until a moment, then with its handle below, and perhaps sent twice."""

    __slots__ = ("due_s", "handle", "message", "twice")

    def __init__(self, message: Message) -> None:
        self.message, self.due_s, self.twice = message, 0.0, False
        self.handle: Handle | None = None  # nothing is sent: nothing is waited for

    @property
    def place(self) -> tuple[int, int]:
        """Messages of the same place stay in order."""
        return self.message.peer, self.message.tag


class FaultyTransport(AroundTransport):
    """Messages of another transport with faults."""

    def __init__(self, below: Transport, faults: Faults) -> None:
        super().__init__(below)
        below.exchanges_to = 0  # on all ranks, as soon as one has faults
        self._faults, self._left = faults, faults.most
        self._random = Random(f"{faults.seed} {self.rank}")  # noqa: S311  # no secret
        self._held: list[_Sending] = []  # in the order in which they are due
        self._copies: list[Handle] = []  # nobody waits for them, perhaps nobody takes them
        self._lock = threading.RLock()

    def bind(
        self, receives: Sequence[Message], sends: Sequence[Message]
    ) -> Callable[[int], list[Handle]]:
        """Make messages ready; see `Transport.bind`. Faults are drawn when they are posted."""
        return partial(self._post, receives, sends)

    def _post(
        self, receives: Sequence[Message], sends: Sequence[Message], mixed: int
    ) -> list[Handle]:
        with self._lock:
            arriving = [message._replace(tag=message.tag ^ mixed) for message in receives]
            handles = self.below.post(arriving, [])
            for message in sends:
                sending = _Sending(message._replace(tag=message.tag ^ mixed))
                self._send(sending, self._drawn(message) if mixed else "")
                handles.append(sending)
            return handles

    def _drawn(self, message: Message) -> str:
        """The fault of a message, or ``""``."""
        odds = self._faults.odds
        (kind,) = self._random.choices(("", *_KINDS), (max(0.0, 1 - sum(odds)), *odds))
        is_empty = kind in ("truncate", "flip") and not message.tensor.nbytes
        if not kind or is_empty or self._left <= 0:
            return ""
        self._left -= 1
        nbytes, peer = message.tensor.nbytes, message.peer
        _log.info("rank %d: %s of a message of %d bytes to rank %d", self.rank, kind, nbytes, peer)
        return kind

    def _send(self, sending: _Sending, kind: str) -> None:
        message = sending.message
        if kind == "drop":
            return
        if kind == "truncate":
            numel = self._random.randrange(message.tensor.numel())
            sending.message = message._replace(tensor=message.tensor[:numel].clone())
        elif kind == "flip":
            tensor = message.tensor.clone()
            place, bit = divmod(self._random.randrange(8 * tensor.nbytes), 8)
            tensor.view(torch.uint8)[place] ^= 1 << bit
            sending.message = message._replace(tensor=tensor)
        sending.twice = kind == "duplicate"
        # Behind one that is held back, another one of its place is so as well.
        earlier = [other.due_s for other in self._held if other.place == sending.place]
        if kind in ("delay", "reorder") or earlier:
            longest_s = self._faults.longest_s if kind == "delay" else 1e-6
            drawn_s = time.monotonic() + longest_s * self._random.random()
            sending.due_s = max(drawn_s, *earlier) if earlier else drawn_s
            self._held.append(sending)
            self._held.sort(key=lambda other: other.due_s)
        else:
            self._start(sending)

    def _start(self, sending: _Sending) -> None:
        message = sending.message
        (sending.handle,) = self.below.post([], [message])
        if sending.twice:
            self._copies += self.below.post([], [message._replace(tensor=message.tensor.clone())])

    def wait(self, handle: Handle, timeout_s: float) -> None:
        """Wait for one message; see `Transport.wait`."""
        with self._lock:
            while self._held:
                sending = self._held.pop(0)
                time.sleep(max(0.0, sending.due_s - time.monotonic()))
                self._start(sending)
        if isinstance(handle, _Sending):
            handle = handle.handle
            if handle is None:
                return
        self.below.wait(handle, timeout_s)
