"""Links between nodes, and the numbers of a topology.

A node is a rank, by its number, or a switch, by its name. A link leads one way, so a cable is two
links.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from math import isfinite
from typing import Any, TypedDict

from ringcoll.errors import ArgumentError

Node = int | str
Number = int | float | Fraction


def checked(
    name: str, value: Any, *, positive: bool = False, whole: bool = False, most: int | None = None
) -> None:
    """Check a number of a topology, or of a call."""
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
    """The costs of a rank that every function takes which makes a topology; see `Topology`."""

    alpha_s: Number
    overhead_s: Number
    gamma_s_per_byte: Number
    memory_nbytes: int | None


def cable(
    first: Node, second: Node, bandwidth: Number, latency_s: Number, lanes: Number | None = 1
) -> Iterator[Link]:
    """The two links of a cable."""
    link = Link(first, second, bandwidth, latency_s, lanes)
    yield from (link, link.back)
