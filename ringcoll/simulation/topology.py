"""Topologies: links between ranks and switches, and the route of each message.

A node is a rank, by its number, or a switch, by its name. A link leads one way, so a cable is two
links. A topology whose links were all there at the beginning knows its routes by a formula; after
`Topology.without` messages take a route with the fewest links.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from math import isfinite, prod
from typing import Any, TypedDict, Unpack

from ringcoll.errors import ArgumentError

__all__ = [
    "LARGEST_WORLD",
    "Link",
    "Node",
    "Number",
    "RankCosts",
    "Topology",
    "crossbar",
    "fat_tree",
    "hosts",
    "ring",
    "torus",
]

LARGEST_WORLD = 1 << 16
"""Most ranks of a topology: a typing error should not use all memory."""

Node = int | str
Number = int | float | Fraction


def checked(
    name: str, value: Any, *, positive: bool = False, whole: bool = False, most: int | None = None
) -> None:
    """Check a number of a topology, or of a call.

    Raises
    ------
    ArgumentError
        The value is no number, is not finite, or is too low or too high.
    """
    numeric = isinstance(value, int if whole else int | float | Fraction)
    fits = numeric and not isinstance(value, bool) and isfinite(value)
    if fits and not (value < 0 or (positive and not value) or (most is not None and value > most)):
        return
    kind = "a whole number" if whole else "a finite number"
    above = ("above 0" if positive else "at least 0") + (f", at most {most}" if most else "")
    raise ArgumentError(
        "the number is out of range", argument=name, expected=f"{kind}, {above}", got=repr(value)
    )


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of a cable, or of a port.

    Parameters
    ----------
    source, target
        The nodes at the ends: a number is a rank, text is a switch.
    bandwidth
        Bytes per second of one lane.
    latency_s
        Seconds from the moment at which a byte leaves to its arrival, at least 0.
    lanes
        Messages that the link carries at full bandwidth at the same time, 1 or more, fractions
        too: 1/2 is a link with half of the bandwidth. ``None`` for a link that is never full.

    Raises
    ------
    ArgumentError
        The bandwidth, or the number of lanes, is not above 0, or the latency is below 0.
    """

    source: Node
    target: Node
    bandwidth: Number
    latency_s: Number = 0
    lanes: Number | None = 1

    def __post_init__(self) -> None:
        checked("bandwidth", self.bandwidth, positive=True)
        checked("latency_s", self.latency_s)
        if self.lanes is not None:
            checked("lanes", self.lanes, positive=True)

    @property
    def name(self) -> str:
        """The link in words, such as ``0 -> leaf 0``."""
        return f"{self.source} -> {self.target}"

    @property
    def capacity(self) -> Number | None:
        """Bytes per second of all lanes; ``None`` for a link that is never full."""
        return None if self.lanes is None else self.bandwidth * self.lanes

    @property
    def fastest(self) -> Number:
        """Bytes per second that a single message gets."""
        return self.bandwidth if self.capacity is None else min(self.bandwidth, self.capacity)


class RankCosts(TypedDict, total=False):
    """The costs of a rank that every function of this module takes; see `Topology`."""

    alpha_s: Number
    overhead_s: Number
    gamma_s_per_byte: Number
    memory_nbytes: int | None


