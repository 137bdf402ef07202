"""Topologies: ranks, the links between them, and the route of each message.

A node is a rank, by its number, or a switch, by its name. A link leads one way, so a cable is two
links. A topology whose links were all there at the beginning knows its routes by a formula; after
`Topology.without` messages take a route with the fewest links.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Any, TypedDict

from ringcoll.errors import ArgumentError, printable
from ringcoll.schedules import LARGEST_WORLD

MOST_BANDWIDTH, MOST_SECONDS = 10**18, 10**9
"""Bytes per second, and seconds, of a byte too, beyond which times could not be computed with."""
Node = int | str
Number = int | float | Fraction


def checked(
    name: str, value: Any, *, positive: bool = False, whole: bool = False, most: int | None = None
) -> None:
    """Check a number of a topology, or of a call."""
    numeric = isinstance(value, int if whole else int | float | Fraction)
    fits = numeric and not isinstance(value, bool) and value - value == 0  # neither inf nor nan
    if fits and not (value < 0 or (positive and not value) or (most is not None and value > most)):
        return
    kind = "a whole number" if whole else "a finite number"
    above = ("above 0" if positive else "at least 0") + (f", at most {most}" if most else "")
    raise ArgumentError("the number is out of range", name, f"{kind}, {above}", repr(value))


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
        checked("bandwidth", self.bandwidth, positive=True, most=MOST_BANDWIDTH)
        if self.bandwidth * MOST_SECONDS < 1:
            checked("bandwidth", 0, positive=True)
        checked("latency_s", self.latency_s, most=MOST_SECONDS)
        if self.lanes is not None:
            checked("lanes", self.lanes, positive=True)

    @property
    def name(self) -> str:
        """The link in words, such as ``0 -> leaf 0``."""
        return printable(f"{self.source} -> {self.target}")

    @property
    def back(self) -> Link:
        """The equal link of the other direction."""
        return replace(self, source=self.target, target=self.source)

    @property
    def capacity(self) -> Number | None:
        """Bytes per second of all lanes; ``None`` for a link that is never full."""
        return None if self.lanes is None else self.bandwidth * self.lanes

    @property
    def fastest(self) -> Number:
        """Bytes per second that a single message gets."""
        return self.bandwidth if self.capacity is None else min(self.bandwidth, self.capacity)


class RankCosts(TypedDict, total=False):
    """The costs of a rank, for every function that makes a topology; see `Topology`."""

    alpha_s: Number
    overhead_s: Number
    gamma_s_per_byte: Number
    memory_nbytes: int | None


def cable(
    first: Node, second: Node, bandwidth: Number, latency_s: Number, lanes: Number | None = 1
) -> tuple[Link, Link]:
    """The two links of a cable."""
    link = Link(first, second, bandwidth, latency_s, lanes)
    return link, link.back


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
    _trees: dict[int, dict[Node, int]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        checked("world_size", self.world_size, positive=True, whole=True, most=LARGEST_WORLD)
        for name in ("name", "source"):
            object.__setattr__(self, name, printable(getattr(self, name)))
        for name in ("alpha_s", "overhead_s", "gamma_s_per_byte"):
            checked(name, getattr(self, name), most=MOST_SECONDS)
        if self.memory_nbytes is not None:
            checked("memory_nbytes", self.memory_nbytes, positive=True, whole=True)
        for link in self.links:
            for node in (link.source, link.target):
                if isinstance(node, int) and not 0 <= node < self.world_size:
                    message = f"link {link.name} ends at a rank that is not there"
                    raise ArgumentError(message, "links", f"0 to {self.world_size - 1}", node)
        self._check_connected()

    def _check_connected(self) -> None:
        """All ranks are reached from rank 0, and reach rank 0: so each reaches each other one."""
        for leaving in (True, False):
            neighbours: dict[Node, list[Node]] = defaultdict(list)
            for link in self.links:
                ends = (link.source, link.target) if leaving else (link.target, link.source)
                neighbours[ends[0]].append(ends[1])
            reached: set[Node] = {0}
            waiting: list[Node] = [0]
            while waiting:
                new = {*neighbours[waiting.pop()]} - reached
                reached |= new
                waiting += new
            if lost := {*range(self.world_size)} - reached:
                first, second = (0, min(lost)) if leaving else (min(lost), 0)
                raise ArgumentError(
                    f"the topology is not connected: no route from rank {first} to rank {second}",
                    "links",
                )

    def cables(self) -> list[tuple[Link, bool]]:
        """The links, and whether each is a cable; the other link of a cable is left out."""
        kept: dict[Link, bool] = {}
        for link in self.links:
            kept |= {link.back: True} if link.back in kept else {link: False}
        return list(kept.items())

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
    def _leaving(self) -> dict[Node, list[int]]:
        leaving: dict[Node, list[int]] = defaultdict(list)
        for index, link in enumerate(self.links):
            leaving[link.source].append(index)
        return leaving

    def _tree(self, source: int) -> dict[Node, int]:
        """The link by which the shortest route from a rank enters each node."""
        before: dict[Node, int] = {}
        waiting: deque[Node] = deque([source])
        while waiting:
            for index in self._leaving[waiting.popleft()]:
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
            message = "there is no such link"
            expected = (
                f"two ends of a link of {self.name}, such as {self.links[0].name}"
                if self.links
                else "no failed link: the topology has none"
            )
            raise ArgumentError(message, "failed", expected, f"{first} and {second}")
        name = f"{self.name} without {first} - {second}"
        return replace(self, links=kept, router=None, name=name)
