"""The text of a topology, such as ``torus:4x8``."""

from __future__ import annotations

import re
from math import prod
from typing import Any

from ringcoll.errors import ArgumentError
from ringcoll.simulation.dragonfly import dragonfly
from ringcoll.simulation.levels import fat_tree, hosts
from ringcoll.simulation.links import Number
from ringcoll.simulation.presets import MACHINES, PRESETS
from ringcoll.simulation.shapes import crossbar, ring, torus
from ringcoll.simulation.topology import Topology

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
_WITH_SHAPE = {"torus", *(name for name, machine in MACHINES.items() if machine.example)}


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
    if kind in MACHINES:
        if (bandwidth, latency_s, across_bandwidth, across_latency_s) != (None,) * 4:
            raise ArgumentError(
                "a preset has bandwidths and latencies of its own", argument="topology", got=text,
                expected=f"a topology of {', '.join(FORMS)}",
            )  # fmt: skip
        return _of_size(MACHINES[kind].topology(kind, world_size, shape), text, world_size)
    bandwidth = 1e10 if bandwidth is None else bandwidth
    latency_s = 1e-6 if latency_s is None else latency_s
    link: dict[str, Any] = {"bandwidth": bandwidth, "latency_s": latency_s}
    if kind == "crossbar":
        return crossbar(world_size, ports=(*numbers, 1)[0], **link)
    if kind == "ring":
        return ring(world_size, **link)
    if kind == "torus":
        return _of_size(torus(shape, **link), text, world_size)
    if kind == "fat_tree":
        below, times = (*numbers, 1)[:2]
        return fat_tree(world_size, ranks_per_leaf=below, oversubscription=times, **link)
    if kind == "dragonfly":
        names = ("ranks_per_router", "routers_per_group", "global_links")
        shapes: dict[str, Any] = dict(zip(names, numbers, strict=True))
        across: Any = {"global_bandwidth": across_bandwidth, "global_latency_s": across_latency_s}
        return dragonfly(world_size, **shapes, **link, **across)
    return hosts(
        world_size,
        ranks_per_host=numbers[0],
        cards=(*numbers[1:], 1)[0],
        across_bandwidth=bandwidth / 10 if across_bandwidth is None else across_bandwidth,
        across_latency_s=10 * latency_s if across_latency_s is None else across_latency_s,
        **link,
    )


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
    raise ArgumentError("not a topology", argument="topology", expected=known, got=repr(text))


def _of_size(topology: Topology, text: str, world_size: int) -> Topology:
    if topology.world_size != world_size:
        raise ArgumentError(
            f"{text} has {topology.world_size} ranks",
            argument="topology",
            expected=world_size,
            got=topology.world_size,
        )
    return topology
