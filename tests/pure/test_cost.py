"""Lower bounds, the alpha-beta-gamma cost, segments."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ringcoll.algorithms import Algorithm, algorithms, find, schedule_of
from ringcoll.contracts import CONTRACTS, contract
from ringcoll.cost import (
    Counts,
    Distance,
    Machine,
    best_num_segments,
    broadcast_rounds,
    distance,
    formula_counts,
    lower_bound,
    wavefront_counts,
)
from ringcoll.errors import ArgumentError, ScheduleError
from ringcoll.schedule import Recv, RecvReduce, Schedule, Send, Step
from ringcoll.verify import verify

EVERY = tuple(algorithms())
# The machine may be busy with other things.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
MACHINE = Machine(alpha_s=7e-6, beta_s_per_byte=2e-9, gamma_s_per_byte=3e-10)


def name_of(algorithm: Algorithm) -> str:
    return f"{algorithm.collective}-{algorithm.name}"


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


@unhurried
@given(st.integers(2, 1000), st.integers(1, 50))
def test_broadcast_rounds(world_size: int, num_segments: int) -> None:
    expected = num_segments - 1 + math.ceil(math.log2(world_size))
    assert broadcast_rounds(world_size, num_segments) == expected


def test_a_chain_in_segments_does_not_beat_the_bound() -> None:
    for num_segments in (1, 3, 10):
        waves = wavefront_counts(schedule_of("broadcast", "chain", 6), num_segments).rounds
        assert waves >= broadcast_rounds(6, num_segments)


@pytest.mark.parametrize("number", [0, -2])
def test_numbers_below_one_are_refused(number: int) -> None:
    ring = find("all_reduce", "ring")
    for call in (
        lambda: lower_bound("all_reduce", number),
        lambda: lower_bound("all_reduce", 4, ports=number),
        lambda: broadcast_rounds(number, 4),
        lambda: broadcast_rounds(4, number),
        lambda: formula_counts(ring, number),
        lambda: wavefront_counts(ring.schedule(4), number),
    ):
        with pytest.raises(ArgumentError, match=f"expected at least 1, got {number}"):
            call()
    with pytest.raises(ScheduleError, match="unknown collective"):
        lower_bound("all_scatter", 4)


# --- cost -----------------------------------------------------------------------------


def test_the_cost_of_a_ring_by_hand() -> None:
    counts = formula_counts(find("all_reduce", "ring"), 4)
    nbytes = 1_000_000
    by_hand = 6 * 7e-6 + 1.5 * nbytes * 2e-9 + 0.75 * nbytes * 3e-10
    assert counts.seconds(nbytes, MACHINE) == pytest.approx(by_hand, rel=1e-12)
    assert counts.seconds(0, MACHINE) == pytest.approx(6 * 7e-6, rel=1e-12)


def test_gamma_is_free_unless_stated() -> None:
    counts = Counts(rounds=3, traffic=Fraction(2), reduced=Fraction(5))
    assert counts.seconds(100, Machine(alpha_s=1.0, beta_s_per_byte=0.5)) == 103.0


def test_ring_and_doubling_cross_over() -> None:
    """Short vectors want few rounds, long ones little traffic."""
    ring, doubling = (
        formula_counts(find("all_reduce", name), 16) for name in ("ring", "recursive_doubling")
    )
    assert ring.seconds(1_000, MACHINE) > doubling.seconds(1_000, MACHINE)
    assert ring.seconds(10_000_000, MACHINE) < doubling.seconds(10_000_000, MACHINE)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 13])
@pytest.mark.parametrize("algorithm", EVERY, ids=name_of)
def test_one_segment_is_the_schedule_itself(algorithm: Algorithm, world_size: int) -> None:
    rooted = contract(algorithm.collective).rooted
    schedule = algorithm.schedule(world_size, world_size - 1 if rooted else 0)
    assert wavefront_counts(schedule, 1) == formula_counts(algorithm, world_size)


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


@pytest.mark.parametrize("algorithm", EVERY, ids=name_of)
def test_a_wave_costs_at_most_all_steps_of_the_busiest_rank(algorithm: Algorithm) -> None:
    """T + S - 1 waves, each with at most B/S, which those in the middle reach."""
    schedule = algorithm.schedule(6)
    most = busiest(schedule)
    num_steps = max(len(list(schedule.steps(rank))) for rank in range(6))
    for num_segments in (1, 2, 5, 30, 31):
        counts = wavefront_counts(schedule, num_segments)
        waves = num_steps + num_segments - 1
        assert counts.rounds <= waves
        assert counts.traffic <= most * Fraction(waves, num_segments)
    few, one_more = wavefront_counts(schedule, 30), wavefront_counts(schedule, 31)
    assert 31 * one_more.traffic - 30 * few.traffic == most


def test_segments_bring_the_trees_to_the_traffic_of_a_ring() -> None:
    """Two trees: all links busy at last. One tree: an inner rank hears two children and its parent."""
    many = 10**6
    double = wavefront_counts(schedule_of("all_reduce", "double_tree", 16), many)
    single = wavefront_counts(schedule_of("all_reduce", "binary_tree", 16), many)
    assert float(double.traffic) == pytest.approx(2, rel=1e-4)
    assert float(single.traffic) == pytest.approx(3, rel=1e-4)


def test_the_formula_for_the_best_number_of_segments() -> None:
    """(T-1) alpha + B n beta + 2 sqrt((T-1) B n alpha beta), here with B = 2, is an upper bound."""
    world_size, nbytes = 32, 10_000_000
    schedule = schedule_of("all_reduce", "double_tree", world_size)
    machine = Machine(alpha_s=1e-5, beta_s_per_byte=1e-9)
    waves = 2 * int(math.log2(world_size)) - 1
    formula = (
        waves * machine.alpha_s
        + 2 * nbytes * machine.beta_s_per_byte
        + 2 * math.sqrt(2 * waves * nbytes * machine.alpha_s * machine.beta_s_per_byte)
    )
    best = best_num_segments(schedule, nbytes, machine)
    found = wavefront_counts(schedule, best).seconds(nbytes, machine)
    assert 0.9 * formula < found <= formula


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 13])
@pytest.mark.parametrize(
    "collective, name",
    [
        ("all_reduce", "double_tree"),
        ("all_reduce", "binary_tree"),
        ("all_reduce", "direct"),
        ("all_reduce", "rabenseifner"),
        ("broadcast", "chain"),
        ("broadcast", "binomial_tree"),
    ],
)
def test_the_best_number_of_segments(collective: str, name: str, world_size: int) -> None:
    """Within 2 % of the best that trying all of them finds."""
    schedule = schedule_of(collective, name, world_size)
    for nbytes in (0, 1_000, 100_000, 3_000_000):

        def seconds(num_segments: int, nbytes: int = nbytes) -> float:
            return wavefront_counts(schedule, num_segments).seconds(nbytes, MACHINE)

        best = best_num_segments(schedule, nbytes, MACHINE)
        assert 1 <= best < 150
        assert seconds(best) <= 1.02 * min(seconds(tried) for tried in range(1, 150))


def test_no_more_segments_than_bytes() -> None:
    free = Machine(alpha_s=0.0, beta_s_per_byte=1e-9)
    chain = schedule_of("broadcast", "chain", 5)
    assert best_num_segments(chain, 77, free) == 77
    assert best_num_segments(chain, 0, free) == 1
    assert best_num_segments(schedule_of("broadcast", "chain", 2), 77, free) == 1


def test_more_bytes_want_more_segments() -> None:
    tree = schedule_of("all_reduce", "double_tree", 8)
    found = [best_num_segments(tree, 10**power, MACHINE) for power in range(2, 10)]
    assert found[0] == 1
    assert all(few <= more for few, more in pairwise(found))
    assert found[-1] > 500


def test_a_rank_that_ends_early_is_counted_right() -> None:
    schedule = Schedule("barrier", "nothing", 2, 1, 0, lambda rank: [Step()] * rank)
    assert wavefront_counts(schedule, 3) == Counts(0, Fraction(0), Fraction(0))
    empty = Schedule("barrier", "nothing", 2, 1, 0, lambda rank: [])
    assert wavefront_counts(empty, 3) == Counts(0, Fraction(0), Fraction(0))


# --- distance -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "collective, name, expected",  # for 8 ranks
    [
        ("all_reduce", "ring", (Fraction(14, 3), Fraction(1), Fraction(1))),
        ("all_reduce", "rabenseifner", (Fraction(2), Fraction(1), Fraction(1))),
        ("all_reduce", "recursive_doubling", (Fraction(1), Fraction(12, 7), Fraction(24, 7))),
        ("all_gather", "bruck", (Fraction(1), Fraction(1), Fraction(1))),
        ("all_reduce", "direct", (Fraction(1), Fraction(4), Fraction(8))),
        ("reduce", "binomial_tree", (Fraction(1), Fraction(3), Fraction(24, 7))),
        ("gather", "binomial_tree", (Fraction(1), Fraction(1), Fraction(1))),
    ],
)
def test_distance(collective: str, name: str, expected: tuple[Fraction, ...]) -> None:
    assert distance(verify(schedule_of(collective, name, 8))) == Distance(*expected)


def test_distance_on_one_rank() -> None:
    assert distance(verify(schedule_of("all_reduce", "ring", 1))) == Distance(
        Fraction(1), Fraction(1), Fraction(1)
    )
