"""Predicted times: what they are made of, and what is chosen by them."""

from __future__ import annotations

import time
from dataclasses import replace
from fractions import Fraction
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringcoll.errors import ArgumentError
from ringcoll.runtime.transport import costs_of
from ringcoll.schedules import CONTRACTS, OperandOrder, verify
from ringcoll.schedules.algorithms import (
    Algorithm,
    Cost,
    algorithms,
    find,
    register,
    schedule_of,
    unregister,
)
from ringcoll.schedules.cost import LinkCosts, crowded_parameters, wavefront_counts
from ringcoll.schedules.cost.predict import (
    Parameters,
    Prediction,
    _countable,
    _least_s,
    _profile,
    fastest,
    predict,
    predictions,
    preferred,
)

WITHOUT_COPIES = ("binary_tree", "double_tree", "direct", "pairwise", "ring")
WORLDS = (1, 2, 3, 4, 5, 7, 8, 13)


def predicted(world_size: int, collective: str | None = None) -> list[Algorithm]:
    """The algorithms that are predicted: messages cost the same everywhere."""
    return [entry for entry in algorithms(collective, world_size) if not entry.needs_hosts]


def costs(crowd: float = 1.0) -> Parameters:
    """A network of 10 us and 1 GB/s; as many times slower if all send at once."""
    return Parameters(
        alpha_s=1e-5,
        beta_s_per_byte=1e-9,
        gamma_s_per_byte=1e-10,
        overhead_s=2e-6,
        crowded_alpha_s=crowd * 1e-5,
        crowded_beta_s_per_byte=crowd * 1e-9,
        crowded_gamma_s_per_byte=crowd * 1e-10,
    )


def any_costs() -> st.SearchStrategy[Parameters]:
    alpha, beta = st.floats(1e-7, 1e-2), st.floats(1e-12, 1e-7)
    return st.builds(
        lambda a, b, g, crowd, more: Parameters(
            alpha_s=a,
            beta_s_per_byte=b,
            gamma_s_per_byte=g,
            overhead_s=a * more,
            crowded_alpha_s=a * crowd,
            crowded_beta_s_per_byte=b * crowd,
            crowded_gamma_s_per_byte=g * crowd,
        ),
        alpha,
        beta,
        beta,
        st.floats(1, 20),
        st.floats(0, 1),
    )


collectives = st.sampled_from(sorted(CONTRACTS))
worlds = st.sampled_from(WORLDS)
sizes = st.integers(0, 1 << 30)


@given(collectives, worlds, sizes, sizes, any_costs())
def test_more_bytes_never_take_less_time(
    collective: str, world_size: int, first: int, second: int, found: Parameters
) -> None:
    few, many = sorted((first, second))
    for entry in predicted(world_size, collective):
        less = predict(entry, few, world_size, found).seconds
        assert less <= predict(entry, many, world_size, found).seconds * (1 + 1e-9)


@given(collectives, worlds, sizes, any_costs())
def test_they_are_sorted_and_positive(
    collective: str, world_size: int, nbytes: int, found: Parameters
) -> None:
    rows = predictions(collective, nbytes, world_size, found)
    assert rows
    assert len({row.algorithm for row in rows}) == len(rows)
    assert rows[0].seconds == min(row.seconds for row in rows)
    assert [row.seconds for row in rows] == sorted(row.seconds for row in rows)
    for row in rows:
        longer, shorter = max(row.path_s, row.crowded_s), min(row.path_s, row.crowded_s)
        assert shorter >= 0
        assert longer <= row.seconds <= longer + shorter
        if world_size == 1:
            assert row.seconds == 0


@given(collectives, worlds, sizes, any_costs(), st.sampled_from(OperandOrder))
def test_the_fastest_is_the_first_of_all(
    collective: str, world_size: int, nbytes: int, found: Parameters, order: OperandOrder
) -> None:
    """Whatever is left out for its lower bound."""
    rows = predictions(collective, nbytes, world_size, found)
    able = [row for row in rows if find(collective, row.algorithm).order >= order]
    close = tuple(row for row in able if row.seconds <= able[0].seconds * 1.2)
    assert fastest(collective, nbytes, world_size, found, order) == close


def test_few_algorithms_are_predicted_to_find_the_fastest() -> None:
    with mock.patch("ringcoll.schedules.cost.predict.predict", side_effect=predict) as counted:
        fastest("all_reduce", 4, 4, costs(), OperandOrder.ANY)
    assert counted.call_count <= len(predictions("all_reduce", 4, 4, costs())) / 2


