"""Two transports of a group, one inside the hosts and one between them; how messages travel is tried on several hosts."""

import pytest
import torch.distributed as dist

from ringcoll.errors import PeerLostError
from ringcoll.transport.pairs import PairsTransport
from ringcoll.transport.shared import SharedTransport


class Near(SharedTransport):
    """Rank 0 of two ranks on two hosts, and the group is broken while the ranks meet."""

    def __init__(self) -> None:
        super().__init__(dist.HashStore(), 0, 2)
        self.has_met = lambda: None

    def connect(self, timeout_s: float) -> None:
        self.hosts = (0, 1)
        self.has_met()


def test_what_is_broken_before_the_hosts_are_connected_does_not_connect_them():
    near = Near()
    pairs = PairsTransport(near, dist.HashStore(), 30.0)
    near.has_met = pairs.abort
    with pytest.raises(PeerLostError, match="rank 0 gave up meeting the others"):
        pairs.connect(30.0)
    pairs.close()
