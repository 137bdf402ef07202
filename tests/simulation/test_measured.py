"""What is measured over a topology that is known gives that topology back."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import given

from ringcoll.errors import ArgumentError
from ringcoll.lab.simulation import Measurements, Topology, topology_from_text, topology_of
from ringcoll.lab.simulation.event_engine import Flows, SimulatedMessage
from ringcoll.lab.simulation.measured import (
    Pair,
    Sample,
    Trial,
    _sharing,
    links_of,
    tournament,
    trials,
)
from tests.cases.effort import effort
from tests.cases.malformed import documents

MB = 1e6
CARDS = (125 * MB, 125 * MB, 25 * MB)


def hosts_text(
    hosts: Sequence[int],
    cards: Sequence[tuple[float, float]],
    leaf_of: Sequence[int] | None = None,
    uplinks: Sequence[float] = (),
    shared: float = 4e9,
) -> str:
    """The text of hosts with cards, each with its bytes per second out and in."""
    lines = [f"{rank} -- host{host} {shared / 1e9} 0.5" for rank, host in enumerate(hosts)]
    for host, (out, into) in enumerate(cards):
        above = "net" if leaf_of is None else f"leaf{leaf_of[host]}"
        lines += [f"host{host} -> {above} {out / 1e9} {10 + host}"]
        lines += [f"{above} -> host{host} {into / 1e9} {10 + host}"]
    lines += [f"leaf{leaf} -- net {rate / 1e9} 0" for leaf, rate in enumerate(uplinks)]
    return "\n".join(lines)


def shared_rates(topology: Topology, pairs: Sequence[Pair]) -> list[float]:
    """Bytes per second of messages that are sent at once: max-min fair."""
    flows = Flows(topology, float, [1] * len(topology.links))
    messages = [SimulatedMessage(None, target, 1, 0, 1e9, 0.0) for _, target in pairs]
    for message, (source, target) in zip(messages, pairs, strict=True):
        flows.lay(message, topology.route(source, target))
        flows.begin(message, 0.0)
    list(flows.share(0.0))
    return [message.rate for message in messages]


def measured(
    topology: Topology, hosts: Sequence[int], noise: float = 0.0, budget_s: float = 20.0
) -> Measurements:
    """What a measurement of the topology finds; each number is wrong by a factor of its own."""
    chance = random.Random(len(hosts))

    def sample(value: float) -> Sample:
        return Sample(value * max(0.5, chance.gauss(1, noise)), noise)

    plan = trials(hosts, budget_s)
    seconds = 0.0
    try:
        trial = next(plan)
        while True:
            ranks = [rank for pair in trial.pairs for rank in pair]
            assert len(set(ranks)) == len(ranks), "a rank is in two pairs"
            seconds += trial.seconds
            if trial.is_short:
                numbers = [route_s(topology, *pair) for pair in trial.pairs]
            else:
                numbers = shared_rates(topology, trial.pairs)
            trial = plan.send({p: sample(r) for p, r in zip(trial.pairs, numbers, strict=True)})
    except StopIteration as end:
        found: Measurements = end.value
    assert seconds < budget_s
    assert Measurements.from_json(found.to_json()) == found
    assert len(found.latency_s) == len(hosts) * (len(hosts) - 1)
    return found


def bandwidths(topology: Topology) -> dict[str, float]:
    return {link.name: float(link.bandwidth) for link in topology.links}


def route_rate(topology: Topology, source: int, target: int) -> float:
    return min(float(topology.links[link].bandwidth) for link in topology.route(source, target))


def route_s(topology: Topology, source: int, target: int) -> float:
    return sum(float(topology.links[link].latency_s) for link in topology.route(source, target))


def check(hosts: Sequence[int], text: str, noise: float, budget_s: float = 20.0) -> Topology:
    """The topology that is found has the rate and latency of every pair."""
    known = topology_from_text(text)
    found = topology_of(measured(known, hosts, noise, budget_s))
    near = 3.5 * noise + 0.001  # three standard deviations of a number and more
    assert found.world_size == len(hosts)
    for source in range(len(hosts)):
        for target in range(len(hosts)):
            if source != target:
                rate = route_rate(known, source, target)
                assert route_rate(found, source, target) == pytest.approx(rate, rel=near)
                latency_s = route_s(known, source, target)
                assert route_s(found, source, target) == pytest.approx(latency_s, rel=near)
    return found


def cards(found: Topology, host: int, above: str = "net") -> tuple[float, float]:
    rates = bandwidths(found)
    return rates[f"card{host} -> {above}"], rates[f"{above} -> card{host}"]


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize(
    "hosts", [(0, 0, 1, 1, 2, 2), (0, 1, 2, 2, 1, 0), (0, 1, 2), (0, 0, 0, 1, 2, 2, 2)]
)
def test_two_fast_hosts_and_a_slow_one(hosts: tuple[int, ...], noise: float) -> None:
    found = check(hosts, hosts_text(hosts, [(rate, rate) for rate in CARDS]), noise)
    for host, rate in enumerate(CARDS):
        assert cards(found, host) == pytest.approx((rate, rate), rel=0.001 + 1.5 * noise)
    names = {link.source for link in found.links} - set(range(len(hosts)))
    assert names == {"net", *(f"{kind}{host}" for kind in ("host", "card") for host in range(3))}


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_a_card_that_sends_slower_than_it_receives(noise: float) -> None:
    hosts = (0, 0, 1, 1, 2, 2)
    rates = [(60 * MB, 125 * MB), (125 * MB, 125 * MB), (125 * MB, 40 * MB)]
    found = check(hosts, hosts_text(hosts, rates), noise)
    for host, both in enumerate(rates):
        assert cards(found, host) == pytest.approx(both, rel=0.001 + 1.5 * noise)


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize(
    "leaf_of, ranks", [((0, 0, 1, 1), 2), ((0, 0, 1, 1), 1), ((0, 1, 0, 1), 2), ((0, 1, 1, 0), 1)]
)
def test_two_leaves_with_half_of_the_uplinks(
    leaf_of: tuple[int, ...], ranks: int, noise: float
) -> None:
    hosts = [rank // ranks for rank in range(4 * ranks)]
    text = hosts_text(hosts, [(125 * MB, 125 * MB)] * 4, leaf_of, (125 * MB, 125 * MB))
    found = check(hosts, text, noise)
    near = 0.001 + 1.5 * noise
    rates = bandwidths(found)
    leaves = {link.source for link in found.links if str(link.source).startswith("leaf")}
    assert leaves == {"leaf0", "leaf1"}
    for leaf in leaves:
        assert rates[f"{leaf} -> net"] == pytest.approx(125 * MB, rel=near)
        assert rates[f"net -> {leaf}"] == pytest.approx(125 * MB, rel=near)
    above = {link.source: link.target for link in found.links if str(link.source).startswith("card")
             and not str(link.target).startswith("host")}  # fmt: skip
    for host in range(4):
        assert cards(found, host, str(above[f"card{host}"])) == pytest.approx(
            (125 * MB,) * 2, rel=near
        )
        for other in range(4):
            assert (above[f"card{host}"] == above[f"card{other}"]) is (
                leaf_of[host] == leaf_of[other]
            )


@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_leaves_of_four(noise: float) -> None:
    """Two hosts alone do not fill the uplink, and four do."""
    hosts, leaf_of = list(range(8)), [0] * 4 + [1] * 4
    text = hosts_text(hosts, [(100 * MB, 100 * MB)] * 8, leaf_of, (200 * MB, 200 * MB))
    rates = bandwidths(check(hosts, text, noise))
    assert rates["leaf0 -> net"] == pytest.approx(200 * MB, rel=0.001 + 2 * noise)
    assert rates["card7 -> leaf1"] == pytest.approx(100 * MB, rel=0.001 + 2 * noise)


def test_leaves_whose_hosts_are_not_neighbours() -> None:
    hosts, leaf_of = list(range(8)), [0, 1, 2, 3, 3, 0, 1, 2]
    text = hosts_text(hosts, [(100 * MB, 100 * MB)] * 8, leaf_of, [100 * MB] * 4)
    found = check(hosts, text, 0.0)
    above = {str(link.source): str(link.target) for link in found.links}
    assert above["card0"] == above["card5"] != above["card1"] == above["card6"]


@pytest.mark.parametrize("rates, found", [((40, 40), [{0, 3}]), ((80, 46), []), ((80, 80), [])])
def test_both_get_more_where_the_other_does_not_send(
    rates: tuple[float, float], found: list[set[int]]
) -> None:
    """A host whose answers wait behind another's messages is slow, too; but the other is not."""
    alone = [{(3, 2): Sample(80.0)}, {(0, 1): Sample(80.0)}]
    both = {(3, 2): Sample(rates[0]), (0, 1): Sample(rates[1])}
    assert _sharing([*alone, both]) == found