@pytest.mark.parametrize("nbytes", [0, 1, 10**6])
@pytest.mark.parametrize("world_size", WORLDS)
def test_the_path_in_one_piece_is_that_of_the_literature(world_size: int, nbytes: int) -> None:
    found = replace(costs(), overhead_s=0.0)
    machine = LinkCosts(alpha_s=1e-5, beta_s_per_byte=1e-9, gamma_s_per_byte=1e-10)
    for entry in predicted(world_size):
        row = predict(entry, nbytes, world_size, found)
        whole = machine.seconds(nbytes, *entry.counts(world_size))
        # Copies for messages of several chunks are not in the literature's counts.
        copied = 1e-10 * nbytes * 2 * float(entry.counts(world_size).traffic)
        if row.num_segments == 1:
            assert row.num_waits == entry.counts(world_size).rounds
        if row.num_segments == 1 and entry.name not in WITHOUT_COPIES:
            assert whole * (1 - 1e-9) <= row.path_s <= (whole + copied) * (1 + 1e-9)
        elif row.num_segments == 1:
            assert row.path_s == pytest.approx(whole)
        else:
            assert row.path_s < whole


@pytest.mark.parametrize("name", ["binary_tree", "double_tree"])
@pytest.mark.parametrize("world_size", [3, 4, 7, 8])
def test_segments_are_counted_as_on_the_schedule(name: str, world_size: int) -> None:
    # So dear are bytes that many segments are best.
    found = replace(costs(), alpha_s=1e-9, crowded_alpha_s=1e-9, overhead_s=0.0)
    entry, nbytes = find("all_reduce", name), 1 << 26
    row = predict(entry, nbytes, world_size, found)
    assert row.num_segments > 8
    schedule = schedule_of("all_reduce", name, world_size)
    counts = wavefront_counts(schedule, row.num_segments)
    machine = LinkCosts(alpha_s=1e-9, beta_s_per_byte=1e-9, gamma_s_per_byte=1e-10)
    assert row.path_s == pytest.approx(machine.seconds(nbytes, *counts), rel=1e-6)
    assert row.segment_bytes is not None
    chunk = -(-nbytes // schedule.num_chunks)
    assert -(-chunk // row.segment_bytes) == row.num_segments
    assert row.num_waits == counts.rounds == entry.counts(world_size).rounds + row.num_segments - 1
    # Each message of a rank is as many as there are segments.
    free = replace(found, crowded_beta_s_per_byte=0.0, crowded_gamma_s_per_byte=0.0)
    row = predict(entry, nbytes, world_size, free)
    messages = float(verify(schedule).messages_mean)
    assert row.crowded_s == pytest.approx(messages * row.num_segments * 1e-9)


@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 7, 8])
def test_what_all_do_is_counted_as_by_the_verifier(world_size: int) -> None:
    found = replace(costs(), crowded_alpha_s=1.0, crowded_beta_s_per_byte=1.0)
    for entry in predicted(world_size):
        if entry.pipelined:
            continue
        proof = verify(schedule_of(entry.collective, entry.name, world_size))
        row = predict(entry, 1, world_size, found)
        told = float(proof.messages_mean + proof.sent_mean)
        assert row.crowded_s == pytest.approx(told, abs=1e-6)


def test_few_rounds_for_short_vectors_little_traffic_for_long_ones() -> None:
    short = predictions("all_reduce", 64, 8, costs())[0].algorithm
    assert short == "recursive_doubling"
    long = predictions("all_reduce", 256 << 20, 8, costs())
    assert {row.algorithm for row in long[:3]} & {"ring", "rabenseifner"}
    times = {row.algorithm: row.seconds for row in long}
    assert times["ring"] < times["recursive_doubling"] / 1.5
    assert times["ring"] < times["binomial_tree"] / 1.5


def test_a_tree_gains_where_ranks_share_cores() -> None:
    def lead(crowd: float) -> float:
        rows = predictions("all_reduce", 1 << 10, 8, costs(crowd))
        times = {row.algorithm: row.seconds for row in rows}
        return times["ring"] / times["binomial_tree"]

    assert lead(4.0) > 1.5 * lead(1.0)
    # Of those that send the fewest messages the one with the shortest path: trees, and the star.
    best, *trees = predictions("all_reduce", 64, 8, costs(8.0))[:5]
    names = {"binary_tree", "binomial_tree", "bine_tree", "dual_root"}
    assert {row.algorithm for row in trees} == names
    fewest = {
        verify(schedule_of("all_reduce", row.algorithm, 8)).messages_mean for row in (best, *trees)
    }
    assert fewest == {Fraction(2 * 7, 8)}
    assert best.path_s < trees[0].path_s


