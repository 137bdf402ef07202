"""PAT and Sparbit: few data far away, and little memory."""

from __future__ import annotations

from collections import Counter

import pytest

from ringcoll.schedules import count, packed_chunks
from ringcoll.schedules.algorithms import find, schedule_of
from ringcoll.schedules.algorithms.parallel_trees import all_shifts, rounds
from tests.cases.messages import distances, far_traffic, messages_of

WORLDS = (2, 3, 4, 5, 7, 8, 13, 33, 64)


def lg(k: int) -> int:
    return (k - 1).bit_length()


@pytest.mark.parametrize("trees", [1, 2, 4, 8, 16, 32, 64])
def test_every_shift_arrives_once_after_its_parent(trees: int) -> None:
    for k in (k for k in range(1, 65) if trees <= all_shifts(k)):
        arrived = [0]
        for distance, shifts in rounds(k, trees):
            assert 1 <= len(shifts) <= trees
            assert all(shift & -shift == distance for shift in shifts)
            assert {shift - distance for shift in shifts} <= {*arrived}
            arrived += shifts
        assert sorted(arrived) == [*range(k)]


@pytest.mark.parametrize("k", WORLDS)
def test_the_reduce_scatter_is_the_all_gather_backwards(k: int) -> None:
    for name in ("pat", "pat_2_trees"):
        there = messages_of(schedule_of("all_gather", name, k))
        back = messages_of(schedule_of("reduce_scatter", name, k))
        last = max(message.step for message in there)
        turned = {(last - step, end, start, chunks) for step, start, end, chunks in back}
        assert {tuple(message) for message in there} == turned


@pytest.mark.parametrize("k", WORLDS)
def test_memory_is_logarithmic_with_two_trees(k: int) -> None:
    """A sum for each level of each tree; with most trees a tree has one level."""
    assert find("reduce_scatter", "pat_2_trees").slots(k) <= max(0, 2 * lg(k) - 3)
    assert find("reduce_scatter", "pat").slots(k) == (k - 2) // 2
    assert find("reduce_scatter", "pat_2_trees").slots(64) == 9
    assert max(len(m.chunks) for m in messages_of(schedule_of("all_gather", "pat_2_trees", k))) <= 2


@pytest.mark.parametrize("k", [8, 16, 64])
def test_data_that_go_far_are_few(k: int) -> None:
    """A message over half of the ranks has one block; in Bruck's it has half of all."""
    blocks = {
        name: Counter(
            {
                (message.target - message.source) % k: len(message.chunks)
                for message in messages_of(schedule_of("all_gather", name, k))
            }
        )
        for name in ("pat", "bruck")
    }
    assert blocks["pat"] == {k - 2**bit: k >> (bit + 1) for bit in range(lg(k))}
    assert blocks["bruck"] == {k - 2**bit: 2**bit for bit in range(lg(k))}


@pytest.mark.parametrize("name", ["pat", "sparbit"])
def test_less_traffic_from_host_to_host(name: str) -> None:
    few, many = (far_traffic(schedule_of("all_gather", each, 64), 12) for each in (name, "bruck"))
    assert float(few / many) == pytest.approx(0.27, abs=0.005)


def blocks_of_sparbit(k: int) -> list[int]:
    """Blocks of each step, by the bits of k: arXiv 2109.08751, as Open MPI has it."""
    zeros = (k & -k).bit_length() - 1
    ignored = (~(k >> zeros) | 1) << zeros
    known, blocks = 1, []
    for bit in reversed(range(lg(k))):
        excluded = (1 << bit) & ignored == 1 << bit
        blocks.append(known - excluded)
        known = 2 * known - excluded
    return blocks


def test_sparbit_sends_as_many_blocks_as_published() -> None:
    for k in range(2, 65):
        steps = schedule_of("all_gather", "sparbit", k).steps(0)
        assert [count(step)[0] for step in steps] == blocks_of_sparbit(k)


@pytest.mark.parametrize("k", WORLDS)
def test_sparbit_packs_nothing(k: int) -> None:
    schedule = schedule_of("all_gather", "sparbit", k)
    assert all(len(message.chunks) == 1 for message in messages_of(schedule))
    assert not any(packed_chunks(step) for rank in range(k) for step in schedule.steps(rank))
    halving = [2**bit for bit in reversed(range(lg(k)))]
    assert distances(schedule) == [{min(distance, k - distance)} for distance in halving]
