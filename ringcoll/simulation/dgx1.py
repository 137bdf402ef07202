"""The DGX-1: eight GPUs whose cables of NVLink form a cube with some diagonals, some of them double."""

from __future__ import annotations

from ringcoll.simulation.graph_text import topology_from_text
from ringcoll.simulation.topology import Topology

# 25 GB/s each way a cable; a double cable is one link of 50 GB/s. 3.4 us over NVLink.
_CABLES = """
    0 -- 1 50 3.4    # the double cables are a ring: 0 1 3 2 6 7 5 4
    1 -- 3 50 3.4
    3 -- 2 50 3.4
    2 -- 6 50 3.4
    6 -- 7 50 3.4
    7 -- 5 50 3.4
    5 -- 4 50 3.4
    4 -- 0 50 3.4
    0 -- 2 25 3.4
    0 -- 3 25 3.4
    1 -- 2 25 3.4
    1 -- 5 25 3.4
    3 -- 7 25 3.4
    4 -- 6 25 3.4
    4 -- 7 25 3.4
    5 -- 6 25 3.4
"""


def dgx1() -> Topology:
    """Build the topology of a DGX-1 with V100: 8 ranks, each with 6 cables to 4 other ranks."""
    return topology_from_text(_CABLES, name="dgx1")
