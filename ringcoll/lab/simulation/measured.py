"""Measurements between the ranks of a group, and the topology that explains them.

The topology has the ranks, a switch for each host, the host's card, and the network between cards::

    0 -- host0 -- card0 -- net -- card1 -- host1 -- 2

A link carries the most that has gone over it. Half of the least latency inside a host is on the way
from and to its ranks; the rest of the latency between hosts is on the cards. Further links are
there only where these do not explain a rate: between two ranks of a host, such as of two sockets;
between two cards; and a switch ``leaf0`` between ``net`` and the cards of hosts that share a cable.
Routes are those with the fewest links.

`trials` yields the pairs that send at once, and is sent their numbers. All ranks have the same
numbers, so all follow it in step; a test follows it over a topology that it knows.

1. Short messages of all pairs, in rounds of disjoint pairs.
2. Long messages of pairs, each direction by itself. No host is in two pairs that cross hosts at
   once; with many ranks, one pair stands for two hosts. Where other hosts have sent meanwhile, slow
   pairs are measured again.
3. All ranks of a host send at once, or receive: what its card carries.
4. Half of the hosts send to the other half. Where some get less than their cards carry, the set is
   measured without each of them: two hosts share a cable if either gets more without the other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice, pairwise
from math import inf
from statistics import median, quantiles
from typing import Any, NamedTuple

from ringcoll.errors import ArgumentError
from ringcoll.lab.simulation.topology import Link, Node, Topology

Pair = tuple[int, int]
"""Two ranks, or two hosts: sender and receiver."""

_SLOWER_RATE = 0.8  # of a rate: a rate below is another one
_SAME_RATE = 0.9  # of a rate: a rate above differs by noise
_OWN_LINK_RATE = 0.75  # of the rate of a host's links: a slower pair of its ranks has its own link
_GROWS = 1.2  # times the rate that a host has got where another one did not send


class Sample(NamedTuple):
    """A measured number, and its spread: the interquartile range over the median."""

    value: float
    spread: float = 0.0


Rates = Mapping[Pair, Sample]
"""Bytes per second, or seconds, from rank to rank or from host to host."""


def between(
    rates: Rates, hosts: Sequence[int], join: Callable[[list[Sample]], Sample]
) -> dict[Pair, Sample]:
    """The numbers from host to host, those of their ranks joined by a function."""
    of_hosts: dict[Pair, list[Sample]] = {}
    for (source, target), sample in rates.items():
        if hosts[source] != hosts[target]:
            of_hosts.setdefault((hosts[source], hosts[target]), []).append(sample)
    return {ends: join(samples) for ends, samples in of_hosts.items()}


def total(samples: Sequence[Sample]) -> Sample:
    """The sum, with the mean spread."""
    value = sum(sample.value for sample in samples)
    return Sample(value, sum(value * spread for value, spread in samples) / value)


def typical(samples: Iterable[Sample]) -> Sample:
    """The median of numbers, and of their spreads; 0 without any."""
    both = [*zip(*samples, strict=True)]
    return Sample(*map(median, both)) if both else Sample(0.0)


def capacity(samples: Iterable[Sample]) -> Sample:
    """The capacity of a link: the median of the largest samples, which differ by noise only."""
    known = [*samples]
    most = max((sample.value for sample in known), default=0.0)
    return typical(sample for sample in known if sample.value >= _SAME_RATE * most)


def carried(flows: Iterable[Rates], inside: set[int], end: int) -> Sample:
    """The most that leaves (``end`` is 0) or enters (1) a set of hosts."""
    crossing = (
        [s for ends, s in rates.items() if ends[end] in inside and ends[1 - end] not in inside]
        for rates in flows
    )
    return capacity(total(samples) for samples in crossing if samples)


def slower(alone: Rates) -> list[Pair]:
    """Pairs of hosts that are clearly slower than others of these hosts, the slowest first."""
    usual = {
        (host, end): capacity(s for ends, s in alone.items() if ends[end] == host).value
        for host in {host for ends in alone for host in ends}
        for end in (0, 1)
    }
    slow = [
        (a, b) for a, b in alone if alone[a, b].value < _SLOWER_RATE * min(usual[a, 0], usual[b, 1])
    ]
    return sorted(slow, key=lambda ends: alone[ends])


@dataclass(frozen=True)
class Measurements:
    """The host of every rank, and numbers of pairs of ranks, as `trials` finds them.

    ``latency_s`` has the seconds of a short message, and ``bandwidth`` the bytes per second of a
    pair that sends alone; ``together`` has the bytes per second in sets of pairs that send at once.
    The costs of a rank are ``alpha_s``, ``overhead_s`` and ``gamma_s_per_byte`` of `Topology`.
    """

    hosts: tuple[int, ...]
    latency_s: Rates
    bandwidth: Rates
    together: tuple[Rates, ...] = ()
    rank_costs: tuple[float, ...] = (0.0, 0.0, 0.0)

    def to_json(self) -> str:
        """Write the measurements; a pair is a list of sender, receiver, number and spread."""
        rates = self.latency_s, self.bandwidth, *self.together
        latency_s, bandwidth, *together = (
            [(*pair, *sample) for pair, sample in each.items()] for each in rates
        )
        value = {"hosts": self.hosts, "latency_s": latency_s, "bandwidth": bandwidth}
        value |= {"together": together, "rank_costs": self.rank_costs}
        return json.dumps(value, allow_nan=False)

    @staticmethod
    def from_json(text: str) -> Measurements:
        """Read a text of `to_json`; an `ArgumentError` if the text is something else."""
        try:
            value = json.loads(text)
            latency_s, bandwidth, *together = [
                {(int(a), int(b)): Sample(float(c), float(d)) for a, b, c, d in rows}
                for rows in (value["latency_s"], value["bandwidth"], *value["together"])
            ]
            hosts = tuple(map(int, value["hosts"]))
            rank_costs = tuple(map(float, value["rank_costs"]))
        except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise ArgumentError(f"no measurements: {error!r}", "text") from error
        ranks, sets = range(len(hosts)), (latency_s, bandwidth, *together)
        if not (
            {*hosts} == {*range(len({*hosts}))} != set()
            and latency_s.keys() == {(a, b) for a in ranks for b in ranks if a != b}
            and len(rank_costs) == 3
            and all(0 <= cost < inf for cost in rank_costs)
            and all(latency_s.keys() >= rates.keys() for rates in sets)
            and all(0 <= d < inf and 0 < c < inf for rates in sets for c, d in rates.values())
        ):
            raise ArgumentError("no measurements of all pairs of these hosts", "text")
        return Measurements(hosts, latency_s, bandwidth, tuple(together), rank_costs)


def topology_of(measurements: Measurements) -> Topology:
    """The topology that explains measurements.

    Examples
    --------
    >>> latency_s = {(0, 1): Sample(2e-6), (1, 0): Sample(2e-6)}
    >>> rates = {(0, 1): Sample(2e9), (1, 0): Sample(1e9)}
    >>> pair = topology_of(Measurements(hosts=(0, 0), latency_s=latency_s, bandwidth=rates))
    >>> [f"{link.name}: {link.bandwidth:g}" for link in pair.links]
    ['0 -> host0: 2e+09', 'host0 -> 0: 1e+09', '1 -> host0: 1e+09', 'host0 -> 1: 2e+09']
    """
    alpha_s, overhead_s, gamma_s = measurements.rank_costs
    return Topology(
        world_size=len(measurements.hosts), links=tuple(links_of(measurements)), name="measured",
        source="measured", alpha_s=alpha_s, overhead_s=overhead_s, gamma_s_per_byte=gamma_s,
    )  # fmt: skip


def links_of(measurements: Measurements) -> dict[Link, float]:
    """The links of `topology_of`, to four digits, each with the spread of its bandwidth."""
    return {
        Link(source, target, float(f"{rate.value:.4g}"), float(f"{latency_s:.4g}")): rate.spread
        for source, target, rate, latency_s in _links(measurements)
    }


def _links(measurements: Measurements) -> Iterator[tuple[Node, Node, Sample, float]]:
    hosts, rates, latencies = measurements.hosts, measurements.bandwidth, measurements.latency_s
    inside = [(hosts[a], s) for (a, b), (s, _) in latencies.items() if hosts[a] == hosts[b]]
    near_s = [min([s for at, s in inside if at == host], default=0.0) / 2
              for host in range(max(hosts) + 1)]  # fmt: skip
    ports = [
        [capacity(s for pair, s in rates.items() if pair[end] == r) for r in range(len(hosts))]
        for end in (0, 1)
    ]
    for rank, host in enumerate(hosts) if rates else ():
        yield rank, f"host{host}", ports[0][rank], near_s[host]
        yield f"host{host}", rank, ports[1][rank], near_s[host]
    for (a, b), rate in rates.items():
        least = min(ports[0][a].value, ports[1][b].value)
        if hosts[a] == hosts[b] and rate.value < _OWN_LINK_RATE * least:
            yield a, b, rate, latencies[a, b].value
    if len(near_s) < 2:
        return

    alone = between(rates, hosts, typical)
    flows = [{ends: sample} for ends, sample in alone.items()]
    flows += [between(together, hosts, total) for together in measurements.together]
    far_s = {
        (a, b): max(0.0, latency_s - near_s[a] - near_s[b])
        for (a, b), (latency_s, _) in between(latencies, hosts, min).items()
    }
    card_s = _of_hosts(far_s, len(near_s))
    cards = [[carried(flows, {host}, end) for host in range(len(near_s))] for end in (0, 1)]
    leaves = [(leaf, [carried(flows, leaf, end) for end in (0, 1)]) for leaf in _sharing(flows)]
    leaves = [
        (leaf, rates)
        for leaf, rates in leaves
        if any(0 < rate.value < _SLOWER_RATE * sum(card[host].value for host in leaf)
               for rate, card in zip(rates, cards, strict=True))
    ]  # fmt: skip
    above = {host: f"leaf{number}" for number, (leaf, _) in enumerate(leaves) for host in leaf}
    for host, latency_s in enumerate(card_s):
        out, into = cards[0][host], cards[1][host]
        yield f"host{host}", f"card{host}", out, 0.0
        yield f"card{host}", f"host{host}", into, 0.0
        yield f"card{host}", above.get(host, "net"), out, latency_s
        yield above.get(host, "net"), f"card{host}", into, latency_s
    for number, (_, (out, into)) in enumerate(leaves):
        yield f"leaf{number}", "net", out, 0.0
        yield "net", f"leaf{number}", into, 0.0
    # Last, and one link shorter than the way by the net: so no other route leads over them.
    for a, b in slower(alone):
        hops = 0 if above.get(a) == above.get(b) else (a in above) + (b in above)
        nodes = [f"card{a}", *(f"way{a}_{b}_{hop}" for hop in range(hops)), f"card{b}"]
        rate = capacity(rates[a, b] for rates in flows if (a, b) in rates)
        for source, target in pairwise(nodes):
            yield source, target, rate, far_s[a, b] / (len(nodes) - 1)


def _of_hosts(far_s: dict[Pair, float], number: int) -> list[float]:
    """The share of each host in the latencies between hosts, by least squares."""
    own = [sum(value for ends, value in far_s.items() if ends[0] == host) for host in range(number)]
    rest_s = sum(own) / (2 * number - 2) if number > 2 else 0.0
    return [max(0.0, (own_s - rest_s) / (number - 2 or 2)) for own_s in own]


def _sharing(flows: Sequence[Rates]) -> list[set[int]]:
    """Hosts that send through one cable: where either does not send, the other gets more."""
    groups: list[set[int]] = []
    for base in flows:
        is_apart = len({target for _, target in base}) == len(base)
        grown: set[Pair] = set()  # where the first does not send, the second gets more
        for rest in flows if is_apart and len(base) > 1 else ():
            missing = base.keys() - rest.keys()
            if len(missing) == 1 and len(rest) == len(base) - 1:
                gains = {a: rest[a, b].value / base[a, b].value for a, b in rest}
                least = max(_GROWS, (1 + max(gains.values())) / 2)
                grown |= {(c, a) for a, gain in gains.items() if gain > least for c, _ in missing}
        for pair in grown:
            if pair[::-1] in grown:
                joined = {*pair}.union(*(group for group in groups if group & {*pair}))
                groups = [group for group in groups if not group & joined] + [joined]
    return sorted(groups, key=min)


_SHARE = 0.4  # of the budget, for pairs alone; as much for many at once, and the rest for latencies
_TRIPS_S, _LEAST_S, _ALONE_S, _TOGETHER_S, _MOST_S = 0.02, 0.03, 0.12, 0.25, 1.0
_SHORT, _LONG = 8, 1 << 15  # bytes of a message
_MESSAGE_S = 0.002  # of the fastest long message of many
_LEAST_NBYTES = 3 << 19  # several times the burst of a token bucket, of up to 256 KiB
_BURST = 3 << 17  # bytes that are left out at the beginning
_WINDOWS = 8  # of a stream, whose rates have a median and a spread
_HALVES = 12  # ways to halve the hosts


class Trial(NamedTuple):
    """Disjoint pairs of ranks that send at once, for how long, and bytes of their messages.

    The messages may grow if ``nbytes`` is 0.
    """

    pairs: tuple[Pair, ...]
    seconds: float
    nbytes: int = 0

    @property
    def is_short(self) -> bool:
        """Whether a message is sent when the one before was answered."""
        return self.nbytes == _SHORT

    def is_enough(self, arrivals: Sequence[tuple[float, int]]) -> bool:
        """Whether a receiver has measured enough after arrivals: a time, and all bytes so far.

        Where several send at once, all measure for as long: a pair that went on after the others
        would get what they had.
        """
        seconds = arrivals[-1][0] - arrivals[0][0]
        if self.nbytes and not self.is_short:
            return seconds >= self.seconds
        enough = len(arrivals) > 3 if self.is_short else arrivals[-1][1] >= _LEAST_NBYTES
        return seconds >= self.seconds and (enough or seconds >= _MOST_S)

    def sample(self, arrivals: Sequence[tuple[float, int]]) -> Sample:
        """Seconds of a message that is answered, or bytes per second after the beginning."""
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
    """Rounds of disjoint pairs in which each meets each other once; of an odd number, one rests."""
    last = number - 1 + number % 2  # it stays, and the others turn
    return [
        [(last, turn)] * (last < number)
        + [((turn + by) % last, (turn - by) % last) for by in range(1, (last + 1) // 2)]
        for turn in range(last)
    ]


def trials(hosts: Sequence[int], budget_s: float) -> Generator[Trial, Any, Measurements]:
    """Yield the next trial, and get its numbers; return all of them."""
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
        """Pairs with messages of one length, so that an answer waits as long behind each."""
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
        least = {ends: _SLOWER_RATE * sample.value for ends, sample in alone.items()}
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

    def member(host: int, number: int) -> int:
        return members[host][number % len(members[host])]

    outside = (
        [(member(a, by), member(b, by + by // longest)) for a, b in pairs]
        for by in range(longest**2)
        for pairs in across
    )
    return [*filter(None, [*inside, *islice(outside, max(len(across), most - len(inside)))])]
