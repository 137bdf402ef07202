"""Which part of a group may go on."""

from __future__ import annotations

import pytest

from ringcoll.resilient.membership import Member, _may_go_on
from ringcoll.runtime.lives import Process

MEMBERS = [Member(f"m{i}", "127.0.0.1", 1000 + i, Process.own()) for i in range(5)]


def parts(size: int) -> list[tuple[list[Member], list[Member]]]:
    """Every way to cut a group in two parts that do not see each other."""
    living = MEMBERS[:size]
    return [
        (
            [member for i, member in enumerate(living) if bits >> i & 1],
            [member for i, member in enumerate(living) if not bits >> i & 1],
        )
        for bits in range(1 << size)
    ]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_of_two_parts_exactly_one_goes_on(size: int) -> None:
    living = MEMBERS[:size]
    for ours, theirs in parts(size):
        able = [part for part in (ours, theirs) if part and _may_go_on(part, living)]
        assert len(able) == 1, (ours, theirs)


@pytest.mark.parametrize("left, may", [([0, 1], True), ([2, 3], False), ([0], False)])
def test_of_two_halves_the_one_with_the_lowest_goes_on(left: list[int], may: bool) -> None:
    assert _may_go_on([MEMBERS[i] for i in left], MEMBERS[:4]) is may
