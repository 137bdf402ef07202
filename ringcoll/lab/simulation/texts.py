"""Topologies by the text of a user, such as ``torus:4x8``: shapes, and networks of real machines.

Machines have the sources of their numbers. Latencies are those by which NCCL chooses its algorithms
(ring, protocol Simple; ``ncclTunerConstants`` in ``src/graph/tuning.cc``, read at commit 5067397c):
3.4 us over NVLink, 5.7 us over PCI Express, 14 us over a network. They are costs of software, too:
a bare message takes less.

A topology of any other shape is the text of a graph, a link a line.
A line names two nodes, the bandwidth of each direction in GB/s, and its latency in microseconds.
A number is a rank, a word is a switch. ``--`` is a cable, with a link in each direction, and ``->``
is a single link::

    # a host with two ranks, and a third rank behind a slow link
    0 -- 1  50  0.5
    1 -- 2  12.5  5
    2 -> 0  6  5
    ranks   0  1.5  0.05

The last line, if it is there, has the costs of a rank: microseconds until a message begins to move,
and until each further one of a wave does, and nanoseconds to reduce a byte. What follows ``#`` is a
comment.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

from ringcoll.errors import ArgumentError
from ringcoll.lab.simulation.shapes import crossbar, dragonfly, fat_tree, hosts, ring, torus
from ringcoll.lab.simulation.topology import Link, Node, Number, Topology
from ringcoll.schedules import LARGEST_WORLD


def dgx1() -> Topology:
    """Build the topology of a DGX-1 with V100: 8 ranks, each with 6 cables to 4 other ranks."""
    # 25 GB/s each way a cable; a double cable is one link of 50 GB/s. 3.4 us over NVLink.
    double = pairwise((0, 1, 3, 2, 6, 7, 5, 4, 0))
    single = ((0, 2), (0, 3), (1, 2), (1, 5), (3, 7), (4, 6), (4, 7), (5, 6))
    cables = [f"{a} -- {b} 50 3.4" for a, b in double] + [f"{a} -- {b} 25 3.4" for a, b in single]
    return topology_from_text("\n".join(cables), name="dgx1")


_NCCL = "latency: NCCL, src/graph/tuning.cc, ring, protocol Simple"


class Machine(NamedTuple):
    """A network of real machines, and the sources of its numbers."""

    about: str
    source: str
    build: Callable[[int, tuple[int, ...]], Topology]  # of the number of ranks, and of dimensions
    example: str = ""  # ranks in each dimension, for the help; empty if the text has none
    world_size: int | None = None  # if all such machines have as many ranks


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


def _pcie_host(generation: str, transfers: int, gigabytes_per_s: float) -> Machine:
    """A host with cards in slots of 16 lanes, each of so many GT/s."""

    def build(world_size: int, shape: tuple[int, ...]) -> Topology:
        if world_size > 8:
            message = "a host has slots for 8 cards of 16 lanes at most"
            raise ArgumentError(message, "world_size", "at most 8", world_size)
        return crossbar(world_size, bandwidth=gigabytes_per_s * 1e9, latency_s=5.7e-6)

    return Machine(
        f"a host with cards in slots of PCI Express {generation} with 16 lanes",
        f"{transfers} GT/s a lane, 128b/130b: {gigabytes_per_s:g} GB/s each way, of which packets "
        f"take a part; that all cards talk at once at full speed is assumed; {_NCCL}, PCI",
        build,
    )


def _tpu(gigabytes_per_s: int, gibibytes: int, world_size: int, shape: tuple[int, ...]) -> Topology:
    memory = gibibytes << 30
    return torus(shape, bandwidth=gigabytes_per_s * 1e9, latency_s=1e-6, memory_nbytes=memory)


MACHINES = {
    "dgx1": Machine(
        "8 V100 GPUs, a cube of NVLink with some diagonals and double cables",
        "Z. Cai et al., arXiv 2008.08708, figure 1, and the topology dgx1 of msccl-tools (the "
        "cables); NVIDIA DGX-1 with V100 (6 links of NVLink a GPU, 25 GB/s each way); "
        f"{_NCCL}, NVLink",
        lambda world_size, shape: dgx1(),
        world_size=8,
    ),
    "pcie4_host": _pcie_host("4.0", 16, 31.5),
    "pcie5_host": _pcie_host("5.0", 32, 63.0),
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
        "over gloo, measured on one host (`ringcoll.runtime.transport.catalogue`), so a network "
        "has more",
        lambda world_size, shape: crossbar(world_size, bandwidth=1.25e9, alpha_s=60e-6),
    ),
    "tpu_v4": Machine(
        "a 3-D torus of TPU v4 chips",
        "N. P. Jouppi et al., TPU v4, arXiv 2304.01433 (3-D torus, 32 GiB; 6 links of 50 GB/s each "
        "way: checked in G. K. Lockwood's notes on TPUv4 only, 400 Gb/s in each direction); the "
        "latency of 1 us a hop is assumed",
        partial(_tpu, 50, 32),
        "4x4x4",
    ),
    "tpu_v5p": Machine(
        "a 3-D torus of TPU v5p chips",
        "Google Cloud, page on TPU v5p (1200 GB/s a chip, both ways together, over 6 links; 95 "
        "GiB); the latency of 1 us a hop is assumed",
        partial(_tpu, 100, 95),
        "4x4x4",
    ),
}
"""Networks of real machines, by name."""

PRESETS = {
    f"{name}:{machine.example}" if machine.example else name: machine.about
    for name, machine in MACHINES.items()
}
"""The texts of networks of real machines, and what they are."""


FORMS = {
    "crossbar": "each rank has a cable to one switch; crossbar:2 has 2 ports a rank",
    "ring": "each rank has a cable to the next one",
    "torus:4x8": "ranks in 2 dimensions, in 3 with torus:4x4x2",
    "fat_tree:8:2": "8 ranks below a leaf, oversubscribed 2 to 1",
    "dragonfly:2:4:1": "2 ranks a router, 4 routers a group, 1 cable a router to other groups",
    "hosts:4": "4 ranks in a host, one network card a host; hosts:4:2 has 2 cards",
}
"""The texts of topologies, and what they mean."""

_SIZES = re.compile(r"\d{1,6}(?:x\d{1,6})*", re.ASCII)

# Fields that may follow the name of a topology.
_FIELDS = {
    "crossbar": (0, 1),
    "ring": (0,),
    "torus": (1,),
    "fat_tree": (1, 2),
    "dragonfly": (3,),
    "hosts": (1, 2),
    **{name: (1,) if machine.example else (0,) for name, machine in MACHINES.items()},
}
_WITH_SHAPE = {"torus", *(name for name in MACHINES if MACHINES[name].example)}


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
        The same between hosts, or between the groups of a dragonfly. Between hosts a tenth of
        ``bandwidth``, and ten times ``latency_s``; between groups the same.

    Raises
    ------
    ArgumentError
        The text is no topology, or one of another number of ranks.

    Examples
    --------
    >>> topology_named("torus:2x4", 8).name
    'torus 2x4'
    """
    kind, shape, numbers = _parsed(text)
    own = bandwidth, latency_s, across_bandwidth, across_latency_s
    if kind in MACHINES and own != (None,) * 4:
        message = "a preset has bandwidths and latencies of its own"
        raise ArgumentError(message, "topology", f"a topology of {', '.join(FORMS)}", text)
    bandwidth = 1e10 if bandwidth is None else bandwidth
    latency_s = 1e-6 if latency_s is None else latency_s
    link: dict[str, Any] = {"bandwidth": bandwidth, "latency_s": latency_s}
    if kind in MACHINES:
        machine = MACHINES[kind]
        topology = machine.build(world_size, shape)
        name = kind if kind == topology.name else f"{kind}, {topology.name}"
        topology = replace(topology, name=name, source=machine.source)
    elif kind == "crossbar":
        topology = crossbar(world_size, ports=(*numbers, 1)[0], **link)
    elif kind == "ring":
        topology = ring(world_size, **link)
    elif kind == "torus":
        topology = torus(shape, **link)
    elif kind == "fat_tree":
        below, times = (*numbers, 1)[:2]
        topology = fat_tree(world_size, ranks_per_leaf=below, oversubscription=times, **link)
    elif kind == "dragonfly":
        topology = dragonfly(
            world_size,
            ranks_per_router=numbers[0],
            routers_per_group=numbers[1],
            global_links=numbers[2],
            global_bandwidth=across_bandwidth,
            global_latency_s=across_latency_s,
            **link,
        )
    else:
        topology = hosts(
            world_size,
            ranks_per_host=numbers[0],
            cards=(*numbers[1:], 1)[0],
            across_bandwidth=bandwidth / 10 if across_bandwidth is None else across_bandwidth,
            across_latency_s=10 * latency_s if across_latency_s is None else across_latency_s,
            **link,
        )
    if topology.world_size != world_size:
        raise ArgumentError(
            f"{text} has {topology.world_size} ranks", "topology", world_size, topology.world_size
        )
    return topology


