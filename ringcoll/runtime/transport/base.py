"""A transport: point-to-point messages between the ranks of one group.

A transport moves bytes between two ranks and knows nothing else: no collective, no operator, no
schedule. Nothing above it knows which one is used. A transport may be around another one, and
change how its messages travel (`AroundTransport`).

Tensors on a CUDA device are carried in the order of the stream that is current on their device
(``torch.cuda.current_stream(device)``) in the thread that calls:

- what was enqueued before `Transport.post` is done before the messages' memory is read or written;
- what is enqueued after `Transport.wait` has returned sees what was received, and may overwrite
  what was sent.

How a transport does that is its own business. If the host moves the messages (UCX, threads), the
transport lets the stream run dry when it posts, with `settle`; `StagedTransport` copies on a
stream of its own; NCCL enqueues the messages themselves.
"""

from __future__ import annotations

import ctypes
import math
import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ringcoll.errors import TransportError

Handle = object
"""A message on its way: `Transport.post` returns it, and `Transport.wait` takes it."""
Start = Callable[[int], list[Handle]]
"""Starts messages that `Transport.bind` has made ready."""


class Message(NamedTuple):
    """One message: a flat contiguous tensor to or from a peer, under a tag of 31 bits.

    A receive that is ``lent`` is read by `Transport.view` or `Transport.read`, not in its tensor.
    """

    peer: int
    tensor: Tensor
    tag: int
    lent: bool = False


class Exchange(Protocol):
    """A message of each rank to all others, bound like `Transport.bind` for any number of runs."""

    place: int
    """In which of two places the messages of the last run lie: 0 or 1, the same for all."""

    def __call__(self, mixed: int) -> list[Handle]:
        """Start the messages; see `Transport.bind`."""

    def view(self, position: int, place: int) -> Tensor:
        """The memory in which a lent receive of this position comes to a place.

        Others may read it until the next run but one.
        """


@dataclass(slots=True)
class LocalWork:
    """Local work of a program, for a transport that can interpret programs: a copy, or a reduction.

    ``lent`` has the numbers of the messages that some of the sources come with, by their positions.
    ``operator`` is the name of an operator whose result on ``dtype`` is that of torch's function of
    two operands; ``None`` of a copy. A total is divided by ``divisor``, if it is not 0.
    """

    into: Tensor
    sources: Sequence[Tensor]
    operator: str | None = None
    lent: Mapping[int, int] = field(default_factory=dict)
    divisor: int = 0


Quick = Callable[[tuple[Callable[[], int], ...] | None], int | None]
"""A whole call, made where nothing is unusual. Functions tell the addresses of the tensors, if
these may have moved; ``None`` if not. It returns ``None`` if the call is over, -1 if it has not
begun, and else its number: `Interpreted.go_on` goes on, in the turn that it has taken."""


class Interpreted(Protocol):
    """A program that its transport runs: see `Transport.interpret`."""

    def quick(
        self, group: array[int], valid: array[int], about: Sequence[int], objects: Sequence[object]
    ) -> Quick:
        """Make a function for whole calls; see `ringcoll.runtime.group.communicator`."""

    def adopt(self) -> int:
        """Take over a run that a function of `quick` has begun, for `go_on`; return its tag."""

    def begin(self, tag: int) -> None:
        """Begin a run, which `go_on` goes on with; ``tag`` is mixed into the tags of messages."""

    def go_on(self, deadline: float, watch: Any) -> tuple[int, list[Handle]] | None:
        """Run on, to the end (``None``).

        Otherwise return the number of the item from which on the program has to be run in another
        way, and the handles of the messages so far. ``watch.wait`` becomes the item that is waited
        for. Raises as `Transport.wait`, after which it goes on if that was a `NotYetError`.
        """


class NotYetError(Exception):
    """A message has not come by `Transport.until_s`, or the wait has given way."""