def test_full_uplinks_need_no_leaf() -> None:
    hosts = [0, 0, 1, 1, 2, 2, 3, 3]
    text = hosts_text(hosts, [(125 * MB, 125 * MB)] * 4, (0, 0, 1, 1), (250 * MB, 250 * MB))
    assert not [link for link in check(hosts, text, 0.05).links if "leaf" in link.name]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 7, 8, 13])
def test_a_single_host(world_size: int) -> None:
    text = "\n".join(f"{rank} -- s {5 - rank % 2} {1 + rank % 3}" for rank in range(world_size))
    known = topology_from_text(text)
    found = topology_of(measured(known, [0] * world_size))
    assert {str(link.source) for link in found.links} <= {"host0", *map(str, range(world_size))}
    for source in range(world_size):
        for target in range(world_size):
            if source != target:
                rate = route_rate(known, source, target)
                assert route_rate(found, source, target) == pytest.approx(rate, rel=0.25)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 7, 8, 13])
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_a_rank_a_host(world_size: int, noise: float) -> None:
    hosts = range(world_size)
    rates = [((20 + 10 * (host % 3)) * MB,) * 2 for host in hosts]
    if world_size == 1:
        assert topology_of(measured(Topology(world_size=1, links=()), hosts)).links == ()
    else:
        check(hosts, hosts_text(hosts, rates), noise)


