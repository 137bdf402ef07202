"""What was measured between the ranks of a group, and the topology that explains it.

The topology has the ranks, a switch for each host, the host's card, and the network between cards::

    0 -- host0 -- card0 -- net -- card1 -- host1 -- 2

A link carries the most that has gone over it. Half of the least latency inside a host is on the way from and to its
ranks; the rest of the latency between hosts is on the cards. Further links are there only where these do not explain a
rate: between two ranks of a host, such as of two sockets; between two cards; and a switch ``leaf0`` between
``net`` and the cards of hosts that share a cable. Routes are those with the fewest links.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from ringcoll.errors import ArgumentError
from ringcoll.simulation.links import Link, Node
from ringcoll.simulation.rates import (
    CLEARLY,
    Pair,
    Rates,
    Sample,
    between,
    capacity,
    carried,
    slower,
    total,
    typical,
)
from ringcoll.simulation.topology import Topology

_DIFFERS = 0.75  # of what a host's links carry: a slower pair of its ranks has its own link
_GROWS = 1.2  # times the rate that a host has got where another one did not send


@dataclass(frozen=True)
class Measurements:
    """The host of every rank, and numbers of pairs of ranks, as `ringcoll.simulation.trials` finds them.

    ``latency_s`` has the seconds of a short message, and ``bandwidth`` the bytes per second of a pair that sends alone;
    ``together`` has the bytes per second in sets of pairs that send at once. The costs of a rank are ``alpha_s``,
    ``overhead_s`` and ``gamma_s_per_byte`` of `Topology`.
    """

    hosts: tuple[int, ...]
    latency_s: Rates
    bandwidth: Rates
    together: tuple[Rates, ...] = ()
    rank_costs: tuple[float, ...] = (0.0, 0.0, 0.0)

    def to_json(self) -> str:
        """Write the measurements; a pair is a list of sender, receiver, number and spread."""
        rates = self.latency_s, self.bandwidth, *self.together
        rows = [[(*pair, *sample) for pair, sample in each.items()] for each in rates]
        latency_s, bandwidth, *sets = rows
        value = {"hosts": self.hosts, "latency_s": latency_s, "bandwidth": bandwidth}
        value |= {"together": sets, "rank_costs": self.rank_costs}
        return json.dumps(value, allow_nan=False)

    @staticmethod
    def from_json(text: str) -> Measurements:
        """Read what `to_json` has written; an `ArgumentError` if the text is something else."""
        try:
            value = json.loads(text)
            latency_s, bandwidth, *together = [
                {(int(a), int(b)): Sample(float(c), float(d)) for a, b, c, d in rows}
                for rows in (value["latency_s"], value["bandwidth"], *value["together"])
            ]
            hosts = tuple(map(int, value["hosts"]))
            rank_costs = tuple(map(float, value["rank_costs"]))
        except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise ArgumentError(f"no measurements: {error!r}", argument="text") from error
        ranks, sets = range(len(hosts)), (latency_s, bandwidth, *together)
        if not (
            {*hosts} == {*range(len({*hosts}))} != set()
            and latency_s.keys() == {(a, b) for a in ranks for b in ranks if a != b}
            and len(rank_costs) == 3
            and all(0 <= cost < inf for cost in rank_costs)
            and all(latency_s.keys() >= rates.keys() for rates in sets)
            and all(0 <= d < inf and 0 < c < inf for rates in sets for c, d in rates.values())
        ):
            raise ArgumentError("no measurements of all pairs of these hosts", argument="text")
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
    alpha_s, overhead_s, gamma_s_per_byte = measurements.rank_costs
    return Topology(
        world_size=len(measurements.hosts), links=tuple(links_of(measurements)), name="measured",
        source="measured", alpha_s=alpha_s, overhead_s=overhead_s, gamma_s_per_byte=gamma_s_per_byte,
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
        [capacity(s for pair, s in rates.items() if pair[end] == rank) for rank in range(len(hosts))]
        for end in (0, 1)
    ]  # fmt: skip
    for rank, host in enumerate(hosts) if rates else ():
        yield rank, f"host{host}", ports[0][rank], near_s[host]
        yield f"host{host}", rank, ports[1][rank], near_s[host]
    for (a, b), rate in rates.items():
        least = min(ports[0][a].value, ports[1][b].value)
        if hosts[a] == hosts[b] and rate.value < _DIFFERS * least:
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
        if any(0 < rate.value < CLEARLY * sum(card[host].value for host in leaf)
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
    # They come last, and are one link shorter than the way by the net: so no other route leads over them.
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
