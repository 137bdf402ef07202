"""CUDA tensors over transports that only know CPU memory: gloo and MPI.

A transport around another transport. A message of a CUDA tensor passes through pinned host memory, in
pieces of `SEGMENT_BYTES`, so that one piece is copied while another is on its way::

    sender's GPU     | copy 0 | copy 1 | copy 2 |
    transport below           | send 0      | send 1      | send 2      |
    receiver's GPU                          | copy 0 |    | copy 1 |    | copy 2 |

Pieces follow from the number of bytes alone, so both ends cut alike. They are sent as bytes,
under the message's tag: within a tag order matches. An empty message is one empty piece.
Both ends of a message have to stage it: both have a CUDA tensor, or neither.

Streams
-------
- *Sends.* All pieces are copied to the host on a stream of the transport's own, which waits for
  the current one first. `StagedTransport.bind`'s function hands each to the transport
  below as soon as its event is complete; so it returns when all are on the host. By then nobody
  reads the tensor's memory any more: no allocator has to know of the other stream.
- *Receives.* All pieces are posted below at once, before any send. `StagedTransport.wait` waits
  for one after the other, and enqueues its copy to the device on the current stream.

Pinned memory comes from torch's caching allocator of it, when a message is posted, and goes
back piece by piece. A block that goes back while a copy of it is enqueued is not given out
before that copy is done, since torch's ``copy_`` notes the stream in the allocator
(``CachingHostAllocator_recordEvent`` in ``ATen/native/cuda/Copy.cu``); another way of copying
would not. It rounds blocks up to powers of two, of which a whole piece is one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ringcoll.transport.around import AroundTransport
from ringcoll.transport.base import Handle, Message, Transport

__all__ = ["SEGMENT_BYTES", "Copies", "StagedTransport"]

# The copy of one piece at either end overlaps with nothing: some 0.1 ms each at 20 GB/s. A piece
# also costs a message below, 0.1 ms over gloo, which takes 2 ms to move so many bytes.
# An estimate from gloo's figures on a CPU; not measured on a GPU.
SEGMENT_BYTES = 1 << 21


def _pinned(nbytes: int) -> Tensor:
    """Host memory that a GPU copies from and to by itself."""
    with torch.inference_mode(False):  # the thread that writes it need not be in that mode
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)


class Copies:
    """Copies between a GPU's memory and the host's; nothing else here touches CUDA."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def download(self, pieces: Sequence[Tensor]) -> list[tuple[Tensor, torch.cuda.Event]]:
        """Enqueue copies to the host, after what is enqueued on the current stream.

        Returns
        -------
        list of (host, ready)
            Host memory, which holds the piece once the event is complete.
        """
        if not pieces:
            return []
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        copies = []
        with torch.cuda.stream(self._stream):
            for piece in pieces:
                host = _pinned(piece.numel())
                host.copy_(piece, non_blocking=True)
                copies.append((host, self._stream.record_event()))
        return copies

    def upload(self, host: Tensor, into: Tensor) -> None:
        """Enqueue a copy to the device on the current stream."""
        into.copy_(host, non_blocking=True)


class _Piece(NamedTuple):
    """A piece on its way below: its handle, its host memory, and its destination."""

    handle: Handle
    host: Tensor
    into: Tensor


class _Flight:
    """A message on its way: the tensor, and the pieces that are not complete."""

    __slots__ = ("pieces", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.pieces: deque[_Piece] = deque()


class StagedTransport(AroundTransport):
    """Messages of another transport, with CUDA tensors that pass through host memory.

    The transport ``below`` moves the bytes of CPU tensors; tensors that are not on the device go
    straight to it. ``segment_bytes``, the bytes of a piece, are the same on all ranks.
    """

    def __init__(
        self, below: Transport, device: torch.device, *, segment_bytes: int = SEGMENT_BYTES
    ) -> None:
        super().__init__(below)
        self._device, self._segment_bytes = device, segment_bytes
        self._copies = Copies(device)
        # Failed messages stay here: the transport below may still use their host memory.
        self._flying: set[_Flight] = set()

    def close(self) -> None:
        """Close the transport below, and let the host memory go."""
        super().close()
        self._flying.clear()

    def bind(
        self, receives: Sequence[Message], sends: Sequence[Message]
    ) -> Callable[[int], list[Handle]]:
        """Make messages ready; see `Transport.bind`. Host memory is taken when they are posted."""
        if not any(self._stages(message.tensor) for message in (*receives, *sends)):
            return self.below.bind(receives, sends)
        return partial(self._post, receives, sends)

    def wait(self, handle: Handle, timeout_s: float) -> None:
        """Wait for one message; see `Transport.wait`."""
        if not isinstance(handle, _Flight):
            self.below.wait(handle, timeout_s)
            return
        deadline = time.monotonic() + timeout_s
        while handle.pieces:
            below, host, into = handle.pieces[0]
            self.below.wait(below, max(deadline - time.monotonic(), 0.001))
            handle.pieces.popleft()
            if into is not host:
                self._copies.upload(host, into)
        self._flying.discard(handle)

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
        flights = [self._receive(message, mixed) for message in receives]
        staged = [message.tensor for message in sends if self._stages(message.tensor)]
        pieces = [piece for tensor in staged for piece in self._pieces(tensor)]
        arriving = iter(self._copies.download(pieces))  # in the order in which they are enqueued
        flights += [self._send(message, mixed, arriving) for message in sends]
        return [*flights]

    def _receive(self, message: Message, mixed: int) -> _Flight:
        """Post all pieces of a message, into host memory."""
        peer, tensor, tag, _ = message
        pieces = self._pieces(tensor)
        hosts = [_pinned(piece.numel()) if self._stages(tensor) else piece for piece in pieces]
        flight = self._flight(tensor)
        handles = self.below.post([Message(peer, host, tag ^ mixed) for host in hosts], [])
        flight.pieces.extend(map(_Piece, handles, hosts, pieces))
        return flight

    def _send(
        self, message: Message, mixed: int, arriving: Iterator[tuple[Tensor, torch.cuda.Event]]
    ) -> _Flight:
        """Post each piece of a message when its copy is there."""
        peer, tensor, tag, _ = message
        flight = self._flight(tensor)
        for piece in self._pieces(tensor):
            host = piece
            if self._stages(tensor):
                host, ready = next(arriving)
                ready.synchronize()
            (handle,) = self.below.post([], [Message(peer, host, tag ^ mixed)])
            flight.pieces.append(_Piece(handle, host, host))
        return flight

    def _flight(self, tensor: Tensor) -> _Flight:
        flight = _Flight(tensor)
        self._flying.add(flight)
        return flight


def staged_if_needed(below: Transport, device: torch.device) -> Transport:
    """A transport of CPU tensors, or one around it for the tensors of a CUDA device."""
    return below if device.type == "cpu" else StagedTransport(below, device)
