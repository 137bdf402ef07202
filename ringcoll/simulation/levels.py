"""Topologies with levels of switches: fat trees, and hosts with several ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from typing import Any, Unpack

from ringcoll.schedule import LARGEST_WORLD
from ringcoll.simulation.links import Link, Node, Number, RankCosts, cable, checked
from ringcoll.simulation.topology import Topology


def _two_levels(
    leaf_of: Sequence[int],
    switch: str,
    inside: Callable[[Node, Node], Iterable[Link]],
    across: Callable[[Node, Node], Iterable[Link]],
    **rest: Any,
) -> Topology:
    """Ranks below switches, and the switches below a core that never is full."""
    world_size, switches = len(leaf_of), max(leaf_of) + 1
    links: list[Link] = []
    for rank, leaf in enumerate(leaf_of):
        links += inside(rank, f"{switch} {leaf}")
    for leaf in range(switches):
        links += across(f"{switch} {leaf}", "core")

    def router(source: int, target: int) -> tuple[int, ...]:
        here, there = leaf_of[source], leaf_of[target]
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
    exact = not isinstance(oversubscription, float)
    lanes = (
        Fraction(ranks_per_leaf) / oversubscription
        if exact
        else (ranks_per_leaf / float(oversubscription))
    )
    return _two_levels(
        [rank // ranks_per_leaf for rank in range(world_size)],
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

    def inside(rank: Node, host: Node) -> Iterator[Link]:
        yield Link(rank, host, bandwidth, latency_s, ports)
        yield Link(host, rank, bandwidth, 0, ports)

    def across(host: Node, core: Node) -> Iterator[Link]:
        yield Link(host, core, across_bandwidth, across_latency_s, cards)
        yield Link(core, host, across_bandwidth, 0, cards)

    return _two_levels(
        [rank // ranks_per_host for rank in range(world_size)],
        "host",
        inside,
        across,
        name=f"hosts of {ranks_per_host} ranks",
        **costs,
    )