class Transport(Protocol):
    """Point-to-point messages among the ranks of one group.

    Messages between two ranks match by tag, and within a tag in the order in which they are
    posted. A transport that ignores tags (``ordered``) matches by order alone. Tensors stay in use
    from when they are posted until `wait` returns.
    """

    rank: int
    world_size: int
    name: str
    ordered: bool
    """Whether tags are ignored, so that ranks must agree before they send."""

    waits_on_host: bool = True
    """Whether `wait` returns only when the message is there; if not, it orders the stream."""

    waits_briefly: bool = False
    """Whether `wait` heeds `until_s` and `gives_way`."""

    until_s: float | None = None
    """When `wait` gives up, as ``time.monotonic`` counts, with a `NotYetError` that harms nothing:
    the message may be waited for again, in any thread. ``None``: only its time limit counts, which
    breaks the group."""

    gives_way: Callable[[], bool] | None = None
    """Asked before `wait` sleeps; if it returns ``True``, `wait` gives up as at `until_s`."""

    shares_process: bool = False
    """Whether the ranks are threads of one process."""

    lends_from: float = math.inf
    """Bytes from which on a message can be lent: read where it lies, which saves a copy."""

    direct_from: int | None = None
    """Bytes from which a message inside a host is read where it lies in its sender's memory; a
    shorter one is copied twice. It may be set, as the quicker of the two depends on the machine.
    ``None``: there is one way."""

    slice_bytes: int | None = None
    """Most bytes of the slices in which a transport moves long messages best, as they stay in
    caches on the way; ``None`` if it makes no difference. A group measures of how many bytes they
    are, if they are quicker at all."""

    exchanges_to: int = 0
    """Bytes up to which one message of each rank to all others has a way of its own: see
    `bind_exchange`. Alike on all ranks after `connect`; a rank whose messages have to pass through
    another transport sets it to 0 before."""

    verifies: bool = False
    """Whether each message has its checksum beside it; the ranks compare it when they meet."""

    is_automatic: bool = False
    """Whether nobody has asked for this transport, so that another one may take its place."""

    is_far: bool = False
    """Whether messages go to other hosts only, as another transport carries those inside a host;
    set before `connect`."""

    hosts: tuple[int, ...]
    """Host number of every rank, alike on all ranks; empty before `connect`."""

    def connect(self, timeout_s: float) -> None:
        """Meet the other ranks: takes all of them. Called once, before the first message.

        Raises
        ------
        CollectiveTimeoutError
            Some rank did not come.
        TransportError
            The ranks could not be connected, or `abort` was called.
        """

    def bind(self, receives: Sequence[Message], sends: Sequence[Message]) -> Start:
        """Make messages ready; return a callable that starts them, any number of times.

        The callable takes a number of 31 bits, which is mixed into the tags (exclusive or), and
        returns a handle for each message, receives first; ``None`` for one that is over. A handle
        keeps its message's tensor alive.
        """

    def bind_exchange(self, receives: Sequence[Message], send: Tensor, tag: int) -> Exchange:
        """Make a message ready that every rank sends to all others, each as many bytes as it likes.

        All ranks take part in each run, in the same order, and none begins one before it has
        waited for all receives of its last one, and has read what was lent to it.
        """
        raise TransportError(f"the transport {self.name} has no exchanges")

    def interpret(self, items: Sequence[Any], works: Mapping[int, LocalWork]) -> Interpreted | None:
        """Make a program that the transport runs as a whole; ``None`` if it does not.

        ``items`` are those of `ringcoll.runtime.operation.executor`, and ``works`` says what some
        of them do, by their numbers.
        """
        return None

    def post(self, receives: Sequence[Message], sends: Sequence[Message]) -> list[Handle]:
        """Start messages once; return a handle for each, receives first."""
        return self.bind(receives, sends)(0)

    def wait(self, handle: Handle, timeout_s: float) -> None:
        """Wait for one message.

        Raises
        ------
        CollectiveTimeoutError
            It took longer than ``timeout_s`` seconds.
        PeerLostError
            The connection to the peer is gone, or `abort` was called.
        NotYetError
            It has not come by ``until_s``.
        """

    def move(self) -> bool:
        """Move messages on, as the rank waits elsewhere; return whether that is needed.

        It does not wait. By default messages move by themselves.
        """
        return False

    def is_over(self, handle: Handle) -> bool:
        """Whether a message has come, or was taken, although nobody has waited on the host.

        It is asked only if `wait` orders the stream, and after `wait`; see `waits_on_host`. The
        thread that asks is inside of `ringcoll.runtime.transport.streams.beside`.
        """
        return True

    def view(self, handle: Handle, dtype: torch.dtype) -> Tensor | None:
        """The elements of a lent message that has come, if they lie in this process's reach.

        They are not to be written, and not to be read after `release`.
        """
        raise TransportError(f"the transport {self.name} lends no messages")

    def read(self, handle: Handle, start: int, into: Tensor) -> None:
        """Copy elements of a lent message that is out of this process's reach.

        Parameters
        ----------
        handle
            Handle of the receive, for which `wait` has returned.
        start
            The first of the elements.
        into
            Flat tensor for as many as are to be copied.

        Raises
        ------
        PeerLostError
            The peer is gone, or has given up: what was read before may be wrong.
        """
        raise TransportError(f"the transport {self.name} lends no messages")

    def release(self, handle: Handle) -> None:
        """End the loan of a message; the sender's wait ends. Raises as `read`."""
        raise TransportError(f"the transport {self.name} lends no messages")

    def abort(self) -> None:
        """Wake everyone who waits, here and at the peers, with an error; for good."""

    def close(self) -> None:
        """Release what the transport holds. Nothing may be in flight."""


