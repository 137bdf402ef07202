"""Hierarchical all-reduce, and what it needs: ranks on hosts in any layout."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringcoll.algorithms import algorithms, find, on_hosts, register, schedule_of, unregister
from ringcoll.algorithms.host_layout import Hosts, layout_of
from ringcoll.errors import ScheduleError, UnknownAlgorithmError, UnsupportedWorldSizeError
from ringcoll.schedule import (
    Program,
    Proof,
    Schedule,
    Send,
    Step,
    copy,
    inp,
    out,
    recv,
    recv_reduce,
    send,
    tmp,
    verify,
)

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


# --- any algorithm inside, any across -----------------------------------------------------

NAMES = sorted(entry.name for entry in algorithms("all_reduce"))
OUTERMOST = {"optcc", "r2ccl", "stragglar"}
"""They pass on complete chunks before all are complete."""


def proof_by(name: str, hosts: Hosts) -> Proof:
    return verify(find("all_reduce", name).schedule(len(hosts), hosts=hosts))


@settings(max_examples=60)
@given(
    st.lists(st.sampled_from(NAMES), min_size=2, max_size=3),
    st.one_of(
        st.tuples(st.integers(1, 4), st.integers(1, 6)).map(lambda m: tuple(range(m[1])) * m[0]),
        st.tuples(st.integers(1, 4), st.integers(1, 6)).map(lambda m: on_hosts(m[0] * m[1], m[1])),
        st.lists(st.integers(0, 3), min_size=1, max_size=12).map(tuple),
    ),
)
def test_any_algorithms_on_any_layout(names: list[str], hosts: Hosts) -> None:
    """They are proved, or refused by the restriction of one of them, or because one is not the outermost."""
    name = "+".join(names)
    needs = [reason for part in names if (reason := find("all_reduce", part).needs)]
    needs += ["too early"] * any(part in OUTERMOST for part in names[:-1])
    refused = ""
    try:
        assert proof_by(name, hosts).same_everywhere
    except ScheduleError as error:
        refused = str(error)
    assert not refused or refused.endswith(tuple(needs))


@pytest.mark.parametrize("name", sorted(OUTERMOST))
def test_no_pipeline_but_as_the_outermost(name: str) -> None:
    hosts = on_hosts(16, 4)
    assert proof_by(f"ring+{name}", hosts).same_everywhere
    with pytest.raises(ScheduleError, match=f"{name} .* does not fall into two parts"):
        proof_by(f"{name}+ring", hosts)


def test_all_is_what_the_levels_are() -> None:
    """Recursive doubling on both levels is recursive doubling; rings make a torus."""
    doubling = verify(schedule_of("all_reduce", "recursive_doubling", 8))
    both = proof_by("recursive_doubling+recursive_doubling", (0, 0, 0, 0, 1, 1, 1, 1))
    assert (both.rounds, both.traffic) == (doubling.rounds, doubling.traffic) == (3, 3)
    rings = find("all_reduce", "ring+ring").schedule(6, hosts=(0, 0, 1, 1, 2, 2))
    usual = ENTRY.schedule(6, hosts=(0, 0, 1, 1, 2, 2))
    assert [[*rings.steps(rank)] for rank in range(6)] == [[*usual.steps(r)] for r in range(6)]
    leaders = proof_by("tree+ring", on_hosts(12, 3))
    assert leaders.rounds == 2 + 4 + 2
    assert leaders.traffic == 2 + Fraction(4, 3) + 2
    three = proof_by("ring+ring+ring", on_hosts(24, 12))  # 12 hosts are 3 rows of 4
    assert (three.rounds, three.traffic) == (2 * (1 + 3 + 2), Fraction(2 * 23, 24))


def test_links_carry_the_least_for_any_scatter_inside() -> None:
    hosts = on_hosts(12, 3)
    for name in ("circulant+ring", "two_shot+circulant", "bcube+two_shot"):
        schedule = find("all_reduce", name).schedule(12, hosts=hosts)
        assert set(left(schedule, hosts).values()) == {Fraction(4, 3)}


def test_a_hierarchy_has_one_name() -> None:
    entry = find("all_reduce", "tree+ring")
    assert entry.name == "binomial_tree+ring"
    assert entry is find("all_reduce", "binomial_tree+ring")
    assert (entry.built_in, entry.needs_hosts, entry.pipelined) == (True, True, False)
    assert find("all_reduce", "double_tree+ring").pipelined
    assert entry.summary == "Hierarchy: binomial_tree inside each host, ring across."
    assert find("all_reduce", "generalized=0+ring").schedule(4).algorithm == "generalized=0+ring"


def test_hierarchies_that_are_refused() -> None:
    with pytest.raises(UnknownAlgorithmError, match="unknown algorithm 'rong' for all_reduce"):
        find("all_reduce", "ring+rong")
    with pytest.raises(UnknownAlgorithmError, match="unknown algorithm '' for all_reduce"):
        find("all_reduce", "ring+")
    with pytest.raises(UnknownAlgorithmError, match="all_gather has no hierarchies"):
        find("all_gather", "ring+ring")
    with pytest.raises(UnsupportedWorldSizeError) as caught:
        find("all_reduce", "ring+swing").schedule(6, hosts=(0, 0, 1, 1, 2, 2))
    assert str(caught.value) == (
        "ring+swing cannot run on 3 hosts of which each has at least 2 ranks: swing all_reduce "
        "cannot run on 3 ranks: it needs a power of 2"
    )


def test_what_does_not_fall_into_two_parts_is_refused_inside_only() -> None:
    @register("all_reduce", "eager", chunks=lambda k: 2)
    def eager(rank: int, world_size: int) -> Program:
        """Eager: the first chunk is sent back while the second is on its way."""
        peers = range(1, world_size)
        for chunk in (0, 1):
            back = [send(peer, out(0)) for peer in peers] if chunk else []
            if rank:
                yield Step(send(0, inp(chunk)), *[recv(0, out(0))] * chunk)
            else:
                local = [inp(chunk), *[out(chunk)] * world_size]
                gathered = (recv_reduce(p, out(chunk), local[p - 1]) for p in peers)
                yield Step(*back, *gathered)
        yield Step(*([recv(0, out(1))] if rank else [send(peer, out(1)) for peer in peers]))

    try:
        assert proof_by("ring+eager", (0, 0, 0, 1, 1, 1)).same_everywhere
        with pytest.raises(
            ScheduleError, match=r"outermost .* chunk out\[0\] is passed on in step 1"
        ):
            proof_by("eager+ring", (0, 0, 0, 1, 1, 1))
    finally:
        unregister("all_reduce", "eager")


def test_a_result_in_scratch_memory_is_refused_inside() -> None:
    @register("all_reduce", "aside", slots=lambda k: 1)
    def aside(rank: int, world_size: int) -> Program:
        """Aside: two ranks add in scratch memory."""
        yield Step(send(1 - rank, inp(0)), recv_reduce(1 - rank, tmp(0, 0), inp(0)))
        yield Step(copy(out(0), tmp(0, 0)))

    try:
        verify(schedule_of("all_reduce", "aside", 2))
        with pytest.raises(ScheduleError, match=r"complete chunk tmp0\[0\] is not in the output"):
            proof_by("aside+ring", (0, 0, 1, 1))
    finally:
        unregister("all_reduce", "aside")
