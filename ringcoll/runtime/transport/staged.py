"""CUDA tensors over a transport that only knows CPU memory, such as gloo.

With `StagedTransport` a message of a CUDA tensor passes through host memory, in pieces of
`SEGMENT_BYTES`. A GPU copies by itself only from and to *pinned* memory, which is slow to get and
takes memory from everybody. So each direction has a *window* of at most 8 pinned pieces, which are
used in turn, and the pieces that wait for a peer lie in ordinary memory::

    sender's GPU     | down 0 | down 1 | down 2 | down 3 |      pinned: at most 8 pieces
    its host                  | copy 0 | copy 1 | copy 2 |      from pinned to ordinary memory
    transport below                    | send 0      | send 1      | send 2      |
    receiver's host                                  | copy 0 |    | copy 1 |    | copy 2 |
    receiver's GPU                                            | up 0 |      | up 1 |

A rank that sends and receives does both at once: uploads go on between downloads::

    down | 0 1 2 3 4 5 6 7 | 8 | 9 | 10 | 11 | ...    a thread, on a stream of the transport's own
    up                     | 0 | 1 | 2  | 3  | ...    the thread that waits, on its current stream

Pieces follow from the number of bytes alone, so both ends cut alike. They are sent as bytes, under
the message's tag: within a tag order matches. An empty message is one empty piece. Both ends of a
message have to stage it: both have a CUDA tensor, or neither.

No rank waits for a peer while it holds a pinned piece: ranks could wait for each other in a circle
although all messages are posted, as a late peer would hold all pieces. The piece is held for two
copies, which take only this rank's GPU and host. A wait below cannot be polled, either (gloo). So
all receives are posted below at once, sends as soon as the GPU has copied them, and no message
waits for the wait of another. That costs one more copy in host memory at each end.

- *Sends.* Downloads run on a stream of the transport's own, which first waits for what was enqueued
  on the current stream before the post. If a post has no more pieces than the window, the thread
  that posts copies them. Otherwise a thread of the transport does, until nothing is left; it never
  waits for a peer. All sends go the same way as long as it runs, so that their order is kept.
- *Receives.* `StagedTransport.wait` waits for one piece after the other, copies it into the window,
  and enqueues its copy to the device on the current stream.
- A message's tensor lives until the message has been waited for. By then nobody reads its memory
  any more: no allocator has to know of the other stream.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ringcoll.errors import CollectiveTimeoutError, PeerLostError, TransportError
from ringcoll.runtime.process import start_thread
from ringcoll.runtime.transport.base import (
    AroundTransport,
    Handle,
    Message,
    Start,
    Transport,
    left_s,
)

# The copy of one piece at either end overlaps with nothing: some 0.1 ms each at 20 GB/s. A piece
# also costs a message below, 0.1 ms over gloo, which takes 2 ms to move so many bytes.
# An estimate from gloo's figures on a CPU; not measured on a GPU.
SEGMENT_BYTES = 1 << 21
PINNED_BYTES = 32 << 20
"""Pinned memory of a group, in bytes: the most, whatever its messages are."""
_MOST_PIECES = PINNED_BYTES // SEGMENT_BYTES // 2  # 8 in each direction
_JOIN_S = 1.0


def _pinned(nbytes: int) -> Tensor:
    """Host memory that a GPU copies from and to by itself."""
    with torch.inference_mode(False):  # the thread that writes it need not be in that mode
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)


def _ordinary(nbytes: int) -> Tensor:
    """Host memory for a piece that waits for a peer."""
    with torch.inference_mode(False):  # as above
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


class Copies:
    """Copies between a GPU's memory and the host's; with `_pinned`, all here that touches CUDA."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def mark(self) -> torch.cuda.Event:
        """The place in the current stream after what is enqueued there."""
        event: torch.cuda.Event = torch.cuda.current_stream(self._device).record_event()
        return event

    def download(self, piece: Tensor, host: Tensor, after: torch.cuda.Event) -> torch.cuda.Event:
        """Enqueue a copy to the host, after a mark; the event is complete when the copy is."""
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(after)
            host.copy_(piece, non_blocking=True)
            copied: torch.cuda.Event = self._stream.record_event()
        return copied

    def upload(self, host: Tensor, into: Tensor) -> torch.cuda.Event:
        """Enqueue a copy to the device on the current stream; the event as of `download`."""
        into.copy_(host, non_blocking=True)
        return self.mark()


