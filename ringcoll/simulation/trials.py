"""Which ranks send at once while a group is measured: `trials` yields pairs, and is sent their numbers.

All ranks have the same numbers, so all follow it in step; a test follows it over a topology that it knows.

1. Short messages of all pairs, in rounds of disjoint pairs.
2. Long messages of pairs, each direction by itself. No host is in two pairs that cross hosts at once; with many
   ranks, one pair stands for two hosts. Where other hosts have sent meanwhile, slow pairs are measured again.
3. All ranks of a host send at once, or receive: what its card carries.
4. Half of the hosts send to the other half. Where some get less than their cards carry, the set is measured
   without each of them: two hosts share a cable if either gets more without the other.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from itertools import chain, islice, pairwise
from statistics import quantiles
from typing import Any, NamedTuple

from ringcoll.simulation.measured import Measurements
from ringcoll.simulation.rates import CLEARLY, Pair, Rates, Sample, between, slower, total, typical

_SHARE = 0.4  # of the budget, for pairs alone; as much for many at once, and the rest for latencies
_TRIPS_S, _LEAST_S, _ALONE_S, _TOGETHER_S, _MOST_S = 0.02, 0.03, 0.12, 0.25, 1.0
_SHORT, _LONG = 8, 1 << 15  # bytes of a message
_MESSAGE_S = 0.002  # of the fastest long message of many
_LEAST_NBYTES = 3 << 19  # several times the burst of a token bucket, of up to 256 KiB
_BURST = 3 << 17  # bytes that are left out at the beginning
_WINDOWS = 8  # of a stream, whose rates have a median and a spread
_HALVES = 12  # ways to halve the hosts


class Trial(NamedTuple):
    """Disjoint pairs of ranks that send at once, for how long, and bytes of their messages; 0 if these may grow."""

    pairs: tuple[Pair, ...]
    seconds: float
    nbytes: int = 0

    @property
    def is_short(self) -> bool:
        """Whether a message is sent when the one before was answered."""
        return self.nbytes == _SHORT

    def is_enough(self, arrivals: Sequence[tuple[float, int]]) -> bool:
        """Whether a receiver has measured enough after arrivals: a time, and all bytes so far.

        Where several send at once, all measure for as long: who went on after the others would get what they had.
        """
        seconds = arrivals[-1][0] - arrivals[0][0]
        if self.nbytes and not self.is_short:
            return seconds >= self.seconds
        enough = len(arrivals) > 3 if self.is_short else arrivals[-1][1] >= _LEAST_NBYTES
        return seconds >= self.seconds and (enough or seconds >= _MOST_S)

    def sample(self, arrivals: Sequence[tuple[float, int]]) -> Sample:
        """Seconds of a message of those that come one by one, or bytes per second after the beginning."""
        nbytes = arrivals[-1][1]
        left_out = 1 if self.is_short else min(nbytes // 2, max(_BURST, nbytes // 4))
        kept = [arrival for arrival in arrivals if arrival[1] >= left_out]
        kept = kept if kept[1:] else [arrivals[0], arrivals[-1]]
        windows = len(kept) - 1 if self.is_short else _WINDOWS
        ends = [kept[(len(kept) - 1) * index // windows] for index in range(windows + 1)]
        steps = [(max(end - begin, 1e-9), new - old) for (begin, old), (end, new) in pairwise(ends)]
        values = [s / 2 if self.is_short else n / s for s, n in steps if n]
        low, middle, high = quantiles(values * 2, n=4)
        rate = (ends[-1][1] - ends[0][1]) / max(ends[-1][0] - ends[0][0], 1e-9)
        return Sample(min(values) if self.is_short else rate, (high - low) / middle)


def tournament(number: int) -> list[list[Pair]]:
    """Rounds of disjoint pairs, in which each meets each other once; of an odd number, one rests.

    >>> tournament(4)
    [[(3, 0), (1, 2)], [(3, 1), (2, 0)], [(3, 2), (0, 1)]]
    """
    last = number - 1 + number % 2  # it stays, and the others turn
    return [
        [(last, turn)] * (last < number)
        + [((turn + by) % last, (turn - by) % last) for by in range(1, (last + 1) // 2)]
        for turn in range(last)
    ]


def trials(hosts: Sequence[int], budget_s: float) -> Generator[Trial, Any, Measurements]:
    """Yield what to measure next, and get its numbers; return all of them."""
    members = [[r for r, at in enumerate(hosts) if at == host] for host in range(max(hosts) + 1)]
    share_s, rounds, longest = _SHARE * budget_s, tournament(len(hosts)), max(map(len, members))
    latency_s, bandwidth, together = dict[Pair, Sample](), dict[Pair, Sample](), list[Rates]()
    for pairs in rounds:
        seconds = min(_TRIPS_S, share_s / 2 / len(rounds))
        rates = yield Trial(tuple(pairs), seconds, _SHORT)
        latency_s |= rates | {(b, a): sample for (a, b), sample in rates.items()}
    turns = _turns(members, longest, int(share_s / _LEAST_S / 2))
    seconds = min(_ALONE_S, max(_LEAST_S, share_s / (2 * len(turns) or 1)))
    for way in (way for turn in turns for way in _ways(turn)):
        bandwidth |= yield Trial(way, seconds)
    if len(members) > 3:  # otherwise no other host has sent
        slow = slower(between(bandwidth, hosts, typical))
        for a, b in [(a, b) for a, b in bandwidth if (hosts[a], hosts[b]) in slow]:
            del bandwidth[a, b]
        for a, b in slow[: int(share_s / seconds / 2)]:
            bandwidth |= yield Trial(((members[a][0], members[b][0]),), seconds)
    alone = between(bandwidth, hosts, typical)

    seconds = min(_TOGETHER_S, max(_LEAST_S, share_s / (3 * len(members) + 2 * _HALVES)))

    def at_once(pairs: Iterable[Pair]) -> Trial:
        """Pairs with messages of one length: an answer waits behind messages of others, and each as long."""
        sent = tuple(pairs)
        rates = [alone.get((hosts[a], hosts[b]), Sample(0.0)).value for a, b in sent]
        slowest_s = _LEAST_NBYTES / max(min(rates), 1.0)  # all go on until the slowest has enough
        return Trial(
            sent, max(seconds, min(_MOST_S, slowest_s)), max(_LONG, int(max(rates) * _MESSAGE_S))
        )

    firsts = sorted(range(len(hosts)), key=lambda rank: members[hosts[rank]].index(rank))
    for host, own in enumerate(members):
        fan = [*zip(own, (rank for rank in firsts if hosts[rank] != host), strict=False)]
        for way in _ways(fan) if len(fan) > 1 else ():
            together.append((yield at_once(way)))
    tested: set[int] = set()
    rounds = tournament(len(members)) if len(members) > 3 else []
    for way in (way for pairs in rounds[:: 1 + len(rounds) // _HALVES] for way in _ways(pairs)):
        flow = {ends: [*zip(*(members[host] for host in ends), strict=False)] for ends in way}
        together.append((yield at_once(chain(*flow.values()))))
        least = {ends: CLEARLY * sample.value for ends, sample in alone.items()}
        less = [ends for ends, sample in between(together[-1], hosts, total).items()
                if sample.value < least.get(ends, 0)]  # fmt: skip
        senders = {a for a, _ in less}
        for missing in less if len(senders) > 1 and senders - tested else ():
            tested |= senders
            rest = chain(*(pairs for ends, pairs in flow.items() if ends != missing))
            together.append((yield at_once(rest)))
    return Measurements(tuple(hosts), latency_s, bandwidth, tuple(together))


def _ways(pairs: Sequence[Pair]) -> tuple[tuple[Pair, ...], ...]:
    return tuple(pairs), tuple((b, a) for a, b in pairs)


def _turns(members: list[list[int]], longest: int, most: int) -> list[list[Pair]]:
    """Pairs of ranks that are measured at the same time: inside hosts, then from host to host."""
    rounds, across = tournament(longest), tournament(len(members))
    if longest * (longest - 1) <= most:
        rounds = [[pair] for pairs in rounds for pair in pairs]
    inside = [[(own[a], own[b]) for own in members for a, b in pairs if max(a, b) < len(own)]
              for pairs in rounds]  # fmt: skip
    outside = ([(members[a][by % len(members[a])], members[b][(by + by // longest) % len(members[b])])
                for a, b in pairs] for by in range(longest**2) for pairs in across)  # fmt: skip
    return [*filter(None, [*inside, *islice(outside, max(len(across), most - len(inside)))])]