def test_many_messages_in_a_step_are_not_free() -> None:
    found = {row.algorithm: row for row in predictions("all_reduce", 4, 8, costs())}
    assert found["direct"].path_s > 1e-5 + 5 * 2e-6


def test_further_messages_are_as_many_as_ranks() -> None:
    """In a step of ``direct`` a rank posts a message for each other rank."""
    costs_s: dict[str, Any] = {
        name: 0.0 for name in Parameters.__slots__ if name.endswith(("_s", "_per_byte"))
    }
    only = Parameters(**costs_s | {"overhead_s": 1.0})
    for world_size in (8, 64, 256):
        row = predict(find("all_reduce", "direct"), 0, world_size, only)
        assert row.path_s == pytest.approx(world_size - 2, rel=0.1)


def test_of_equals_one_without_segments_comes_first() -> None:
    rows = predictions("all_reduce", 64 << 20, 2, costs())
    assert len({row.seconds for row in rows[:4]}) == 1
    best = [row.algorithm for row in rows[:4]]
    assert best == ["rabenseifner", "ring", "two_shot", "double_tree"]


def test_copies_decide_between_two_that_send_the_same() -> None:
    rows = predictions("all_gather", 4 << 10, 8, costs())
    times = {row.algorithm: row.seconds for row in rows}
    assert times["recursive_doubling"] < times["bruck"] < times["ring"]


def test_slices_cost_messages_and_copies_and_spare_writes() -> None:
    whole = replace(costs(), overhead_s=0.0)
    sliced = replace(whole, slice_bytes=1 << 18)
    n = 4 << 20
    rows = {
        which: {row.algorithm: row for row in predictions("all_reduce", n, 4, which)}
        for which in (whole, sliced)
    }
    for name, chunk, rounds in (
        ("ring", n // 4, 6),
        ("two_shot", n // 4, 2),
        ("double_tree", n // 2, 4),
    ):
        slices = chunk >> 18
        assert rows[sliced][name].num_waits >= rounds + slices - 1
    # Its messages are of two chunks in its first and last step, which no slice has side by side.
    gained = {
        name: rows[sliced][name].crowded_s - rows[whole][name].crowded_s
        for name in ("ring", "rabenseifner", "two_shot")
    }
    alpha_s, beta_s = whole.alpha_s, whole.beta_s_per_byte
    assert gained["ring"] == pytest.approx(6 * 3 * alpha_s)
    # Two chunks are packed before the first message, two before the last one, and two are unpacked after it.
    assert gained["rabenseifner"] == pytest.approx(4 * 3 * alpha_s + 6 / 4 * n * beta_s)
    # Of three totals two are not written again: each of a quarter, of which half is the writer's.
    spared_s = 2 / 4 * n / 2 * beta_s
    assert gained["two_shot"] == pytest.approx(6 * 3 * alpha_s - spared_s)


def test_an_exchange_costs_as_one_message() -> None:
    plain = replace(costs(4.0), slice_bytes=1 << 18)
    quick = replace(plain, exchange_s=3e-6, exchanges_to=1 << 10)
    before, after = (
        {row.algorithm: row for row in predictions("all_reduce", 1 << 10, 4, which)}
        for which in (plain, quick)
    )
    assert {name for name in after if after[name] != before[name]} == {
        "direct",
        "recursive_multiplying",
    }
    row, nbytes = after["direct"], 3 * (1 << 10)
    assert row.path_s == pytest.approx(3e-6 + nbytes * 1.1e-9)
    assert row.crowded_s == pytest.approx(3e-6 + nbytes * (4e-9 * 2 / 3 + 4e-10))
    assert predictions("all_reduce", 1 << 10, 4, quick)[0].algorithm == "direct"
    assert fastest("all_reduce", 1 << 10, 4, quick, OperandOrder.ANY)[0] == row
    longer = ((1 << 10) + 1, 4)
    assert predictions("all_reduce", *longer, quick) == predictions("all_reduce", *longer, plain)


def test_bytes_cost_more_beyond_a_cache() -> None:
    flat = costs(2.0)
    curved = replace(flat, cached_beta_s_per_byte=2e-10, crowded_cached_beta_s_per_byte=8e-10)
    assert flat.at(5) is flat
    near, far = curved.at(1 << 21), curved.at(1 << 25)
    assert (near.beta_s_per_byte, near.crowded_beta_s_per_byte) == (2e-10, 8e-10)
    assert (far.beta_s_per_byte, far.crowded_beta_s_per_byte) == (1e-9, 2e-9)
    times = [n * curved.at(n).beta_s_per_byte for n in range(0, 1 << 26, 99_991)]
    assert times == sorted(times)
    middle = ((1 << 21) + (1 << 25)) // 2
    expected_s = ((1 << 21) * 2e-10 + (1 << 25) * 1e-9) / 2
    assert middle * curved.at(middle).beta_s_per_byte == pytest.approx(expected_s)


def test_what_a_program_registers_is_not_chosen() -> None:
    @register("all_reduce", "free", cost=Cost(rounds=lambda k: 0, traffic=Fraction))
    def free(rank, world_size):
        yield from ()

    try:
        assert "free" not in {row.algorithm for row in predictions("all_reduce", 4, 4, costs())}
    finally:
        unregister("all_reduce", "free")


def test_blocks_of_unknown_lengths_are_sent_in_pairs() -> None:
    assert [row.algorithm for row in predictions("all_to_all", 4, 8, costs())] == ["pairwise"]


@pytest.mark.parametrize("world_size", [64, 1000])
def test_many_ranks_are_predicted_at_once(world_size: int) -> None:
    start = time.perf_counter()
    rows = predictions("all_reduce", 1 << 20, world_size, costs())
    assert time.perf_counter() - start < 10  # counting on all ranks would take minutes
    assert {row.algorithm for row in rows} >= {"ring", "double_tree", "binomial_tree"}
    # By the formula, and the tree has fewer messages than the ring.
    times = {row.algorithm: row for row in rows}
    assert times["ring"].path_s == pytest.approx(
        2 * (world_size - 1) * 1e-5 + (2e-9 + 1e-10) * (world_size - 1) / world_size * 2**20
    )
    messages = {name: row.crowded_s for name, row in _messages_only(world_size).items()}
    assert messages["ring"] == pytest.approx(2 * (world_size - 1))
    if world_size == 64:  # elsewhere its path has two rounds in which few are busy
        assert messages["recursive_doubling"] == pytest.approx(6)
    assert 1.9 < messages["binomial_tree"] < 2.3  # 2 (k - 1) / k


def _messages_only(world_size: int) -> dict[str, Prediction]:
    nothing = replace(costs(), crowded_alpha_s=1.0)
    return {row.algorithm: row for row in predictions("all_reduce", 0, world_size, nothing)}


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), "1", None, True])
def test_costs_are_numbers(value: object) -> None:
    with pytest.raises(ArgumentError, match="no cost"):
        replace(costs(), beta_s_per_byte=value)  # type: ignore[arg-type]