def test_two_sockets() -> None:
    lines = [f"{rank} -- socket{rank // 2} 10 0.2" for rank in range(4)]
    text = "\n".join([*lines, "socket0 -- socket1 4 0.6"])
    found = check([0] * 4, text.replace("0.2", "0.25").replace("0.6", "0"), 0.0)
    direct = {link.name for link in found.links if link.bandwidth == 4e9}
    assert direct == {f"{a} -> {b}" for a in range(4) for b in range(4) if a // 2 != b // 2}


@pytest.mark.parametrize("leaf_of, uplinks", [(None, ()), ((0, 0, 1, 1), (125 * MB, 125 * MB))])
@pytest.mark.parametrize("slow", [(0, 3), (3, 0), (1, 2), (0, 1)])
def test_a_pair_of_hosts_with_a_slow_way(
    slow: tuple[int, int], leaf_of: Sequence[int] | None, uplinks: Sequence[float]
) -> None:
    hosts = [0, 0, 1, 1, 2, 2, 3, 3]
    text = hosts_text(hosts, [(125 * MB, 125 * MB)] * 4, leaf_of, uplinks)
    a, b = slow
    hops = ["x", "y"] if leaf_of is not None and leaf_of[a] != leaf_of[b] else []
    nodes = [f"host{a}", *hops, f"host{b}"]  # of as many links that no other route is shorter
    for source, target in pairwise(nodes):
        text += f"\n{source} -> {target} 0.05 {(20 + a + b) / (len(nodes) - 1)}"
    found = check(hosts, text, 0.0)
    ways = [link for link in found.links if link.bandwidth == 50 * MB]
    assert ways[0].source == f"card{a}"
    assert ways[-1].target == f"card{b}"


def test_many_ranks_are_measured_by_a_sample() -> None:
    hosts = [rank // 8 for rank in range(64)]
    known = topology_from_text(hosts_text(hosts, [(1e9, 1e9)] * 8))
    found = measured(known, hosts)
    assert len(found.bandwidth) < 64 * 63 / 2
    assert {(hosts[a], hosts[b]) for a, b in found.bandwidth} >= {
        (a, b) for a in range(8) for b in range(8) if a != b
    }
    assert bandwidths(topology_of(found))["card3 -> net"] == 1e9


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5, 7, 8, 13])
def test_in_a_tournament_each_meets_each_other_once(number: int) -> None:
    rounds = tournament(number)
    assert len(rounds) == (number if number % 2 else number - 1)
    for pairs in rounds:
        players = [player for pair in pairs for player in pair]
        assert len(set(players)) == len(players)
    pairs = sorted((min(pair), max(pair)) for pairs in rounds for pair in pairs)
    assert pairs == [(a, b) for a in range(number) for b in range(a + 1, number)]


