"""What a transport is: point-to-point messages between the ranks of one group.

A transport moves bytes between two ranks and knows nothing else: no collective,
no operator, no schedule. Nothing above it knows which one is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

__all__ = ["Handle", "Message", "Transport"]

Handle = object
"""What `Transport.post` returns for a message, and `Transport.wait` takes."""


class Message(NamedTuple):
    """One message: a flat contiguous tensor to or from a peer, under a tag of 31 bits."""

    peer: int
    tensor: Tensor
    tag: int


class Transport(Protocol):
    """Point-to-point messages among the ranks of one group.

    Messages between two ranks match by tag, and within a tag in the order in which
    they are posted. A transport that ignores tags (``ordered``) matches by order
    alone. Tensors stay in use from `post` until `wait` returns.
    """

    rank: int
    world_size: int
    name: str
    ordered: bool
    """Whether tags are ignored, so that ranks must agree before they send."""

    def post(self, receives: Sequence[Message], sends: Sequence[Message]) -> list[Handle]:
        """Start messages; return a handle for each, receives first."""
        ...

    def wait(self, handle: Handle, timeout_s: float) -> None:
        """Wait for one message.

        Raises
        ------
        CollectiveTimeoutError
            It took longer than ``timeout_s`` seconds.
        PeerLostError
            The connection to the peer is gone, or `abort` was called.
        """
        ...

    def abort(self) -> None:
        """Wake everyone who waits, here and at the peers, with an error; for good."""
        ...

    def close(self) -> None:
        """Release what the transport holds. Nothing may be in flight."""
        ...