def ranks_named(text: str) -> int | None:
    """The number of ranks that the text of a topology says; ``None`` if it says none.

    >>> ranks_named("torus:4x8"), ranks_named("dgx1"), ranks_named("ring")
    (32, 8, None)
    """
    kind, *fields = text.replace("-", "_").split(":")
    if kind in _WITH_SHAPE and len(fields) == 1 and _SIZES.fullmatch(fields[0]):
        return prod(map(int, fields[0].split("x"))) or None
    return MACHINES[kind].world_size if kind in MACHINES else None


def _parsed(text: str) -> tuple[str, tuple[int, ...], list[int]]:
    """The name of a topology, its ranks in each dimension, and its other numbers."""
    name, *fields = text.replace("-", "_").split(":")
    sizes = [tuple(map(int, field.split("x"))) for field in fields if _SIZES.fullmatch(field)]
    if len(sizes) == len(fields) and len(fields) in _FIELDS.get(name, ()):
        if name in _WITH_SHAPE:
            return name, sizes[0], []
        if all(len(size) == 1 for size in sizes):
            return name, (), [size[0] for size in sizes]
    known = ", ".join((*FORMS, *PRESETS))
    raise ArgumentError("not a topology", "topology", known, repr(text))


_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d{1,3})?"
_LINK = re.compile(rf"(\w+)\s*(--|->)\s*(\w+)\s+({_NUMBER})(?:\s+({_NUMBER}))?", re.ASCII)
_RANKS = re.compile(rf"ranks\s+({_NUMBER})\s+({_NUMBER})\s+({_NUMBER})", re.ASCII)
_UNITS = {"alpha_s": 1e-6, "overhead_s": 1e-6, "gamma_s_per_byte": 1e-9}  # of the costs of a rank
_SWITCH = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_LONGEST_LINE = 1 << 10