class Window:
    """At most ``length`` pinned pieces of one direction, which are used in turn."""

    def __init__(self, nbytes: int, length: int) -> None:
        self._nbytes, self.length = nbytes, length
        self._num_pieces = 0  # they are made when they are needed
        self._used: deque[tuple[Tensor, torch.cuda.Event]] = deque()

    def take(self) -> Tensor:
        """The piece that was used the longest time ago; wait until its last copy is done."""
        is_free = bool(self._used) and self._used[0][1].query()  # type: ignore[no-untyped-call]
        if self._num_pieces < self.length and not is_free:
            self._num_pieces += 1
            return _pinned(self._nbytes)
        host, copied = self._used.popleft()
        copied.synchronize()
        return host

    def give(self, host: Tensor, copied: torch.cuda.Event) -> None:
        """Give a piece back that is in use until an event is complete."""
        self._used.append((host, copied))

    def clear(self) -> None:
        """Let the memory go. Torch's allocator waits for copies that are still enqueued.

        For copies by ``copy_`` it does (``CachingHostAllocator_recordEvent`` in
        ``ATen/native/cuda/Copy.cu``); for copies by other means it would not.
        """
        self._used.clear()


class _Piece(NamedTuple):
    """A piece on its way below: its handle, its host memory, and its destination."""

    handle: Handle
    host: Tensor
    into: Tensor


class _Flight:
    __slots__ = ("after", "num_left", "peer", "pieces", "tag", "tensor")

    def __init__(self, message: Message, mixed: int, after: torch.cuda.Event | None = None) -> None:
        self.peer, self.tensor, self.tag = message.peer, message.tensor, message.tag ^ mixed
        self.pieces: deque[_Piece] = deque()  # on their way below
        self.num_left = 0  # pieces that are to be sent and are not below yet
        self.after = after  # the place in the stream after which they may be read


class _Download(NamedTuple):
    """A piece to be sent: the pinned memory that it is copied to, and the end of that copy."""

    flight: _Flight
    piece: Tensor
    pinned: Tensor | None  # `None`, as the next: it is not staged
    copied: torch.cuda.Event | None


