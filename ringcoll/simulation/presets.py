"""Networks of real machines, with the sources of their numbers.

Latencies are those by which NCCL chooses its algorithms (ring, protocol Simple; ``ncclTunerConstants`` in
``src/graph/tuning.cc``, read at commit 5067397c): 3.4 us over NVLink, 5.7 us over PCI Express, 14 us over a
network. They are costs of software, too: a bare message takes less.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ringcoll.errors import ArgumentError
from ringcoll.simulation.dgx1 import dgx1
from ringcoll.simulation.levels import hosts
from ringcoll.simulation.shapes import crossbar, torus
from ringcoll.simulation.topology import Topology

_NCCL = "latency: NCCL, src/graph/tuning.cc, ring, protocol Simple"


@dataclass(frozen=True, slots=True)
class Machine:
    """A network of real machines.

    Parameters
    ----------
    about
        What it is.
    source
        The source of each number.
    build
        Function from the number of ranks, and the ranks in each dimension if they are in the text.
    example
        Ranks in each dimension, for the help; empty if the text has none.
    world_size
        Number of ranks, if all such machines have as many.
    """

    about: str
    source: str
    build: Callable[[int, tuple[int, ...]], Topology]
    example: str = ""
    world_size: int | None = None

    def topology(self, name: str, world_size: int, shape: tuple[int, ...]) -> Topology:
        """The network for a number of ranks."""
        topology = self.build(world_size, shape)
        label = name if name == topology.name else f"{name}, {topology.name}"
        return replace(topology, name=label, source=self.source)


def _dgx_h100(world_size: int, shape: tuple[int, ...]) -> Topology:
    return hosts(
        world_size,
        ranks_per_host=8,
        bandwidth=450e9,
        latency_s=3.4e-6,
        across_bandwidth=50e9,
        across_latency_s=14e-6 - 3.4e-6,  # a route between hosts has both
        cards=8,
        memory_nbytes=80 * 10**9,
    )


def _pcie_host(gigabytes_per_s: float) -> Callable[[int, tuple[int, ...]], Topology]:
    def build(world_size: int, shape: tuple[int, ...]) -> Topology:
        if world_size > 8:
            raise ArgumentError(
                "a host has slots for 8 cards of 16 lanes at most",
                argument="world_size", expected="at most 8", got=world_size,
            )  # fmt: skip
        return crossbar(world_size, bandwidth=gigabytes_per_s * 1e9, latency_s=5.7e-6)

    return build


def _tpu(gigabytes_per_s: int, gibibytes: int) -> Callable[[int, tuple[int, ...]], Topology]:
    def build(world_size: int, shape: tuple[int, ...]) -> Topology:
        memory = gibibytes << 30
        return torus(shape, bandwidth=gigabytes_per_s * 1e9, latency_s=1e-6, memory_nbytes=memory)

    return build


MACHINES = {
    "dgx1": Machine(
        "8 V100 GPUs, a cube of NVLink with some diagonals and double cables",
        "Z. Cai et al., arXiv 2008.08708, figure 1, and the topology dgx1 of msccl-tools (the cables); "
        f"NVIDIA DGX-1 with V100 (6 links of NVLink a GPU, 25 GB/s each way); {_NCCL}, NVLink",
        lambda world_size, shape: dgx1(),
        world_size=8,
    ),
    "pcie4_host": Machine(
        "a host with cards in slots of PCI Express 4.0 with 16 lanes",
        "16 GT/s a lane, 128b/130b: 31.5 GB/s each way, of which packets take a part; that all "
        f"cards talk at once at full speed is assumed; {_NCCL}, PCI",
        _pcie_host(31.5),
    ),
    "pcie5_host": Machine(
        "a host with cards in slots of PCI Express 5.0 with 16 lanes",
        "32 GT/s a lane, 128b/130b: 63 GB/s each way, of which packets take a part; that all "
        f"cards talk at once at full speed is assumed; {_NCCL}, PCI",
        _pcie_host(63.0),
    ),
    "dgx_h100": Machine(
        "hosts of 8 H100 GPUs with NVLink and 8 network cards of 400 Gb/s",
        "NVIDIA on HGX H100 (NVLink 4 through NVSwitch: 900 GB/s a GPU, both ways together; 80 GB "
        "a GPU) and DGX H100 user guide, table of network modules (8 ConnectX-7, one a GPU; 400 "
        f"Gb/s each); {_NCCL}, NVLink and network",
        _dgx_h100,
    ),
    "infiniband_ndr": Machine(
        "hosts with one rank, and InfiniBand of 400 Gb/s",
        "NVIDIA, DGX SuperPOD cabling guide, NDR overview (400 Gb/s a port); a switch that never "
        f"is full is assumed; {_NCCL}, network",
        lambda world_size, shape: crossbar(world_size, bandwidth=50e9, latency_s=14e-6),
    ),
    "ethernet_10g": Machine(
        "hosts with one rank, and Ethernet of 10 Gb/s",
        "10 Gb/s by the name of the standard, IEEE 802.3ae; alpha of 60 us: what a message costs "
        "over gloo, measured on one host (ringcoll/transport/catalogue.py), so a network has more",
        lambda world_size, shape: crossbar(world_size, bandwidth=1.25e9, alpha_s=60e-6),
    ),
    "tpu_v4": Machine(
        "a 3-D torus of TPU v4 chips",
        "N. P. Jouppi et al., TPU v4, arXiv 2304.01433 (3-D torus, 32 GiB; 6 links of 50 GB/s each "
        "way: checked in G. K. Lockwood's notes on TPUv4 only, 400 Gb/s in each direction); the "
        "latency of 1 us a hop is assumed",
        _tpu(50, 32),
        "4x4x4",
    ),
    "tpu_v5p": Machine(
        "a 3-D torus of TPU v5p chips",
        "Google Cloud, page on TPU v5p (1200 GB/s a chip, both ways together, over 6 links; 95 "
        "GiB); the latency of 1 us a hop is assumed",
        _tpu(100, 95),
        "4x4x4",
    ),
}
"""Networks of real machines, by name."""

PRESETS = {
    f"{name}:{machine.example}" if machine.example else name: machine.about
    for name, machine in MACHINES.items()
}
"""The texts of networks of real machines, and what they are."""
