"""Simulated times: closed forms, shared links counted by hand, and what holds for every schedule."""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from math import log2
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ringcoll
from ringcoll.errors import ArgumentError, ScheduleError, TooLargeError
from ringcoll.lab.simulation import (
    Link,
    SimulatedRun,
    Topology,
    crossbar,
    dragonfly,
    fat_tree,
    hosts,
    ring,
    simulate,
    torus,
)
from ringcoll.schedules import (
    Recv,
    RecvReduce,
    Schedule,
    Send,
    Step,
    chunks_of_data,
    inp,
    out,
    recv,
    send,
    tally_of,
)
from ringcoll.schedules.algorithms import Algorithm, algorithms, find, schedule_of
from ringcoll.schedules.cost import LinkCosts, lower_bound
from tests.cases.algorithms import each_on

ALPHA, BETA, GAMMA = Fraction(7, 10**6), Fraction(2, 10**9), Fraction(3, 10**10)
NBYTES = 1_000_003
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=40)


def switch(world_size: int, ports: int | None = 1) -> Topology:
    return crossbar(
        world_size, bandwidth=1 / BETA, ports=ports, alpha_s=ALPHA, gamma_s_per_byte=GAMMA
    )


def of_sends(world_size: int, *steps: list[tuple[int, int]]) -> Schedule:
    """A schedule in which ranks send each other their input, by (source, target) of each step."""

    def program(rank: int) -> list[Step]:
        return [
            Step(
                *(recv(source, out(0)) for source, target in step if target == rank),
                *(send(target, inp(0)) for source, target in step if source == rank),
            )
            for step in steps
        ]

    return Schedule("all_reduce", "sends", world_size, 1, 0, program)


# --- closed forms -----------------------------------------------------------------------


# The formulas of those with trees or halves round log2 k up; without lock-step they take less.
FORMULAS = [
    (collective, name, k)
    for collective, name, world_sizes in (
        ("all_reduce", "ring", (2, 3, 4, 5, 7, 8, 13)),
        ("reduce_scatter", "ring", (2, 3, 4, 5, 7, 8, 13)),
        ("all_gather", "ring", (2, 3, 4, 5, 7, 8, 13)),
        ("all_reduce", "recursive_doubling", (2, 4, 8, 16)),
        ("all_reduce", "rabenseifner", (2, 4, 8, 16)),
        ("all_reduce", "binomial_tree", (2, 4, 8, 16)),
        ("broadcast", "binomial_tree", (2, 3, 4, 5, 7, 8, 13)),
        ("reduce", "binomial_tree", (2, 4, 8, 16)),
    )
    for k in world_sizes
]


@pytest.mark.parametrize("ports", [None, 1])
@pytest.mark.parametrize("collective, name, k", FORMULAS)
def test_without_contention_time_is_the_formula_of_the_algorithm(
    collective: str, name: str, k: int, ports: int | None
) -> None:
    entry = find(collective, name)
    run = simulate(entry.schedule(k), NBYTES, switch(k, ports))
    rounds, traffic, reduced = entry.counts(k)
    assert run.seconds == rounds * ALPHA + NBYTES * (traffic * BETA + reduced * GAMMA)


def test_the_formulas_written_out() -> None:
    k, n, lg = 8, NBYTES, int(log2(8))
    others = Fraction(k - 1, k)
    for name, expected in {
        "ring": 2 * (k - 1) * ALPHA + 2 * others * n * BETA + others * n * GAMMA,
        "recursive_doubling": lg * (ALPHA + n * BETA + n * GAMMA),
        "rabenseifner": 2 * lg * ALPHA + 2 * others * n * BETA + others * n * GAMMA,
        "binomial_tree": 2 * lg * (ALPHA + n * BETA) + lg * n * GAMMA,
    }.items():
        assert simulate(schedule_of("all_reduce", name, k), n, switch(k)).seconds == expected


@pytest.mark.parametrize("ports", [None, 1])
@pytest.mark.parametrize("k", [2, 3, 5, 8])
@pytest.mark.parametrize("segments", [1, 2, 7, 100])
def test_chain_in_segments(k: int, segments: int, ports: int | None) -> None:
    run = simulate(
        schedule_of("broadcast", "chain", k), NBYTES, switch(k, ports), segments=segments
    )
    assert run.seconds == (k + segments - 2) * (ALPHA + Fraction(NBYTES, segments) * BETA)


