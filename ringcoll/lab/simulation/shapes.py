r"""Topologies by their shape: crossbars, rings, tori, fat trees, hosts and dragonflies.

Nothing is above a rank in a ring or a torus. Fat trees, and hosts with several ranks, have two
levels of switches. A dragonfly has groups of routers, every two of which are joined by a cable::

    group 0                         group 1
    ranks - router 0.0 -- router 0.1 ======== router 1.0 -- router 1.1 - ranks
         \                                       /
          ===== router 2.0 -- router 2.1 ========
                      group 2

Source of dragonflies: J. Kim, W. J. Dally, S. Scott and D. Abts, "Technology-driven,
highly-scalable dragonfly topology", ISCA 2008.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from itertools import combinations, pairwise
from math import prod
from typing import Any, Unpack

from ringcoll.errors import ArgumentError
from ringcoll.lab.simulation.topology import Link, Node, Number, RankCosts, Topology, cable, checked
from ringcoll.schedules import LARGEST_WORLD


def crossbar(
    world_size: int,
    *,
    bandwidth: Number,
    latency_s: Number = 0,
    ports: int | None = 1,
    **costs: Unpack[RankCosts],
) -> Topology:
    """One switch that never is full: each rank has a cable to it.

    Parameters
    ----------
    world_size
        Number of ranks.
    bandwidth
        Bytes per second of a port.
    latency_s
        Seconds from a rank to another.
    ports
        Messages that a rank sends, and receives, at full bandwidth at the same time. ``None``
        for any number of them: then no message shares anything, and the simulation is faster.
    **costs
        The costs of a rank, as of `Topology`.

    Examples
    --------
    >>> from ringcoll.schedules import schedule_of
    >>> from ringcoll.lab.simulation import simulate
    >>> switch = crossbar(4, bandwidth=10**9, alpha_s=1e-6)
    >>> run = simulate(schedule_of("all_reduce", "ring", 4), 10**6, switch)
    >>> round(run.seconds, 9)  # 6 alpha + 3/2 n beta
    0.001506
    """
    checked("world_size", world_size, positive=True, whole=True, most=LARGEST_WORLD)
    return Topology(
        world_size=world_size,
        links=(
            *(Link(rank, "switch", bandwidth, latency_s, ports) for rank in range(world_size)),
            *(Link("switch", rank, bandwidth, 0, ports) for rank in range(world_size)),
        ),
        name="crossbar",
        router=lambda source, target: (source, world_size + target),
        **costs,
    )


def torus(
    shape: Sequence[int], *, bandwidth: Number, latency_s: Number = 0, **costs: Unpack[RankCosts]
) -> Topology:
    """A torus of any number of dimensions; ranks are numbered with the last dimension first.

    Each rank has a cable to the next one in each dimension, and the last one to the first. A
    message goes through the dimensions in order, in each the shorter way; of equal ones upward.

    Parameters
    ----------
    shape
        Ranks in each dimension.
    bandwidth, latency_s
        Bytes per second, and seconds, of a cable in each direction.
    **costs
        The costs of a rank, as of `Topology`.

    Examples
    --------
    >>> grid = torus((3, 4), bandwidth=10**9)
    >>> [grid.links[index].name for index in grid.route(0, 7)]  # 7 is (1, 3)
    ['0 -> 4', '4 -> 7']
    """
    for length in shape:
        checked("shape", length, positive=True, whole=True, most=LARGEST_WORLD)
    world_size = prod(shape)
    checked("world_size", world_size, positive=True, whole=True, most=LARGEST_WORLD)
    strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]

    def beside(rank: int, axis: int, way: int) -> int:
        place = rank // strides[axis] % shape[axis]
        return rank + ((place + way) % shape[axis] - place) * strides[axis]

    links: list[Link] = []
    number: dict[tuple[int, int], int] = {}
    for rank in range(world_size):
        for axis in range(len(shape)):
            for way in (1, -1):
                peer = beside(rank, axis, way)
                if peer != rank and (rank, peer) not in number:
                    number[rank, peer] = len(links)
                    links.append(Link(rank, peer, bandwidth, latency_s))

    def router(source: int, target: int) -> tuple[int, ...]:
        route, here = [], source
        for axis, (stride, length) in enumerate(zip(strides, shape, strict=True)):
            up = (target // stride - here // stride) % length
            way, hops = (1, up) if 2 * up <= length else (-1, length - up)
            for _ in range(hops):
                there = beside(here, axis, way)
                route.append(number[here, there])
                here = there
        return tuple(route)

    name = "torus " + "x".join(map(str, shape)) if len(shape) > 1 else "ring"
    return Topology(world_size=world_size, links=tuple(links), name=name, router=router, **costs)


def ring(
    world_size: int, *, bandwidth: Number, latency_s: Number = 0, **costs: Unpack[RankCosts]
) -> Topology:
    """A ring: each rank has a cable to the next one, as in a `torus` of one dimension."""
    return torus((world_size,), bandwidth=bandwidth, latency_s=latency_s, **costs)


def _two_levels(
    world_size: int,
    below: int,
    switch: str,
    inside: Callable[[Node, Node], Iterable[Link]],
    across: Callable[[Node, Node], Iterable[Link]],
    **rest: Any,
) -> Topology:
    """So many ranks below each switch, and the switches below a core that never is full."""
    links: list[Link] = []
    for rank in range(world_size):
        links += inside(rank, f"{switch} {rank // below}")
    for leaf in range(-(-world_size // below)):
        links += across(f"{switch} {leaf}", "core")

    def router(source: int, target: int) -> tuple[int, ...]:
        here, there = source // below, target // below
        if here == there:
            return 2 * source, 2 * target + 1
        above = 2 * world_size
        return 2 * source, above + 2 * here, above + 2 * there + 1, 2 * target + 1

    return Topology(world_size=world_size, links=tuple(links), router=router, **rest)


def fat_tree(
    world_size: int,
    *,
    ranks_per_leaf: int,
    bandwidth: Number,
    latency_s: Number = 0,
    oversubscription: Number = 1,
    **costs: Unpack[RankCosts],
) -> Topology:
    """Two levels of switches: ranks below leaves, and leaves below a core.

    Parameters
    ----------
    world_size
        Number of ranks.
    ranks_per_leaf
        Ranks below a leaf; the last leaf may have fewer.
    bandwidth, latency_s
        Bytes per second, and seconds, of a cable.
    oversubscription
        Bandwidth of the cables from a full leaf to its ranks over that of its cables to the
        core: with 2, half of the ranks fill the cables to the core.
    **costs
        The costs of a rank, as of `Topology`.
    """
    checked("world_size", world_size, positive=True, whole=True, most=LARGEST_WORLD)
    checked("ranks_per_leaf", ranks_per_leaf, positive=True, whole=True)
    checked("oversubscription", oversubscription, positive=True)
    lanes = Fraction(ranks_per_leaf) / oversubscription
    return _two_levels(
        world_size,
        ranks_per_leaf,
        "leaf",
        lambda rank, leaf: cable(rank, leaf, bandwidth, latency_s),
        lambda leaf, core: cable(leaf, core, bandwidth, latency_s, lanes),
        name=f"fat tree, {ranks_per_leaf} ranks a leaf, {oversubscription}:1",
        **costs,
    )


def hosts(
    world_size: int,
    *,
    ranks_per_host: int,
    bandwidth: Number,
    across_bandwidth: Number,
    latency_s: Number = 0,
    across_latency_s: Number = 0,
    ports: int = 1,
    cards: int = 1,
    **costs: Unpack[RankCosts],
) -> Topology:
    """Hosts with several ranks: links of one kind inside, and network cards between hosts.

    Parameters
    ----------
    world_size
        Number of ranks.
    ranks_per_host
        Ranks of a host, in a row; the last host may have fewer.
    bandwidth, latency_s
        Bytes per second of a rank's port, and seconds between two ranks of a host.
    across_bandwidth, across_latency_s
        Bytes per second of a network card, and seconds between two hosts.
    ports
        Messages that a rank sends, and receives, at full bandwidth at the same time.
    cards
        Network cards of a host, which its ranks share.
    **costs
        The costs of a rank, as of `Topology`.
    """
    checked("world_size", world_size, positive=True, whole=True, most=LARGEST_WORLD)
    checked("ranks_per_host", ranks_per_host, positive=True, whole=True)
    return _two_levels(
        world_size,
        ranks_per_host,
        "host",
        lambda rank, host: (
            Link(rank, host, bandwidth, latency_s, ports),
            Link(host, rank, bandwidth, 0, ports),
        ),
        lambda host, core: (
            Link(host, core, across_bandwidth, across_latency_s, cards),
            Link(core, host, across_bandwidth, 0, cards),
        ),
        name=f"hosts of {ranks_per_host} ranks",
        **costs,
    )


_MOST_ROUTERS = 1 << 10  # of a group: it has a cable for each pair


def dragonfly(
    world_size: int,
    *,
    ranks_per_router: int,
    routers_per_group: int,
    global_links: int,
    bandwidth: Number,
    latency_s: Number = 0,
    global_bandwidth: Number | None = None,
    global_latency_s: Number | None = None,
    **costs: Unpack[RankCosts],
) -> Topology:
    """Groups of routers: all routers of a group are joined, and all groups are.

    A message takes the one cable between the two groups (minimal routing): from its router to the
    router that has the cable, over the cable, and to the router of the receiver. The cable from
    group g to group g + 1 + i is at router i // ``global_links`` of group g, so that all groups
    are alike.

    Parameters
    ----------
    world_size
        Number of ranks; the last group may have fewer than the others.
    ranks_per_router, routers_per_group, global_links
        Ranks and cables to other groups of a router, and routers of a group: p, h and a of the
        source. There are at most a h + 1 groups.
    bandwidth, latency_s
        Bytes per second, and seconds, of a cable inside a group.
    global_bandwidth, global_latency_s
        The same for a cable between groups; by default those inside a group.
    **costs
        The costs of a rank, as of `Topology`.

    Raises
    ------
    ArgumentError
        A number is out of range, or there are more groups than the routers of a group have cables.

    Examples
    --------
    >>> network = dragonfly(
    ...     12, ranks_per_router=2, routers_per_group=2, global_links=1, bandwidth=10**9
    ... )
    >>> [network.links[index].name for index in network.route(0, 7)]
    ['0 -> router 0.0', 'router 0.0 -> router 1.1', 'router 1.1 -> 7']
    """
    checked("world_size", world_size, positive=True, whole=True, most=LARGEST_WORLD)
    checked("ranks_per_router", ranks_per_router, positive=True, whole=True)
    checked("routers_per_group", routers_per_group, positive=True, whole=True, most=_MOST_ROUTERS)
    checked("global_links", global_links, whole=True)
    groups = -(-world_size // (ranks_per_router * routers_per_group))
    if groups > routers_per_group * global_links + 1:
        message = "a dragonfly has at most one group more than cables leave a group"
        expected = f"at least {-(-(groups - 1) // routers_per_group)} for {groups} groups"
        raise ArgumentError(message, "global_links", expected, global_links)
    global_bandwidth = bandwidth if global_bandwidth is None else global_bandwidth
    global_latency_s = latency_s if global_latency_s is None else global_latency_s

    def gate(group: int, other: int) -> tuple[int, int]:
        """The router of a group that has the cable to another one."""
        return group, (other - group - 1) % groups // global_links

    def name(router: tuple[int, int]) -> str:
        return f"router {router[0]}.{router[1]}"

    def router_of(rank: int) -> tuple[int, int]:
        return divmod(rank // ranks_per_router, routers_per_group)

    links: list[Link] = []
    for rank in range(world_size):
        links += cable(rank, name(router_of(rank)), bandwidth, latency_s)
    for group in range(groups):
        for pair in combinations(range(routers_per_group), 2):
            first, second = (name((group, router)) for router in pair)
            links += cable(first, second, bandwidth, latency_s)
    for low, high in combinations(range(groups), 2):
        ends = name(gate(low, high)), name(gate(high, low))
        links += cable(*ends, global_bandwidth, global_latency_s)
    number = {(link.source, link.target): index for index, link in enumerate(links)}

    def router(source: int, target: int) -> tuple[int, ...]:
        here, there = router_of(source), router_of(target)
        routers = [here, there]
        if here[0] != there[0]:
            routers[1:1] = gate(here[0], there[0]), gate(there[0], here[0])
        nodes: list[Node] = [source, *dict.fromkeys(map(name, routers)), target]
        return tuple(number[hop] for hop in pairwise(nodes))

    title = f"dragonfly, {groups} groups of {routers_per_group} routers"
    return Topology(world_size=world_size, links=tuple(links), name=title, router=router, **costs)
