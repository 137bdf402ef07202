"""A group measures anew when its operations have become slow, and goes on with other algorithms, all ranks at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import ringcoll
from ringcoll.collectives import communicator
from ringcoll.errors import ArgumentError, PeerLostError, RingcollError, ScheduleError
from ringcoll.group import Communicator
from ringcoll.group.agreement import Refits
from ringcoll.launch import LocalGroup
from ringcoll.simulation import topology_from_text
from tests.cases.effort import effort
from tests.fakes.network import NetworkHub
from tests.programs.threads import together

HOSTS = (0, 1, 2, 0, 1, 2)


def network(*cards: float) -> Any:
    """Three hosts of two ranks, with cards of so many MB/s."""
    lines = [f"{rank} -- host{host} 0.1 2" for rank, host in enumerate(HOSTS)]
    lines += [f"host{host} -- net {rate / 1e3} 50" for host, rate in enumerate(cards)]
    return topology_from_text("\n".join(lines))


def over(hub: NetworkHub, main: Callable[[Any], Any], *, refits: bool) -> list[Any]:
    """What ``main`` returns for the group of each rank."""
    store = dist.HashStore()
    members = [
        Communicator(transport, dist.PrefixStore("monitor", store), 60.0, refits=refits)
        for transport in hub.transports()
    ]

    def of_rank(rank: int) -> Any:
        try:
            return main(LocalGroup(members[rank]))
        except BaseException as error:
            hub.abort(f"rank {rank} raised {error!r}")
            raise
        finally:
            members[rank].close()

    return together(hub.world_size, of_rank, 120.0)


def ranks_sum(group: LocalGroup) -> int:
    return group.size() * (group.size() + 1) // 2


# --- What rank 0 sees -----------------------------------------------------------------------


def noted(seconds: Sequence[float]) -> Refits:
    refits = Refits()
    for each in seconds:
        refits.note("call", each)
    return refits


def test_most_of_the_last_operations_have_to_be_slow() -> None:
    usual = [0.010] * 5
    assert noted([*usual, *[0.010] * 7]).ratio == 1
    assert noted([*usual, *[0.030] * 3, *[0.010] * 4]).ratio == 1
    assert noted([*usual, *[0.010] * 3, *[0.030] * 4]).ratio == pytest.approx(3)
    assert noted([*usual, *[0.030] * 6]).ratio == 1  # too few
    assert noted([*[0.0001] * 5, *[0.0009] * 9]).ratio == 1  # too short


@effort(50)
@given(st.lists(st.floats(0.001, 0.014), min_size=0, max_size=40), st.integers(0, 3))
def test_noise_of_less_than_half_is_not_slow(more: list[float], outliers: int) -> None:
    """Fewer than four of the last seven do not move the median above their bound."""
    seconds = [0.010] * 5 + [min(0.014, max(0.001, each)) for each in more]
    for place in range(outliers):
        if len(seconds) > 12 + place:
            seconds[-1 - 2 * place] = 5.0
    assert noted(seconds).ratio <= 1.5


def test_operations_are_compared_with_themselves() -> None:
    """Many short ones beside a long one hide nothing, and their noise does not count."""
    refits = Refits()
    for number in range(24):
        for _ in range(5):
            refits.note("short", 0.002 * (1 + number % 3))
        refits.note("long", 0.2 if number < 14 else 0.5)
        if number >= 12:
            assert refits.ratio == pytest.approx(1 if number < 17 else 2.5)


@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize("slow", [False, True])
def test_all_ranks_look_alike(world_size: int, slow: bool) -> None:
    def main(group: Any) -> tuple[bool, int, bool, int]:
        ringcoll.barrier(group)
        member = communicator(group, torch.device("cpu"))
        refits = Refits()
        if slow and group.rank() == 0:
            refits = noted([0.010] * 5 + [0.1] * 7)
        first = refits.look(member.transport, 8, 20.0)
        next_look = refits.next_look
        second = refits.look(member.transport, next_look, 20.0)
        return first, next_look, second, refits.next_look

    results = ringcoll.run_threads(main, world_size)
    assert all(result == results[0] for result in results)
    first, next_look, _, last = results[0]
    assert first is slow
    assert 8 < next_look <= 8 + 255
    assert last > next_look


# --- Refits that were asked for --------------------------------------------------------------


@pytest.mark.slow
def test_a_refit_between_operations() -> None:
    """Values stay right, prepared operations and those under way too; all ranks tell the same."""

    def main(group: Any) -> tuple[str, str]:
        rank, ranks = group.rank() + 1, ranks_sum(group)
        vector = torch.arange(20_000, dtype=torch.float64)
        tensor = vector * rank
        prepared = ringcoll.all_reduce.plan(tensor, group=group)
        prepared()
        assert torch.equal(tensor, vector * ranks)
        before = [vector * rank for _ in range(3)]
        works = [ringcoll.all_reduce(each, group=group, async_op=True) for each in before]
        words = ringcoll.refit(group, budget_s=0.3)
        after = vector * rank
        ringcoll.all_reduce(after, group=group)
        tensor.copy_(vector * rank)
        prepared()
        for work in works:
            assert work is not None
            work.wait()
        for each in (*before, after, tensor):
            assert torch.equal(each, vector * ranks)
        return words, str(ringcoll.explain("all_reduce", after, group)).splitlines()[1]

    results = over(NetworkHub(network(40, 40, 4), HOSTS), main, refits=False)
    assert len(set(results)) == 1
    words, reason = results[0]
    assert words.startswith("all_reduce:")
    assert reason.startswith("why: fitted on ")


@pytest.mark.slow
def test_the_bits_of_a_reproducible_group_do_not_change() -> None:
    def main(group: Any) -> bool:
        generator = torch.Generator().manual_seed(group.rank())
        data = torch.randn(3_000, generator=generator)
        sums = [data.clone(), data.clone()]
        for tensor in sums:
            ringcoll.all_reduce(tensor, group=group, reproducible=True)
            ringcoll.refit(group, [("all_reduce", 12_000)], 0.3)
        return torch.equal(*sums)

    assert over(NetworkHub(network(40, 40, 4), HOSTS), main, refits=False) == [True] * 6


def test_nothing_to_fit() -> None:
    assert ringcoll.run_threads(lambda group: ringcoll.refit(group, budget_s=0.3), 2) == ["", ""]


def test_an_unknown_collective_is_refused_before_anything_is_sent() -> None:
    def main(group: Any) -> int:
        with pytest.raises(ScheduleError, match="unknown collective 'best'"):
            ringcoll.refit(group, [("best", 8)])
        tensor = torch.ones(3)
        ringcoll.all_reduce(tensor, group=group)
        return int(tensor[0])

    assert ringcoll.run_threads(main, 3) == [3, 3, 3]


def test_a_fit_that_fails_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any, **named: Any) -> Any:
        raise ScheduleError("no fit today")

    monkeypatch.setattr("ringcoll.search.fit", fails)

    def main(group: Any) -> tuple[str, float]:
        words = ringcoll.refit(group, [("all_reduce", 1 << 20)], 0.3)
        tensor = torch.ones(5)
        ringcoll.all_reduce(tensor, group=group)
        return words, tensor[0].item()

    assert ringcoll.run_threads(main, 3) == [("", 3.0)] * 3


def test_a_rank_that_leaves_in_a_refit_is_lost() -> None:
    def main(group: Any) -> Any:
        ringcoll.barrier(group)
        if group.rank() == 2:
            raise RuntimeError("leaves")
        ringcoll.refit(group, [("all_reduce", 1 << 20)], 0.5)
        return "refitted"

    results = over(NetworkHub(network(40, 40, 40), HOSTS), main, refits=False)
    assert isinstance(results[2], RuntimeError)
    for rank in (0, 1, 3, 4, 5):
        assert isinstance(results[rank], RingcollError), results[rank]


# --- Refits of a group by itself -------------------------------------------------------------


@pytest.mark.slow
def test_a_link_that_becomes_slow_is_noticed_by_all_at_once() -> None:
    hub = NetworkHub(network(40, 40, 40), HOSTS)

    def main(group: Any) -> tuple[list[str], int, str]:
        rank, ranks = group.rank() + 1, ranks_sum(group)
        vector = torch.arange(25_000, dtype=torch.float64)
        reasons: list[str] = []
        words = ringcoll.refit(group, [("all_reduce", 200_000)], 0.3)
        go_on, number = torch.ones(1), 0
        while go_on.item():
            if number == 15 and group.rank() == 0:
                hub.topology = network(40, 40, 3)
            tensors = [vector * rank for _ in range(2)]
            work = ringcoll.all_reduce(tensors[0], group=group, async_op=True)
            ringcoll.all_reduce(tensors[1], group=group)
            assert work is not None
            work.wait()
            assert all(torch.equal(tensor, vector * ranks) for tensor in tensors)
            member = communicator(group, torch.device("cpu"))
            assert member.table is not None
            assert member.table.fit is not None
            reasons.append(member.table.fit.graph)
            number += 1
            go_on[0] = float(number < 120 and len(set(reasons)) < 2)
            ringcoll.broadcast(go_on, src=0, group=group)
        return reasons, number, words

    results = over(hub, main, refits=True)
    for result in results:
        assert result == results[0], result
    reasons, number, _ = results[0]
    assert len(set(reasons)) == 2
    assert number > 15
    before, after = (topology_from_text(graph) for graph in (reasons[0], reasons[-1]))

    def card(topology: Any) -> float:
        speeds = {link.name: float(link.bandwidth) for link in topology.links}
        return speeds["host2 -> card2"]

    assert card(before) == pytest.approx(40e6, rel=0.3)
    assert card(after) == pytest.approx(3e6, rel=0.3)


@pytest.mark.slow
def test_where_no_link_is_slower_nothing_is_swapped(caplog: pytest.LogCaptureFixture) -> None:
    """A rank that comes late makes operations as long, and is no link."""
    import time

    def main(group: Any) -> bool:
        tensor = torch.ones(25_000, dtype=torch.float64)
        ringcoll.refit(group, [("all_reduce", 200_000)], 0.3)
        member = communicator(group, torch.device("cpu"))
        fit = member.table and member.table.fit
        for number in range(60):
            if number > 14 and group.rank() == 3:
                time.sleep(0.06)
            ringcoll.all_reduce(tensor, group=group)
        return member.table is not None and member.table.fit is fit

    with caplog.at_level("WARNING", "ringcoll"):
        assert over(NetworkHub(network(40, 40, 40), HOSTS), main, refits=True) == [True] * 6
    assert "no link has become slower: the algorithms stay as they are" in caplog.text


def test_a_rank_that_leaves_before_a_look_is_lost() -> None:
    def main(group: Any) -> Any:
        tensor = torch.ones(4)
        for number in range(30):
            if number == 7 and group.rank() == 1:
                raise RuntimeError("leaves")
            ringcoll.all_reduce(tensor, group=group)
        return "went on"

    results = over(NetworkHub(network(40, 40, 40), HOSTS), main, refits=True)
    for rank in (0, 2, 3, 4, 5):
        assert isinstance(results[rank], PeerLostError | RingcollError), results[rank]


def test_a_group_of_one_does_not_look() -> None:
    def main(group: Any) -> float:
        tensor = torch.ones(4)
        for _ in range(20):
            ringcoll.all_reduce(tensor, group=group)
        return float(tensor[0].item())

    hub = NetworkHub(topology_from_text("0 -- host0 1 1"), (0,))
    assert over(hub, main, refits=True) == [1.0]


@pytest.mark.parametrize("nbytes", [0, -1, 1.5, "1K", True, None])
def test_uses_have_sizes(nbytes: Any) -> None:
    """It is said before any rank waits for the others."""

    def main(group: Any) -> None:
        with pytest.raises(ArgumentError, match="bytes, at least 1"):
            ringcoll.refit(group, [("all_reduce", 8), ("broadcast", nbytes)])

    ringcoll.run_threads(main, 1)
