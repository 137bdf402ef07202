"""Texts that ranks leave for each other in a store."""

from __future__ import annotations

import time
from functools import partial

import pytest
import torch.distributed as dist

from ringcoll.errors import CollectiveTimeoutError, PeerLostError, TransportError
from ringcoll.runtime.rendezvous import read_from_ranks

LIMIT_S = 30.0


@pytest.fixture
def store() -> dist.Store:
    """What ranks 1 and 3 have left for rank 0."""
    store = dist.HashStore()
    store.set("places/1", "[1, 10]")
    store.set("places/3", "[3, 30]")
    return store


def test_each_rank_is_read_by_its_own_key(store: dist.Store) -> None:
    read = partial(read_from_ranks, store, "places", 0, given_up=lambda: False)
    assert read([3, 1], LIMIT_S, parse=tuple) == {3: (3, 30), 1: (1, 10)}
    with pytest.raises(TransportError, match="places/3"):
        read([3, 1], LIMIT_S, parse=int)


def test_the_limit_counts_from_the_time_that_is_given(store: dist.Store) -> None:
    begin = time.monotonic()
    read = partial(read_from_ranks, store, "places", 0, [1, 2], given_up=lambda: False, parse=tuple)
    with pytest.raises(CollectiveTimeoutError, match=r"rank 2\b"):
        read(LIMIT_S, since_s=begin - LIMIT_S)
    assert time.monotonic() - begin < LIMIT_S / 2
    with pytest.raises(CollectiveTimeoutError, match=r"rank 2\b"):
        read(0.05)
    assert time.monotonic() - begin > 0.05


def test_a_wait_ends_when_the_rank_gives_up(store: dist.Store) -> None:
    with pytest.raises(PeerLostError, match="rank 0 gave up"):
        read_from_ranks(store, "places", 0, [2], LIMIT_S, lambda: True, tuple)
