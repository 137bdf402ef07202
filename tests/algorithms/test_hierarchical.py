"""Hierarchies, and what they need: ranks on hosts in any layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from itertools import product
from math import gcd

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringcoll.errors import ScheduleError, UnknownAlgorithmError, UnsupportedWorldSizeError
from ringcoll.schedules import (
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
from ringcoll.schedules.algorithms import (
    Algorithm,
    algorithms,
    find,
    on_hosts,
    register,
    schedule_of,
    unregister,
)
from ringcoll.schedules.algorithms.hierarchical import Hosts, layout_of

ENTRY = find("all_reduce", "hierarchical")
OF_BLOCKS = [find(collective, "hierarchical") for collective in ("all_gather", "reduce_scatter")]

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


def proof_on(hosts: Hosts, entry: Algorithm = ENTRY) -> Proof:
    return verify(entry.schedule(len(hosts), hosts=hosts))


def check(hosts: Hosts) -> None:
    for entry in (ENTRY, *OF_BLOCKS):
        proof = proof_on(hosts, entry)
        assert proof.same_everywhere
        assert (proof.rounds, proof.traffic, proof.reduced) == entry.counts(len(hosts), hosts)


@pytest.mark.slow
@pytest.mark.parametrize("hosts", LAYOUTS, ids=lambda hosts: "".join(map(str, hosts)))
def test_any_layout(hosts: Hosts) -> None:
    check(hosts)


@pytest.mark.slow
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


# --- blocks -----------------------------------------------------------------------------------


def messages_left(schedule: Schedule, hosts: Hosts) -> list[tuple[int, int, int]]:
    """Source, target and number of chunks of each message between hosts."""
    return [
        (rank, operation.peer, len(operation.refs))
        for rank in range(schedule.world_size)
        for step in schedule.steps(rank)
        for operation in step
        if isinstance(operation, Send) and hosts[operation.peer] != hosts[rank]
    ]


@pytest.mark.parametrize("entry", OF_BLOCKS, ids=lambda entry: entry.collective)
@pytest.mark.parametrize(
    "hosts, ways",
    [
        # Three hosts of two ranks: from each rank, two blocks to the rank of its number.
        ((0, 0, 1, 1, 2, 2), {(0, 2): 2, (2, 4): 2, (4, 0): 2, (1, 3): 2, (3, 5): 2, (5, 1): 2}),
        ((0, 1, 0, 1), {(0, 1): 1, (1, 0): 1, (2, 3): 1, (3, 2): 1}),
        # Three pairs, of which two are on one host.
        ((0, 0, 0, 0, 1, 1), {(2, 4): 2, (3, 5): 2, (4, 0): 2, (5, 1): 2}),
        ((0, 0, 1, 1, 0, 0), {(4, 2): 2, (5, 3): 2, (2, 0): 2, (3, 1): 2}),
        # All ranks are one level, host by host.
        ((0, 0, 0, 1), {(2, 3): 3, (3, 0): 3}),
        ((0, 1, 0, 1, 0), {(4, 1): 4, (3, 0): 4}),
    ],
)
def test_messages_between_hosts(
    entry: Algorithm, hosts: Hosts, ways: dict[tuple[int, int], int]
) -> None:
    found = messages_left(entry.schedule(len(hosts), hosts=hosts), hosts)
    assert Counter((source, target) for source, target, _ in found) == ways
    assert {chunks for *_, chunks in found} == {1}  # of which each is a block


@pytest.mark.slow
@pytest.mark.parametrize("entry", OF_BLOCKS, ids=lambda entry: entry.collective)
def test_blocks_leave_each_host_once(entry: Algorithm) -> None:
    """All but those of one group, whose size divides all hosts: for equal hosts the least possible."""
    for hosts in LAYOUTS:
        k, group = len(hosts), gcd(*Counter(hosts).values())
        proof = proof_on(hosts, entry)
        assert proof.rounds == group - 1 + k // group - 1
        found = messages_left(entry.schedule(k, hosts=hosts), hosts)
        several = len(set(hosts)) > 1
        assert Counter(hosts[source] for source, *_ in found) == (
            dict.fromkeys(hosts, k - group) if several else {}
        )


@pytest.mark.parametrize("entry", OF_BLOCKS, ids=lambda entry: entry.collective)
@pytest.mark.parametrize("hosts", [(7,) * 5, (0, 1, 2, 3, 4), (0, 0, 0, 1, 1)])
def test_one_level_is_the_ring(entry: Algorithm, hosts: Hosts) -> None:
    ring, one_level = schedule_of(entry.collective, "ring", 5), entry.schedule(5, hosts=hosts)
    assert [[*ring.steps(rank)] for rank in range(5)] == [[*one_level.steps(r)] for r in range(5)]
    assert ring.num_slots == one_level.num_slots


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

NAMES = [
    (collective, sorted(entry.name for entry in algorithms(collective)))
    for collective in ("all_reduce", "all_gather", "reduce_scatter")
]
OUTERMOST = {"optcc", "r2ccl", "stragglar"}
"""They pass on complete chunks before all are complete."""


def proof_by(name: str, hosts: Hosts, collective: str = "all_reduce") -> Proof:
    return verify(find(collective, name).schedule(len(hosts), hosts=hosts))


@settings(max_examples=150)
@given(
    st.sampled_from(NAMES).flatmap(
        lambda known: st.tuples(
            st.just(known[0]), st.lists(st.sampled_from(known[1]), min_size=2, max_size=3)
        )
    ),
    st.one_of(
        st.tuples(st.integers(1, 4), st.integers(1, 6)).map(lambda m: tuple(range(m[1])) * m[0]),
        st.tuples(st.integers(1, 4), st.integers(1, 6)).map(lambda m: on_hosts(m[0] * m[1], m[1])),
        st.lists(st.integers(0, 3), min_size=1, max_size=12).map(tuple),
    ),
)
def test_any_algorithms_on_any_layout(joined: tuple[str, list[str]], hosts: Hosts) -> None:
    """They are proved, or refused by the restriction of one of them, or because one is not the outermost."""
    collective, names = joined
    name = "+".join(names)
    needs = [reason for part in names if (reason := find(collective, part).needs)]
    needs += ["too early"] * any(part in OUTERMOST for part in names[:-1])
    refused = ""
    try:
        assert proof_by(name, hosts, collective).same_everywhere
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


def test_levels_of_blocks() -> None:
    """Rounds add up, and traffic is the least if it is on each level."""
    hosts = on_hosts(12, 3)
    for collective, names in (("all_gather", "bruck+direct"), ("reduce_scatter", "pat+direct")):
        proof = proof_by(names, hosts, collective)
        assert (proof.rounds, proof.traffic) == (2 + 1, Fraction(11, 12))
    for collective in ("all_gather", "reduce_scatter"):
        three = proof_by("ring+ring+ring", on_hosts(24, 12), collective)  # hosts: 3 rows of 4
        assert (three.rounds, three.traffic) == (1 + 3 + 2, Fraction(23, 24))
        entry = find(collective, "ring+ring")
        assert (entry.collective, entry.needs_hosts, entry.built_in) == (collective, True, True)
        for hosts in ((0, 0, 1, 1, 2, 2), (0, 0, 0, 0, 1, 1), (0, 0, 1)):
            usual = find(collective, "hierarchical").schedule(len(hosts), hosts=hosts)
            joined = entry.schedule(len(hosts), hosts=hosts)
            assert usual.to_text() == joined.to_text().replace("ring+ring", "hierarchical")


@contextmanager
def halves() -> Iterator[None]:
    """An all-gather and a reduce-scatter with two chunks in a block, scratch memory, and a rank that ends last."""

    @register("all_gather", "halves", chunks=lambda k: 2 * k, slots=lambda k: 1)
    def gather(rank: int, world_size: int) -> Program:
        """Halves: the second half of a block waits in scratch memory."""
        yield Step(*(copy(out(chunk), inp(chunk)) for chunk in (2 * rank, 2 * rank + 1)))
        for far in range(1, world_size):
            to, of = (rank + far) % world_size, (rank - far) % world_size
            own, waiting = map(inp, (2 * rank, 2 * rank + 1)), tmp(0, 2 * of + 1)
            yield Step(send(to, *own), recv(of, out(2 * of), waiting))
            yield Step(copy(out(2 * of + 1), waiting))
        if rank == 0:
            yield Step()

    @register("reduce_scatter", "halves", chunks=lambda k: 2 * k, slots=lambda k: 2)
    def scatter(rank: int, world_size: int) -> Program:
        """Halves: partial results are in scratch memory."""
        kept, result = [tmp(half, 2 * rank + half) for half in (0, 1)], []
        held = [inp(2 * rank), inp(2 * rank + 1)]
        for far in range(1, world_size):
            to, of = (rank + far) % world_size, (rank - far) % world_size
            result = kept if far < world_size - 1 else [out(2 * rank), out(2 * rank + 1)]
            yield Step(
                send(to, inp(2 * to), inp(2 * to + 1)),
                recv_reduce(of, tuple(result), tuple(held), received_left=of < rank),
            )
            held = kept
        if rank == 0:
            yield Step()

    try:
        yield
    finally:
        for collective in ("all_gather", "reduce_scatter"):
            unregister(collective, "halves")


@pytest.mark.parametrize(
    "hosts", [(0, 0, 1, 1, 2, 2), (0, 1, 0, 1, 0, 1), (0,) * 4 + (1,) * 2, (3,) * 3]
)
@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter"])
def test_blocks_in_several_chunks_and_scratch_memory_on_both_levels(
    collective: str, hosts: Hosts
) -> None:
    with halves():
        for name in ("halves+ring", "ring+halves", "halves+halves", "halves+halves+halves"):
            schedule = find(collective, name).schedule(len(hosts), hosts=hosts)
            verify(schedule)
            assert schedule.num_chunks >= 2 * len(hosts)


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
    with pytest.raises(UnknownAlgorithmError, match="all_to_all has no hierarchies"):
        find("all_to_all", "pairwise+bruck")
    with pytest.raises(UnsupportedWorldSizeError, match=r"bine\+ring cannot run on 2 hosts"):
        find("all_gather", "bine+ring").schedule(6)
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
