"""A transport around another transport; a subclass changes how messages travel."""

from __future__ import annotations

from ringcoll.transport.base import Handle, Transport


class AroundTransport(Transport):
    """All that a subclass does not change is as in the transport ``below``, which moves the bytes."""

    def __init__(self, below: Transport) -> None:
        self.below = below
        self.rank, self.world_size, self.name = below.rank, below.world_size, below.name
        self.ordered, self.waits_on_host = below.ordered, below.waits_on_host
        self.shares_process, self.hosts = below.shares_process, below.hosts

    # The innermost transport meets the others, and says it then.
    @property
    def verifies(self) -> bool:
        """Whether each message has its checksum beside it."""
        return self.below.verifies

    @verifies.setter
    def verifies(self, verifies: bool) -> None:
        self.below.verifies = verifies

    @property
    def direct_from(self) -> int | None:
        """Bytes from which a message is read in its sender's memory."""
        return self.below.direct_from

    @direct_from.setter
    def direct_from(self, nbytes: int | None) -> None:
        self.below.direct_from = nbytes

    @property
    def slice_bytes(self) -> int | None:  # type: ignore[override]
        """Bytes of the slices in which long messages move best."""
        return self.below.slice_bytes

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
