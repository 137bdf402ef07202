"""Two transports of a group, one inside the hosts and one between them; how messages travel is tried on several hosts."""

import time

import pytest
import torch.distributed as dist

from ringcoll.errors import CollectiveTimeoutError, PeerLostError
from ringcoll.transport import SharedTransport, told_by
from ringcoll.transport.pairs import PairsTransport


class Near(SharedTransport):
    """Rank 0 of two ranks on two hosts, and the group is broken while the ranks meet."""

    def __init__(self) -> None:
        super().__init__(dist.HashStore(), 0, 2)
        self.has_met = lambda: None

    def connect(self, timeout_s: float) -> None:
        self.hosts = (0, 1)
        self.has_met()


def test_the_time_limit_of_meeting_counts_from_its_begin():
    begin_s = time.monotonic()
    how = (dist.HashStore(), "address", 0, [1], 60.0, lambda: False)
    with pytest.raises(CollectiveTimeoutError, match="for rank 1 to use the group"):
        told_by(*how, since_s=begin_s - 59.9)
    assert time.monotonic() - begin_s < 30


def test_what_is_broken_before_the_hosts_are_connected_does_not_connect_them():
    near = Near()
    pairs = PairsTransport(near, dist.HashStore(), 30.0)
    near.has_met = pairs.abort
    with pytest.raises(PeerLostError, match="rank 0 gave up meeting the others"):
        pairs.connect(30.0)
    pairs.close()
