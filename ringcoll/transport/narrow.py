"""Messages in a narrower dtype than the one that is computed in.

A transport around another: what is sent is rounded to the wire dtype, what arrives is
widened. Nothing above knows of it, and partial results are added in the wide dtype.

The sender's own copy is rounded as well. Where two ranks exchange partial results and
both add them up (recursive doubling), each would otherwise add its own exact one to
the other's rounded one, and ranks would end with different sums. So the tensors must
be the library's own working copies, never the user's memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ringcoll.transport.base import Handle, Message, Transport

__all__ = ["NarrowTransport"]


class _Arriving(NamedTuple):
    """A receive: its handle in the transport below, and what is to be widened into what."""

    handle: Handle
    narrow: Tensor
    into: Tensor


class _Leaving(NamedTuple):
    """A send: its handle in the transport below, and the tensor that is being read."""

    handle: Handle
    narrow: Tensor


class NarrowTransport:
    """Messages of another transport, sent in a wire dtype.

    Parameters
    ----------
    below
        What moves the bytes.
    wire_dtype
        The dtype of every message.
    """

    def __init__(self, below: Transport, wire_dtype: torch.dtype) -> None:
        self._below, self._wire_dtype = below, wire_dtype
        self.rank, self.world_size = below.rank, below.world_size
        self.name, self.ordered = below.name, below.ordered
        self.connect, self.abort, self.close = below.connect, below.abort, below.close

    @property
    def hosts(self) -> tuple[int, ...]:
        """The host of every rank; see `Transport.hosts`."""
        return self._below.hosts

    def post(self, receives: Sequence[Message], sends: Sequence[Message]) -> list[Handle]:
        """Start messages; see `Transport.post`."""
        arriving = [
            Message(peer, torch.empty_like(into, dtype=self._wire_dtype), tag)
            for peer, into, tag in receives
        ]
        leaving = []
        for peer, tensor, tag in sends:
            narrow = tensor.to(self._wire_dtype)
            tensor.copy_(narrow)
            leaving.append(Message(peer, narrow, tag))
        handles = self._below.post(arriving, leaving)
        # The rest of the handles are of sends; they keep their tensors alive below.
        return [
            *(
                _Arriving(handle, message.tensor, original.tensor)
                for handle, message, original in zip(handles, arriving, receives, strict=False)
            ),
            *(
                _Leaving(handle, message.tensor)
                for handle, message in zip(handles[len(arriving) :], leaving, strict=True)
            ),
        ]

    def wait(self, handle: Handle, timeout_s: float) -> None:
        """Wait for one message; see `Transport.wait`."""
        assert isinstance(handle, _Arriving | _Leaving)
        self._below.wait(handle.handle, timeout_s)
        if isinstance(handle, _Arriving):
            handle.into.copy_(handle.narrow)