def test_a_latency_holds_up_the_receiver_only() -> None:
    lazy = crossbar(3, bandwidth=1, latency_s=10)
    run = simulate(schedule_of("broadcast", "chain", 3), 4, lazy, segments=4)
    # Rank 1 has segments at 11, 12, 13 and 14, and sends each in its next wave.
    assert run.ends == (4, 15, 25)


def test_floats_are_near_fractions() -> None:
    exact = simulate(schedule_of("all_reduce", "ring", 5), NBYTES, switch(5))
    rough = crossbar(
        5, bandwidth=float(1 / BETA), alpha_s=float(ALPHA), gamma_s_per_byte=float(GAMMA)
    )
    run = simulate(schedule_of("all_reduce", "ring", 5), NBYTES, rough)
    assert isinstance(run.seconds, float)
    assert isinstance(exact.seconds, Fraction)
    assert run.seconds == pytest.approx(float(exact.seconds), rel=1e-12)


def test_no_bytes_and_one_rank() -> None:
    assert simulate(schedule_of("all_reduce", "ring", 4), 0, switch(4)).seconds == 6 * ALPHA
    assert simulate(schedule_of("all_reduce", "ring", 1), 8, switch(1)).seconds == 0


# --- contention, by hand ----------------------------------------------------------------


def test_two_messages_share_one_link() -> None:
    line = ring(4, bandwidth=10)  # 0 -> 2 and 1 -> 2 both need 1 -> 2
    both = of_sends(4, [(0, 2), (1, 2)])
    assert simulate(both, 100, line).seconds == 20
    assert simulate(of_sends(4, [(0, 2), (1, 3)]), 100, line).seconds == 20
    assert simulate(of_sends(4, [(0, 2), (3, 1)]), 100, line).seconds == 20  # 3 -> 0 -> 1
    assert simulate(of_sends(4, [(0, 2), (2, 0)]), 100, line).seconds == 10  # both ways up


def test_a_message_that_is_left_alone_gets_the_whole_link() -> None:
    late = simulate(of_sends(3, [(0, 2), (1, 2)]), 100, crossbar(3, bandwidth=10), late={1: 5})
    # Rank 0 sends 50 bytes alone, both share for 10 s, and rank 1 has 50 left.
    assert [late.ends[0], late.ends[1], late.ends[2]] == [15, 20, 20]


def test_max_min_shares_differ_by_bottleneck() -> None:
    # a: 0 -> 1, b: 0 -> 3, c: 2 -> 3, d: 4 -> 3. The port into 3 gives 10/3 each, a gets the rest
    # of the port out of 0.
    run = simulate(of_sends(5, [(0, 1), (0, 3), (2, 3), (4, 3)]), 100, crossbar(5, bandwidth=10))
    assert run.ends[1] == 15
    assert run.ends[3] == 30


@pytest.mark.parametrize(
    "oversubscription, seconds", [(1, 10), (2, 20), (Fraction(4, 3), 14), (4, 40)]
)
def test_oversubscription(oversubscription: int, seconds: int) -> None:
    tree = fat_tree(8, ranks_per_leaf=4, bandwidth=10, oversubscription=oversubscription)
    run = simulate(of_sends(8, [(rank, rank + 4) for rank in range(4)]), 100, tree)
    assert run.seconds == (seconds if seconds != 14 else Fraction(40, 3))
    inside = simulate(of_sends(8, [(0, 1), (1, 2), (2, 3), (3, 0)]), 100, tree)
    assert inside.seconds == 10


def test_a_torus_goes_around() -> None:
    grid = torus((3, 5), bandwidth=10, latency_s=1)
    last = of_sends(15, [(0, 14)])  # (0, 0) to (2, 4): one up around, one back around
    run = simulate(last, 100, grid)
    assert run.seconds == 10 + 2
    assert [load.link.name for load in run.loads()] == ["0 -> 10", "10 -> 14"]
    ends = torus((5,), bandwidth=10)
    assert simulate(of_sends(5, [(4, 0), (0, 4)]), 100, ends).seconds == 10
    # 3 -> 0 goes through 4, and shares 4 -> 0.
    assert simulate(of_sends(5, [(4, 0), (3, 0)]), 100, ends).seconds == 20
    cube = torus((2, 2, 2), bandwidth=10)
    assert simulate(of_sends(8, [(0, 7)]), 100, cube).link_nbytes.count(100) == 3


