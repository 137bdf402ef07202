"""Programs that are one program, turned, and networks that look the same from every p-th rank.

Problem: on 4,096 ranks a ring has 33 million messages, and every rank's program says the same,
seen from another rank. If rank r sends to rank r + d wherever rank 0 sends to rank d, one program
is enough; and where the network looks alike, too, the events of a few ranks are. Both must be
*proved*, not guessed from some ranks.

Programs. A `TurnedRank` stands for every rank at once: it is ``factor * rank + offset``, and of the
rank nothing is known but, at most, what it leaves when it is divided by ``period``. It can be added
to and multiplied, ``% world_size`` brings it back among the ranks, and a comparison is answered
only where the answer is the same for all of these ranks. Every other use is an error, hash and text
included. So if the program ends without an error, it took the same way for all of them, and its
peers are at the same distances. ::

    ring       next_rank = (rank + 1) % k        turned by any number of ranks
    Swing      if rank % 2: ...                  turned by an even number: two programs
    doubling   rank ^ 1                          no answer: the program is not turned

A program has to compute with its rank for that; one that asks for the rank's *type* could escape.
So the programs of the first and of the last rank are compared with what was found, as well.

Networks. Let rank r + p send to peer + p whatever rank r sends to peer. If the links on the way are
alike as well, and so are late and slow ranks, then rank r + p has the times of rank r: the events
of ranks 0 to p - 1 are those of all. It is proved link by link, for all messages. The route of each
message, turned by p ranks, has to lead over other links *of the same numbers*, and a link has to be
turned to the same link in every route that it is a link of. So the turn is a permutation of the
links; it does not matter what the topology is called, or who made it. The links that turn into each
other are an *orbit*, of which one link stands for all. A message of rank r that crosses an orbit
twice, as on a ring of cables, meets itself there: it shares a link with the message of another
rank, which is at the other place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from math import lcm
from operator import attrgetter
from typing import Any, NoReturn

from ringcoll.lab.simulation.lockstep import RankWave, wave_of
from ringcoll.lab.simulation.topology import Number, Topology
from ringcoll.schedules import MOST_STEPS, Schedule

_LONGEST_PERIOD = 64


class _NotTurned(Exception):  # noqa: N818  # an answer, which leaves this module as `None`
    """The program asks what differs among the ranks; ``period`` is what it would have to know."""

    def __init__(self, period: int = 0) -> None:
        super().__init__("the programs of the ranks differ")
        self.period = period


class TurnedRank:
    """The number ``factor * rank + offset``, for every rank that leaves ``rest`` modulo ``period``.

    ``period`` divides the number of ranks; the number is known up to multiples of the number of
    ranks, and ``is_rank`` says that it is one of 0 to ``world_size - 1``.
    """

    __slots__ = ("factor", "is_rank", "known", "offset", "world_size")
    __hash__ = None  # type: ignore[assignment]  # a set of ranks would not ask `__eq__`

    def __init__(
        self,
        world_size: int,
        period: int = 1,
        rest: int = 0,
        *,
        factor: int = 1,
        offset: int = 0,
        is_rank: bool = True,
    ) -> None:
        self.world_size, self.known = world_size, (period, rest)
        self.factor, self.offset = factor % world_size, offset % world_size
        self.is_rank = is_rank

    def _like(self, factor: int, offset: int, is_rank: bool = False) -> TurnedRank:
        return TurnedRank(
            self.world_size, *self.known, factor=factor, offset=offset, is_rank=is_rank
        )

    def __add__(self, other: Any) -> Any:
        if type(other) is int:
            return self._like(self.factor, self.offset + other) if other else self
        if type(other) is TurnedRank:
            return self._like(self.factor + other.factor, self.offset + other.offset)
        return NotImplemented

    __radd__ = __add__

    def __neg__(self) -> TurnedRank:
        return self._like(-self.factor, -self.offset)

    def __sub__(self, other: Any) -> Any:
        return self + -other if type(other) in (int, TurnedRank) else NotImplemented

    def __rsub__(self, other: Any) -> Any:
        return -self + other

    def __mul__(self, other: Any) -> Any:
        if type(other) is not int:
            return NotImplemented
        return self._like(self.factor * other, self.offset * other)

    __rmul__ = __mul__

    def __mod__(self, other: Any) -> Any:
        if type(other) is not int or other < 1:
            return NotImplemented
        if other == self.world_size:
            if self.is_rank:
                return self
            return self._like(self.factor, self.offset, True) if self.factor else self.offset
        if self.world_size % other:
            raise _NotTurned
        period, rest = self.known
        if self.factor * period % other:
            raise _NotTurned(other)
        return (self.factor * rest + self.offset) % other

    def __eq__(self, other: object) -> Any:
        if type(other) is TurnedRank:
            if self.is_rank and other.is_rank and self.factor == other.factor:
                return self.offset == other.offset
            raise _NotTurned
        if type(other) is not int:
            return NotImplemented
        if self.is_rank and not 0 <= other < self.world_size:
            return False
        raise _NotTurned

    def __lt__(self, other: Any) -> Any:
        if type(other) is int and self.is_rank and not 0 < other < self.world_size:
            return other > 0
        raise _NotTurned

    def __ge__(self, other: Any) -> Any:
        return not self < other

    def __le__(self, other: Any) -> Any:
        return self < other + 1

    def __gt__(self, other: Any) -> Any:
        return not self < other + 1

    def __bool__(self) -> NoReturn:
        raise _NotTurned

    def __repr__(self) -> NoReturn:
        raise _NotTurned  # text would tell ranks apart


def turned_programs(schedule: Schedule) -> list[list[RankWave]] | None:
    """The programs of which all others are turned ones, or ``None`` if there are none."""
    period, world_size = 1, schedule.world_size
    while period <= min(_LONGEST_PERIOD, world_size // 2):
        try:
            programs = [
                list(_distances(schedule, TurnedRank(world_size, period, rest)))
                for rest in range(period)
            ]
        except _NotTurned as asked:
            if asked.period < 2 or lcm(asked.period, period) == period:
                return None
            period = lcm(asked.period, period)
        except Exception:  # noqa: BLE001  # of the program, which wanted a number: all mean "no"
            return None
        else:
            agrees = all(_agrees(schedule, programs, rank) for rank in (0, world_size - 1))
            return programs if agrees else None
    return None


def _distances(schedule: Schedule, rank: TurnedRank) -> Iterator[RankWave]:
    program: Any = schedule.program
    for number, step in enumerate(program(rank)):
        if number > MOST_STEPS:
            raise _NotTurned
        yield _with_peers(wave_of(number, step), _distance)


def _distance(peer: Any) -> int:
    """How far a peer is ahead of the rank, if it is always as far, and always a rank."""
    if type(peer) is not TurnedRank or not peer.is_rank or peer.factor != 1 or not peer.offset:
        raise _NotTurned
    return peer.offset


def _agrees(schedule: Schedule, programs: list[list[RankWave]], rank: int) -> bool:
    steps = zip_longest(schedule.program(rank), programs[rank % len(programs)])
    return all(
        step is not None and wave == turned(wave_of(number, step), -rank, schedule.world_size)
        for number, (step, wave) in enumerate(steps)
    )


def turned(wave: RankWave, by: int, world_size: int) -> RankWave:
    """A wave with other peers: turned by a number of ranks."""
    return _with_peers(wave, lambda peer: (peer + by) % world_size)


def _with_peers(wave: RankWave, peer_of: Callable[[Any], int]) -> RankWave:
    return RankWave(
        [(peer_of(peer), *rest) for peer, *rest in wave.sends],  # type: ignore[misc]
        [(peer_of(peer), *rest) for peer, *rest in wave.receives],  # type: ignore[misc]
        wave.reduced,
        wave.step,
    )


@dataclass(frozen=True, slots=True)
class Folding:
    """Ranks and links that stand for others: rank r does what rank ``r % period`` does.

    ``standing_in`` has the link that stands for each link, itself if it is alone. ``crossings`` has
    the messages that cross each link where one message of ranks 0 to ``period - 1`` crosses the
    link that stands for it.
    """

    period: int
    standing_in: Sequence[int]
    crossings: Sequence[int]

    @classmethod
    def none(cls, topology: Topology) -> Folding:
        """Every rank, and every link, stands for itself."""
        links = len(topology.links)
        return cls(topology.world_size, range(links), [1] * links)


def folded(
    topology: Topology, programs: Sequence[Sequence[RankWave]], *of_ranks: Mapping[int, Number]
) -> Folding | None:
    """Find the fewest ranks that stand for all."""
    world_size = topology.world_size
    distances = [{peer for wave in steps for peer, *_ in wave.sends} for steps in programs]
    for period in range(len(programs), world_size // 2 + 1, len(programs)):
        if world_size % period or not all(
            numbers.get((rank + period) % world_size) == number
            for numbers in of_ranks
            for rank, number in numbers.items()
        ):
            continue
        turn = _turn(topology, distances, period)
        if turn is not None:
            return _folding(topology, turn, period)
    return None


def _turn(topology: Topology, distances: list[set[int]], period: int) -> dict[int, int] | None:
    """The link that each link becomes in a turn by ``period`` ranks, if all messages agree."""
    turn: dict[int, int] = {}
    world_size, links = topology.world_size, topology.links
    for rank in range(period):
        for distance in distances[rank % len(distances)]:
            # From the rank, and from those that are turned, once around.
            sources = (*range(rank, world_size, period), rank)
            routes = (topology.route(here, (here + distance) % world_size) for here in sources)
            for before, route in pairwise(routes):
                if len(route) != len(before):
                    return None
                for old, new in zip(before, route, strict=True):
                    known = turn.get(old)
                    if known is None and _numbers(links[old]) == _numbers(links[new]):
                        turn[old] = new
                    elif known != new:
                        return None
    return turn


_numbers = attrgetter("bandwidth", "latency_s", "lanes")


def _folding(topology: Topology, turn: dict[int, int], period: int) -> Folding:
    turns = topology.world_size // period
    standing_in = list(range(len(topology.links)))
    crossings = [1] * len(topology.links)
    seen: set[int] = set()
    for first in turn:
        orbit: dict[int, None] = {}
        link = first
        while link not in seen:
            seen.add(link)
            orbit[link] = None
            link = turn[link]
        for link in orbit:
            standing_in[link] = first
            crossings[link] = turns // len(orbit)
    return Folding(period, standing_in, crossings)
