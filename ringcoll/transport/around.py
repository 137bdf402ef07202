"""A transport around another transport; a subclass changes how messages travel."""

from __future__ import annotations

from typing import Any

from ringcoll.transport.base import Handle, Transport


def _of_below(name: str) -> Any:
    """An attribute that is the one of the transport below, to read and to set."""
    return property(
        lambda around: getattr(around.below, name),
        lambda around, value: setattr(around.below, name, value),
        doc=f"See `Transport.{name}`; it is that of the transport below.",
    )


class AroundTransport(Transport):
    """All that a subclass does not change is as in the transport ``below``, which moves the bytes."""

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
