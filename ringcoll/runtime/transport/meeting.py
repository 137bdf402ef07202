"""How the ranks of a group meet before their first message, whatever transport they have."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch.distributed as dist

from ringcoll._package import __version__
from ringcoll.errors import TransportError
from ringcoll.runtime.machine import hosts_of, place
from ringcoll.runtime.rendezvous import await_ranks, read_texts
from ringcoll.runtime.transport import catalogue
from ringcoll.runtime.transport.base import Transport


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
    return meet_with_texts(store, transport, timeout_s, given_up, "")[0]


def meet_with_texts(
    store: dist.Store,
    transport: Transport,
    timeout_s: float,
    given_up: Callable[[], bool],
    text: str,
) -> tuple[tuple[int, ...], list[str]]:
    """As `meet`, and give this rank's text to the others; return the texts of all ranks, too."""
    rank, world_size = transport.rank, transport.world_size
    keys = {peer: f"here/{peer}" for peer in range(world_size)}
    how = " with verify_messages" if transport.verifies else ""
    own = f"transport {transport.name}{how} of ringcoll {__version__}"
    store.set(keys[rank], f"{own}\n{place()}\n{text}")
    await_ranks(store, rank, keys, time.monotonic() + timeout_s, timeout_s, given_up)
    places, texts = [], []
    for peer, words in enumerate(read_texts(store, [*keys.values()])):
        other, where, peer_text = [*words.split("\n", 2), "", ""][:3]
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
        texts.append(peer_text)
    return hosts_of(places), texts
