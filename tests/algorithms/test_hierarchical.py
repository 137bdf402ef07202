"""Hierarchical all-reduce, and what it needs: ranks on hosts in any layout."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringcoll.algorithms import find, on_hosts, schedule_of
from ringcoll.algorithms.hierarchical import Hosts, layout_of
from ringcoll.errors import ScheduleError
from ringcoll.schedule.ir import (
    Schedule,
    Send,
)
from ringcoll.schedule.verifier import Proof, verify

ENTRY = find("all_reduce", "hierarchical")

LAYOUTS: list[Hosts] = [
    *(hosts for world_size in range(1, 6) for hosts in product(range(3), repeat=world_size)),
    *(on_hosts(world_size, num_hosts) for world_size in (6, 7, 8, 13) for num_hosts in range(1, 8)),
    (0, 1) * 8,  # dealt out in turn
    (0, 1, 2, 3) * 3,
    (0,) * 7 + (1,),  # all but one
    (1, 0, 0, 0, 0, 0, 2, 2),
    (5, 5, 3, 9, 3, 5, 9, 9, 3),  # numbers say nothing but who is with whom
    on_hosts(64, 8),
]


def proof_on(hosts: Hosts) -> Proof:
    return verify(ENTRY.schedule(len(hosts), hosts=hosts))


def check(hosts: Hosts) -> None:
    proof = proof_on(hosts)
    assert proof.same_everywhere
    assert (proof.rounds, proof.traffic, proof.reduced) == ENTRY.counts(len(hosts), hosts)


@pytest.mark.parametrize("hosts", LAYOUTS, ids=lambda hosts: "".join(map(str, hosts)))
def test_any_layout(hosts: Hosts) -> None:
    check(hosts)


@settings(max_examples=60)
@given(st.lists(st.integers(0, 5), min_size=6, max_size=24).map(tuple))
def test_layouts_by_chance(hosts: Hosts) -> None:
    check(hosts)


# --- what leaves a host -------------------------------------------------------------------


def left(schedule: Schedule, hosts: Hosts) -> dict[int, Fraction]:
    """What all ranks of each host send to other hosts, in n."""
    sent = Counter[int]()
    for rank in range(schedule.world_size):
        for step in schedule.steps(rank):
            for operation in step:
                if isinstance(operation, Send) and hosts[operation.peer] != hosts[rank]:
                    sent[hosts[rank]] += len(operation.refs)
    return {host: Fraction(sent[host], schedule.num_chunks) for host in set(hosts)}


@pytest.mark.parametrize("num_hosts", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("per_host", [1, 2, 3, 5])
def test_links_carry_the_least_possible(per_host: int, num_hosts: int) -> None:
    """2 (H - 1) / H of the vector: as an all-reduce of one rank on each host."""
    world_size = per_host * num_hosts
    in_a_row, in_turn = on_hosts(world_size, num_hosts), tuple(range(num_hosts)) * per_host
    for hosts in (in_a_row, in_turn):
        schedule = ENTRY.schedule(world_size, hosts=hosts)
        assert set(left(schedule, hosts).values()) == {Fraction(2 * (num_hosts - 1), num_hosts)}
    if num_hosts > 1 and per_host > 1:
        ring = schedule_of("all_reduce", "ring", world_size)
        for host, sent in left(ring, in_turn).items():
            assert sent == per_host * left(ring, in_a_row)[host]
            assert left(ring, in_a_row)[host] == Fraction(2 * (world_size - 1), world_size)


def test_leaders_where_one_rank_is_alone() -> None:
    hosts = (0, 0, 0, 0, 1)
    schedule = ENTRY.schedule(5, hosts=hosts)
    assert left(schedule, hosts) == {0: 1, 1: 1}
    assert layout_of(hosts).teams == (((0, 1, 2, 3),), ((4,),))
    assert proof_on(hosts).rounds == 2 + 1 + 2


def test_on_one_host_it_is_the_ring() -> None:
    ring = schedule_of("all_reduce", "ring", 5)
    one = ENTRY.schedule(5, hosts=(7,) * 5)
    assert [list(one.steps(rank)) for rank in range(5)] == [
        list(ring.steps(rank)) for rank in range(5)
    ]


def test_one_rank_on_each_host_is_what_goes_across() -> None:
    ring = schedule_of("all_reduce", "ring", 5)
    far = ENTRY.schedule(5, hosts=tuple(range(5)))
    assert [list(far.steps(rank)) for rank in range(5)] == [
        list(ring.steps(rank)) for rank in range(5)
    ]


def test_ranks_act_for_others_evenly() -> None:
    layout = layout_of((0,) * 7 + (1,) * 3)
    assert [[len(team) for team in host] for host in layout.teams] == [[3, 2, 2], [1, 1, 1]]
    assert sorted(rank for host in layout.teams for team in host for rank in team) == [*range(10)]
    for rank in range(10):
        host, index, place = layout.find(rank)
        assert layout.teams[host][index][place] == rank


# --- hosts in the registry ------------------------------------------------------------------


def test_hosts_are_one_for_each_rank() -> None:
    for name in ("hierarchical", "ring"):
        with pytest.raises(ScheduleError, match="hosts are given for 3 ranks of 4"):
            find("all_reduce", name).schedule(4, hosts=(0, 0, 1))


def test_two_hosts_where_none_are_given() -> None:
    assert ENTRY.schedule(6) == ENTRY.schedule(6, hosts=(0, 0, 0, 1, 1, 1))
    assert schedule_of("all_reduce", "hierarchical", 6, hosts=(0, 1) * 3) != ENTRY.schedule(6)
    assert ENTRY.world(5) == (0, 0, 0, 1, 1)
    assert find("all_reduce", "ring").world(5, (0,) * 5) == 5


def test_on_hosts() -> None:
    for world_size in range(1, 30):
        for num_hosts in range(1, 12):
            hosts = on_hosts(world_size, num_hosts)
            assert list(hosts) == sorted(hosts)
            numbers = Counter(hosts)
            assert len(hosts) == world_size
            assert set(numbers) == set(range(min(num_hosts, world_size)))
            assert max(numbers.values()) - min(numbers.values()) <= 1