@dataclass(frozen=True, eq=False, kw_only=True)
class Topology:
    """Ranks, the links between them, and the costs of a rank.

    Parameters
    ----------
    world_size
        Number of ranks.
    links
        All links.
    name
        The topology in words.
    alpha_s
        Seconds from the post of a message until its bytes begin to move.
    overhead_s
        Seconds by which each further message of a wave begins later.
    gamma_s_per_byte
        Seconds that a rank needs to reduce a byte with another.
    memory_nbytes
        Bytes of memory of a rank; ``None`` if it does not matter.
    source
        Source of the numbers.
    router
        Function from two ranks to the indices of the links between them; by default a route with
        the fewest links, of equal ones the one whose links come first.

    Raises
    ------
    ArgumentError
        A number is out of range, a link names a rank that is not there, or there is no route
        between two ranks.
    """

    world_size: int
    links: tuple[Link, ...]
    name: str = "links"
    alpha_s: Number = 0
    overhead_s: Number = 0
    gamma_s_per_byte: Number = 0
    memory_nbytes: int | None = None
    source: str = ""
    router: Callable[[int, int], tuple[int, ...]] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        checked("world_size", self.world_size, positive=True, whole=True, most=LARGEST_WORLD)
        for name in ("alpha_s", "overhead_s", "gamma_s_per_byte"):
            checked(name, getattr(self, name))
        if self.memory_nbytes is not None:
            checked("memory_nbytes", self.memory_nbytes, positive=True, whole=True)
        for link in self.links:
            for node in (link.source, link.target):
                if isinstance(node, int) and not 0 <= node < self.world_size:
                    raise ArgumentError(
                        f"link {link.name} ends at a rank that is not there",
                        argument="links",
                        expected=f"0 to {self.world_size - 1}",
                        got=node,
                    )
        self._check_connected()

    def _check_connected(self) -> None:
        """All ranks are reached from rank 0, and reach rank 0: so each reaches each other one."""
        for leaving in (True, False):
            reached: set[Node] = {0}
            waiting: list[Node] = [0]
            neighbours: dict[Node, list[Node]] = {}
            for link in self.links:
                ends = (link.source, link.target) if leaving else (link.target, link.source)
                neighbours.setdefault(ends[0], []).append(ends[1])
            while waiting:
                new = set(neighbours.get(waiting.pop(), ())) - reached
                reached |= new
                waiting += new
            lost = next((rank for rank in range(self.world_size) if rank not in reached), None)
            if lost is not None:
                ends = (0, lost) if leaving else (lost, 0)
                raise ArgumentError(
                    f"the topology is not connected: no route from rank {ends[0]} to "
                    f"rank {ends[1]}",
                    argument="links",
                )

    def route(self, source: int, target: int) -> tuple[int, ...]:
        """Indices of the links from one rank to another, in order."""
        if self.router is not None:
            return self.router(source, target)
        before = self._trees.get(source)
        if before is None:
            before = self._trees[source] = self._tree(source)
        route = []
        node: Node = target
        while node != source:
            route.append(before[node])
            node = self.links[before[node]].source
        return tuple(reversed(route))

    @cached_property
    def _trees(self) -> dict[int, dict[Node, int]]:
        return {}

    @cached_property
    def _leaving(self) -> dict[Node, list[int]]:
        leaving: dict[Node, list[int]] = {}
        for index, link in enumerate(self.links):
            leaving.setdefault(link.source, []).append(index)
        return leaving

    def _tree(self, source: int) -> dict[Node, int]:
        """The link by which the shortest route from a rank enters each node."""
        before: dict[Node, int] = {}
        waiting: deque[Node] = deque([source])
        while waiting:
            for index in self._leaving.get(waiting.popleft(), ()):
                node = self.links[index].target
                if node != source and node not in before:
                    before[node] = index
                    waiting.append(node)
        return before

    def without(self, first: Node, second: Node) -> Topology:
        """The topology after the links between two nodes, in both directions, have failed.

        Raises
        ------
        ArgumentError
            There is no such link, or a rank cannot be reached any more.
        """
        failed = {(first, second), (second, first)}
        kept = tuple(link for link in self.links if (link.source, link.target) not in failed)
        if len(kept) == len(self.links):
            raise ArgumentError(
                "there is no such link",
                argument="failed",
                expected=f"two ends of a link of {self.name}, such as {self.links[0].name}"
                if self.links
                else "no failed link: the topology has none",
                got=f"{first} and {second}",
            )
        name = f"{self.name} without {first} - {second}"
        return replace(self, links=kept, router=None, name=name)


def _cable(
    first: Node, second: Node, bandwidth: Number, latency_s: Number, lanes: Number | None = 1
) -> Iterator[Link]:
    yield Link(first, second, bandwidth, latency_s, lanes)
    yield Link(second, first, bandwidth, latency_s, lanes)


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
    >>> from ringcoll.algorithms import schedule_of
    >>> from ringcoll.simulation import simulate
    >>> switch = crossbar(4, bandwidth=10**9, alpha_s=1e-6)
    >>> run = simulate(schedule_of("all_reduce", "ring", 4), 10**6, switch)
    >>> round(run.seconds, 9)  # 6 alpha + 3/2 n beta
    0.001506
    """
    checked("world_size", world_size, positive=True, whole=True, most=LARGEST_WORLD)
    links = [
        *(Link(rank, "switch", bandwidth, latency_s, ports) for rank in range(world_size)),
        *(Link("switch", rank, bandwidth, 0, ports) for rank in range(world_size)),
    ]

    def router(source: int, target: int) -> tuple[int, ...]:
        return source, world_size + target

    return Topology(
        world_size=world_size, links=tuple(links), name="crossbar", router=router, **costs
    )


def torus(
    shape: Sequence[int],
    *,
    bandwidth: Number,
    latency_s: Number = 0,
    **costs: Unpack[RankCosts],
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
        lambda rank, leaf: _cable(rank, leaf, bandwidth, latency_s),
        lambda leaf, core: _cable(leaf, core, bandwidth, latency_s, lanes),
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
