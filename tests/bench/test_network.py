"""What ranks measure over a network that is simulated, and what they say of messages that do not come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

import ringcoll
from ringcoll.errors import CollectiveTimeoutError, PeerLostError
from ringcoll.lab.simulation import Measurements, topology_from_text, topology_of
from ringcoll.runtime.launch import RankError, Ranks
from ringcoll.runtime.transport import Hub
from ringcoll.tools.bench.network import probe_pairs
from tests.fakes.network import NetworkHub
from tests.programs import several_hosts
from tests.programs.threads import together


def cluster(hosts: Sequence[int], cards: Sequence[float]) -> str:
    """Hosts with cards of so many MB/s."""
    lines = [f"{rank} -- host{host} 1 2" for rank, host in enumerate(hosts)]
    lines += [f"host{host} -- net {rate / 1e3} 50" for host, rate in enumerate(cards)]
    return "\n".join(lines)


def probed(hub: Hub, budget_s: float, limit_s: float = 20.0) -> list[Any]:
    def main(rank: int) -> Measurements:
        transport = hub.transports()[rank]
        transport.connect(20.0)
        try:
            return probe_pairs(transport, budget_s, limit_s)
        except BaseException:
            transport.abort()
            raise

    return together(hub.world_size, main, 120.0)


@pytest.mark.slow
def test_hosts_with_cards_of_different_speed() -> None:
    hosts = (0, 0, 1, 1, 2, 2)
    text = cluster(hosts, (125, 125, 25))
    first, *others = probed(NetworkHub(topology_from_text(text), hosts), 20.0)
    assert isinstance(first, Measurements), first
    assert all(one == first for one in others)
    assert first.hosts == hosts
    rates = {link.name: link.bandwidth for link in topology_of(first).links}
    for host, rate in enumerate((125e6, 125e6, 25e6)):
        assert rates[f"card{host} -> net"] == pytest.approx(rate, rel=0.15)
        assert rates[f"net -> card{host}"] == pytest.approx(rate, rel=0.15)
    assert not [name for name in rates if "leaf" in name or "way" in name]
    for (a, b), (value, _) in first.latency_s.items():
        assert value >= (4e-6 if hosts[a] == hosts[b] else 104e-6)


@pytest.mark.slow
def test_leaves_that_are_oversubscribed() -> None:
    """Measured up to three times, as other tests may take the cores: what the last measurement says counts."""
    hosts = (0, 0, 1, 1, 2, 2, 3, 3)
    text = cluster(hosts, (80, 80, 80, 80))
    for host in range(4):
        text = text.replace(f"host{host} -- net", f"host{host} -- leaf{host % 2}")
    text += "\nleaf0 -- net 0.08 0\nleaf1 -- net 0.08 0"
    names = [f"card{host} -> leaf{host % 2}" for host in range(4)]
    names += [f"leaf{leaf} -> net" for leaf in range(2)] + [
        f"net -> leaf{leaf}" for leaf in range(2)
    ]
    expected = dict.fromkeys(names, pytest.approx(80e6, rel=0.15))
    for _ in range(3):
        first, *_ = probed(NetworkHub(topology_from_text(text), hosts), 20.0)
        assert isinstance(first, Measurements), first
        rates = {link.name: link.bandwidth for link in topology_of(first).links}
        found = {name: rates.get(name) for name in names}
        if found == expected:
            break
    assert found == expected


@pytest.mark.slow
def test_many_ranks() -> None:
    hosts = [rank // 8 for rank in range(64)]
    hub = NetworkHub(topology_from_text(cluster(hosts, [50] * 8)), hosts)
    first, *others = probed(hub, 3.0, 60.0)
    assert isinstance(first, Measurements), first
    assert all(one == first for one in others)
    assert len(first.latency_s) == 64 * 63
    for end in (0, 1):
        assert {pair[end] for pair in first.bandwidth} == set(range(64))
    assert topology_of(first).world_size == 64


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_a_single_host(world_size: int) -> None:
    for found in ringcoll.run_threads(lambda group: ringcoll.probe(group, 1.0), world_size):
        assert found.world_size == world_size
        assert {str(link.source) for link in found.links} <= {"host0", *"01234"}


@pytest.mark.parametrize("way", [(0, 1), (1, 0), (2, 0), (1, 2)])
def test_a_way_on_which_nothing_comes_is_named(way: tuple[int, int]) -> None:
    hosts = (0, 1, 2)
    hub = NetworkHub(topology_from_text(cluster(hosts, (100, 100, 100))), hosts, lost=[way])
    errors = probed(hub, 1.0, 1.0)
    assert all(isinstance(error, CollectiveTimeoutError | PeerLostError) for error in errors)
    told = {str(error) for error in errors if isinstance(error, CollectiveTimeoutError)}
    assert any(f"nothing came from rank {way[0]} to rank {way[1]} for" in text for text in told)


def test_a_rank_that_leaves_is_lost() -> None:
    def main(group: Any) -> Any:
        if group.rank() == 2:
            ringcoll.barrier(group)
            ringcoll.close(group)
            return None
        try:
            return ringcoll.probe(group, 1.0)
        except PeerLostError as error:
            return error.peer

    assert ringcoll.run_threads(main, 3)[:2] == [2, 2]


@pytest.mark.processes
@pytest.mark.parametrize("dying", [0, 2])
def test_a_rank_that_is_killed_is_lost(dying: int) -> None:
    reports: list[tuple[int, str, int | None, str]] = []
    with pytest.raises(RankError), Ranks(3, timeout_s=60.0) as pool:
        pool.run(several_hosts.lose_a_rank_that_is_measured, dying, on_report=reports.append)
    told = [error for error in reports if error[1] == "PeerLostError"]
    assert len(told) == len(reports) > 0
    for rank, _, peer, text in told:
        assert rank != dying
        assert peer == dying, text
