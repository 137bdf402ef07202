"""A common clock for all ranks, from messages that were sent anyway.

Problem: each rank notes times on a clock of its own, and a picture of all ranks needs a common one.

Every message is a bound: a message is received after it was sent. If the offset ``o[r]`` has to
be added to the clock of rank r, a message from a to b says ::

    sent + o[a] <= received + o[b],   so   o[a] - o[b] <= received - sent

A ping and its answer bound the offset of a rank from both sides (Cristian, "Probabilistic
clock synchronization", 1989); all messages together are a system of difference constraints,
whose tightest form is a matrix of shortest paths. The middle between the two bounds of each
rank against rank 0 satisfies all of them at once: by the triangle inequality
``d[a][0] - d[b][0] <= d[a][b]`` and ``d[0][b] - d[0][a] <= d[a][b]``, and half the sum of
the left sides is ``o[a] - o[b]``. So no message arrives before it was sent, and the true
offset is no further away than half the distance of the bounds, which is the uncertainty.

Clocks of different hosts may also run at different rates. If the bounds from the beginning and
the bounds from the end exclude each other, a constant rate is assumed. If some bound is still
broken then, all bounds are loosened alike, and the uncertainty grows with them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ringcoll.errors import TraceError

_Bounds = list[list[float]]
"""Upper bounds of o[a] - o[b] in ns: whole numbers, or infinity where nothing is known."""


class Sighting(NamedTuple):
    """A message from one rank to another: times in ns, each on the clock of its rank."""

    source: int
    target: int
    sent: int
    received: int


@dataclass(frozen=True)
class Clock:
    """From the clock of a rank to that of rank 0.

    ``offset_ns``, which is added to the rank's clock, is the offset at the time ``since_ns`` on
    that clock; it grows by ``rate`` in each unit of time. The true offset is at most
    ``uncertainty_ns`` away. A message may seem to arrive ``slack_ns`` before it was sent: 0 unless
    clocks drift in an irregular way.
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

    ``begin`` and ``end`` are messages between rank 0 and each other rank, both ways, before and
    after the messages ``between``.
    """
    drifts = _drifts(world_size, begin, end)
    messages = [_steady(message, drifts) for message in (*begin, *between, *end)]
    bounds, slack = _feasible(world_size, messages)
    clocks = []
    for rank, (rate, since) in enumerate(drifts):
        above, below = bounds[rank][0], bounds[0][rank]
        if math.isinf(above) or math.isinf(below):
            raise TraceError(f"no messages both ways between rank 0 and rank {rank}")
        offset, uncertainty = int(above - below) // 2, -(-int(above + below) // 2)
        clocks.append(Clock(offset, uncertainty, rate, since, slack))
    return clocks


def _drifts(
    world_size: int, begin: Sequence[Sighting], end: Sequence[Sighting]
) -> list[tuple[float, int]]:
    """The rate of each rank's offset, and since when; 0 unless the rate is certain."""
    drifts = [(0.0, 0)] * world_size
    first, last = _direct(world_size, begin), _direct(world_size, end)
    for rank in range(1, world_size):
        low, high = -first[0][rank], first[rank][0]
        low_later, high_later = -last[0][rank], last[rank][0]
        if not math.isfinite(low + high + low_later + high_later):
            continue
        if low_later > high or high_later < low:
            since, until = _middle(begin, rank), _middle(end, rank)
            change = (low_later + high_later - low - high) / 2
            drifts[rank] = change / (until - since), since
    return drifts


def _middle(messages: Sequence[Sighting], rank: int) -> int:
    """Mean time of the messages of a rank, on its own clock."""
    times = [message.sent for message in messages if message.source == rank]
    return sum(times) // len(times)


def _steady(message: Sighting, drifts: Sequence[tuple[float, int]]) -> Sighting:
    """A message with the times of clocks that keep the rate of rank 0."""
    source, target, sent, received = message
    (rate, since), (other, other_since) = drifts[source], drifts[target]
    return Sighting(
        source,
        target,
        sent + round(rate * (sent - since)),
        received + round(other * (received - other_since)),
    )


def _direct(world_size: int, messages: Iterable[Sighting]) -> _Bounds:
    """The bounds from single messages."""
    bounds = [[math.inf] * world_size for _ in range(world_size)]
    for source, target, sent, received in messages:
        bounds[source][target] = min(bounds[source][target], received - sent)
    return bounds


def _feasible(world_size: int, messages: Sequence[Sighting]) -> tuple[_Bounds, int]:
    """The tightest bounds, and the slack without which they would exclude each other."""
    slack = 0
    while True:
        bounds = _closed(_direct(world_size, messages), slack)
        if all(bounds[rank][rank] >= 0 for rank in range(world_size)):
            return bounds, slack
        slack = 2 * slack or 1000


def _closed(bounds: _Bounds, slack: int) -> _Bounds:
    """Bounds by way of any other ranks: shortest paths, by Floyd and Warshall."""
    closed = [[bound + slack for bound in row] for row in bounds]
    for rank, row in enumerate(closed):
        row[rank] = 0
    for via, beyond in enumerate(closed):
        for row in closed:
            near = row[via]
            row[:] = [min(known, near + far) for known, far in zip(row, beyond, strict=True)]
    return closed
