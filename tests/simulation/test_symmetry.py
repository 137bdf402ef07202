"""Ranks that stand for others: the results are those of all ranks, and what differs is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ringcoll.errors import ArgumentError
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
from ringcoll.lab.simulation.lockstep import RankWave, never_full, senders_of
from ringcoll.lab.simulation.symmetry import TurnedRank, folded, turned_programs
from ringcoll.schedules import Schedule, Step, inp, out, recv, send
from ringcoll.schedules.algorithms import algorithms, schedule_of

NBYTES = 840
WORLD_SIZES = (2, 3, 4, 6, 8)
COSTS: Any = {
    "alpha_s": Fraction(3, 10**6),
    "overhead_s": Fraction(1, 10**6),
    "gamma_s_per_byte": Fraction(1, 10**9),
}
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=40)

TURNED = [
    (entry, k)
    for entry in algorithms()
    if entry.built_in
    for k in WORLD_SIZES
    if not entry.restriction(k) and turned_programs(entry.schedule(k)) is not None
]


def bus(world_size: int, **costs: Any) -> Topology:
    """All messages cross one link, which every turn leaves where it is."""
    ports = [Link(rank, "in", 10**9) for rank in range(world_size)]
    ports += [Link("out", rank, 10**9) for rank in range(world_size)]
    return Topology(world_size=world_size, links=(*ports, Link("in", "out", 10**9)), **costs)


@st.composite
def networks(draw: st.DrawFn, world_size: int) -> Topology:
    costs = COSTS | {
        "bandwidth": 10**9,
        "latency_s": draw(st.sampled_from([0, Fraction(1, 10**6)])),
    }
    pairs = {"routers_per_group": 1, "ranks_per_router": 2, "global_links": 6}
    makers: list[Callable[[], Topology]] = [
        lambda: crossbar(world_size, ports=1, **costs),
        lambda: crossbar(world_size, ports=2, **costs),
        lambda: crossbar(world_size, ports=None, **costs),
        lambda: ring(world_size, **costs),
        lambda: torus((world_size // 2, 2) if world_size % 2 == 0 else (world_size, 1), **costs),
        lambda: fat_tree(world_size, ranks_per_leaf=2, oversubscription=2, **costs),
        lambda: hosts(world_size, ranks_per_host=2, across_bandwidth=10**8, **costs),
        lambda: dragonfly(world_size, **pairs, **costs),
        lambda: bus(world_size, **COSTS),
    ]
    return draw(st.sampled_from(makers))()


def by(engine: str, *arguments: Any, **options: Any) -> SimulatedRun | None:
    try:
        return simulate(*arguments, engine=engine, **options)
    except ArgumentError as error:
        if "cannot run this schedule" not in str(error):
            raise
        return None


def assert_same(run: SimulatedRun, other: SimulatedRun) -> None:
    for name in ("seconds", "ends", "waited_s", "link_nbytes", "path", "num_messages"):
        assert getattr(run, name) == getattr(other, name), (name, run.engine, other.engine)


@unhurried
@given(st.sampled_from(TURNED), st.integers(1, 3), st.data())
def test_all_engines_find_the_same(case: Any, segments: int, data: st.DataObject) -> None:
    entry, k = case
    few = st.dictionaries(st.integers(0, k - 1), st.sampled_from([2, 3]), max_size=2)
    everybody = st.just(dict.fromkeys(range(0, k, 2), 2))
    options: dict[str, Any] = {
        "segments": segments,
        "late": data.draw(few) if data.draw(st.booleans()) else {},
        "slowness": data.draw(few | everybody) if data.draw(st.booleans()) else {},
    }
    network = data.draw(networks(k))
    arguments = entry.schedule(k), NBYTES, network
    exact = simulate(*arguments, engine="events", **options)
    assert exact.engine == "events"
    assert_same(exact, simulate(*arguments, **options))
    for engine in ("symmetry", "steps"):
        run = by(engine, *arguments, **options)
        if run is not None:
            assert run.engine == engine
            assert_same(exact, run)


@pytest.mark.parametrize("engine", ["symmetry", "steps"])
def test_floats_are_near(engine: str) -> None:
    network = ring(12, bandwidth=1.1e9, latency_s=1e-6, alpha_s=3e-6, gamma_s_per_byte=1e-10)
    schedule = schedule_of("all_reduce", "ring", 12)
    exact, run = (simulate(schedule, NBYTES, network, engine=each) for each in ("events", engine))
    assert run.ends == pytest.approx(exact.ends, rel=1e-9)
    assert run.waited_s == pytest.approx(exact.waited_s, rel=1e-9)
    assert run.link_nbytes == pytest.approx(exact.link_nbytes, rel=1e-9)
    assert [part[:3] for part in run.path] == [part[:3] for part in exact.path]


@pytest.mark.parametrize(
    "name, topology, period",
    [
        ("ring", crossbar(12, bandwidth=1), 1),
        ("circulant", ring(12, bandwidth=1), 1),
        ("ring", torus((3, 4), bandwidth=1), 4),
        ("ring", fat_tree(12, ranks_per_leaf=3, bandwidth=1), 3),
        ("bidirectional_ring", hosts(12, ranks_per_host=6, bandwidth=1, across_bandwidth=1), 6),
        ("circulant", bus(12), 1),
        ("circulant", dragonfly(12, ranks_per_router=2, routers_per_group=2, global_links=1,
                                bandwidth=1), 4),
    ],
)  # fmt: skip
def test_so_many_ranks_stand_for_all(name: str, topology: Topology, period: int) -> None:
    programs = turned_programs(schedule_of("all_reduce", name, 12))
    assert programs is not None
    folding = folded(topology, programs)
    assert folding is not None
    assert folding.period == period


def test_even_and_odd_ranks_swing_to_different_sides() -> None:
    programs = turned_programs(schedule_of("all_reduce", "swing", 16))
    assert programs is not None
    assert len(programs) == 2
    run = simulate(schedule_of("all_reduce", "swing", 16), 8, ring(16, bandwidth=1))
    assert run.engine == "symmetry"


# --- what has to be refused -----------------------------------------------------------------


def neighbours(rank: int, k: int) -> Iterable[Step]:
    yield Step(send((rank + 1) % k, inp(0)), recv((rank - 1) % k, out(0)))


def schedule(program: Callable[[Any], Iterable[Step]], k: int = 8) -> Schedule:
    return Schedule("all_reduce", "made_up", k, 1, 0, program)


def only_if(condition: Callable[[Any], Any]) -> Schedule:
    """A ring, with a second round if the condition on the rank holds."""

    def program(rank: Any) -> Iterable[Step]:
        yield from neighbours(rank, 8)
        if condition(rank):
            yield from neighbours(rank, 8)

    return schedule(program)


@pytest.mark.parametrize(
    "condition",
    [
        lambda rank: rank == 3,
        lambda rank: 3 == rank,  # noqa: SIM300  # the other way round is the point
        lambda rank: rank != 3,
        lambda rank: rank < 3,
        lambda rank: 3 <= rank,  # noqa: SIM300
        lambda rank: rank,
        lambda rank: not rank,
        lambda rank: rank in {3, 4},
        lambda rank: rank in (3, 4),
        lambda rank: rank in range(3),
        lambda rank: {3: True}.get(rank, False),
        lambda rank: [0, 0, 0, 1, 0, 0, 0, 0][rank],
        lambda rank: rank ^ 1 == 2,
        lambda rank: rank & 2,
        lambda rank: rank >> 1 == 1,
        lambda rank: rank // 2 == 1,
        lambda rank: divmod(rank, 4)[0],
        lambda rank: rank % 3 == 1,
        lambda rank: rank + 1 > 5,
        lambda rank: (rank + 1) % 8 > 5,
        lambda rank: min(rank, 3) == 3,
        lambda rank: max([rank, (rank + 1) % 8]) == 3,
        lambda rank: str(rank) == "3",
        lambda rank: f"{rank}" == "3",
        lambda rank: repr(rank) == "3",
        lambda rank: hash(rank) == 3,
        lambda rank: int(rank) == 3,
        lambda rank: len(range(rank)) == 3,
        lambda rank: len(bytes(rank)) == 3,
        lambda rank: "x" * rank,
        lambda rank: abs(rank) == 3,
        lambda rank: 1 << rank == 8,
        lambda rank: isinstance(rank, int),
        lambda rank: type(rank) is int,
    ],
)  # fmt: skip
def test_programs_that_look_at_their_number_are_not_turned(condition: Any) -> None:
    assert turned_programs(only_if(condition)) is None


def test_what_is_the_same_for_all_ranks_is_answered() -> None:
    def condition(rank: Any) -> bool:
        others = [(rank + step) % 8 for step in range(1, 8)]
        return bool(
            rank != others[0]
            and rank >= 0
            and rank < 8
            and rank not in others
            and (others[2] - rank) % 8 == 3
            and -1 < rank  # noqa: SIM300
        )

    programs = turned_programs(only_if(condition))
    assert programs is not None
    assert [len(steps) for steps in programs] == [2]


@pytest.mark.parametrize(
    "peers",
    [
        lambda rank: (0, 0),
        lambda rank: (rank + 1, (rank - 1) % 8),  # rank 7 would send to rank 8
        lambda rank: (-rank % 8, -rank % 8),
        lambda rank: (3 * rank % 8, 3 * rank % 8),
        lambda rank: (rank, rank),
        lambda rank: (rank % 8, rank % 8),
    ],
)
def test_peers_are_always_as_far_away(peers: Any) -> None:
    def program(rank: Any) -> Iterable[Step]:
        to, source = peers(rank)
        yield Step(send(to, inp(0)), recv(source, out(0)))

    assert turned_programs(schedule(program)) is None


def test_small_periods_only() -> None:
    assert turned_programs(only_if(lambda rank: rank % 2)) is not None
    assert turned_programs(only_if(lambda rank: rank % 2 and rank % 4 == 1)) is not None
    assert turned_programs(only_if(lambda rank: rank % 8 == 1)) is None, (
        "no rank stands for another"
    )


OPERATIONS: list[Callable[[Any, int], Any]] = [
    lambda x, n: x + n,
    lambda x, n: n + x,
    lambda x, n: x - n,
    lambda x, n: n - x,
    lambda x, n: x * n,
    lambda x, n: n * x,
    lambda x, n: x + x,
    lambda x, n: -x,
    lambda x, n: x % 12,
    lambda x, n: x % 2,
    lambda x, n: x % 3,
    lambda x, n: x % 6,
    lambda x, n: x < n,
    lambda x, n: x <= n,
    lambda x, n: x > n,
    lambda x, n: x >= n,
    lambda x, n: x == n,
    lambda x, n: x != n,
    lambda x, n: x == (x + n) % 12,
    lambda x, n: (x - n) % 12 == x,
]


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(-25, 25)), max_size=6),
    st.sampled_from([1, 2, 3, 6]),
    st.integers(0, 5),
)
def test_a_turned_rank_is_every_rank(steps: Any, period: int, rest: int) -> None:
    rest %= period

    def evaluate(value: Any) -> Any:
        for operation, number in steps:
            value = operation(value, number)
        return value

    try:
        value = evaluate(TurnedRank(12, period, rest))
    except Exception:  # noqa: BLE001  # no answer is never wrong
        return
    for rank in range(rest, 12, period):
        expected = evaluate(rank)
        if isinstance(value, TurnedRank):
            assert (value.factor * rank + value.offset - expected) % 12 == 0
            assert not value.is_rank or 0 <= expected < 12
        else:
            assert value == expected


def turned_ring() -> Any:
    programs = turned_programs(schedule_of("all_reduce", "ring", 8))
    assert programs is not None
    return programs


def with_link(topology: Topology, index: int, **changes: Any) -> Topology:
    links = list(topology.links)
    links[index] = replace(links[index], **changes)
    return replace(topology, links=tuple(links))


@pytest.mark.parametrize(
    "changes", [{"bandwidth": 2}, {"latency_s": 1}, {"lanes": 2}, {"lanes": None}]
)
def test_a_link_that_is_different_is_seen(changes: dict[str, Any]) -> None:
    network = crossbar(8, bandwidth=1)
    assert folded(network, turned_ring()) is not None
    for index in (0, 5, 7, 8, 15):
        assert folded(with_link(network, index, **changes), turned_ring()) is None


def test_links_that_no_message_uses_do_not_matter() -> None:
    network = ring(8, bandwidth=1)  # the ring sends to the next rank only
    backward = [index for index, link in enumerate(network.links) if link.name == "1 -> 0"]
    changed = with_link(network, backward[0], bandwidth=7)
    assert folded(changed, turned_ring()) is not None
    run = simulate(schedule_of("all_reduce", "ring", 8), 8, changed)
    assert_same(run, simulate(schedule_of("all_reduce", "ring", 8), 8, changed, engine="events"))


def test_a_failed_link_is_seen() -> None:
    assert folded(ring(8, bandwidth=1).without(3, 4), turned_ring()) is None


def test_a_detour_is_seen() -> None:
    network = torus((2, 4), bandwidth=1)

    def router(source: int, target: int) -> tuple[int, ...]:
        assert network.router is not None
        if (source, target) == (4, 5):
            return (*network.router(4, 6), *network.router(6, 5))
        return network.router(source, target)

    assert folded(network, turned_ring()) is not None
    assert folded(replace(network, router=router), turned_ring()) is None


def test_routes_that_meet_are_seen() -> None:
    """The same link, or one of its own: what differs is only who shares it."""
    links = [Link(rank, "switch", 1) for rank in range(8)]
    links += [Link("switch", rank, 1) for rank in range(8)]
    links += [Link("switch", 0, 1)]

    def router(source: int, target: int) -> tuple[int, ...]:
        return source, 8 + target

    def sharing(source: int, target: int) -> tuple[int, ...]:
        return (0 if source == 1 else source), 8 + target

    alike = Topology(world_size=8, links=tuple(links), router=router)
    assert folded(alike, turned_ring()) is not None
    assert folded(replace(alike, router=sharing), turned_ring()) is None


def test_late_and_slow_ranks_are_seen() -> None:
    network, programs = crossbar(8, bandwidth=1), turned_ring()
    assert folded(network, programs, {3: 1}) is None
    everybody = folded(network, programs, dict.fromkeys(range(8), 1))
    assert everybody is not None
    assert everybody.period == 1
    half = folded(network, programs, {1: 5, 3: 5, 5: 5, 7: 5}, {0: 2, 4: 2})
    assert half is not None
    assert half.period == 4


def test_no_step_by_step_where_a_link_can_be_full() -> None:
    assert never_full(crossbar(8, bandwidth=1), turned_ring())
    assert never_full(fat_tree(8, ranks_per_leaf=4, bandwidth=1, oversubscription=4), turned_ring())
    assert not never_full(bus(8), turned_ring())
    swing = turned_programs(schedule_of("all_reduce", "swing", 8))
    assert swing is not None
    assert not never_full(crossbar(8, bandwidth=1), swing), "two senders could be at one port"
    assert never_full(crossbar(8, bandwidth=1, ports=3), swing)
    assert never_full(crossbar(8, bandwidth=1, ports=None), swing)


def test_no_step_by_step_if_messages_are_of_other_steps() -> None:
    def program(rank: Any) -> Iterable[Step]:
        yield Step(send((rank + 1) % 8, inp(0)))
        yield Step(recv((rank - 1) % 8, out(0)))

    late = turned_programs(schedule(program))
    assert late is not None
    assert senders_of(late, 8) is None
    assert senders_of(turned_ring(), 8) is not None
    arguments = schedule(program), 8, crossbar(8, bandwidth=1)
    assert by("steps", *arguments) is None
    assert_same(simulate(*arguments, engine="events"), simulate(*arguments, engine="symmetry"))


def test_a_message_of_another_length_is_none_that_a_receive_takes() -> None:
    """As many sends as receives, and yet one of them takes none."""

    def programs(received: int) -> list[list[RankWave]]:
        return [[RankWave([(1, 1, 0)], [(1, received, 0, False)], 0, 0)]]

    assert senders_of(programs(1), 2) == [[[0]]]
    twice = RankWave([(1, 1, 0), (1, 2, 0)], [(1, 1, 0, False), (1, 2, 0, False)], 0, 0)
    assert senders_of([[twice]], 2) == [[[0, 1]]]
    assert senders_of(programs(2), 2) is None