class StagedTransport(AroundTransport):
    """Messages of another transport, with CUDA tensors that pass through host memory.

    The transport ``below`` moves the bytes of CPU tensors; tensors that are not on the device go
    straight to it. ``segment_bytes``, the bytes of a piece, are the same on all ranks.
    """

    def __init__(
        self, below: Transport, device: torch.device, *, segment_bytes: int = SEGMENT_BYTES
    ) -> None:
        super().__init__(below)
        assert 0 < segment_bytes <= PINNED_BYTES // 2
        self._device, self._segment_bytes = device, segment_bytes
        self._copies = Copies(device)
        length = min(_MOST_PIECES, PINNED_BYTES // 2 // segment_bytes)
        self._downs, self._ups = Window(segment_bytes, length), Window(segment_bytes, length)
        self._uploading = threading.Lock()
        self._changed = threading.Condition()  # guards what follows
        self._leaving: deque[tuple[_Flight, Tensor]] = deque()  # pieces to be copied and sent
        self._is_draining = False  # whether a thread sees to them
        self._thread: threading.Thread | None = None
        self._is_aborted = False
        self._error: BaseException | None = None  # of the thread that sees to sends
        # Failed messages stay here: the transport below may still use their host memory.
        self._flying: set[_Flight] = set()

    def abort(self) -> None:
        """Abort the transport below, and send nothing more."""
        self._stop()
        super().abort()

    def close(self) -> None:
        """Close the transport below, and let the host memory go."""
        self._stop()
        if self._thread is not None:
            self._thread.join(_JOIN_S)
        super().close()
        self._flying.clear()
        self._downs.clear()
        self._ups.clear()

    def _stop(self) -> None:
        with self._changed:
            self._is_aborted = True
            self._leaving.clear()
            self._changed.notify_all()

    def bind(self, receives: Sequence[Message], sends: Sequence[Message]) -> Start:
        """Make messages ready; see `Transport.bind`. Host memory is taken when they are posted."""
        post = partial(self._post, receives, sends)
        if any(self._stages(message.tensor) for message in (*receives, *sends)):
            return post
        straight = self.below.bind(receives, sends)
        if not sends:
            return straight
        # Behind sends that are still to come, so that order is kept.
        return lambda mixed: post(mixed) if self._is_draining else straight(mixed)

    def wait(self, handle: Handle, timeout_s: float) -> None:
        """Wait for one message; see `Transport.wait`."""
        if not isinstance(handle, _Flight):
            self.below.wait(handle, timeout_s)
            return
        deadline = time.monotonic() + timeout_s
        try:
            if handle.num_left:
                self._wait_until_sent(handle, timeout_s)
            while handle.pieces:
                below, host, into = handle.pieces[0]
                self.below.wait(below, left_s(deadline))
                handle.pieces.popleft()
                if into is not host:
                    self._upload(host, into)
        except TransportError:
            self._check()
            raise
        self._flying.discard(handle)

    def _wait_until_sent(self, flight: _Flight, timeout_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not flight.num_left or self._is_broken(), timeout_s)
            if not flight.num_left:
                return
            if self._is_broken():
                raise PeerLostError("the connection was broken", peer=flight.peer)
        raise CollectiveTimeoutError(
            f"a message was not copied to the host within {timeout_s:g} s", peer=flight.peer
        )

    def _is_broken(self) -> bool:
        return self._is_aborted or self._error is not None

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _upload(self, host: Tensor, into: Tensor) -> None:
        """Enqueue the copy of a piece to the device, by way of the window."""
        nbytes = host.numel()
        with self._uploading:
            pinned = self._ups.take()
            ctypes.memmove(pinned.data_ptr(), host.data_ptr(), nbytes)
            self._ups.give(pinned, self._copies.upload(pinned[:nbytes], into))

    def _stages(self, tensor: Tensor) -> bool:
        return tensor.device.type == self._device.type

    def _pieces(self, tensor: Tensor) -> Sequence[Tensor]:
        """The pieces of a tensor's bytes, or the tensor itself if it is not staged."""
        if not self._stages(tensor):
            return (tensor,)
        return torch.split(tensor.view(torch.uint8), self._segment_bytes)

    def _post(
        self, receives: Sequence[Message], sends: Sequence[Message], mixed: int
    ) -> list[Handle]:
        self._check()
        flights = [self._receive(message, mixed) for message in receives]
        after = self._copies.mark() if sends else None
        leaving = []
        for message in sends:
            flight = _Flight(message, mixed, after)
            pieces = self._pieces(message.tensor)
            flight.num_left = len(pieces)
            leaving += [(flight, piece) for piece in pieces]
            flights.append(flight)
        self._flying.update(flights)
        self._send(leaving)
        return [*flights]

    def _receive(self, message: Message, mixed: int) -> _Flight:
        """Post all pieces of a message, into host memory."""
        flight, tensor = _Flight(message, mixed), message.tensor
        pieces = self._pieces(tensor)
        hosts = [_ordinary(piece.numel()) for piece in pieces] if self._stages(tensor) else pieces
        handles = self.below.post([Message(flight.peer, host, flight.tag) for host in hosts], [])
        flight.pieces.extend(map(_Piece, handles, hosts, pieces))
        return flight

    def _send(self, pieces: Sequence[tuple[_Flight, Tensor]]) -> None:
        """Send pieces behind those that are still to be sent, in this thread or another one."""
        with self._changed:
            self._leaving.extend(pieces)
            is_mine, self._is_draining = not self._is_draining, self._is_draining or bool(pieces)
        if not is_mine or not pieces:
            return
        if len(pieces) <= self._downs.length:
            self._drain()
            self._check()
        else:
            self._thread = start_thread(self._drain, f"ringcoll-staging-{self.rank}")

    def _drain(self) -> None:
        """Copy pieces to the host and send them, until there are none."""
        downloads: deque[_Download] = deque()
        try:
            while True:
                while len(downloads) < self._downs.length and (
                    leaving := self._next(is_last=not downloads)
                ):
                    downloads.append(self._download(*leaving))
                if not downloads:
                    return
                self._pass_on(downloads.popleft())
        except BaseException as error:  # noqa: BLE001  # raised by who waits, or by who posts
            with self._changed:
                self._error, self._is_draining = error, False
                self._leaving.clear()
                self._changed.notify_all()
            self.below.abort()  # messages are missing: nobody is to wait for them

    def _next(self, *, is_last: bool) -> tuple[_Flight, Tensor] | None:
        """The next piece to be sent; without one, the thread is done if all others are sent."""
        with self._changed:
            if self._leaving:
                return self._leaving.popleft()
            if is_last:
                self._is_draining = False
            return None

    def _download(self, flight: _Flight, piece: Tensor) -> _Download:
        """Enqueue the copy of a piece to the host, if the piece is staged."""
        if not self._stages(piece):
            return _Download(flight, piece, None, None)
        pinned = self._downs.take()
        assert flight.after is not None
        copied = self._copies.download(piece, pinned[: piece.numel()], flight.after)
        return _Download(flight, piece, pinned, copied)

    def _pass_on(self, download: _Download) -> None:
        """Hand a piece to the transport below when it is on the host."""
        flight, host, pinned, copied = download
        if pinned is not None and copied is not None:
            copied.synchronize()
            host = self._out_of(pinned, host.numel())
            self._downs.give(pinned, copied)
        if self._is_aborted:
            return
        (handle,) = self.below.post([], [Message(flight.peer, host, flight.tag)])
        flight.pieces.append(_Piece(handle, host, host))
        with self._changed:
            flight.num_left -= 1
            if not flight.num_left:
                self._changed.notify_all()

    def _out_of(self, pinned: Tensor, nbytes: int) -> Tensor:
        """The content of a pinned piece, in memory that may wait for a peer."""
        host = _ordinary(nbytes)
        # In this thread alone, without Python's lock.
        ctypes.memmove(host.data_ptr(), pinned.data_ptr(), nbytes)
        return host


def staged_if_needed(below: Transport, device: torch.device) -> Transport:
    """A transport of CPU tensors, or one around it for the tensors of a CUDA device."""
    return below if device.type == "cpu" else StagedTransport(below, device)
