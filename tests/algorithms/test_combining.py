"""All-to-all by way of other ranks: digits of any radix, both sides at once, a torus."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringcoll.errors import UnknownAlgorithmError, UnsupportedWorldSizeError
from ringcoll.schedules import Proof, Schedule, Send, verify
from ringcoll.schedules.algorithms import find, on_hosts, schedule_of
from ringcoll.schedules.algorithms.combining import digits_of


def proof_of(name: str, k: int) -> Proof:
    """The proof, which also compares the stated cost with the counted one."""
    return verify(schedule_of("all_to_all", name, k))


def sent(schedule: Schedule, rank: int) -> list[list[tuple[int, int]]]:
    """How far each message of a rank goes, and its blocks, by steps."""
    k = schedule.world_size
    return [
        [((op.peer - rank) % k, len(op.refs)) for op in step if isinstance(op, Send)]
        for step in schedule.steps(rank)
    ]


# --- a radix ------------------------------------------------------------------------------


def written(number: int, radix: int) -> list[int]:
    """The digits of a number, the lowest first."""
    return [number] if number < radix else [number % radix, *written(number // radix, radix)]


@pytest.mark.slow
@pytest.mark.parametrize("k", range(2, 41))
def test_rounds_and_traffic_of_each_radix(k: int) -> None:
    """A round for each digit other than 0 that occurs at a place, and each such digit of each distance."""
    for radix in (2, 3, 4, 5, 8, k, k + 1):
        digits = Counter(
            (place, digit)
            for far in range(k)
            for place, digit in enumerate(written(far, radix))
            if digit
        )
        proof = proof_of(f"bruck={radix}", k)
        assert proof.rounds == len(digits)
        assert proof.traffic == proof.sent_max == Fraction(digits.total(), k)
        assert proof.ports == 1
        assert proof.rounds <= (radix - 1) * len(written(k - 1, radix))


@pytest.mark.parametrize("radix, power", [(2, 5), (3, 3), (4, 2), (6, 2), (5, 2)])
def test_powers_of_the_radix(radix: int, power: int) -> None:
    """(r - 1) log_r k rounds, each with a part 1/r of the blocks."""
    schedule = schedule_of("all_to_all", f"bruck={radix}", radix**power)
    proof = verify(schedule)
    assert (proof.rounds, proof.traffic) == (
        (radix - 1) * power,
        Fraction(power * (radix - 1), radix),
    )
    for rank in (0, 1):
        assert sent(schedule, rank) == [
            [(digit * radix**place, radix ** (power - 1))]
            for place in range(power)
            for digit in range(1, radix)
        ]


@pytest.mark.parametrize("name", ["bruck=5", "bruck=7", "torus=1", "torus=5"])
def test_the_pairwise_exchange_is_one_of_them(name: str) -> None:
    """In one phase each block goes straight to its rank."""
    pairwise, other = (schedule_of("all_to_all", each, 5) for each in ("pairwise", name))
    assert [[*other.steps(rank)] for rank in range(5)] == [[*pairwise.steps(r)] for r in range(5)]
    assert other.num_slots == 0


@settings(max_examples=60)
@given(st.integers(1, 120), st.integers(1, 6))
def test_digits_add_up_to_the_distances(k: int, half: int) -> None:
    """From 0 on, and for an odd radix with as many digits below 0 as above."""
    for distances, radix, least in (
        (range(k), half + 1, 0),
        (range(-((k - 1) // 2), k // 2 + 1), 2 * half + 1, -half),
    ):
        ways = digits_of(distances, radix, least)
        assert [sum(way) for way in ways] == [*distances]
        for way in ways:
            for place, hop in enumerate(way):
                assert hop % radix**place == 0
                assert least <= hop // radix**place < least + radix


# --- both sides ---------------------------------------------------------------------------


@pytest.mark.parametrize("k", [*range(2, 41), 81])
def test_both_sides_at_once(k: int) -> None:
    proof, schedule = proof_of("retri", k), schedule_of("all_to_all", "retri", k)
    assert 3 ** (proof.rounds - 1) < k <= 3**proof.rounds
    assert proof.ports == min(2, k - 1)
    for number, messages in enumerate(sent(schedule, 1)):
        assert {far for far, _ in messages} <= {3**number % k, -(3**number) % k}
    if k in (3, 9, 27, 81):
        half = [(k - 1, k // 3), (1, k // 3)]
        assert sent(schedule, 0)[0] == half
        assert proof.traffic == Fraction(2 * proof.rounds, 3) == proof_of("bruck=3", k).traffic
        assert proof_of("bruck=3", k).rounds == 2 * proof.rounds


# --- a torus ------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [*range(2, 26), 36, 40])
def test_rows_and_columns(k: int) -> None:
    """b - 1 messages along the row, of a block for each row; a - 1 along the column, of one for each column."""
    for columns in (number for number in range(1, k + 1) if k % number == 0):
        rows, schedule = k // columns, schedule_of("all_to_all", f"torus={columns}", k)
        proof = verify(schedule)
        assert proof.rounds == columns - 1 + rows - 1
        assert proof.traffic == Fraction(columns - 1, columns) + Fraction(rows - 1, rows)
        assert proof.ports == 1
        for rank in (0, k - 1):
            row, column = divmod(rank, columns)
            steps = [[(rank + far) % k for far, _ in step] for step in sent(schedule, rank)]
            assert steps == [
                *([row * columns + (column + hop) % columns] for hop in range(1, columns)),
                *([(rank + hop * columns) % k] for hop in range(1, rows)),
            ]
            assert [blocks for step in sent(schedule, rank) for _, blocks in step] == (
                [rows] * (columns - 1) + [columns] * (rows - 1)
            )


def test_a_torus_is_as_square_as_can_be() -> None:
    shapes = {k: schedule_of("all_to_all", "torus", k) for k in (12, 16, 13, 2)}
    names = {12: "torus=4", 16: "torus=4", 13: "torus=13", 2: "torus=2"}
    for k, schedule in shapes.items():
        named = schedule_of("all_to_all", names[k], k)
        assert schedule.to_text() == named.to_text().replace(names[k], "torus")


def test_a_row_for_each_host_sends_the_fewest_messages_between_hosts() -> None:
    """From each rank one to each other host, with all that the host gets from its row."""
    hosts = on_hosts(12, 3)
    torus, pairwise = (schedule_of("all_to_all", name, 12) for name in ("torus=4", "pairwise"))
    for schedule, messages in ((torus, 2), (pairwise, 8)):
        for rank in range(12):
            between = [
                blocks
                for step in sent(schedule, rank)
                for far, blocks in step
                if hosts[(rank + far) % 12] != hosts[rank]
            ]
            assert len(between) == messages
            assert sum(between) == 8


@pytest.mark.parametrize("k, columns", [(8, 3), (8, 16), (7, 2)])
def test_rows_that_do_not_fill_a_torus(k: int, columns: int) -> None:
    reason = f"{columns} has to divide the number of ranks"
    assert find("all_to_all", f"torus={columns}").restriction(k) == reason
    with pytest.raises(UnsupportedWorldSizeError, match=reason):
        schedule_of("all_to_all", f"torus={columns}", k)


def test_a_row_of_no_ranks() -> None:
    with pytest.raises(UnknownAlgorithmError, match=r"takes a number of ranks in a row, .* 1, and"):
        find("all_to_all", "torus=0")
