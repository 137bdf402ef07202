"""The common clock of all ranks of a trace, from messages that were sent anyway.

Each rank notes times on a clock of its own, and a picture of all ranks needs a common clock.

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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringcoll.errors import TraceError

ReadClock = Callable[[], int]
"""A clock: it gives nanoseconds, and never goes back."""

_Bounds = NDArray[np.object_]
"""Upper bounds of o[a] - o[b] in ns: whole numbers of any size, or infinity for no message."""


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
    # Clocks that keep the rate of rank 0, but for their offset.
    steady = [Clock(0, 0, *drift) for drift in _drifts(world_size, begin, end)]
    direct = _direct(
        world_size,
        [
            Sighting(a, b, steady[a].corrected(sent), steady[b].corrected(received))
            for a, b, sent, received in (*begin, *between, *end)
        ],
    )
    slack = 0
    while (bounds := _shortest_paths(direct + slack)).diagonal().min() < 0:
        slack = 2 * slack or 1000
    clocks = []
    for rank, clock in enumerate(steady):
        above, below = bounds[rank, 0], bounds[0, rank]
        if math.inf in (above, below):
            raise TraceError(f"no messages both ways between rank 0 and rank {rank}")
        offset, uncertainty = (above - below) // 2, -(-(above + below) // 2)
        clocks.append(Clock(offset, uncertainty, clock.rate, clock.since_ns, slack))
    return clocks


def _drifts(
    world_size: int, begin: Sequence[Sighting], end: Sequence[Sighting]
) -> list[tuple[float, int]]:
    """The rate of each rank's offset, and since when; 0 unless the rate is certain."""
    drifts = [(0.0, 0)] * world_size
    first, last = _direct(world_size, begin), _direct(world_size, end)
    for rank in range(1, world_size):
        low, high = -first[0, rank], first[rank, 0]
        low_later, high_later = -last[0, rank], last[rank, 0]
        if math.isfinite(low + high + low_later + high_later) and (
            low_later > high or high_later < low
        ):
            # Mean times of the rank's messages, on its own clock.
            times = ([each.sent for each in own if each.source == rank] for own in (begin, end))
            since, until = (sum(own) // len(own) for own in times)
            change = (low_later + high_later - low - high) / 2
            drifts[rank] = change / (until - since), since
    return drifts


def _direct(world_size: int, messages: Iterable[Sighting]) -> _Bounds:
    """The bounds from single messages."""
    bounds = np.full((world_size, world_size), math.inf, dtype=object)
    for source, target, sent, received in messages:
        bounds[source, target] = min(bounds[source, target], received - sent)
    return bounds


def _shortest_paths(bounds: _Bounds) -> _Bounds:
    """Bounds by way of any other ranks, by Floyd and Warshall."""
    np.fill_diagonal(bounds, 0)
    for via in range(len(bounds)):
        bounds = np.minimum(bounds, bounds[:, [via]] + bounds[via])
    return bounds
