"""The binary tree, and the two trees whose inner ranks are disjoint."""

from __future__ import annotations

from fractions import Fraction

import pytest

from ringcoll.schedules import RecvReduce, verify
from ringcoll.schedules.algorithms import binary_tree, schedule_of

# Every shape up to six levels, and both sides of the powers of two above them.
WORLDS = (*range(2, 66), 100, 127, 128, 129, 255, 256, 257, 300)


@pytest.mark.parametrize("world_size", [1, *WORLDS])
def test_binary_tree_is_a_tree(world_size: int) -> None:
    labels = range(1, world_size + 1)
    top = [label for label in labels if binary_tree.parent(label, world_size) is None]
    assert len(top) == 1
    below = {label: binary_tree.children(label, world_size) for label in labels}
    assert all(len(found) <= 2 for found in below.values())
    for label in labels:
        above = binary_tree.parent(label, world_size)
        if above is None:
            assert binary_tree.depth(label, world_size) == 0
            continue
        assert label in below[above]
        assert binary_tree.depth(label, world_size) == binary_tree.depth(above, world_size) + 1
    assert sum(map(len, below.values())) == world_size - 1
    deepest = max(binary_tree.depth(label, world_size) for label in labels)
    assert deepest == binary_tree.height(world_size) == world_size.bit_length() - 1


@pytest.mark.parametrize("world_size", [1, *WORLDS])
def test_binary_tree_is_in_order(world_size: int) -> None:
    """Left of a label are lower ones only, right of it higher ones: operands keep their order."""

    def walk(label: int) -> list[int]:
        below = binary_tree.children(label, world_size)
        lower = [found for child in below if child < label for found in walk(child)]
        higher = [found for child in below if child > label for found in walk(child)]
        return [*lower, label, *higher]

    (top,) = (
        label for label in range(1, world_size + 1) if binary_tree.parent(label, world_size) is None
    )
    assert walk(top) == list(range(1, world_size + 1))


@pytest.mark.parametrize("world_size", WORLDS)
def test_inner_ranks_of_the_two_trees_are_disjoint(world_size: int) -> None:
    inner: list[set[int]] = []
    for chunk in range(2):
        ranks = set()
        for rank in range(world_size):
            steps = binary_tree.tree_all_reduce(rank, world_size, chunk=chunk, turn=chunk)
            if any(isinstance(op, RecvReduce) for step in steps for op in step):
                ranks.add(rank)
        inner.append(ranks)
    assert not inner[0] & inner[1]
    assert all(len(ranks) == world_size // 2 for ranks in inner)


@pytest.mark.parametrize("world_size", [*range(2, 18), 31, 32, 33, 64, 100, 255])
def test_double_tree_sends_no_more_than_twice_the_vector(world_size: int) -> None:
    proof = verify(schedule_of("all_reduce", "double_tree", world_size))
    assert proof.sent_max <= 2
    assert proof.messages_max <= 4
    assert proof.ports <= 3
    single = verify(schedule_of("all_reduce", "binary_tree", world_size))
    assert proof.sent_mean == single.sent_mean == Fraction(2 * (world_size - 1), world_size)
