"""The text of a topology, and networks of real machines with the sources of their numbers."""

from __future__ import annotations

import re
from dataclasses import replace
from math import prod

from ringcoll.errors import ArgumentError
from ringcoll.simulation.dgx1 import dgx1
from ringcoll.simulation.topology import (
    Number,
    Topology,
    crossbar,
    fat_tree,
    hosts,
    ring,
    torus,
)

__all__ = ["FORMS", "PRESETS", "ranks_named", "topology_named"]

FORMS = {
    "crossbar": "each rank has a cable to one switch; crossbar:2 has 2 ports a rank",
    "ring": "each rank has a cable to the next one",
    "torus:4x8": "ranks in 2 dimensions, in 3 with torus:4x4x2",
    "fat_tree:8:2": "8 ranks below a leaf, oversubscribed 2 to 1",
    "hosts:4": "4 ranks in a host, one network card a host; hosts:4:2 has 2 cards",
}
"""The texts of topologies, and what they mean."""

PRESETS = {
    "dgx1": "8 V100 GPUs, a cube of NVLink with some diagonals and double cables",
    "dgx_h100": "hosts of 8 H100 GPUs with NVLink and 8 network cards of 400 Gb/s",
    "tpu_v4:4x4x4": "a 3-D torus of TPU v4 chips",
    "ethernet_10g": "hosts with one rank, and Ethernet of 10 Gb/s",
}
"""Networks of real machines, and what they are."""

_SIZES = re.compile(r"\d{1,6}(?:x\d{1,6})*", re.ASCII)


def topology_named(
    text: str,
    world_size: int,
    *,
    bandwidth: Number | None = None,
    latency_s: Number | None = None,
    across_bandwidth: Number | None = None,
    across_latency_s: Number | None = None,
) -> Topology:
    """Build the topology of a text, such as ``torus:4x8``: one of `FORMS` or of `PRESETS`.

    Parameters
    ----------
    text
        The topology.
    world_size
        Number of ranks.
    bandwidth, latency_s
        Bytes per second, and seconds, of a link; 1e10 and 1e-6. A preset has its own.
    across_bandwidth, across_latency_s
        The same between hosts; a tenth of ``bandwidth``, and ten times ``latency_s``.

    Raises
    ------
    ArgumentError
        The text is no topology, or one of another number of ranks.

    Examples
    --------
    >>> topology_named("torus:2x4", 8).name
    'torus 2x4'
    """
    kind, *fields = text.replace("-", "_").split(":")
    sizes = [tuple(map(int, field.split("x"))) for field in fields if _SIZES.fullmatch(field)]
    expected = _FIELDS.get(kind)
    if expected is None or len(sizes) != len(fields) or len(fields) not in expected:
        raise _unknown(text)
    if any(len(size) > 1 for size in sizes[: None if kind not in ("torus", "tpu_v4") else 0]):
        raise _unknown(text)
    if kind in ("dgx1", "dgx_h100", "tpu_v4", "ethernet_10g"):
        if (bandwidth, latency_s, across_bandwidth, across_latency_s) != (None,) * 4:
            raise ArgumentError(
                "a preset has bandwidths and latencies of its own", argument="topology", got=text,
                expected=f"a topology of {', '.join(FORMS)}",
            )  # fmt: skip
        return _preset(kind, world_size, sizes)
    bandwidth = 1e10 if bandwidth is None else bandwidth
    latency_s = 1e-6 if latency_s is None else latency_s
    numbers = [size[0] for size in sizes]
    if kind == "crossbar":
        return crossbar(
            world_size, bandwidth=bandwidth, latency_s=latency_s, ports=(*numbers, 1)[0]
        )
    if kind == "ring":
        return ring(world_size, bandwidth=bandwidth, latency_s=latency_s)
    if kind == "torus":
        grid = torus(sizes[0], bandwidth=bandwidth, latency_s=latency_s)
        return _of_size(grid, text, world_size)
    if kind == "fat_tree":
        return fat_tree(
            world_size,
            ranks_per_leaf=numbers[0],
            oversubscription=(*numbers[1:], 1)[0],
            bandwidth=bandwidth,
            latency_s=latency_s,
        )
    return hosts(
        world_size,
        ranks_per_host=numbers[0],
        cards=(*numbers[1:], 1)[0],
        bandwidth=bandwidth,
        latency_s=latency_s,
        across_bandwidth=bandwidth / 10 if across_bandwidth is None else across_bandwidth,
        across_latency_s=10 * latency_s if across_latency_s is None else across_latency_s,
    )


