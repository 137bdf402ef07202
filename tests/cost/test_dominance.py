"""The Pareto front, and the distance to the lower bounds."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringcoll.schedules import Counts, verify
from ringcoll.schedules.algorithms import algorithms, schedule_of
from ringcoll.schedules.cost import bound_of, distance, lower_bound
from ringcoll.schedules.cost.counts import dominates, dominators

COSTS = st.builds(
    lambda rounds, traffic, reduced: Counts(rounds, Fraction(traffic), Fraction(reduced)),
    *[st.integers(0, 3)] * 3,
)


@given(COSTS, COSTS)
def test_an_algorithm_dominates_if_it_is_never_slower_and_once_faster(
    first: Counts, second: Counts
) -> None:
    pairs: list[tuple[Any, Any]] = list(zip(first, second, strict=True))
    never_slower = all(ours <= theirs for ours, theirs in pairs)
    assert dominates(first, second) == (never_slower and any(a < b for a, b in pairs))


@given(st.dictionaries(st.text("abc", max_size=3), COSTS, max_size=8))
def test_the_front_is_what_nothing_dominates(costs: dict[str, Counts]) -> None:
    found = dominators(costs)
    assert list(found) == list(costs)
    for name, cost in costs.items():
        others = [other for other in costs if dominates(costs[other], cost)]
        assert bool(found[name]) == bool(others)
        assert set(found[name]) == {other for other in others if not found[other]}


def test_equal_costs_are_both_on_the_front() -> None:
    cost = Counts(2, Fraction(1), Fraction(1))
    assert dominators({"first": cost, "second": cost}) == {"first": (), "second": ()}
    assert dominators({}) == {}


@pytest.mark.parametrize("world_size", [1, 2, 5, 8])
def test_no_algorithm_is_below_a_bound(world_size: int) -> None:
    for entry in algorithms():
        if entry.restriction(world_size):
            continue
        proof = verify(entry.schedule(world_size))
        bound, factors = bound_of(proof), distance(proof)
        assert bound == lower_bound(entry.collective, world_size, ports=max(1, proof.ports))
        amounts = [Fraction(proof.rounds), proof.traffic, proof.reduced]
        leasts = [Fraction(bound.rounds), bound.traffic, bound.reduced]
        for factor, amount, least in zip(factors, amounts, leasts, strict=True):
            if least:
                assert factor == amount / least >= 1
            else:
                assert factor is None


@pytest.mark.parametrize(
    "collective, name, world_size, words",
    [
        ("all_reduce", "rabenseifner", 8, "2.00x the rounds, 1.00x the traffic, 1.00x the reduced data"),
        ("all_gather", "ring", 5, "1.33x the rounds, 1.00x the traffic"),
        ("all_gather", "ring", 1, "all are 0"),
    ],
)  # fmt: skip
def test_the_distance_in_words(collective: str, name: str, world_size: int, words: str) -> None:
    assert str(distance(verify(schedule_of(collective, name, world_size)))) == words