def test_hosts_share_their_cards() -> None:
    def two(cards: int) -> Topology:
        return hosts(8, ranks_per_host=4, bandwidth=100, across_bandwidth=10, cards=cards)

    across = of_sends(8, [(rank, rank + 4) for rank in range(4)])
    assert [simulate(across, 100, two(cards)).seconds for cards in (1, 2, 4)] == [40, 20, 10]
    assert simulate(of_sends(8, [(0, 1)]), 100, two(1)).seconds == 1


def test_groups_of_a_dragonfly_share_a_cable() -> None:
    def groups(**numbers: int) -> Topology:
        sizes = {"ranks_per_router": 2, "routers_per_group": 2, "global_links": 1}
        return dragonfly(12, **sizes, bandwidth=10, **numbers)

    def seconds(network: Topology, *messages: tuple[int, int]) -> Fraction:
        run = simulate(of_sends(12, list(messages)), 100, network)
        assert isinstance(run.seconds, Fraction)
        return run.seconds

    # All four ranks of group 0 send to group 1, over one cable; ranks 2 and 3 go over router 0.0.
    across = [(rank, rank + 4) for rank in range(4)]
    assert seconds(groups(), *across) == 40
    # Over a fast one, the cable of ranks 2 and 3 inside group 0 is the full one, and that of ranks
    # 0 and 1, whose peers are at router 1.0, inside group 1.
    assert seconds(groups(global_bandwidth=100), *across) == 20
    assert seconds(groups(global_bandwidth=100), *across[:1], *across[2:3]) == 10
    # Two to group 1, at router 0.0, and two to group 2, at router 0.1: each cable has two.
    assert seconds(groups(), (0, 4), (1, 5), (2, 8), (3, 9)) == 20
    assert seconds(groups(), (0, 1), (2, 3), (4, 6)) == 10
    assert seconds(groups(latency_s=1, global_latency_s=5), (3, 5)) == 10 + 1 + 1 + 5 + 1 + 1


def test_ports() -> None:
    spread = of_sends(4, [(0, 1), (0, 2), (0, 3)])
    times = [
        simulate(spread, 60, crossbar(4, bandwidth=10, ports=ports)).seconds
        for ports in (1, 2, 3, None)
    ]
    assert times == [18, 9, 6, 6]


def test_overhead_of_further_messages() -> None:
    spread = of_sends(3, [(0, 1), (0, 2)])
    two = crossbar(3, bandwidth=10, ports=2, alpha_s=5, overhead_s=3)
    assert simulate(spread, 100, two).ends == (18, 15, 18)


def test_a_failed_link_is_gone_around() -> None:
    whole = ring(5, bandwidth=10)
    broken = whole.without(0, 1)
    pair = of_sends(5, [(0, 1)])
    assert simulate(pair, 100, broken).seconds == 10
    assert sum(simulate(pair, 100, broken).link_nbytes) == 400
    assert simulate(of_sends(5, [(0, 1), (4, 3)]), 100, broken).seconds == 20
    grid = torus((3, 3), bandwidth=10).without(0, 1)
    assert sum(simulate(of_sends(9, [(0, 1)]), 100, grid).link_nbytes) == 200


def test_slow_and_late_ranks() -> None:
    doubling = schedule_of("all_reduce", "recursive_doubling", 4)
    one = ALPHA + NBYTES * (BETA + GAMMA)
    run = simulate(doubling, NBYTES, switch(4), slowness={2: 3})
    # Rank 2 gets its first message in time, reduces it slowly, and posts its second slowly.
    assert run.seconds == run.ends[0] == 4 * ALPHA + NBYTES * (2 * BETA + 4 * GAMMA)
    assert [part.waits_for for part in run.path] == [3, 2]
    late = simulate(doubling, NBYTES, switch(4), late={3: Fraction(1, 10)})
    assert late.seconds == Fraction(1, 10) + 2 * one
    assert late.waited_s[2] == Fraction(1, 10) + one - NBYTES * GAMMA
    assert late.path[0].waits_for == 3


