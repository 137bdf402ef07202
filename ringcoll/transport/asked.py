"""Faults and checksums go around a transport, where the program or the environment asks for them."""

from __future__ import annotations

from ringcoll.errors import ArgumentError
from ringcoll.machine import settings
from ringcoll.transport.base import Transport
from ringcoll.transport.faulty import Faults, FaultyTransport
from ringcoll.transport.verified import VerifiedTransport


def as_asked(
    transport: Transport, *, verify_messages: bool | None = None, faults: Faults | None = None
) -> Transport:
    """The transport itself, or another around it with checksums or faults; the variables come first.

    Raises
    ------
    ArgumentError
        Messages that do not pass through the host, such as NCCL's, are to be verified or disturbed.
    """
    forced, text = settings.verifies_messages(), settings.faults()
    verifies = verify_messages if forced is None else forced
    faults = Faults.parse(text) if text else faults
    if (verifies or faults is not None) and not transport.waits_on_host:
        raise ArgumentError(
            f"over {transport.name} the host does not see the messages",
            rank=transport.rank,
            argument="verify_messages" if verifies else "faults",
            expected="another transport",
            got=transport.name,
        )
    if faults is not None:
        transport = FaultyTransport(transport, faults)
    return VerifiedTransport(transport) if verifies else transport
