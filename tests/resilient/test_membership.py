"""Which part of a group may go on; members that are slow to reach."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from ringcoll.resilient import membership
from ringcoll.resilient.membership import Member, Membership, View, _may_go_on
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


@pytest.fixture
def slow_to_connect(monkeypatch: pytest.MonkeyPatch) -> list[Membership]:
    """Three members of a group; torch takes longer to connect than an answer may take."""
    made = [Membership("127.0.0.1") for _ in range(3)]
    for member in made:
        member.take(View(1, 0, tuple(other.own for other in made)))
    connect = dist.TCPStore

    def slowly(*arguments: Any, **others: Any) -> dist.TCPStore:
        time.sleep(0.6)
        return connect(*arguments, **others)

    monkeypatch.setattr(dist, "TCPStore", slowly)
    monkeypatch.setattr(membership, "_REACH_S", 0.2)
    return made


def test_the_meeting_place_may_be_slow_to_reach(slow_to_connect: list[Membership]) -> None:
    leader, *followers = slow_to_connect
    for number, member in enumerate(followers):
        member.meeting_place().set(f"came/{number}", "here")
        assert leader.door.get(f"came/{number}") == b"here"


def test_no_member_is_left_out_because_it_is_slow_to_reach(
    slow_to_connect: list[Membership],
) -> None:
    with ThreadPoolExecutor(3) as threads:
        views = threads.map(lambda member: member.change(7, (), 20.0), slow_to_connect)
    members = tuple(member.own for member in slow_to_connect)
    assert [*views] == [View(2, 7, members)] * 3