def topology_from_text(text: str, *, name: str = "graph", source: str = "") -> Topology:
    r"""Read the links of a topology; there are as many ranks as the largest number says.

    Parameters
    ----------
    text
        The graph, a link a line.
    name, source
        The topology in words, and the source of its numbers.

    Raises
    ------
    ArgumentError
        There is no link, or a line is none, or has no latency, or its bandwidth is not above 0:
        the message names the line. Or two ranks are not connected.

    Examples
    --------
    >>> line = topology_from_text("0 -- 1 50 0.5 # fast" "\n" "1 -- 2 12.5 5")
    >>> line.world_size, [link.name for link in line.links]
    (3, ['0 -> 1', '1 -> 0', '1 -> 2', '2 -> 1'])
    """
    links: dict[tuple[Node, Node], Link] = {}
    costs: dict[str, float] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        if match := _RANKS.fullmatch(content[:_LONGEST_LINE]):
            values = map(float, match.groups())
            costs = {name: value * _UNITS[name] for name, value in zip(_UNITS, values, strict=True)}
            continue
        for link in _links(content, number):
            if (link.source, link.target) in links:
                raise _wrong(number, f"the link {link.name} is there twice", content)
            links[link.source, link.target] = link
    if not links:
        raise ArgumentError("the graph has no link", "text")
    ranks = [node for ends in links for node in ends if isinstance(node, int)]
    named: dict[str, Any] = {"name": name, "source": source, **costs}
    return Topology(world_size=max(ranks, default=0) + 1, links=tuple(links.values()), **named)


