"""Which part of a group may go on; members that are slow to reach."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from ringcoll.errors import GroupBrokenError, PeerLostError
from ringcoll.runtime.machine import place
from ringcoll.runtime.rendezvous import deliver
from ringcoll.runtime.watch import Process
from ringcoll.training.resilient import membership
from ringcoll.training.resilient.membership import Membership
from ringcoll.training.resilient.succession import Member, Record, View, _is_quorum

MEMBERS = [Member(f"m{i}", "127.0.0.1", 1000 + i, 2000 + i, Process.own()) for i in range(5)]


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
def test_of_two_parts_at_most_one_is_a_quorum(size: int) -> None:
    living = MEMBERS[:size]
    for ours, theirs in parts(size):
        able = [part for part in (ours, theirs) if part and _is_quorum(part, living)]
        assert len(able) == 1, (ours, theirs)


@pytest.mark.parametrize("left, may", [([0, 1], True), ([2, 3], False), ([0], False)])
def test_of_two_halves_the_one_with_the_first_goes_on(left: list[int], may: bool) -> None:
    assert _is_quorum([MEMBERS[i] for i in left], MEMBERS[:4]) is may


def members_of_a_group(size: int) -> list[Membership]:
    """Members of a group, all in this process."""
    made = [Membership("127.0.0.1") for _ in range(size)]
    for member in made:
        member.take(View(1, 0, tuple(other.own for other in made)))
    return made


def changed(members: list[Membership], limit_s: float) -> list[Any]:
    """What the members get that change their group at the same time: views or errors."""

    def change(member: Membership) -> Any:
        try:
            return member.change(7, (), limit_s)
        except GroupBrokenError as error:
            member.leave()
            return str(error)

    with ThreadPoolExecutor(len(members)) as threads:
        return [*threads.map(change, members)]


def test_who_is_left_out_is_told_though_the_others_have_ended() -> None:
    """It sleeps for longer than the limit, the others go on, and are gone when it looks."""
    *others, late = members_of_a_group(3)
    views = changed(others, 1.0)
    assert [view.members for view in views] == [tuple(other.own for other in others)] * 2
    late._ended |= {other.own for other in others}
    begin_s = time.monotonic()
    assert "went on without this rank" in changed([late], 1.0)[0]
    assert time.monotonic() - begin_s < 0.5


def test_a_leader_that_comes_late_is_left_out_and_told() -> None:
    late, *others = members_of_a_group(3)
    views = changed(others, 1.0)
    assert [view.members for view in views] == [tuple(other.own for other in others)] * 2
    assert "went on without this rank" in changed([late], 1.0)[0]


@pytest.mark.slow
@pytest.mark.parametrize("absent", [{0, 1}, {0, 3}], ids=str)
def test_two_of_five_that_do_not_come_are_left_out_whichever_they_are(absent: set[int]) -> None:
    """Also the two that would lead one after the other: the second one is not waited for as a leader."""
    members = members_of_a_group(5)
    left = [member for number, member in enumerate(members) if number not in absent]
    views = changed(left, 8.0)
    assert views == [View(2, 7, tuple(member.own for member in left))] * 3


@pytest.mark.slow
def test_a_minority_ends_within_its_limit_and_the_others_go_on_without_it() -> None:
    alone, *others = members_of_a_group(4)
    begin_s = time.monotonic()
    assert "only 1 of the 4 ranks" in changed([alone], 1.0)[0]
    assert time.monotonic() - begin_s < 1.5
    views = changed(others, 1.0)
    assert [view.members for view in views] == [tuple(other.own for other in others)] * 3


def test_who_has_ended_or_left_is_not_waited_for() -> None:
    ended, left, *others = members_of_a_group(4)
    dead = ended.own._replace(process=Process(1 << 30, "1", place()))  # no such number
    for member in others:
        known = member.view.members
        member.take(View(1, 0, (dead, *known[1:])))
    left.take(others[0].view)
    left.leave()
    begin_s = time.monotonic()
    views = changed(others, 20.0)
    assert [view.members for view in views] == [tuple(other.own for other in others)] * 2
    assert time.monotonic() - begin_s < 5


def test_who_joins_is_taken_in_and_who_asks_one_that_has_left_is_refused() -> None:
    first, second = members_of_a_group(2)
    newcomer, late = Membership("127.0.0.1"), Membership("127.0.0.1")
    with ThreadPoolExecutor(3) as threads:
        joining = threads.submit(newcomer.join, "127.0.0.1", second.own.port, 20.0)
        while not (wanting := first.newcomers()):
            time.sleep(0.01)
        members = zip((first, second), (wanting, []), strict=True)
        views = [threads.submit(member.change, 3, new, 20.0) for member, new in members]
        everyone = View(2, 3, (first.own, second.own, newcomer.own))
        assert [view.result() for view in (*views, joining)] == [everyone] * 3
        refused = threads.submit(late.join, "127.0.0.1", second.own.port, 20.0)
        while not first.newcomers():
            time.sleep(0.01)
        for member in (first, second, newcomer):
            member.leave()
        with pytest.raises(PeerLostError, match="no member of the group"):
            refused.result()


@pytest.mark.parametrize(
    "text", ["GET / HTTP/1.1", "[]", "[1, [2]]", "[{}, null]", "[" * 100_000, "\0"]
)
def test_a_stranger_disturbs_nobody(text: str) -> None:
    members = members_of_a_group(2)
    deliver(text, [member.own.mailbox for member in members], 2.0)
    assert [view.epoch for view in changed(members, 20.0)] == [2, 2]


STRANGER: list[Any] = json.loads(json.dumps(MEMBERS[0]))
HERS: list[Any] = json.loads(json.dumps(Record(View(1, 0, (MEMBERS[0],)), 0)))
DISGUISED = {
    "name": [[["m0"], *STRANGER[1:]], HERS],
    "start of the process": [[*STRANGER[:4], [1 << 30, 17, place(), None]], None],
    "epoch": [STRANGER, [["1", *HERS[0][1:]], *HERS[1:]]],
    "no members": [STRANGER, [[9, 0, []], *HERS[1:]]],
    "port": [[*STRANGER[:3], 1 << 16, STRANGER[4]], HERS],
}


@pytest.mark.parametrize("mail", DISGUISED.values(), ids=DISGUISED)
def test_mail_that_only_looks_right_is_told_and_left(
    mail: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    members = members_of_a_group(2)
    for text in (json.dumps(mail), json.dumps([STRANGER, None])):
        deliver(text, [member.own.mailbox for member in members], 2.0)
    for member in members:
        deadline = time.monotonic() + 10.0
        while member.newcomers() != [MEMBERS[0]]:  # the right mail behind it
            assert time.monotonic() < deadline
            time.sleep(0.01)
    told = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(told) == 2
    assert all("a message in the mailbox of a resilient group" in each.message for each in told)
    assert [view.epoch for view in changed(members, 20.0)] == [2, 2]


@pytest.fixture
def slow_to_connect(monkeypatch: pytest.MonkeyPatch) -> list[Membership]:
    """Three members of a group; torch takes longer to connect than an answer may take."""
    made = members_of_a_group(3)
    connect = dist.TCPStore

    def slowly(*arguments: Any, **others: Any) -> dist.TCPStore:
        time.sleep(0.6)
        return connect(*arguments, **others)

    monkeypatch.setattr(dist, "TCPStore", slowly)
    monkeypatch.setattr(membership, "_REACH_S", 0.2)
    return made


@pytest.mark.slow
def test_the_meeting_place_may_be_slow_to_reach(slow_to_connect: list[Membership]) -> None:
    leader, *followers = slow_to_connect
    for number, member in enumerate(followers):
        member.meeting_place(20.0).set(f"came/{number}", "here")
        assert leader.door.get(f"came/{number}") == b"here"


def test_no_member_is_left_out_because_it_is_slow_to_reach(
    slow_to_connect: list[Membership],
) -> None:
    with ThreadPoolExecutor(3) as threads:
        views = threads.map(lambda member: member.change(7, (), 20.0), slow_to_connect)
    members = tuple(member.own for member in slow_to_connect)
    assert [*views] == [View(2, 7, members)] * 3


@pytest.mark.slow
def test_who_joins_reaches_a_leader_that_is_slow_to_reach(
    slow_to_connect: list[Membership],
) -> None:
    leader, follower, _ = slow_to_connect
    newcomer = Membership("127.0.0.1")
    with ThreadPoolExecutor(1) as thread:
        thread.submit(newcomer.join, "127.0.0.1", follower.own.port, 10.0)
        deadline = time.monotonic() + 10.0
        while not (wanting := leader.newcomers()) and time.monotonic() < deadline:
            time.sleep(0.01)
        newcomer.leave()
    assert wanting == [newcomer.own]


@pytest.mark.parametrize("is_here", [True, False])
def test_a_mailbox_that_is_closed_proves_an_end_on_this_host_only(is_here: bool) -> None:
    """Of another host's address a firewall may say that nobody listens there."""
    member, other = members_of_a_group(2)
    other._mailbox.close()
    process = other.own.process if is_here else Process(1, "1", "another host")
    known = other.own._replace(process=process)
    member.take(View(1, 0, (member.own, known)))
    member._tell([known])
    assert member._ended == ({known} if is_here else set())