def ranks_named(text: str) -> int | None:
    """The number of ranks that the text of a topology says; ``None`` if it says none.

    >>> ranks_named("torus:4x8"), ranks_named("dgx1"), ranks_named("ring")
    (32, 8, None)
    """
    kind, *fields = text.replace("-", "_").split(":")
    if kind == "dgx1":
        return dgx1().world_size
    if kind in ("torus", "tpu_v4") and len(fields) == 1 and _SIZES.fullmatch(fields[0]):
        return prod(map(int, fields[0].split("x"))) or None
    return None


# Fields that may follow the name of a topology.
_FIELDS = {
    "crossbar": (0, 1),
    "ring": (0,),
    "torus": (1,),
    "fat_tree": (1, 2),
    "hosts": (1, 2),
    "dgx1": (0,),
    "dgx_h100": (0,),
    "tpu_v4": (1,),
    "ethernet_10g": (0,),
}


def _unknown(text: str) -> ArgumentError:
    known = ", ".join((*FORMS, *PRESETS))
    return ArgumentError("not a topology", argument="topology", expected=known, got=repr(text))


def _of_size(topology: Topology, text: str, world_size: int) -> Topology:
    if topology.world_size != world_size:
        raise ArgumentError(
            f"{text} has {topology.world_size} ranks",
            argument="topology",
            expected=world_size,
            got=topology.world_size,
        )
    return topology


def _preset(kind: str, world_size: int, sizes: list[tuple[int, ...]]) -> Topology:
    if kind == "dgx1":
        return _of_size(dgx1(), kind, world_size)
    if kind == "dgx_h100":
        # Inside: 18 links of NVLink 4 with 25 GB/s each way. Across: 8 cards of 400 Gb/s.
        topology = hosts(
            world_size,
            ranks_per_host=8,
            bandwidth=450e9,
            latency_s=3.4e-6,
            across_bandwidth=50e9,
            across_latency_s=14e-6 - 3.4e-6,  # a route between hosts has both
            cards=8,
            memory_nbytes=80 * 10**9,
        )
        source = (
            "NVIDIA DGX H100 user guide (900 GB/s of NVLink a GPU, both ways together; 8 "
            "ConnectX-7 of 400 Gb/s; 80 GB a GPU); latencies: NCCL, src/graph/tuning.cc, ring, "
            "Simple protocol (3.4 us over NVLink, 14 us over the network)"
        )
    elif kind == "tpu_v4":
        topology = _of_size(
            torus(sizes[0], bandwidth=50e9, latency_s=1e-6, memory_nbytes=32 << 30),
            f"tpu_v4:{'x'.join(map(str, sizes[0]))}",
            world_size,
        )
        source = (
            "N. P. Jouppi et al., TPU v4, arXiv 2304.01433 (6 links of 50 GB/s each way, 32 GiB); "
            "the latency of 1 us a hop is assumed"
        )
    else:
        topology = crossbar(world_size, bandwidth=1.25e9, alpha_s=60e-6)
        source = (
            "IEEE 802.3ae (10 Gb/s); alpha of 60 us: what a message costs over gloo, "
            "ringcoll/cost/choice.py"
        )
    return replace(topology, name=f"{kind}, {topology.name}", source=source)
