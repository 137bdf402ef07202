"""One clock for all ranks, from messages that were sent anyway.

Problem: each rank notes times on a clock of its own, and a picture of all ranks needs one.

Every message is a bound: it is received after it was sent. If ``o[r]`` is what has to be
added to the clock of rank r, a message from a to b says ::

    sent + o[a] <= received + o[b],   so   o[a] - o[b] <= received - sent

A ping and its answer bound the offset of a rank from both sides (Cristian, "Probabilistic
clock synchronization", 1989); all messages together are a system of difference constraints,
whose tightest form is a matrix of shortest paths. The middle between the two bounds of each
rank against rank 0 satisfies all of them at once: by the triangle inequality
``d[a][0] - d[b][0] <= d[a][b]`` and ``d[0][b] - d[0][a] <= d[a][b]``, and half the sum of
the left sides is ``o[a] - o[b]``. So no message arrives before it was sent, and the true
offset is no further away than half the distance of the bounds, which is the uncertainty.

Clocks of different hosts may also run at different rates. Where the bounds from the
beginning and those from the end exclude each other, a constant rate is assumed. Where even
then some bound cannot be kept, all of them are loosened alike, and the uncertainty says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ringcoll.errors import TraceError

__all__ = ["Clock", "Sighting", "agree"]

_Bounds = list[list[int | None]]
"""Of o[a] - o[b], from above, in ns; none where nothing is known."""


class Sighting(NamedTuple):
    """A message from one rank to another: times in ns, each on the clock of its rank."""

    source: int
    target: int
    sent: int
    received: int


@dataclass(frozen=True)
class Clock:
    """From the clock of a rank to that of rank 0.

    Parameters
    ----------
    offset_ns
        What has to be added at the time ``since_ns``.
    uncertainty_ns
        How far the true offset may be away from it.
    rate
        By how much the offset grows in each unit of time.
    since_ns
        On the clock of the rank.
    slack_ns
        By how much a message may seem to arrive before it was sent: 0 unless clocks drift
        in an irregular way.
    """

    offset_ns: int
    uncertainty_ns: int
    rate: float = 0.0
    since_ns: int = 0
    slack_ns: int = 0

    def corrected(self, time_ns: int) -> int:
        """The time on the clock of rank 0."""
        return time_ns + self.offset_ns + round(self.rate * (time_ns - self.since_ns))


def agree(
    world_size: int,
    begin: Sequence[Sighting],
    end: Sequence[Sighting],
    between: Iterable[Sighting] = (),
) -> list[Clock]:
    """Find the clocks of all ranks.

    Parameters
    ----------
    world_size
        Number of ranks.
    begin, end
        Messages between rank 0 and each other one, both ways, before and after.
    between
        All other messages.

    Raises
    ------
    TraceError
        Between rank 0 and some other rank there were not messages both ways.
    """
    drifts = _drifts(world_size, begin, end)
    messages = [_steady(message, drifts) for message in (*begin, *between, *end)]
    bounds, slack = _feasible(world_size, messages)
    clocks = []
    for rank, (rate, since) in enumerate(drifts):
        above, below = bounds[rank][0], bounds[0][rank]
        if above is None or below is None:
            raise TraceError(f"no messages both ways between rank 0 and rank {rank}")
        clocks.append(Clock((above - below) // 2, -(-(above + below) // 2), rate, since, slack))
    return clocks


def _drifts(
    world_size: int, begin: Sequence[Sighting], end: Sequence[Sighting]
) -> list[tuple[float, int]]:
    """The rate of each rank's offset, and since when; 0 unless it is certain."""
    found = [(0.0, 0)] * world_size
    first, last = _direct(world_size, begin), _direct(world_size, end)
    for rank in range(1, world_size):
        before, after = _window(first, rank), _window(last, rank)
        if before is None or after is None:
            continue
        (low, high), (low_later, high_later) = before, after
        if low_later > high or high_later < low:
            since, until = _middle(begin, rank), _middle(end, rank)
            change = (low_later + high_later - low - high) / 2
            found[rank] = change / (until - since), since
    return found


def _window(bounds: _Bounds, rank: int) -> tuple[int, int] | None:
    """Between what the offset of a rank is."""
    above, below = bounds[rank][0], bounds[0][rank]
    return None if above is None or below is None else (-below, above)


def _middle(messages: Sequence[Sighting], rank: int) -> int:
    """When, on its own clock, the messages of a rank were."""
    times = [item.sent for item in messages if item.source == rank]
    return sum(times) // len(times)


def _steady(message: Sighting, drifts: Sequence[tuple[float, int]]) -> Sighting:
    """A message as clocks would have seen it that keep the rate of rank 0."""
    source, target, sent, received = message
    (rate, since), (other, other_since) = drifts[source], drifts[target]
    return Sighting(
        source,
        target,
        sent + round(rate * (sent - since)),
        received + round(other * (received - other_since)),
    )


def _direct(world_size: int, messages: Iterable[Sighting]) -> _Bounds:
    """The bounds that single messages give."""
    bounds: _Bounds = [[None] * world_size for _ in range(world_size)]
    for source, target, sent, received in messages:
        known = bounds[source][target]
        if known is None or received - sent < known:
            bounds[source][target] = received - sent
    return bounds


def _feasible(world_size: int, messages: Sequence[Sighting]) -> tuple[_Bounds, int]:
    """The tightest bounds, and by how much they had to be loosened to be possible at all."""
    slack = 0
    while True:
        bounds = _closed(_direct(world_size, messages), slack)
        if all((own := bounds[rank][rank]) is not None and own >= 0 for rank in range(world_size)):
            return bounds, slack
        slack = 2 * slack or 1000


def _closed(bounds: _Bounds, slack: int) -> _Bounds:
    """Bounds by way of any other ranks: shortest paths, by Floyd and Warshall."""
    ranks = range(len(bounds))
    closed = [[None if item is None else item + slack for item in row] for row in bounds]
    for rank in ranks:
        closed[rank][rank] = 0
    for via in ranks:
        beyond = closed[via]
        for row in closed:
            near = row[via]
            if near is None:
                continue
            for rank in ranks:
                far, known = beyond[rank], row[rank]
                if far is not None and (known is None or near + far < known):
                    row[rank] = near + far
    return closed