def _of_below(name: str) -> Any:
    """An attribute that is the one of the transport below, to read and to set."""
    return property(
        lambda around: getattr(around.below, name),
        lambda around, value: setattr(around.below, name, value),
        doc=f"See `Transport.{name}`; it is that of the transport below.",
    )


class AroundTransport(Transport):
    """All that a subclass does not change is as in the transport ``below``, which moves bytes."""

    def __init__(self, below: Transport) -> None:
        self.below = below
        self.rank, self.world_size, self.name = below.rank, below.world_size, below.name
        self.ordered, self.waits_on_host = below.ordered, below.waits_on_host
        self.shares_process, self.hosts = below.shares_process, below.hosts

    # The innermost transport meets the others, and waits.
    verifies = _of_below("verifies")
    direct_from = _of_below("direct_from")
    slice_bytes = _of_below("slice_bytes")
    until_s = _of_below("until_s")
    gives_way = _of_below("gives_way")

    def connect(self, timeout_s: float) -> None:
        """Connect the transport below."""
        self.below.connect(timeout_s)
        self.hosts, self.name = self.below.hosts, self.below.name

    def is_over(self, handle: Handle) -> bool:
        """Whether a message of the transport below is over."""
        return self.below.is_over(handle)

    def abort(self) -> None:
        """Abort the transport below."""
        self.below.abort()

    def close(self) -> None:
        """Close the transport below."""
        self.below.close()


def devices_of(messages: Iterable[Message]) -> tuple[torch.device, ...]:
    """The CUDA devices whose memory the messages read or write; mostly zero or one device."""
    devices = (message.tensor.device for message in messages)
    return tuple(dict.fromkeys(device for device in devices if device.type == "cuda"))


def bytes_at(address: int, nbytes: int) -> memoryview:
    """Some bytes of this process's memory; the result does not keep the memory alive."""
    if not nbytes:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def left_s(deadline: float) -> float:
    """Seconds until a deadline of ``time.monotonic``; a moment at least, for a last look."""
    return max(deadline - time.monotonic(), 0.001)


def settle(devices: Iterable[torch.device]) -> None:
    """Wait for all work that is enqueued on the current streams of some CUDA devices."""
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
