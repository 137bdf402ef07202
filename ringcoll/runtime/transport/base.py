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

No address of a user's tensor is read before the tensor has passed `with_memory`. A tensor that is
on a device need not have memory there. A subclass with a ``__torch_dispatch__`` of its own may
stand for other tensors: an ``AsyncCollectiveTensor`` of torch for the result of a collective that
is still under way, a ``DTensor`` for a part on each rank, a ``FakeTensor`` for nothing. And a
storage can be freed, or made shorter than the tensors that look at it.

torch's collectives are operators, so that such a class itself says what an operator does to its
tensors. Here an operator that does nothing goes the same way, and notes the tensor that arrives.
"""

from __future__ import annotations

import ctypes
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn.parameter import is_lazy

from ringcoll._package import __version__
from ringcoll.errors import ArgumentError, CollectiveTimeoutError, PeerLostError, TransportError
from ringcoll.runtime.machine import appears, as_json, hosts_of, place, read_all
from ringcoll.runtime.transport import catalogue
from ringcoll.runtime.transport.shared.memory import may_write

Handle = object
"""A message on its way: `Transport.post` returns it, and `Transport.wait` takes it."""


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

    def bind(
        self, receives: Sequence[Message], sends: Sequence[Message]
    ) -> Callable[[int], list[Handle]]:
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


def settle(devices: Iterable[torch.device]) -> None:
    """Wait for all work that is enqueued on the current streams of some CUDA devices."""
    for device in devices:
        torch.cuda.current_stream(device).synchronize()


def late(rank: int, missing: Sequence[int], timeout_s: float) -> CollectiveTimeoutError:
    """The error of a rank that has waited in vain for others to meet it."""
    ranks = ", ".join(f"rank {peer}" for peer in missing)
    return CollectiveTimeoutError(
        f"rank {rank} waited the whole timeout of {timeout_s:g} s for {ranks} to use the "
        "group for the first time",
        peer=missing[0] if missing else None,
    )


def await_peers(
    store: dist.Store,
    rank: int,
    keys: Mapping[int, str],
    deadline: float,
    timeout_s: float,
    given_up: Callable[[], bool],
    *,
    last_key: str = "",
) -> None:
    """Wait until the store has the key of each peer, or the last key, which follows all of them."""
    if not appears(store, [last_key] if last_key else [*keys.values()], deadline, given_up):
        if given_up():
            raise PeerLostError(f"rank {rank} gave up meeting the others")
        missing = [peer for peer, key in keys.items() if not store.check([key])]
        raise late(rank, missing, timeout_s)


def told_by(
    store: dist.Store,
    name: str,
    rank: int,
    peers: Sequence[int],
    timeout_s: float,
    given_up: Callable[[], bool],
    parse: Callable[[Any], Any],
    *,
    since_s: float | None = None,
) -> dict[int, Any]:
    """Read what each of some ranks has put into the store as JSON, under ``NAME/RANK``.

    The time limit counts from ``since_s``, a time of ``time.monotonic``; by default from now.

    Raises
    ------
    CollectiveTimeoutError, PeerLostError
        As `meet`.
    TransportError
        A text is not JSON that ``parse`` reads.
    """
    keys = {peer: f"{name}/{peer}" for peer in peers}
    deadline = (time.monotonic() if since_s is None else since_s) + timeout_s
    await_peers(store, rank, keys, deadline, timeout_s, given_up)
    texts = zip(keys.items(), read_all(store, [*keys.values()]), strict=True)
    return {peer: as_json(key, text, parse) for (peer, key), text in texts}


def meet(
    store: dist.Store, transport: Transport, timeout_s: float, given_up: Callable[[], bool]
) -> tuple[int, ...]:
    """Wait for every rank, with the same transport and version; return their host numbers.

    Parameters
    ----------
    store
        Store of the group. Its keys here are the same for every transport, so that ranks with
        different transports meet.
    transport
        This rank's transport.
    timeout_s
        Time limit in seconds.
    given_up
        Function that says whether the wait is in vain.

    Raises
    ------
    CollectiveTimeoutError
        Some rank did not come.
    TransportError
        Some rank came with another transport, or another version of the library.
    PeerLostError
        ``given_up`` has returned ``True``.
    """
    return meet_telling(store, transport, timeout_s, given_up, "")[0]


def meet_telling(
    store: dist.Store,
    transport: Transport,
    timeout_s: float,
    given_up: Callable[[], bool],
    about: str,
) -> tuple[tuple[int, ...], list[str]]:
    """As `meet`; ``about`` is this rank's text for the others.

    Returns the number of each rank's host, and the text of every rank.
    """
    rank, world_size = transport.rank, transport.world_size
    keys = {peer: f"here/{peer}" for peer in range(world_size)}
    how = " with verify_messages" if transport.verifies else ""
    own = f"transport {transport.name}{how} of ringcoll {__version__}"
    store.set(keys[rank], f"{own}\n{place()}\n{about}")
    await_peers(store, rank, keys, time.monotonic() + timeout_s, timeout_s, given_up)
    places, abouts = [], []
    for peer, text in enumerate(read_all(store, [*keys.values()])):
        other, where, about = [*text.split("\n", 2), "", ""][:3]
        if other != own:
            lacking = catalogue.lacking("".join(other.split()[1:2]))
            raise TransportError(
                f"rank {rank} came with {own}, rank {peer} with {other}; all ranks need the same. "
                + (f"Rank {rank} cannot: {lacking}. " if lacking else "")
                + "`ringcoll doctor` says, where a rank runs, what it lacks, and "
                "RINGCOLL_TRANSPORT=gloo (RINGCOLL_CUDA_TRANSPORT for CUDA tensors), on all ranks, "
                "needs nothing"
            )
        places.append(where)
        abouts.append(about)
    return hosts_of(places), abouts


# --- the memory of a user's tensors ---------------------------------------------------------


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor's elements lie in memory by strides, as they are."""
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested


