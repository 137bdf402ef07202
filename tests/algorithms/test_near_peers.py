"""Algorithms for networks on which ranks with near numbers are near: Swing, Trivance, Bine trees."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest

from ringcoll.schedules import CONTRACTS, Schedule, packed_chunks, verify
from ringcoll.schedules.algorithms import algorithms, schedule_of
from ringcoll.schedules.algorithms.exchanges import Rounds, exchange_vectors, swing, tripling
from tests.cases.messages import distances, far_traffic, messages_of

POWERS = (2, 4, 8, 16, 32, 64)


def lg(k: int) -> int:
    return k.bit_length() - 1


def published(k: int) -> list[set[int]]:
    """|1 - (-2)^(s+1)|/3: arXiv 2401.09356 and 2508.17311."""
    return [{abs(1 - (-2) ** (step + 1)) // 3} for step in range(lg(k))]


def test_published_distances_by_hand() -> None:
    assert published(64) == [{1}, {1}, {3}, {5}, {11}, {21}]


@pytest.mark.slow
@pytest.mark.parametrize("k", POWERS)
def test_messages_go_as_far_as_published(k: int) -> None:
    near_first, far_first = published(k), published(k)[::-1]
    assert distances(schedule_of("reduce_scatter", "bine", k)) == near_first
    assert distances(schedule_of("all_to_all", "bine", k)) == near_first
    assert distances(schedule_of("all_gather", "bine", k)) == far_first
    assert distances(schedule_of("all_reduce", "swing_latency", k)) == far_first
    for name in ("swing", "bine"):
        assert distances(schedule_of("all_reduce", name, k)) == near_first + far_first
    for root in {0, 1, k // 2, k - 1}:
        for collective in ("broadcast", "scatter"):
            assert distances(schedule_of(collective, "bine_tree", k, root)) == far_first
        for collective in ("reduce", "gather"):
            assert distances(schedule_of(collective, "bine_tree", k, root)) == near_first
    assert distances(schedule_of("all_reduce", "bine_tree", k)) == near_first + far_first


@pytest.mark.parametrize("k", [3, 9, 27])
def test_trivance_triples_its_distances(k: int) -> None:
    tripled = [{distance} for distance in (9, 3, 1) if distance < k]
    assert distances(schedule_of("all_reduce", "trivance_latency", k)) == tripled
    assert distances(schedule_of("all_reduce", "trivance", k)) == tripled[::-1] + tripled


def test_eight_collectives_have_bine_trees() -> None:
    with_bine = {entry.collective for entry in algorithms() if entry.name in ("bine", "bine_tree")}
    assert with_bine == {*CONTRACTS} - {"barrier", "scan", "exscan"}


# --- trees: the formulas of arXiv 2508.17311, section 2 --------------------------------------


def negabinary(rank: int, k: int) -> list[int]:
    """Digits of a rank in base -2, lowest first; ranks that need more digits stand for rank - k."""
    for number in (rank, rank - k):
        digits, rest = [], number
        for _ in range(lg(k)):
            digits.append(rest % 2)
            rest = (rest - rest % 2) // -2
        if rest == 0:
            return digits
    raise AssertionError(rank)


@pytest.mark.parametrize("k", POWERS)
def test_a_rank_receives_when_its_digits_say_so(k: int) -> None:
    """In step lg k - u, where the u lowest digits are equal, from the rank with those u inverted."""
    digits = [negabinary(rank, k) for rank in range(k)]
    expected = set()
    for rank in range(1, k):
        equal = next((u for u in range(lg(k)) if digits[rank][u] != digits[rank][0]), lg(k))
        inverted = [1 - digit for digit in digits[rank][:equal]] + digits[rank][equal:]
        expected.add((lg(k) - equal, digits.index(inverted), rank))
    messages = messages_of(schedule_of("broadcast", "bine_tree", k))
    assert {message[:3] for message in messages} == expected


@pytest.mark.parametrize("k", POWERS)
@pytest.mark.parametrize("collective", ["gather", "scatter"])
def test_a_subtree_is_a_range_of_ranks_that_may_go_round_the_end(collective: str, k: int) -> None:
    for message in messages_of(schedule_of(collective, "bine_tree", k, k // 2)):
        chunks = set(message.chunks)
        assert sum((chunk + 1) % k not in chunks for chunk in chunks) == 1


@pytest.mark.parametrize("k", POWERS)
def test_the_tree_in_the_middle_does_not_go_round_the_end(k: int) -> None:
    schedule = schedule_of("all_reduce", "bine_tree", k)
    assert max(abs(message.source - message.target) for message in messages_of(schedule)) == max(
        published(k)[-1]
    )


# --- bits -------------------------------------------------------------------------------------


def vectors_of(pattern: Rounds, k: int) -> Schedule:
    return Schedule("all_reduce", "vectors", k, 1, 3, lambda rank: exchange_vectors(rank, pattern))


@pytest.mark.parametrize("pattern, k", [(swing, 8), (swing, 64), (tripling, 9), (tripling, 27)])
def test_from_near_to_far_ranks_have_different_bits(
    pattern: Callable[[int], Rounds], k: int
) -> None:
    """So the order of the papers is left out, and its reverse is what the library has."""
    assert not verify(vectors_of(pattern(k), k)).same_everywhere
    assert verify(vectors_of(pattern(k)[::-1], k)).same_everywhere


# --- what it is for ---------------------------------------------------------------------------


@pytest.mark.parametrize("k", POWERS)
def test_messages_of_bine_are_ranges_where_those_of_swing_are_packed(k: int) -> None:
    packed = {
        name: sum(
            packed_chunks(step)
            for rank in range(k)
            for step in schedule_of("all_reduce", name, k).steps(rank)
        )
        for name in ("swing", "bine")
    }
    assert packed["bine"] == 0
    assert (packed["swing"] > 0) == (k > 2)
    peers = [
        sorted((*message[:3], len(message.chunks)) for message in messages_of(schedule))
        for schedule in (schedule_of("all_reduce", name, k) for name in packed)
    ]
    assert peers[0] == peers[1]


FAR_LESS = [
    ("broadcast", "bine_tree", "binomial_tree", 0.88),
    ("reduce", "bine_tree", "binomial_tree", 0.88),
    ("gather", "bine_tree", "binomial_tree", 0.91),
    ("scatter", "bine_tree", "binomial_tree", 0.91),
    ("all_reduce", "bine_tree", "binomial_tree", 0.77),
    ("all_reduce", "bine", "rabenseifner", 0.83),
    ("all_reduce", "swing_latency", "recursive_doubling", 0.88),
    ("all_to_all", "bine", "bruck", 0.85),
    ("reduce_scatter", "bine", "recursive_halving", 0.21),
    ("all_gather", "bine", "bruck", 0.20),
    ("all_gather", "bine", "pat", 0.76),
]


@pytest.mark.parametrize("collective, name, other, ratio", FAR_LESS)
def test_less_traffic_from_host_to_host(
    collective: str, name: str, other: str, ratio: float
) -> None:
    """64 ranks on hosts of 12, the mean over all places of the borders."""
    near, far = (far_traffic(schedule_of(collective, each, 64), 12) for each in (name, other))
    assert float(near / far) == pytest.approx(ratio, abs=0.006)


def test_binomial_trees_stay_better_where_hosts_hold_a_power_of_two() -> None:
    """There a binomial tree goes to each host once."""
    schedules = [schedule_of("broadcast", name, 64) for name in ("binomial_tree", "bine_tree")]
    across = [
        sum(message.source // 8 != message.target // 8 for message in messages_of(schedule))
        for schedule in schedules
    ]
    assert across[0] == 7 < across[1]


@pytest.mark.parametrize("k", [16, 64])
def test_total_distance_of_exchanges_falls_towards_two_thirds(k: int) -> None:
    total = [
        sum(map(max, distances(schedule_of("all_reduce", name, k))))
        for name in (
            "swing_latency",
            "recursive_doubling",
        )
    ]
    near, far = total
    assert (
        near
        == sum(map(max, published(k)))
        < far
        == sum(min(distance, k - distance) for distance in (2**step for step in range(lg(k))))
    )
    assert all(first <= second for first, second in pairwise(map(max, published(k))))