@pytest.mark.parametrize("rate", [1 * MB, 25 * MB, 125 * MB])
@pytest.mark.parametrize("burst", [0, 64 << 10, 256 << 10])
def test_the_burst_of_a_token_bucket_is_no_rate(rate: float, burst: int) -> None:
    size, arrivals = 64 << 10, [(0.0, 0)]
    while arrivals[-1][0] < 0.2 or arrivals[-1][1] < 3 << 19:
        nbytes = arrivals[-1][1] + size
        arrivals.append((max(nbytes / 1e9, (nbytes - burst) / rate), nbytes))
    found = Trial((), 0.2).sample(arrivals)
    assert found.value == pytest.approx(rate, rel=0.01)
    assert found.spread < 0.01


def test_of_a_few_arrivals_all_count() -> None:
    assert Trial((), 1.0).sample([(1.0, 0), (3.0, 100)]) == Sample(50.0, 0.0)


def test_a_latency_is_half_of_the_shortest_round_trip() -> None:
    arrivals = [
        (0.0, 0),
        (9.0, 8),
        (11.0, 16),
        (12.0, 24),
        (16.0, 32),
    ]  # the first has no trip before
    found = Trial((), 1.0, 8).sample(arrivals)
    assert (found.value, found.spread) == (0.5, pytest.approx(1.5))


WRITTEN = measured(topology_from_text(hosts_text((0, 0, 1), [(1e8, 2e8)] * 2)), (0, 0, 1))


@pytest.mark.parametrize(
    "old, new",
    [
        ('"hosts": [0, 0, 1]', '"hosts": [0, 0]'),
        ('"hosts": [0, 0, 1]', '"hosts": [0, 0, 2]'),
        ('"hosts": [0, 0, 1]', '"hosts": [0, 0, Infinity]'),
        ("[1, 0, 1e-06, 0.0]", "[1, 0, 0, 0.0]"),
        ("[1, 0, 1e-06, 0.0]", "[1, 0, NaN, 0.0]"),
        ("[1, 0, 1e-06, 0.0]", "[1, 0, 1e-06, -1]"),
        ("[1, 0, 1e-06, 0.0]", "[1, 1, 1e-06, 0.0]"),
        ("[1, 0, 1e-06, 0.0]", "[1, 0, 1e-06]"),
        ('"together"', '"set"'),
        ("{", "["),
    ],
)
def test_what_is_no_measurement(old: str, new: str) -> None:
    assert old in WRITTEN.to_json()
    with pytest.raises(ArgumentError, match="no measurements"):
        Measurements.from_json(WRITTEN.to_json().replace(old, new, 1))


@effort(60)
@given(documents(json.loads(WRITTEN.to_json())))
def test_any_text_is_a_measurement_or_refused(text: str) -> None:
    try:
        assert topology_of(Measurements.from_json(text)).links
    except ArgumentError as error:
        assert str(error)  # noqa: PT017


def test_every_link_has_the_spread_of_its_rate() -> None:
    hosts = (0, 0, 1, 1)
    found = measured(topology_from_text(hosts_text(hosts, [(125 * MB,) * 2] * 2)), hosts, 0.04)
    assert [*links_of(found).values()] == [pytest.approx(0.04)] * 16


def test_a_stream_that_waits_for_another_one_does_not_count_what_comes_afterwards() -> None:
    """Two streams share 24 MB/s; the second gets a tenth of it until the first one has ended."""
    trial, first, second = Trial((), 0.25, 1 << 16), [(0.0, 0)], [(0.0, 0)]
    for arrivals, share in ((first, 0.9), (second, 0.1)):
        while not trial.is_enough(arrivals):
            now, nbytes = arrivals[-1]
            rate = 24e6 * (share if now < 0.25 else 1)
            arrivals.append((now + trial.nbytes / rate, nbytes + trial.nbytes))
    rates = [trial.sample(arrivals).value for arrivals in (first, second)]
    assert 0.95 * 24e6 < sum(rates) < 1.05 * 24e6
    alone = Trial(
        (), 0.25
    )  # where nobody else sends, a slow stream goes on until it has enough bytes
    assert not alone.is_enough([(0.0, 0), (0.3, 1 << 20)])


def test_streams_at_once_go_on_until_the_slowest_has_more_than_a_burst() -> None:
    plan, hosts = trials((0, 0, 1, 1), 0.3), (0, 0, 1, 1)
    trial, together = next(plan), list[Trial]()
    with suppress(StopIteration):
        while trial:
            if trial.nbytes and not trial.is_short:
                together.append(trial)
            rates = {(a, b): Sample(1e7 if hosts[a] == hosts[b] else 2e6) for a, b in trial.pairs}
            trial = plan.send(rates)
    assert together
    assert all(trial.seconds >= (3 << 19) / 2e6 for trial in together)
