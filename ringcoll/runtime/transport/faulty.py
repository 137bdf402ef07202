"""Messages with faults on purpose, and the checksums that find them; each is around a transport.

Faults test algorithms, programs and the library itself: the sender draws a fault for each of its
messages, or none, from a random generator of its own, so that a seed repeats a run.

=============  ===========================================================================
``delay``      the message is sent a while later
``reorder``    messages of other tags or to other peers, posted at the same time, overtake it
``drop``       it is not sent
``duplicate``  it is sent twice
``truncate``   the elements from a random place on are not sent
``flip``       a random bit is sent inverted
=============  ===========================================================================

Messages to a peer under one tag stay in order, as transports promise. A rank sends what it has held
back before it waits for anything. Messages by which ranks meet and agree, and those of a user's
own, have no faults: their tags have nothing mixed in.

The checksum of a message is its CRC-32, and travels beside it as a message of 8 bytes under a tag
of its own, so that lengths fit whatever happens to either. The receiver computes the checksum again
when both have come. The checksum begins with the number of the message among those of its tag from
its sender. So a message that is lost, or comes twice, is found by the next one, also if its
checksum is lost or comes twice, too.

With checksums nothing is lent: what a receiver reads piece by piece in its peer's memory has no
moment at which all of it is there to be verified. CUDA tensors are copied to the host to be
verified.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from random import Random

import torch
from torch import Tensor

from ringcoll.errors import ArgumentError, CorruptMessageError
from ringcoll.runtime.machine import settings
from ringcoll.runtime.transport.base import (
    AroundTransport,
    Handle,
    Message,
    Start,
    Transport,
    bytes_at,
    left_s,
)

_KINDS = ("delay", "reorder", "drop", "duplicate", "truncate", "flip")
_BESIDE = 0x2C9277B5  # mixed into the tags of checksums; any number of 31 bits
_MOST_TAGS = 1 << 14  # whose messages are counted: far more than are in use at a time
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
        Probability that a message has this fault; see `ringcoll.runtime.transport.faulty`.
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
            message = "not probabilities of faults of which a message has one at most"
            expected = "numbers from 0 on, with a sum of 1 at most"
            raise ArgumentError(message, ", ".join(_KINDS), expected, odds)
        if not (0 <= self.longest_s < math.inf and self.most >= 0):
            message = "not the longest delay and the largest number of faults"
            expected = "finite seconds, and a number, from 0 on"
            raise ArgumentError(message, "longest_s, most", expected, (self.longest_s, self.most))

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
        expected = f"NAME=NUMBER,..., with the names {', '.join(sorted(known))}"
        raise ArgumentError("not faults", "faults", expected, text)


class _Sending:
    """A send: held back until a moment, then with its handle below, and perhaps sent twice."""

    __slots__ = ("due_s", "handle", "message", "place", "twice")

    def __init__(self, message: Message) -> None:
        self.message, self.due_s, self.twice = message, 0.0, False
        self.place = message.peer, message.tag  # messages of the same place stay in order
        self.handle: Handle | None = None  # nothing is sent: nothing is waited for


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

    def bind(self, receives: Sequence[Message], sends: Sequence[Message]) -> Start:
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


def _next_number(counts: dict[tuple[int, int], int], message: Message, mixed: int) -> int:
    """Number of a message of a peer and tag. Tags of operations do not come again."""
    key = message.peer, message.tag ^ mixed
    number = counts.pop(key, 0)
    counts[key] = number + 1  # now the latest of all
    if len(counts) > _MOST_TAGS:
        del counts[next(iter(counts))]
    return number & 0xFFFFFFFF


class _Beside:
    """A message, the message with its checksum, and the memory of the latter."""

    def __init__(self, message: Message) -> None:
        self.message = message
        with torch.inference_mode(False):  # the other end may be outside of that mode
            tensor = torch.zeros(1, dtype=torch.int64, device="cpu")
        self.checksum = Message(message.peer, tensor, message.tag ^ _BESIDE)
        self.word = bytes_at(tensor.data_ptr(), 8).cast("q")

    def compute(self, number: int) -> int:
        """CRC-32 of what is in the message's memory."""
        host: Tensor = self.message.tensor.cpu()
        return zlib.crc32(bytes_at(host.data_ptr(), host.nbytes), number)


@dataclass(slots=True)
class _Checked:
    """A message and its checksum on their way below; of a receive also what is to be verified."""

    message: Handle
    checksum: Handle
    beside: _Beside | None = None
    number: int = 0


class VerifiedTransport(AroundTransport):
    """Messages of another transport, on all ranks, each with its checksum beside it."""

    def __init__(self, below: Transport) -> None:
        super().__init__(below)
        self.verifies = True
        self._sent: dict[tuple[int, int], int] = {}  # numbers of the next messages
        self._received: dict[tuple[int, int], int] = {}

    def bind(self, receives: Sequence[Message], sends: Sequence[Message]) -> Start:
        """Make messages ready; see `Transport.bind`."""
        arriving, leaving = [*map(_Beside, receives)], [*map(_Beside, sends)]
        start = self.below.bind(
            [*receives, *(beside.checksum for beside in arriving)],
            [*sends, *(beside.checksum for beside in leaving)],
        )
        split = len(arriving)

        def post(mixed: int) -> list[Handle]:
            for beside in leaving:
                number = _next_number(self._sent, beside.message, mixed)
                beside.word[0] = beside.compute(number)
            handles = start(mixed)
            into, out_of = handles[: 2 * split], handles[2 * split :]
            pairs = [*map(_Checked, into[:split], into[split:])]
            for pair, beside in zip(pairs, arriving, strict=True):
                pair.beside = beside
                pair.number = _next_number(self._received, beside.message, mixed)
            pairs += map(_Checked, out_of[: len(leaving)], out_of[len(leaving) :])
            return [*pairs]

        return post

    def wait(self, handle: Handle, timeout_s: float) -> None:
        """As `Transport.wait`; `CorruptMessageError` if the message is not what was sent."""
        assert isinstance(handle, _Checked)
        deadline = time.monotonic() + timeout_s
        self.below.wait(handle.message, timeout_s)
        self.below.wait(handle.checksum, left_s(deadline))
        beside, handle.beside = handle.beside, None  # a second wait verifies nothing
        if beside is not None and (own := beside.compute(handle.number)) != beside.word[0]:
            peer, tensor = beside.message.peer, beside.message.tensor
            raise CorruptMessageError(
                f"rank {self.rank} got a message of {tensor.nbytes} bytes from rank {peer} with "
                f"the checksum {own:#010x} instead of {beside.word[0]:#010x}: it was changed, lost "
                "or doubled on its way",
                peer=peer,
            )


def as_asked(
    transport: Transport, *, verify_messages: bool | None = None, faults: Faults | None = None
) -> Transport:
    """The transport itself, or another around it with checksums or faults.

    The environment's variables come before the arguments. Raises `ArgumentError` if messages that
    do not pass through the host, such as NCCL's, are to be verified or disturbed.
    """
    forced, text = settings.verifies_messages(), settings.faults()
    verifies = verify_messages if forced is None else forced
    faults = Faults.parse(text) if text else faults
    if (verifies or faults is not None) and not transport.waits_on_host:
        message = f"over {transport.name} the host does not see the messages"
        argument, name = "verify_messages" if verifies else "faults", transport.name
        raise ArgumentError(message, argument, "another transport", name, transport.rank)
    if faults is not None:
        transport = FaultyTransport(transport, faults)
    return VerifiedTransport(transport) if verifies else transport