def topology_text(topology: Topology, comments: Mapping[Link, str] | None = None) -> str:
    """Write a topology as a text that `topology_from_text` reads, with comments on links.

    Raises
    ------
    ArgumentError
        The text cannot say it: a link with several lanes, routes by a formula, a name of other
        signs.

    Examples
    --------
    >>> print(topology_text(topology_from_text("0 -- 1 50 0.5")), end="")
    0 -- 1 50 0.5
    """
    nodes = [node for link in topology.links for node in (link.source, link.target)]
    is_named = all(isinstance(node, int) or _SWITCH.fullmatch(node) for node in nodes)
    is_plain = {link.lanes for link in topology.links} == {1}
    if not is_named or not is_plain or topology.router is not None:
        message = "a text cannot say it"
        expected = "links of one lane, the shortest routes, names of letters and digits"
        raise ArgumentError(message, "topology", expected, topology.name)
    text, links, comments = "", list(topology.links), comments or {}
    while links:
        link = links.pop(0)
        comment = comments.get(link, "")
        # The order of links decides between routes: only two that follow each other are one line.
        is_cable = links[:1] == [link.back] and comments.get(link.back, "") == comment
        del links[: int(is_cable)]
        numbers = f"{float(link.bandwidth) / 1e9:.12g} {float(link.latency_s) * 1e6:.12g}"
        text += f"{link.source} {'--' if is_cable else '->'} {link.target} {numbers}"
        text += f"  # {comment}\n" if comment else "\n"
    costs = [float(getattr(topology, name)) / unit for name, unit in _UNITS.items()]
    return text + f"ranks {' '.join(f'{cost:.12g}' for cost in costs)}\n" * any(costs)


def _links(content: str, number: int) -> list[Link]:
    match = _LINK.fullmatch(content) if len(content) <= _LONGEST_LINE else None
    if match is None:
        raise _wrong(number, "the line is no link", content[:40])
    ends = _node(match[1], number), _node(match[3], number)
    if ends[0] == ends[1]:
        raise _wrong(number, f"the link leads from {ends[0]} to itself", content)
    if match[5] is None:
        raise _wrong(number, "the link has no latency, in microseconds; it may be 0", content)
    try:
        link = Link(*ends, float(match[4]) * 1e9, float(match[5]) * 1e-6)
    except ArgumentError as error:
        what = f"the {str(error.argument).removesuffix('_s')} is out of range"
        raise _wrong(number, what, content) from None
    return [link, link.back] if match[2] == "--" else [link]


def _node(word: str, number: int) -> Node:
    if not word[0].isdigit():
        return word
    if not word.isdigit() or len(word) > 6 or int(word) >= LARGEST_WORLD:
        what = f"a rank is a number below {LARGEST_WORLD}, and a switch begins with a letter"
        raise _wrong(number, what, word)
    return int(word)


def _wrong(number: int, message: str, got: str) -> ArgumentError:
    return ArgumentError(
        f"line {number}: {message}",
        "text",
        "'0 -- 1 50 0.5': two nodes, GB/s above 0, microseconds",
        repr(got),
    )
