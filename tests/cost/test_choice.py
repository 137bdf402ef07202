"""What the rules, the model and a table choose, for every operator."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringcoll import UserOp
from ringcoll.errors import TuningFileError
from ringcoll.runtime.reduction import as_operator
from ringcoll.runtime.transport import costs_of
from ringcoll.schedules import CONTRACTS, OperandOrder, Program, contract, verify
from ringcoll.schedules.algorithms import (
    algorithms,
    find,
    order_of,
    proved_schedule,
    register,
    schedule_of,
    unregister,
)
from ringcoll.schedules.cost import (
    BUILT_IN,
    MEASURED,
    Table,
    crowded_parameters,
    parse_rules,
    predictions,
)
from ringcoll.schedules.cost.choice import (
    CUDA_SEGMENT_BYTES,
    PIPELINED_SEGMENT_BYTES,
    Choice,
    choose,
    segment_bytes_of,
    segment_count,
)
from tests.cases.algorithms import worlds_of

SIZES = (0, 4, 1 << 10, 1 << 16, 1 << 20, 1 << 26)
IN_ORDER = as_operator(UserOp(lambda x, y: x, name="first"))
LEFT = as_operator(UserOp(lambda x, y: x, associative=False, name="fold"))


def table(world_size: int, **more: Any) -> Table:
    found = crowded_parameters(costs_of("gloo"), world_size, cores=world_size)
    return Table(transport="gloo", world_size=world_size, parameters=found, **more)


@given(st.sampled_from(sorted(CONTRACTS)), st.sampled_from(SIZES), st.sampled_from([1, 2, 3, 5, 8]))
def test_without_rules_the_least_predicted_time_is_chosen_or_half_of_its_waits(
    collective: str, nbytes: int, world_size: int
) -> None:
    own = table(world_size)
    choice = choose(collective, nbytes, world_size, own)
    rows = predictions(collective, nbytes, world_size, own.parameters)
    first, chosen = rows[0], choice.predicted
    assert chosen is not None
    if not CONTRACTS[collective].common_lengths:
        return
    wait_s = max(own.parameters.alpha_s, own.parameters.crowded_alpha_s)
    few = [row for row in rows if row.seconds <= 1.2 * first.seconds]
    few = [row for row in few if row.num_waits <= first.num_waits / 2]
    few = [
        row
        for row in few
        if row.seconds + row.num_waits * wait_s < first.seconds + first.num_waits * wait_s
    ]
    assert chosen.num_waits == min((row.num_waits for row in few), default=first.num_waits)
    assert chosen in few if few else chosen == first
    assert choice.reason.startswith("few waits" if chosen != first else "the least predicted time")


@pytest.mark.slow
@given(st.sampled_from(sorted(CONTRACTS)), st.sampled_from(SIZES), st.integers(1, 64))
def test_what_is_chosen_is_defined_for_so_many_ranks(
    collective: str, nbytes: int, world_size: int
) -> None:
    forced = parse_rules("swing;trivance;neighbor_exchange")
    for own in (table(world_size), table(world_size, forced=forced)):
        name = choose(collective, nbytes, world_size, own).algorithm
        assert find(collective, name).restriction(world_size) is None


@pytest.mark.parametrize(
    "collective, name, few, many", [("all_reduce", "swing", 6, 8), ("all_reduce", "trivance", 8, 9)]
)
def test_a_rule_counts_where_its_algorithm_is_defined(
    collective: str, name: str, few: int, many: int
) -> None:
    chosen = [
        choose(collective, 4096, k, table(k, forced=parse_rules(f"{name};ring"))).algorithm
        for k in (few, many)
    ]
    assert chosen == ["ring", name]


@pytest.mark.slow
@given(st.sampled_from(sorted(CONTRACTS)), st.sampled_from(SIZES), st.integers(2, 32))
def test_a_second_choice_is_chosen_only_if_it_is_faster(
    collective: str, nbytes: int, world_size: int
) -> None:
    best, *others = predictions(collective, nbytes, world_size, table(world_size).parameters)
    if find(collective, best.algorithm).second_choice:
        for row in others:
            if not find(collective, row.algorithm).second_choice:
                assert best.seconds < row.seconds


def test_of_equal_times_the_first_choice_is_chosen() -> None:
    own = table(2)
    rows = predictions("all_reduce", 1 << 24, 2, own.parameters)
    equal = [row.algorithm for row in rows if row.seconds == rows[0].seconds]
    later = [find("all_reduce", name).second_choice for name in equal]
    assert later == sorted(later)
    assert {True, False} == set(later)
    assert choose("all_reduce", 1 << 24, 2, own).algorithm == equal[0]


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 6, 8])
@pytest.mark.parametrize("operator", [IN_ORDER, LEFT], ids=str)
def test_operators_that_need_an_order_get_it(operator: Any, world_size: int) -> None:
    forced = parse_rules("ring;double_tree")  # neither keeps it
    for collective in ("all_reduce", "reduce_scatter", "reduce"):
        for nbytes in SIZES:
            for own in (table(world_size), table(world_size, forced=forced)):
                choice = choose(collective, nbytes, world_size, own, operator.order)
                for root in range(world_size) if collective == "reduce" else (0,):
                    # Raises if the order is another one.
                    proved_schedule(
                        collective,
                        find(collective, choice.algorithm),
                        world_size,
                        root,
                        None,
                        order=operator.order,
                        operator=str(operator),
                        rank=0,
                    )


@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter", "reduce"])
def test_operands_that_have_to_meet_at_once_do_so_on_several_hosts(collective: str) -> None:
    across = parse_rules("all_reduce:0-inf:hierarchical:hosts=2-inf")
    for nbytes in SIZES:
        own = table(8, hosts=2, tuned=across, source=MEASURED)
        choice = choose(collective, nbytes, 8, own, OperandOrder.AT_ONCE)
        assert find(collective, choice.algorithm).order is OperandOrder.AT_ONCE
    assert choose("all_reduce", 1 << 20, 8, own).algorithm == "hierarchical"


def test_what_is_taken_for_in_order_is_so_everywhere() -> None:
    kept = [entry for entry in algorithms() if entry.order is not OperandOrder.ANY]
    assert len(kept) >= 7
    for entry in kept:
        for world_size in worlds_of(entry, 1, 2, 3, 4, 5, 6, 7, 8, 11, 16):
            roots = range(world_size) if contract(entry.collective).rooted else (0,)
            for root in roots:
                schedule = schedule_of(entry.collective, entry.name, world_size, root)
                assert order_of(schedule) >= entry.order


def test_and_the_test_would_find_one_that_is_not() -> None:
    assert not verify(schedule_of("all_reduce", "ring", 4)).rank_order
    assert not verify(schedule_of("reduce", "binomial_tree", 4, 1)).rank_order


def test_forced_rules_come_before_tuned_ones() -> None:
    own = table(
        4,
        forced=parse_rules("all_reduce:0-1K:auto;all_reduce:0-64K:direct"),
        tuned=parse_rules("all_reduce:*:ring"),
        source="tuning.json",
    )
    choices = [choose("all_reduce", n, 4, own) for n in (4, 4096, 1 << 20)]
    assert [choice.algorithm for choice in choices] == ["ring", "direct", "ring"]
    assert "RINGCOLL_ALGORITHM" in choices[1].reason
    assert "tuning.json" in choices[2].reason


def test_all_to_all_is_not_to_be_forced() -> None:
    own = table(4, forced=parse_rules("all_to_all:*:bruck"))
    assert choose("all_to_all", 64, 4, own).algorithm == "pairwise"


def test_segments_of_a_rule() -> None:
    def of(text: str) -> int | None:
        own = table(8, tuned=parse_rules(text), source="tuning.json")
        return choose("all_reduce", 64 << 20, 8, own).segment_bytes

    assert of("double_tree@256K") == 256 << 10
    assert of("ring@256K") == 256 << 10
    assert of("ring") is None
    entry = next(one for one in table_predictions() if one.algorithm == "double_tree")
    assert of("double_tree") == entry.segment_bytes


def test_segments_of_a_users_algorithm_are_not_predicted() -> None:
    entry = find("all_reduce", "double_tree")

    def mine(rank: int, world_size: int) -> Program:
        yield from entry.program(rank, world_size)

    register("all_reduce", "mine", chunks=entry.chunks, pipelined=True)(mine)
    try:
        for source in (BUILT_IN, MEASURED):
            own = table(8, tuned=parse_rules("mine", known_only=False), source=source)
            assert choose("all_reduce", 1 << 20, 8, own).segment_bytes == PIPELINED_SEGMENT_BYTES
        built_in = table(8, tuned=parse_rules("double_tree"), source=MEASURED)
        predicted = choose("all_reduce", 1 << 20, 8, built_in).segment_bytes
        assert predicted not in (None, PIPELINED_SEGMENT_BYTES)
    finally:
        unregister("all_reduce", "mine")


def test_rules_that_an_order_does_not_allow_are_passed_over() -> None:
    own = table(4, forced=parse_rules("ring;direct"))
    choice = choose("all_reduce", 64, 4, own, OperandOrder.RANK)
    assert choice.algorithm == "direct"
    assert choice.reason.startswith("by the rule ")
    best = choose("all_reduce", 64, 4, table(4), OperandOrder.RANK)
    assert " of those that reduce in " in best.reason
    assert " of those " not in choose("all_reduce", 64, 4, table(4)).reason


def test_choices_are_kept() -> None:
    own = table(4)
    assert choose("all_reduce", 4, 4, own) is choose("all_reduce", 4, 4, own)


def test_a_choice_in_words() -> None:
    own = table(8, tuned=parse_rules("double_tree@256K;ring"), source="tuning.json")
    choice = choose("all_reduce", 64 << 20, 8, own)
    assert str(choice) == (
        "all_reduce of 67108864 bytes on 8 ranks over gloo: double_tree in segments of "
        f"262144 bytes; {choice.reason}"
    )
    whole = choose("all_reduce", 4, 8, table(8, forced=parse_rules("ring")))
    assert str(whole) == f"all_reduce of 4 bytes on 8 ranks over gloo: ring; {whole.reason}"


def test_an_algorithm_without_a_prediction() -> None:
    choice = Choice("all_reduce", 4, 8, "nobody's", None, "", table_predictions(), table(8))
    assert choice.predicted is None


@pytest.mark.parametrize(
    "algorithm, nbytes, segment_bytes, numel, count",
    [
        ("ring", 64 << 20, None, 1 << 20, 1),
        ("double_tree", 64 << 20, None, 1 << 20, 64),
        ("double_tree", (64 << 20) + 1, None, 1 << 20, 65),
        ("ring", 5, 2, 100, 3),
        ("ring", 10, 1, 100, 10),
        ("ring", 10, 1, 4, 4),
        ("ring", 10, 0, 4, 4),
        ("ring", 10, 100, 4, 1),
        ("ring", 0, 8, 0, 1),
    ],
)
def test_how_many_segments(
    algorithm: str, nbytes: int, segment_bytes: int | None, numel: int, count: int
) -> None:
    schedule = schedule_of("all_reduce", algorithm, 4)
    assert segment_count(schedule, nbytes, segment_bytes, numel) == count


def test_segments_for_cuda_tensors_have_a_size_of_their_own() -> None:
    assert CUDA_SEGMENT_BYTES != PIPELINED_SEGMENT_BYTES
    sizes = {"cpu": PIPELINED_SEGMENT_BYTES, "cuda": CUDA_SEGMENT_BYTES}
    for device, segment_bytes in sizes.items():
        for algorithm in ("double_tree", schedule_of("all_reduce", "double_tree", 4)):
            assert segment_bytes_of("all_reduce", algorithm, device) == segment_bytes
        for algorithm in ("auto", "ring", "tree", schedule_of("all_reduce", "ring", 4)):
            assert segment_bytes_of("all_reduce", algorithm, device) is None
        # Nothing was measured, and a rule asks for an algorithm.
        own = table(8, forced=parse_rules("double_tree"), device=device)
        assert own.source == BUILT_IN
        assert choose("all_reduce", 64 << 20, 8, own).segment_bytes == segment_bytes


@pytest.mark.parametrize(
    "source, origin",
    [
        (BUILT_IN, "built-in"),
        (MEASURED, "measured with CUDA tensors"),
        ("tuning.json", "tuning.json, measured with CUDA tensors"),
    ],
)
def test_a_table_says_with_what_tensors_it_was_measured(source: str, origin: str) -> None:
    own = table(4, source=source, device="cuda", tuned=parse_rules("broadcast:*:chain"))
    assert own.origin == origin
    assert f"(costs: {origin})" in choose("all_reduce", 4, 4, own).reason
    assert choose("broadcast", 4, 4, own).reason.endswith(f"({origin})")
    assert Table.from_json(json.loads(own.dumps())).origin == origin


def table_predictions() -> tuple[Any, ...]:
    return predictions("all_reduce", 64 << 20, 8, table(8).parameters)


def test_a_table_survives_json() -> None:
    own = table(4, forced=parse_rules("ring"), tuned=parse_rules("all_reduce:0-3:direct"))
    again = Table.from_json(json.loads(own.dumps()))
    assert again.to_json() == own.to_json()
    assert again.parameters == own.parameters


@pytest.mark.parametrize(
    "change",
    [
        {"transport": 3},
        {"device": "tpu"},
        {"device": ["cuda"]},
        {"world_size": 0},
        {"hosts": "1"},
        {"parameters": {}},
        {"parameters": {"alpha_s": 1}},
        {"tuned": "all_reduce:4"},
        {"tuned": None},
    ],
    ids=str,
)
def test_other_things_are_no_tables(change: dict[str, Any]) -> None:
    with pytest.raises(TuningFileError, match="not a table"):
        Table.from_json(table(4).to_json() | change)