def test_the_time_in_which_a_member_is_stopped_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it has to wait for may have come meanwhile: an eighth of its limit counts, no more."""
    member = members_of_a_group(3)[0]
    now_s, stops_s = [0.0], [100.0, 50.0]

    def sleep(seconds: float) -> None:
        now_s[0] += stops_s.pop() if stops_s else 0.015625

    clock = SimpleNamespace(monotonic=lambda: now_s[0], sleep=sleep)
    monkeypatch.setattr(membership, "time", clock)
    monkeypatch.setattr(membership, "deliver", lambda *_: set())
    with pytest.raises(GroupBrokenError, match="only 1 of the 3 ranks"):
        member.change(7, (), 1.0)
    assert stops_s == []
    # Two stops of an eighth, then 0.75 s awake, and the look after it.
    assert now_s[0] == 150.0 + 0.75 + 0.015625


def test_what_does_not_concern_a_member_is_not_kept() -> None:
    """Records of a group that it is not in, and old ones that come late."""
    member, other = members_of_a_group(2)
    stranger = MEMBERS[0]
    with_member = Record(View(5, 0, (stranger, member.own)), 0)
    assert member._concerns(stranger, with_member)
    assert not member._concerns(stranger, Record(View(5, 0, (stranger, other.own)), 0))
    assert not member._concerns(stranger, Record(View(5, 0, (other.own, member.own)), 0))
    member._applicants[stranger] = None
    assert member._concerns(stranger, Record(View(5, 0, (stranger, other.own)), 0))
    assert member._concerns(other.own, Record(View(5, 0, (other.own,)), 0))
    member._heard[other.own] = new = Record(View(1, 0, (other.own,)), 0, 3)
    assert member._concerns(other.own, new)
    assert not member._concerns(other.own, new._replace(ballot=2))