def test_built_in_costs_know_of_crowds() -> None:
    alone, crowded = (
        crowded_parameters(costs_of("ucx"), 8, cores=8),
        crowded_parameters(costs_of("ucx"), 8, cores=2),
    )
    assert crowded.crowded_alpha_s == 4 * alone.crowded_alpha_s
    assert crowded_parameters(costs_of("ucx"), 8, 4, cores=2) == alone


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ring", "direct", "two_shot"])
@pytest.mark.parametrize("world_size", [33, 64, 200])
def test_what_is_not_counted_goes_on_in_a_straight_line(name: str, world_size: int) -> None:
    """Rings and direct exchanges are straight lines, so the guess is what would be counted."""
    entry = find("all_reduce", name)
    proof = verify(schedule_of("all_reduce", name, world_size))
    profile = _profile(entry, world_size)
    assert _countable(entry, world_size) < world_size
    assert profile.means.messages == pytest.approx(float(proof.messages_mean))
    assert profile.means.sent == pytest.approx(float(proof.sent_mean))
    assert profile.means.reduced == pytest.approx(float(proof.reduced))


@pytest.mark.parametrize("name, most", [("ring", 14), ("binary_tree", 3), ("binomial_tree", 3)])
def test_a_segment_adds_the_messages_of_the_busiest_rank(name: str, most: int) -> None:
    pieces = _profile(find("all_reduce", name), 8).pieces
    assert pieces is None or pieces.further == most - 1


def test_a_chain_has_no_further_messages_and_is_cut_as_often_as_is_allowed() -> None:
    chain = find("broadcast", "chain")
    pieces = _profile(chain, 8).pieces
    assert pieces is not None
    assert pieces.further == 0
    free = replace(costs(), alpha_s=1e-9, crowded_alpha_s=1e-9, overhead_s=0.0)
    assert predict(chain, 1 << 40, 8, free).num_segments == 1024
    assert predict(chain, 0, 8, free).num_segments == 1


@pytest.mark.parametrize("collective", CONTRACTS)
@pytest.mark.parametrize("world_size", WORLDS)
def test_what_cannot_run_is_not_predicted(collective: str, world_size: int) -> None:
    rows = predictions(collective, 1 << 10, world_size, costs())
    able = {entry.name for entry in algorithms(collective, world_size, variants=True)}
    assert rows
    assert {row.algorithm for row in rows} <= able


