"""What a transport has to do: between processes, and in one process with threads."""

from __future__ import annotations

import threading

import pytest
import torch

from ringcoll.errors import CollectiveTimeoutError, PeerLostError, TransportError
from ringcoll.runtime.launch import RankError, Ranks
from ringcoll.runtime.transport import Hub, Message, NarrowTransport
from tests.programs import several_hosts, transports
from tests.programs.transports import CONFORMANCE, spares_other_connections


@pytest.mark.processes
@pytest.mark.parametrize("name", CONFORMANCE)
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("transport", transports.TRANSPORTS)
def test_between_processes(pool, transport: str, name: str, world_size: int):
    assert pool(world_size).run(transports.conforms, transport, name) == [""] * world_size


@pytest.mark.processes
def test_closing_wakes_who_waits_on_another_thread(pool):
    assert pool(2).run(transports.conforms, "ucx", "closed_while_waiting") == [""] * 2


@pytest.mark.processes
@pytest.mark.parametrize("transport", ["shared", "gloo", "ucx"])
def test_a_group_ends_on_a_rank_that_others_have_given_up(pool, transport: str):
    """Over UCX it once waited for ever for peers that had let go of it."""
    if transport == "ucx":
        pytest.importorskip("ucxx")
    seconds = pool(3).run(transports.leaves_when_others_have_given_up, transport)
    assert all(0 <= item < 10 for item in seconds), seconds


@pytest.mark.processes
def test_ranks_with_different_transports_are_told(pool):
    for text in pool(3).run(transports.different_transports):
        assert "transport gloo of ringcoll" in text
        assert "transport ucx of ringcoll" in text
        assert "rank 1" in text


@pytest.mark.processes
def test_a_rank_that_dies_is_missed_over_shared_memory():
    reports: list[tuple[int, str, int, float]] = []
    with Ranks(3, timeout_s=60.0) as ranks, pytest.raises(RankError):
        ranks.run(transports.die_over_ucx, 1, on_report=reports.append)
    assert {rank for rank, *_ in reports} == {0, 2}
    for _, text, peer, seconds in reports:
        assert "rank 1" in text
        assert "all_reduce" in text
        assert peer == 1
        assert seconds < 2


@pytest.mark.slow
@pytest.mark.processes
def test_groups_over_ucx_leave_nothing(pool):
    for held in pool(2).run(transports.groups_come_and_go, 50):
        for first, second, third in zip(*held, strict=True):
            # What every group leaves behind grows in both rounds.
            assert not first < second < third, held


@pytest.mark.processes
def test_a_transport_is_chosen_before_the_first_operation(pool):
    for unknown, late in pool(2).run(transports.late_choice):
        assert "expected one of auto, shared, ucx, gloo, got pigeons" in unknown
        assert "the group is in use" in late


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFORMANCE)
@pytest.mark.parametrize("world_size", [2, 3])
def test_local(name: str, world_size: int):
    found = ["not done"] * world_size
    ends = Hub(world_size).transports()

    def main(rank: int) -> None:
        ends[rank].connect(10)
        found[rank] = CONFORMANCE[name](ends[rank])

    threads = [threading.Thread(target=main, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == [""] * world_size


def test_hosts_of_threads_are_pretended():
    assert [end.hosts for end in Hub(3).transports()] == [(0, 0, 0)] * 3
    ends = Hub(3, hosts=[0, 1, 0]).transports()
    assert [end.hosts for end in ends] == [(0, 1, 0)] * 3
    assert NarrowTransport(ends[0], torch.bfloat16).hosts == (0, 1, 0)


@pytest.mark.processes
@pytest.mark.parametrize("transport", ["gloo", "ucx"])
def test_processes_are_on_one_host(pool, transport: str):
    assert pool(3).run(several_hosts.connected_hosts, transport) == [((), (0, 0, 0), 6)] * 3


@pytest.mark.processes
def test_gloo_breaks_only_its_own_connections(pool):
    assert pool(2).run(spares_other_connections) == [[], []]


def test_local_tells_that_a_rank_has_left():
    first, second, third = Hub(3).transports()
    (unsent,) = first.post([Message(1, torch.zeros(3), 0)], [])
    (sent,) = third.post([Message(1, torch.zeros(3), 0)], [])
    second.post([], [Message(2, torch.ones(3), 0)])
    second.close()
    third.wait(sent, 1)  # what has been sent still arrives
    with pytest.raises(PeerLostError, match="rank 1 has left") as caught:
        first.wait(unsent, 20)
    assert caught.value.peer == 1
    with pytest.raises(PeerLostError, match="rank 1 has left"):
        first.connect(20)  # it has not come to meet the others
    second.hub.arrived.add(1)
    with pytest.raises(CollectiveTimeoutError, match="rank 2"):
        first.connect(0.1)


def test_local_refuses_lengths_that_differ():
    first, second = Hub(2).transports()
    (sent,) = first.post([], [Message(1, torch.zeros(3), 0)])
    (handle,) = second.post([Message(0, torch.zeros(4), 0)], [])
    with pytest.raises(TransportError, match="3 elements met a receive of 4") as caught:
        second.wait(handle, 1)
    assert caught.value.peer == 0
    first.wait(sent, 0)  # a send is over when its message has met its receive