# --- what holds for every schedule ------------------------------------------------------

EVERY = [entry for entry in algorithms() if entry.built_in]


@st.composite
def runs(draw: st.DrawFn) -> tuple[Schedule, int]:
    entry: Algorithm = draw(st.sampled_from(EVERY))
    world_size = draw(st.sampled_from([k for k in (2, 3, 4, 5, 8) if not entry.restriction(k)]))
    return entry.schedule(world_size), draw(st.integers(1, 3))


@st.composite
def networks(draw: st.DrawFn, world_size: int, bandwidth: Fraction = Fraction(10**9)) -> Topology:
    costs: Any = {
        "bandwidth": bandwidth,
        "latency_s": draw(st.sampled_from([0, Fraction(1, 10**6)])),
    }
    kind = draw(st.sampled_from(["crossbar", "free", "ring", "torus", "tree", "hosts", "broken"]))
    if kind == "torus" and world_size % 2 == 0:
        return torus((2, world_size // 2), **costs)
    if kind == "tree":
        return fat_tree(world_size, ranks_per_leaf=2, oversubscription=2, **costs)
    if kind == "hosts":
        return hosts(world_size, ranks_per_host=2, across_bandwidth=bandwidth / 7, **costs)
    if kind == "broken" and world_size > 2:
        return ring(world_size, **costs).without(0, 1)
    if kind in ("crossbar", "free"):
        return crossbar(world_size, ports=None if kind == "free" else 1, **costs)
    return ring(world_size, **costs)


@unhurried
@given(runs(), st.data())
def test_bytes_on_links_are_bytes_sent_times_hops(
    case: tuple[Schedule, int], data: st.DataObject
) -> None:
    schedule, segments = case
    network = data.draw(networks(schedule.world_size))
    run = simulate(schedule, NBYTES, network, segments=segments)
    unit = Fraction(NBYTES, chunks_of_data(schedule))
    hops = sum(
        len(operation.refs) * unit * len(network.route(rank, operation.peer))
        for rank in range(schedule.world_size)
        for step in schedule.steps(rank)
        for operation in step
        if isinstance(operation, Send)
    )
    assert sum(run.link_nbytes) == hops
    assert run.num_messages == segments * sum(tally_of(schedule).sends)
    for load in run.loads():
        assert load.share is None or 0 < load.share <= 1


@unhurried
@given(runs(), st.data())
def test_the_critical_path_has_no_gap(case: tuple[Schedule, int], data: st.DataObject) -> None:
    schedule, segments = case
    late = data.draw(
        st.dictionaries(st.integers(0, schedule.world_size - 1), st.just(3), max_size=1)
    )
    run = simulate(
        schedule, NBYTES, data.draw(networks(schedule.world_size)), segments=segments, late=late
    )
    parts = run.path
    assert parts[-1].end_s == run.seconds
    assert parts[0].begin_s in {0, *late.values()}
    for before, after in pairwise(parts):
        assert before.end_s == after.begin_s
        assert before.rank in (after.rank, after.waits_for)


@unhurried
@given(runs())
def test_no_time_is_below_the_bounds(case: tuple[Schedule, int]) -> None:
    schedule, segments = case
    k = schedule.world_size
    run = simulate(schedule, NBYTES, switch(k), segments=segments)
    ports = max(1, tally_of(schedule).ports) * segments
    bound = lower_bound(schedule.collective, k, ports=ports)
    if schedule.collective != "barrier":  # its token is not a vector that has to arrive
        assert run.seconds >= bound.traffic * NBYTES * BETA
    assert run.seconds >= bound.rounds * ALPHA
    if schedule.collective == "all_reduce":
        assert run.seconds >= bound.reduced * NBYTES * GAMMA


@unhurried
@given(runs(), st.integers(0, 7), st.integers(2, 5))
def test_a_faster_port_makes_nothing_slower_where_nothing_is_shared(
    case: tuple[Schedule, int], port: int, factor: int
) -> None:
    schedule, segments = case
    slow = switch(schedule.world_size, None)
    links = list(slow.links)
    link = links[port % len(links)]
    links[port % len(links)] = Link(link.source, link.target, link.bandwidth * factor, 0, None)
    fast = Topology(
        world_size=slow.world_size, links=tuple(links), router=slow.router,
        alpha_s=ALPHA, gamma_s_per_byte=GAMMA,
    )  # fmt: skip
    before, after = (simulate(schedule, NBYTES, each, segments=segments) for each in (slow, fast))
    assert all(new <= old for new, old in zip(after.ends, before.ends, strict=True))


@unhurried
@given(runs(), st.data(), st.integers(2, 9))
def test_time_is_inverse_to_bandwidth_if_nothing_else_costs(
    case: tuple[Schedule, int], data: st.DataObject, factor: int
) -> None:
    schedule, segments = case
    network = data.draw(networks(schedule.world_size))
    slow, fast = (
        Topology(
            world_size=network.world_size,
            router=network.router,
            links=tuple(
                Link(link.source, link.target, link.bandwidth * times, 0, link.lanes)
                for link in network.links
            ),
        )
        for times in (1, factor)
    )
    assert simulate(schedule, NBYTES, slow, segments=segments).seconds == factor * (
        simulate(schedule, NBYTES, fast, segments=segments).seconds
    )


@unhurried
@given(runs(), st.randoms(use_true_random=False), st.sampled_from([None, 1]))
def test_the_ranks_of_a_crossbar_are_alike(case, random, ports) -> None:
    schedule, segments = case
    k = schedule.world_size
    names = list(range(k))
    random.shuffle(names)

    def program(rank: int) -> list[Step]:
        old = names.index(rank)
        return [
            Step(
                *(
                    replace(operation, peer=names[operation.peer])
                    if isinstance(operation, Send | Recv | RecvReduce)
                    else operation
                    for operation in step
                )
            )
            for step in schedule.steps(old)
        ]

    renamed = Schedule(schedule.collective, "renamed", k, schedule.num_chunks, 0, program)
    first, second = (
        simulate(each, NBYTES, switch(k, ports), segments=segments) for each in (schedule, renamed)
    )
    assert [second.ends[name] for name in names] == list(first.ends)


@pytest.mark.parametrize("entry, k", each_on(4, 5, entries=EVERY))
def test_every_algorithm_ends(entry: Algorithm, k: int) -> None:
    run = simulate(entry.schedule(k), NBYTES, ring(k, bandwidth=1e9), segments=2)
    assert run.seconds > 0
    assert str(run)


# --- refused ----------------------------------------------------------------------------


def refuse(*names: str) -> None:
    raise AssertionError("work has begun")


@pytest.mark.parametrize(
    "arguments, said",
    [
        ({"topology": crossbar(3, bandwidth=1)}, "another number of ranks"),
        ({"nbytes": -1}, "'nbytes'"),
        ({"nbytes": 1.5}, "'nbytes'"),
        ({"nbytes": 1 << 63}, "'nbytes'"),
        ({"nbytes": 41}, "memory of a rank"),
        ({"segments": 0}, "'segments'"),
        ({"segments": 1 << 20}, "'segments'"),
        ({"late": {0: -1}}, "late"),
        ({"late": {4: 1}}, "late"),
        ({"slowness": {0: 0}}, "slowness"),
        ({"slowness": {0: float("nan")}}, "slowness"),
        ({"trace": True, "segments": 1 << 16}, "too many messages"),
        ({"engine": "magic"}, "no such engine"),
    ],
)
def test_bad_calls_are_refused_before_work_begins(arguments, said, monkeypatch) -> None:
    monkeypatch.setattr("ringcoll.lab.simulation.simulate_call.RunSettings", refuse)
    call = {
        "schedule": schedule_of("all_reduce", "ring", 4),
        "nbytes": 40,
        "topology": crossbar(4, bandwidth=1, memory_nbytes=40),
    }
    with pytest.raises(ArgumentError, match=said):
        simulate(**call | arguments)


def test_scratch_slots_need_memory_too() -> None:
    """A slot is as long as a chunk: five slots of a quarter of the data."""
    schedule = replace(schedule_of("all_reduce", "ring", 4), num_slots=5)
    enough = crossbar(4, bandwidth=1, memory_nbytes=40 + 5 * 10)
    assert simulate(schedule, 40, enough).seconds > 0
    with pytest.raises(ArgumentError, match=r"at most 89 bytes together.*got 90"):
        simulate(schedule, 40, replace(enough, memory_nbytes=89))


@pytest.mark.parametrize(
    "programs, said",
    [
        (lambda rank: [Step(recv(1 - rank, out(0)))], "waits for a message of rank"),
        (lambda rank: [Step(send(1 - rank, inp(0)))], "does not receive a message"),
        (lambda rank: [Step(send(rank, inp(0)))], "not another rank"),
        (lambda rank: [Step(send(5, inp(0)))], "not another rank"),
        (
            lambda rank: [Step(recv(0, out(0)) if rank else send(1, inp(0), inp(1)))],
            "sends 2 chunks to rank 1, which expects 1",
        ),
    ],
)
@pytest.mark.parametrize("ports", [None, 1])
def test_a_wrong_schedule_is_refused(programs, said, ports) -> None:
    with pytest.raises(ScheduleError, match=said):
        simulate(Schedule("all_reduce", "wrong", 2, 2, 0, programs), 8, switch(2, ports))


def test_the_public_name_stays_a_function() -> None:
    assert ringcoll.simulate is simulate
    assert isinstance(ringcoll.simulate(of_sends(2, [(0, 1)]), 8, switch(2)), SimulatedRun)


def test_the_costs_of_a_link() -> None:
    costs = LinkCosts(float(ALPHA), float(BETA), float(GAMMA))
    for name in ("ring", "recursive_doubling"):
        run = simulate(schedule_of("all_reduce", name, 8), NBYTES, switch(8))
        expected = costs.seconds(NBYTES, *find("all_reduce", name).counts(8))
        assert float(run.seconds) == pytest.approx(expected, rel=1e-12)


def test_the_page_prints_what_its_program_prints(capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).parents[2] / "docs" / "simulation.md"
    python, printed = re.findall(
        r"```python\n(.*?)```\n\nprints\n\n```\n(.*?)```", page.read_text("utf-8"), re.DOTALL
    )[0]
    exec(compile(python, page, "exec"), {})
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize(
    "engine, segments, most, counted", [("symmetry", 3, 17, 18), ("events", 1, 23, 24)]
)
def test_a_refusal_counts_the_messages(
    engine: str, segments: int, most: int, counted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ring of 4 ranks has 2 (k - 1) k = 24 messages; folded to one rank, 6 of them are simulated."""
    monkeypatch.setattr("ringcoll.lab.simulation.simulate_call._MOST_MESSAGES", most)
    schedule, network = schedule_of("all_reduce", "ring", 4), crossbar(4, bandwidth=1)
    with pytest.raises(
        TooLargeError, match=f"about {counted} messages here, expected at most {most}"
    ):
        simulate(schedule, 400, network, segments=segments, engine=engine)
    monkeypatch.setattr("ringcoll.lab.simulation.simulate_call._MOST_MESSAGES", counted)
    assert simulate(schedule, 400, network, segments=segments, engine=engine).seconds > 0


@pytest.mark.parametrize("longest", [0, 1, 2])
@pytest.mark.parametrize("shares", [True, False])
def test_a_rank_goes_on_when_the_longest_of_its_messages_has_left(
    longest: int, shares: bool
) -> None:
    """Whatever the order in which they were posted."""
    nbytes = [1, 1, 1]
    nbytes[longest] = 4

    def program(rank: int) -> list[Step]:
        chunks = [[out(chunk) for chunk in range(count)] for count in nbytes]
        sources = [[inp(chunk) for chunk in range(count)] for count in nbytes]
        if rank == 0:
            return [Step(*(send(peer, *sources[peer - 1]) for peer in (1, 2, 3)))]
        return [Step(recv(0, *chunks[rank - 1]))]

    schedule = Schedule("all_reduce", "lengths", 4, 4, 0, program)
    lazy = crossbar(4, bandwidth=1, ports=3 if shares else None, latency_s=10)
    run = simulate(schedule, 4, lazy)
    assert run.ends == (4, *(10 + count for count in nbytes))
    assert run.waited_s == (0, *(10 + count for count in nbytes))
    assert run.path[-1].waits_for == 0
    assert run.path[-1].rank == 1 + longest
