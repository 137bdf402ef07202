r"""Dragonflies: groups of routers, every two of which are joined by a cable.

::

    group 0                         group 1
    ranks - router 0.0 -- router 0.1 ======== router 1.0 -- router 1.1 - ranks
         \                                       /
          ===== router 2.0 -- router 2.1 ========
                      group 2

Source: J. Kim, W. J. Dally, S. Scott and D. Abts, "Technology-driven, highly-scalable dragonfly
topology", ISCA 2008.
"""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Unpack

from ringcoll.errors import ArgumentError
from ringcoll.schedule import LARGEST_WORLD
from ringcoll.simulation.links import Link, Node, Number, RankCosts, cable, checked
from ringcoll.simulation.topology import Topology

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
        raise ArgumentError(
            "a dragonfly has at most one group more than cables leave a group",
            argument="global_links",
            expected=f"at least {-(-(groups - 1) // routers_per_group)} for {groups} groups",
            got=global_links,
        )
    across = (
        bandwidth if global_bandwidth is None else global_bandwidth,
        latency_s if global_latency_s is None else global_latency_s,
    )

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
        links += cable(name(gate(low, high)), name(gate(high, low)), *across)
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