def extent(tensor: Tensor) -> int:
    """Bytes from a strided tensor's first element to the end of its last element."""
    if tensor.is_contiguous():
        return tensor.nbytes
    if not tensor.numel():
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in steps)) * tensor.itemsize


def has_memory(tensor: Tensor) -> bool:
    """Whether the storage of a strided tensor has all its elements."""
    nbytes = extent(tensor)
    if not nbytes:
        return True
    end = nbytes + tensor.storage_offset() * tensor.itemsize
    return tensor.data_ptr() != 0 and tensor.untyped_storage().nbytes() >= end


def can_write(tensor: Tensor) -> bool:
    """Whether the first and the last element of a strided tensor can be written.

    A file that is mapped for reading cannot; torch does not know. torch's own memory can.
    """
    if tensor.untyped_storage().resizable() or not tensor.is_cpu or not tensor.numel():
        return True
    begin = tensor.data_ptr()
    return may_write(begin) and may_write(begin + extent(tensor) - 1)


def with_memory(
    tensor: object, rank: int | None = None, argument: str = "tensor", *, is_written: bool = False
) -> Tensor:
    """The dense tensor in whose memory the elements of a user's tensor lie.

    It is the tensor itself; or, for a tensor of a class that dispatches operators, the tensor that
    the class hands to an operator. It has been waited for.

    Parameters
    ----------
    tensor
        Argument of the user, unchecked.
    rank, argument
        Rank and name of the argument, for the error.
    is_written
        Whether the memory is going to be written.

    Raises
    ------
    ArgumentError
        The argument is no tensor, is not dense, or has no memory; or it is going to be written, and
        its memory can only be read.
    """
    if not isinstance(tensor, Tensor):
        raise ArgumentError("not a tensor", argument, "a torch.Tensor", type(tensor), rank)
    if is_lazy(tensor):
        raise ArgumentError("is not initialized yet", argument, "memory", type(tensor), rank)
    if is_functorch_wrapped_tensor(tensor):
        message = "is of a transformation such as vmap"
        raise ArgumentError(message, argument, "memory", "no memory", rank)
    if _dispatches(tensor):
        tensor = _behind(tensor, argument, rank)
    if not is_dense(tensor):
        kind: object = tensor.dtype if tensor.is_quantized else tensor.layout
        kind = "a nested tensor" if tensor.is_nested else kind
        raise ArgumentError("must be dense", argument, "a strided tensor", kind, rank)
    if tensor.is_meta:
        raise ArgumentError("has no data", argument, "memory", tensor.device, rank)
    if not has_memory(tensor):
        size = tensor.untyped_storage().nbytes()
        message = "has no memory: its storage was freed, or has become too short, or never had any"
        got = f"{type(tensor).__name__} with a storage of {size} bytes"
        raise ArgumentError(message, argument, f"{extent(tensor)} bytes", got, rank)
    if is_written and not can_write(tensor):
        expected = "memory that can be written: clone() it"
        got = "memory that can only be read, as a file's"
        raise ArgumentError("would be written", argument, expected, got, rank)
    return tensor


def _dispatches(tensor: Tensor) -> bool:
    """Whether a tensor's class says itself what operators do."""
    kind: Any = type(tensor)
    return bool(kind.__torch_dispatch__ is not _NONE)


class _Arrived(threading.local):
    """The tensors that have arrived at the operator in this thread."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []


_arrived = _Arrived()


def _arrive(tensor: Tensor) -> None:
    _arrived.tensors.append(tensor)


_NONE = Tensor.__torch_dispatch__
_making = threading.Lock()
_operator: list[Any] = []


def _behind(tensor: Tensor, argument: str, rank: int | None) -> Tensor:
    """The tensor that arrives at an operator in the place of a tensor that dispatches."""
    with _making:
        if not _operator:
            library: Any = torch.library.Library("ringcoll", "FRAGMENT")  # type: ignore[no-untyped-call]
            library.define("arrive(Tensor tensor) -> ()")
            for key in ("CPU", "CUDA"):
                library.impl("arrive", _arrive, key)
            _operator.extend((torch.ops.ringcoll.arrive.default, library))
    expected, kind = "memory, or a class that stands for a single tensor", type(tensor)
    _arrived.tensors = []
    try:
        with torch.no_grad():
            _operator[0](tensor)
    except Exception as error:
        message = f"a tensor of this class cannot be sent ({error})"
        raise ArgumentError(message, argument, expected, kind, rank) from error
    finally:
        arrived, _arrived.tensors = _arrived.tensors, []
    if len(arrived) != 1 or _dispatches(arrived[0]):
        message = f"its class stands for {len(arrived)} tensors"
        raise ArgumentError(message, argument, expected, kind, rank)
    return arrived[0]