def test_through_slices_a_byte_is_charged_half_to_each_of_its_ends() -> None:
    whole = replace(costs(), slice_bytes=0)
    sliced = replace(whole, slice_bytes=1 << 18)
    nbytes = 1 << 18  # one slice
    found = [
        {row.algorithm: row for row in predictions("reduce", nbytes, 2, which)}
        for which in (whole, sliced)
    ]
    beta_s = whole.beta_s_per_byte
    # One rank sends all, the other one receives it.
    before, after = (rows["binomial_tree"] for rows in found)
    assert before.path_s - after.path_s == pytest.approx(nbytes / 2 * beta_s)
    # Both send and receive a half; then one of them sends a half.
    before, after = (rows["reduce_scatter_gather"] for rows in found)
    assert before.path_s - after.path_s == pytest.approx(nbytes / 4 * beta_s)


def test_few_waits_are_preferred_where_a_wait_decides() -> None:
    def row(name: str, seconds: float, waits: int) -> Prediction:
        return Prediction(name, seconds, seconds, 0.0, waits, 1, None)

    found = replace(costs(), alpha_s=1e-5, crowded_alpha_s=1e-5)
    first = row("first", 100e-6, 4)
    for other, is_preferred in (
        (row("half", 119e-6, 2), True),
        (row("less than half", 119e-6, 1), True),
        (row("more than half", 101e-6, 3), False),
        (row("much later", 121e-6, 1), False),
    ):
        assert preferred([first, other], found) is (other if is_preferred else first)
    # Two waits take 2 us: they do not make up for 3.
    short = replace(found, alpha_s=1e-6, crowded_alpha_s=1e-6)
    assert preferred([first, row("half", 103e-6, 2)], short) is first


def test_who_sends_what_comes_back_writes_and_reads_in_turn() -> None:
    whole = replace(costs(), slice_bytes=0)
    sliced = replace(whole, slice_bytes=1 << 18)
    before, after = (
        {row.algorithm: row.path_s for row in predictions("all_reduce", 1 << 18, 2, which)}
        for which in (whole, sliced)
    )
    assert after["binomial_tree"] == before["binomial_tree"]


@pytest.mark.parametrize("slice_bytes", [0, 1 << 18])
@pytest.mark.parametrize("exchanges_to", [0, 1 << 10])
@pytest.mark.parametrize("collective", CONTRACTS)
def test_no_prediction_is_below_its_bound(
    collective: str, slice_bytes: int, exchanges_to: int
) -> None:
    """Algorithms whose bounds are too high would be left out, and a slower one taken."""
    which = replace(
        costs(), slice_bytes=slice_bytes, exchanges_to=exchanges_to, exchange_s=3e-6,
        cached_beta_s_per_byte=2e-10, crowded_cached_beta_s_per_byte=2e-10,
    )  # fmt: skip
    for world_size in WORLDS:
        for entry in predicted(world_size, collective):
            for nbytes in (0, 1, 1000, 1 << 18, 1 << 20, 1 << 22, 1 << 26):
                path_s = predict(entry, nbytes, world_size, which).path_s
                least_s = _least_s(entry, nbytes, world_size, which)
                assert least_s <= path_s * (1 + 1e-12), (entry.name, world_size, nbytes)


def test_a_bound_is_the_time_of_rounds_and_traffic_and_in_slices_of_half_of_it() -> None:
    entry, nbytes = find("all_reduce", "rabenseifner"), 1 << 20
    traffic, reduced = 2 * 3 / 4 * nbytes * 1e-9, 3 / 4 * nbytes * 1e-10
    assert _least_s(entry, nbytes, 4, costs()) == pytest.approx(4e-5 + traffic + reduced)
    sliced = replace(costs(), slice_bytes=1 << 18)
    assert _least_s(entry, nbytes, 4, sliced) == pytest.approx(4e-5 + (traffic / 2 + reduced))
    quick = replace(costs(), exchanges_to=1, exchange_s=3e-6)
    assert _least_s(entry, nbytes, 4, quick) == pytest.approx(4 * 3e-6 + traffic + reduced)
    assert _least_s(entry, nbytes, 4, replace(quick, exchange_s=1.0)) == pytest.approx(
        4e-5 + traffic + reduced
    )
    chain = find("broadcast", "chain")  # in pieces it is as fast as the literature has it
    assert _least_s(chain, nbytes, 4, costs()) == pytest.approx(3e-5)
