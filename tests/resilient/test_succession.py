"""Who goes on from a group, in every interleaving; and rules by which two groups would, which are found."""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import pytest

from ringcoll.errors import GroupBrokenError
from ringcoll.training.resilient import Member, Patience, Record, View, succession
from tests.resilient.model import CASES, BrokenRulesError, Budget, Model


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.states < 13_000])
def test_at_most_one_group_goes_on_and_nobody_waits_for_it(name: str) -> None:
    case = CASES[name]
    assert Model(case.size, case.budget, case.joiners).explore() == case.states


def wrong(**functions: Any) -> Any:
    """The rules, with other functions."""
    names = ("step", "listeners", "newest")
    return SimpleNamespace(**{name: getattr(succession, name) for name in names} | functions)


def step_in_one_phase(
    me: Member, own: Record, heard: Any, gone: Collection[Member], patience: Patience, *_: Any
) -> Record:
    """The leader decides alone, if more than half of those come that are not known to be dead."""
    if (taken := succession.newest(own, heard)) is not own:
        return taken
    members = own.view.members
    living = [
        member
        for member in members
        if member not in gone and not (member in heard and heard[member].has_left)
    ]
    lost = max(own.ballot, 0) + (patience is not Patience.WAITS and members[own.ballot] != me)
    leader = next((member for member in members[lost:] if member in living), me)
    ballot = members.index(leader)
    if leader == me:
        came = [
            member
            for member in living
            if member == me
            or (
                member in heard
                and heard[member].view == own.view
                and heard[member].ballot == ballot
            )
        ]
        if came == living or patience:
            twice = 2 * len(came)
            if twice < len(living) or (twice == len(living) and came[0] != living[0]):
                raise GroupBrokenError("too few")
            return Record(View(own.view.epoch + 1, 0, tuple(came)), 0)
    return own._replace(ballot=ballot)


def listeners_that_came(me: Member, old: Record, new: Record, *_: Any) -> tuple[Member, ...]:
    """Nobody tells those that are left out."""
    members = old.view.members
    if new.view != old.view:
        return tuple(m for m in new.view.members if m != me and members[old.ballot] == me)
    leader = members[new.ballot]
    return (leader,) if new != old and leader != me else ()


def test_one_decision_without_a_vote_leaves_one_alone() -> None:
    """So it was: who comes late finds the others ended, and goes on as a group of one."""
    rules = wrong(step=step_in_one_phase, listeners=listeners_that_came)
    with pytest.raises(BrokenRulesError, match="goes on beside"):
        Model(2, Budget(lates=1), rules=rules).explore(100_000)
    with pytest.raises(BrokenRulesError, match="goes on beside"):
        Model(3, Budget(lates=1), rules=rules).explore(100_000)


def test_who_is_left_out_has_to_be_told() -> None:
    def listeners(me: Member, old: Record, new: Record, *rest: Any) -> tuple[Member, ...]:
        told = succession.listeners(me, old, new, *rest)
        inside = new.view.members if new.proposal is None else new.proposal.members
        return tuple(member for member in told if member in inside)

    with pytest.raises(BrokenRulesError, match="goes on beside"):
        Model(2, Budget(lates=1), rules=wrong(listeners=listeners)).explore(100_000)


def test_half_of_those_that_live_are_no_quorum(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_quorum(voters: Collection[Member], living: list[Member]) -> bool:
        return 2 * len(voters) >= len(living)

    monkeypatch.setattr(succession, "_is_quorum", is_quorum)
    with pytest.raises(BrokenRulesError, match="goes on beside"):
        Model(2, Budget(lates=2)).explore(100_000)
