"""Algorithms whose ranks stand in another order: the same proof and the same cost, along other links."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ringcoll
from ringcoll.errors import (
    ArgumentError,
    RulesError,
    ScheduleError,
    UnknownAlgorithmError,
    UnsupportedWorldSizeError,
)
from ringcoll.schedules import Send, contract, tally_of, verify
from ringcoll.schedules.algorithms import algorithms, find, order_in_text, register, unregister
from ringcoll.schedules.cost import in_text, parse_rules
from tests.cases.effort import effort


@effort(60)
@given(st.integers(1, 40).flatmap(lambda number: st.permutations(range(number))))
def test_an_order_is_read_as_it_was_written(order: list[int]) -> None:
    text = order_in_text(order)
    read = find("all_reduce", f"ring~{text}")
    assert read.name == f"ring~{text}"
    if len(order) > 1:
        peers = [
            operation.peer
            for step in read.schedule(len(order)).steps(order[0])
            for operation in step
            if isinstance(operation, Send)
        ]
        assert set(peers) == {order[1]}  # the rank at place 0 sends to that at place 1


@pytest.mark.parametrize("world_size", [2, 3, 5, 8])
def test_every_algorithm_in_another_order_is_right_at_the_same_cost(world_size: int) -> None:
    order = list(range(world_size))
    Random(world_size).shuffle(order)
    for entry in algorithms(None, world_size):
        if contract(entry.collective).is_prefix:
            continue
        moved = find(entry.collective, f"{entry.name}~{order_in_text(order)}")
        roots = (0, world_size - 1) if contract(entry.collective).rooted else (0,)
        for root in roots:
            schedule = moved.schedule(world_size, root)
            verify(schedule)
            place = order.index(root) if len(roots) > 1 else 0
            hosts = None
            if entry.needs_hosts:
                usual = entry.world(world_size)
                hosts = [usual[rank] for rank in order]
            plain, tally = tally_of(entry.schedule(world_size, place, hosts)), tally_of(schedule)
            assert tally.rounds == plain.rounds
            assert sorted(tally.sent) == sorted(plain.sent)
            assert tally.total_reduced == plain.total_reduced


@pytest.mark.parametrize(
    "text", ["", "0-", "0.0.1", "0.2", "1-3", "a", "0..1", "0-9999999", "-1.0"]
)
def test_what_is_no_order_is_refused(text: str) -> None:
    with pytest.raises(UnknownAlgorithmError):
        find("all_reduce", f"ring~{text}")


def test_a_prefix_is_about_the_order_of_ranks() -> None:
    with pytest.raises(UnknownAlgorithmError, match="scan is about the order of ranks"):
        find("scan", "linear~0.2.1")


def test_an_order_is_for_as_many_ranks_as_it_names() -> None:
    with pytest.raises(UnsupportedWorldSizeError, match="its order has 3"):
        find("all_reduce", "ring~0.2.1").schedule(4)


def test_the_sign_is_not_part_of_a_name() -> None:
    with pytest.raises(ScheduleError, match="~"):
        register("all_reduce", "own~0.1")(lambda rank, world_size: iter(()))


def test_a_rule_may_name_an_order() -> None:
    text = "all_reduce:64K-inf:ring~0.2.1@256K:k=3"
    assert in_text(parse_rules(text)) == text
    with pytest.raises(RulesError):
        parse_rules("all_reduce:*:ring~0.0")


def _calls(group: Any) -> list[Any]:
    rank, results = group.rank(), []
    vector = torch.arange(11, dtype=torch.float64) + 100 * rank
    ringcoll.all_reduce(vector, group=group, algorithm="ring~2.0.3.1")
    results.append(vector.tolist())
    blocks = torch.empty(4, 3, dtype=torch.int64)
    ringcoll.all_gather_into_tensor(
        blocks, torch.arange(3) + 10 * rank, group=group, algorithm="bruck~2.0.3.1"
    )
    results.append(blocks.tolist())
    own = torch.arange(5) + 10 * rank
    ringcoll.broadcast(own, src=3, group=group, algorithm="binomial_tree~1-0.3-2")
    results.append(own.tolist())
    return results


def test_calls_in_another_order() -> None:
    for results in ringcoll.run_threads(_calls, 4):
        assert results[0] == [4.0 * index + 600 for index in range(11)]
        assert results[1] == [[10 * rank + index for index in range(3)] for rank in range(4)]
        assert results[2] == [30, 31, 32, 33, 34]


def _not_commutative(group: Any) -> None:
    op = ringcoll.UserOp(lambda left, right: left, name="first", commutative=False)
    ringcoll.all_reduce(torch.ones(2), op, group=group, algorithm="linear~1.0.2")


def test_an_operator_that_does_not_commute_needs_rank_order() -> None:
    with pytest.raises(ArgumentError, match="does not keep operands in rank order"):
        ringcoll.run_threads(_not_commutative, 3)


def test_an_order_of_a_users_algorithm_is_proved_as_his() -> None:
    def silent(rank: int, world_size: int) -> Any:
        yield from ()

    register("all_reduce", "silent")(silent)
    try:
        assert not find("all_reduce", "silent~1.0").built_in
        assert find("all_reduce", "ring~1.0").built_in
    finally:
        unregister("all_reduce", "silent")
