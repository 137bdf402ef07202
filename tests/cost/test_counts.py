"""Lower bounds, the alpha-beta-gamma cost, segments."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ringcoll.errors import ArgumentError, ScheduleError
from ringcoll.schedules import (
    CONTRACTS,
    Counts,
    Recv,
    RecvReduce,
    Schedule,
    Send,
    Step,
    contract,
    verify,
)
from ringcoll.schedules.algorithms import Algorithm, find, on_hosts, schedule_of
from ringcoll.schedules.algorithms.hierarchical import Hosts
from ringcoll.schedules.cost import (
    LinkCosts,
    bound_of,
    lower_bound,
    seconds_on_hosts,
    wavefront_counts,
)
from tests.cases.algorithms import EVERY, each_on, name_of, worlds_of

# The machine may be busy with other things.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
MACHINE = LinkCosts(alpha_s=7e-6, beta_s_per_byte=2e-9, gamma_s_per_byte=3e-10)


# --- lower bounds ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "collective, sent, received, reduced",  # for 5 ranks
    [
        ("all_reduce", Fraction(8, 5), Fraction(8, 5), Fraction(4, 5)),
        ("reduce_scatter", Fraction(4, 5), Fraction(4, 5), Fraction(4, 5)),
        ("all_gather", Fraction(4, 5), Fraction(4, 5), Fraction(0)),
        ("broadcast", Fraction(1), Fraction(1), Fraction(0)),
        ("reduce", Fraction(1), Fraction(1), Fraction(4, 5)),
        ("gather", Fraction(1, 5), Fraction(4, 5), Fraction(0)),
        ("scatter", Fraction(4, 5), Fraction(1, 5), Fraction(0)),
        ("all_to_all", Fraction(4, 5), Fraction(4, 5), Fraction(0)),
        ("barrier", Fraction(1), Fraction(1), Fraction(4, 5)),
    ],
)
def test_bounds(collective: str, sent: Fraction, received: Fraction, reduced: Fraction) -> None:
    bound = lower_bound(collective, 5)
    assert (bound.rounds, bound.sent, bound.received, bound.reduced) == (3, sent, received, reduced)
    assert bound.traffic == max(sent, received)


@pytest.mark.parametrize("collective", CONTRACTS)
def test_one_rank_needs_nothing(collective: str) -> None:
    bound = lower_bound(collective, 1)
    assert bound.rounds == 0
    assert bound.sent == bound.received == bound.reduced == 0


@unhurried
@given(st.integers(1, 10**6), st.integers(1, 9))
def test_rounds_are_a_logarithm(world_size: int, ports: int) -> None:
    rounds = lower_bound("barrier", world_size, ports=ports).rounds
    assert (ports + 1) ** rounds >= world_size
    assert rounds == 0 or (ports + 1) ** (rounds - 1) < world_size


def test_a_chain_in_segments_does_not_beat_the_bound() -> None:
    for num_segments in (1, 3, 10):
        waves = wavefront_counts(schedule_of("broadcast", "chain", 6), num_segments).rounds
        assert waves >= num_segments - 1 + 3  # Bar-Noy and Kipnis, 1994: lg 6 rounds up to 3


@pytest.mark.parametrize("number", [0, -2])
def test_numbers_below_one_are_refused(number: int) -> None:
    ring = find("all_reduce", "ring")
    for call in (
        lambda: lower_bound("all_reduce", number),
        lambda: lower_bound("all_reduce", 4, ports=number),
        lambda: wavefront_counts(ring.schedule(4), number),
    ):
        with pytest.raises(ArgumentError, match=f"expected at least 1, got {number}"):
            call()
    with pytest.raises(ScheduleError, match="unknown collective"):
        lower_bound("all_scatter", 4)


# --- cost -----------------------------------------------------------------------------


def test_the_cost_of_a_ring_by_hand() -> None:
    counts = find("all_reduce", "ring").counts(4)
    nbytes = 1_000_000
    by_hand = 6 * 7e-6 + 1.5 * nbytes * 2e-9 + 0.75 * nbytes * 3e-10
    assert MACHINE.seconds(nbytes, *counts) == pytest.approx(by_hand, rel=1e-12)
    assert MACHINE.seconds(0, *counts) == pytest.approx(6 * 7e-6, rel=1e-12)


def test_gamma_is_free_unless_stated() -> None:
    counts = Counts(rounds=3, traffic=Fraction(2), reduced=Fraction(5))
    assert LinkCosts(alpha_s=1.0, beta_s_per_byte=0.5).seconds(100, *counts) == 103.0


def test_ring_and_doubling_cross_over() -> None:
    """Short vectors want few rounds, long ones little traffic."""
    ring, doubling = (
        find("all_reduce", name).counts(16) for name in ("ring", "recursive_doubling")
    )
    assert MACHINE.seconds(1_000, *ring) > MACHINE.seconds(1_000, *doubling)
    assert MACHINE.seconds(10_000_000, *ring) < MACHINE.seconds(10_000_000, *doubling)


@pytest.mark.parametrize("algorithm", EVERY, ids=name_of)
def test_one_segment_is_the_schedule_itself(algorithm: Algorithm) -> None:
    for world_size in worlds_of(algorithm, 1, 2, 3, 8, 13):
        root = world_size - 1 if contract(algorithm.collective).rooted else 0
        schedule = algorithm.schedule(world_size, root)
        assert wavefront_counts(schedule, 1) == algorithm.counts(world_size), world_size


@pytest.mark.parametrize("world_size", [2, 5, 9])
@pytest.mark.parametrize("num_segments", [1, 2, 3, 8, 100])
def test_the_textbook_chain(world_size: int, num_segments: int) -> None:
    """(k + B - 2)(alpha + n/B beta)."""
    counts = wavefront_counts(schedule_of("broadcast", "chain", world_size), num_segments)
    waves = world_size + num_segments - 2
    assert counts == Counts(waves, Fraction(waves, num_segments), Fraction(0))


def busiest(schedule: Schedule) -> Fraction:
    """The most that any rank sends, or receives, in all steps."""
    most = 0
    for rank in range(schedule.world_size):
        operations = [operation for step in schedule.steps(rank) for operation in step]
        sent = sum(len(op.refs) for op in operations if isinstance(op, Send))
        received = sum(len(op.refs) for op in operations if isinstance(op, Recv))
        received += sum(len(op.into) for op in operations if isinstance(op, RecvReduce))
        most = max(most, sent, received)
    blocks = contract(schedule.collective).num_blocks(schedule.world_size)
    return Fraction(most * blocks, schedule.num_chunks * (schedule.world_size if blocks > 1 else 1))


@pytest.mark.parametrize("algorithm, world_size", each_on(6))
def test_a_wave_costs_at_most_all_steps_of_the_busiest_rank(
    algorithm: Algorithm, world_size: int
) -> None:
    """T + S - 1 waves, each with at most B/S, which those in the middle reach."""
    schedule = algorithm.schedule(world_size)
    most = busiest(schedule)
    num_steps = max(len(list(schedule.steps(rank))) for rank in range(world_size))
    for num_segments in (1, 2, 5, 30, 31):
        counts = wavefront_counts(schedule, num_segments)
        waves = num_steps + num_segments - 1
        assert counts.rounds <= waves
        assert counts.traffic <= most * Fraction(waves, num_segments)
    many = max(30, num_steps)
    few, one_more = wavefront_counts(schedule, many), wavefront_counts(schedule, many + 1)
    assert (many + 1) * one_more.traffic - many * few.traffic == most


def test_segments_bring_the_trees_to_the_traffic_of_a_ring() -> None:
    """Two trees: all links busy at last. One tree: an inner rank hears two children and its parent."""
    many = 10**6
    double = wavefront_counts(schedule_of("all_reduce", "double_tree", 16), many)
    single = wavefront_counts(schedule_of("all_reduce", "binary_tree", 16), many)
    assert float(double.traffic) == pytest.approx(2, rel=1e-4)
    assert float(single.traffic) == pytest.approx(3, rel=1e-4)


def test_a_rank_that_ends_early_is_counted_right() -> None:
    schedule = Schedule("barrier", "nothing", 2, 1, 0, lambda rank: [Step()] * rank)
    assert wavefront_counts(schedule, 3) == Counts(0, Fraction(0), Fraction(0))
    empty = Schedule("barrier", "nothing", 2, 1, 0, lambda rank: [])
    assert wavefront_counts(empty, 3) == Counts(0, Fraction(0), Fraction(0))


# --- the cost on hosts ----------------------------------------------------------------

INSIDE = LinkCosts(alpha_s=2.0, beta_s_per_byte=3.0, gamma_s_per_byte=5.0)
ACROSS = LinkCosts(alpha_s=100.0, beta_s_per_byte=1000.0)


def seconds(name: str, hosts: Hosts, nbytes: int = 12) -> float:
    schedule = schedule_of("all_reduce", name, len(hosts), hosts=hosts)
    return seconds_on_hosts(schedule, nbytes, hosts, inside=INSIDE, across=ACROSS)


def test_seconds_on_hosts_by_hand() -> None:
    """Halves inside, then both halves of each host over its link at once, then halves inside."""
    half, whole = 6, 12
    assert seconds("hierarchical", (0, 0, 1, 1)) == sum(
        [
            2.0 + 3.0 * half + 5.0 * half,
            100.0 + 1000.0 * whole + 5.0 * half,
            2.0 + 3.0 * half,
        ]
    )
    # In each of the ring's steps a quarter crosses.
    assert seconds("ring", (0, 0, 1, 1)) == 6 * (100.0 + 1000.0 * 3) + 3 * 5.0 * 3
    # In turn, two do.
    assert seconds("ring", (0, 1, 0, 1)) == 6 * (100.0 + 2 * 1000.0 * 3) + 3 * 5.0 * 3


def test_seconds_on_one_host_are_those_of_the_counts() -> None:
    for name in ("ring", "binomial_tree", "recursive_doubling", "direct"):
        expected = INSIDE.seconds(840, *find("all_reduce", name).counts(8))
        if name == "direct":
            expected = 2.0 + 3.0 * 7 * 840 + 5.0 * 7 * 840
        assert seconds(name, (0,) * 8, 840) == pytest.approx(expected)


@pytest.mark.slow
@pytest.mark.parametrize("nbytes", [8, 1 << 20, 1 << 30])
@pytest.mark.parametrize("num_hosts, per_host", [(2, 2), (2, 8), (4, 4), (16, 8)])
def test_the_hierarchy_pays_where_links_are_slow(
    num_hosts: int, per_host: int, nbytes: int
) -> None:
    hosts = on_hosts(num_hosts * per_host, num_hosts)
    times = {name: seconds(name, hosts, nbytes) for name in ("hierarchical", "ring")}
    assert times["hierarchical"] < times["ring"]


def test_hosts_of_another_number_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"'hosts'.*expected 4, got 3"):
        seconds_on_hosts(
            schedule_of("all_reduce", "ring", 4), 1, (0, 0, 1), inside=INSIDE, across=ACROSS
        )


def test_a_rank_alone_is_at_its_bound():
    bound = bound_of(verify(schedule_of("all_reduce", "ring", 1)))
    assert (bound.rounds, bound.sent, bound.reduced) == (0, 0, 0)
