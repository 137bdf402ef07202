"""Messages in a narrower dtype than the one that is computed in.

A transport around another: what is sent is rounded to the wire dtype, what arrives is
widened. Nothing above knows of it, and partial results are added in the wide dtype.

The sender's own copy is rounded as well. Where two ranks exchange partial results and
both add them up (recursive doubling), each would otherwise add its own exact one to
the other's rounded one, and ranks would end with different sums. So the tensors must
be the library's own working copies, never the user's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


class NarrowTransport(Transport):
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
        self.name, self.ordered, self.hosts = below.name, below.ordered, below.hosts

    def connect(self, timeout_s: float) -> None:
        """Connect the transport below."""
        self._below.connect(timeout_s)

    def abort(self) -> None:
        """Abort the transport below."""
        self._below.abort()

    def close(self) -> None:
        """Close the transport below."""
        self._below.close()

    def bind(
        self, receives: Sequence[Message], sends: Sequence[Message]
    ) -> Callable[[int], list[Handle]]:
        """Make messages ready; see `Transport.bind`."""
        arriving, leaving = (
            [
                one._replace(tensor=torch.empty_like(one.tensor, dtype=self._wire_dtype))
                for one in some
            ]
            for some in (receives, sends)
        )
        start = self._below.bind(arriving, leaving)

        def post(mixed: int) -> list[Handle]:
            for (_, tensor, _), (_, narrow, _) in zip(sends, leaving, strict=True):
                narrow.copy_(tensor)
                tensor.copy_(narrow)
            incoming, outgoing = (
                (handles := start(mixed))[: len(receives)],
                handles[len(receives) :],
            )
            widened = [
                _Arriving(handle, narrow.tensor, original.tensor)
                for handle, narrow, original in zip(incoming, arriving, receives, strict=True)
            ]
            return [*widened, *outgoing]

        return post

    def wait(self, handle: Handle, timeout_s: float) -> None:
        """Wait for one message; see `Transport.wait`."""
        if isinstance(handle, _Arriving):
            self._below.wait(handle.handle, timeout_s)
            handle.into.copy_(handle.narrow)
        else:
            self._below.wait(handle, timeout_s)
