"""What each collective promises."""

from __future__ import annotations

from fractions import Fraction

import pytest

from ringcoll.errors import ScheduleError
from ringcoll.schedules import CONTRACTS, Contract, contract

NAMES = (
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "exscan",
    "gather",
    "reduce",
    "reduce_scatter",
    "scan",
    "scatter",
)
WORLDS = (1, 2, 3, 5, 8)


def test_the_collectives() -> None:
    assert sorted(CONTRACTS) == list(NAMES)
    for name in NAMES:
        assert contract(name).collective == name


def test_an_unknown_collective_lists_the_known_ones() -> None:
    with pytest.raises(ScheduleError) as caught:
        contract("allreduce")
    assert "'allreduce'" in str(caught.value)
    for name in NAMES:
        assert name in str(caught.value)


def blocks(rules: Contract, world_size: int, root: int) -> tuple[list[list[int]], list[list[int]]]:
    ranks = range(world_size)
    return (
        [list(rules.inputs(rank, world_size, root)) for rank in ranks],
        [list(rules.outputs(rank, world_size, root)) for rank in ranks],
    )


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("name", NAMES)
def test_every_promise_can_be_kept(name: str, world_size: int) -> None:
    """What is due somewhere is there at the start: at its owner, or at all ranks."""
    rules, root = contract(name), (world_size - 1) // 2
    inputs, outputs = blocks(rules, world_size, root)
    every = set(range(rules.num_blocks(world_size)))
    assert set().union(*map(set, inputs)) == every
    # An exscan leaves a rank that is alone without a result.
    assert set().union(*map(set, outputs)) == (
        every if (name, world_size) != ("exscan", 1) else set()
    )
    for block in every:
        if rules.reduces:
            assert all(block in mine for mine in inputs)
        else:
            owner = rules.owner(block, world_size, root)
            assert [rank for rank in range(world_size) if block in inputs[rank]] == [owner]


def test_where_data_are() -> None:
    assert blocks(contract("all_gather"), 3, 0) == ([[0], [1], [2]], [[0, 1, 2]] * 3)
    assert blocks(contract("reduce_scatter"), 3, 0) == ([[0, 1, 2]] * 3, [[0], [1], [2]])
    assert blocks(contract("all_reduce"), 3, 0) == ([[0]] * 3, [[0]] * 3)
    assert blocks(contract("broadcast"), 3, 1) == ([[], [0], []], [[0]] * 3)
    assert blocks(contract("reduce"), 3, 1) == ([[0]] * 3, [[], [0], []])
    assert blocks(contract("gather"), 3, 1) == ([[0], [1], [2]], [[], [0, 1, 2], []])
    assert blocks(contract("scatter"), 3, 1) == ([[], [0, 1, 2], []], [[0], [1], [2]])
    assert blocks(contract("all_to_all"), 2, 0) == ([[0, 1], [2, 3]], [[0, 2], [1, 3]])
    assert blocks(contract("barrier"), 2, 0) == ([[0]] * 2, [[0]] * 2)
    assert blocks(contract("scan"), 3, 0) == ([[0]] * 3, [[0]] * 3)
    assert blocks(contract("exscan"), 3, 0) == ([[0]] * 3, [[], [0], [0]])


def test_who_contributes() -> None:
    for name in NAMES:
        ranks = [contract(name).contributors(rank, 4) for rank in range(4)]
        assert ranks == {"scan": [1, 2, 3, 4], "exscan": [0, 1, 2, 3]}.get(name, [4] * 4)
        assert contract(name).is_prefix == (name in ("scan", "exscan"))


def test_owners() -> None:
    assert contract("all_to_all").owner(7, 3, 0) == 2
    assert contract("gather").owner(2, 3, 1) == 2
    assert contract("scatter").owner(2, 3, 1) == 1
    assert contract("broadcast").owner(0, 3, 2) == 2
    assert contract("all_gather").owner(1, 3, 0) == 1


def test_what_sets_collectives_apart() -> None:
    def those_that(attribute: str) -> set[str]:
        return {name for name in NAMES if getattr(contract(name), attribute)}

    reducing = {"all_reduce", "barrier", "exscan", "reduce", "reduce_scatter", "scan"}
    assert those_that("reduces") == reducing
    assert those_that("rooted") == {"broadcast", "gather", "reduce", "scatter"}
    assert set(NAMES) - those_that("in_place") == {"all_to_all"}
    assert set(NAMES) - those_that("common_lengths") == {"all_to_all"}
    assert those_that("at_least_once") == {"barrier"}


@pytest.mark.parametrize(
    "name, factor",  # nccl-tests, doc/PERFORMANCE.md, for 4 ranks
    [
        ("all_reduce", Fraction(3, 2)),
        ("reduce_scatter", Fraction(3, 4)),
        ("all_gather", Fraction(3, 4)),
        ("broadcast", Fraction(1)),
        ("reduce", Fraction(1)),
        ("all_to_all", Fraction(3, 4)),
        ("gather", Fraction(3, 4)),
        ("scatter", Fraction(3, 4)),
    ],
)
def test_bus_bandwidth_factors(name: str, factor: Fraction) -> None:
    assert contract(name).busbw_factor(4) == factor


def test_chunks_divide_the_blocks() -> None:
    assert contract("all_reduce").chunks_per_block(6, 4) == 6
    assert contract("all_gather").chunks_per_block(8, 4) == 2
    assert contract("all_to_all").chunks_per_block(16, 4) == 1
    for name, num_chunks in (("all_gather", 6), ("all_to_all", 4), ("all_reduce", 0)):
        with pytest.raises(ScheduleError, match=f"{num_chunks} chunks do not divide evenly"):
            contract(name).chunks_per_block(num_chunks, 4)
