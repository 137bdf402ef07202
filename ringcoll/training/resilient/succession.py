"""The rules by which one group goes on from a group, without clocks, processes or messages.

Each member has a `Record`, and sends it to others when it changes; a newer record of a member holds
all that an older one did. A member's next record follows from its own record, the records that it
has heard, and the members that have surely ended: see `step`. The leader of a *ballot* is the
member with the ballot's number, modulo the number of members.

================================  ==================================================================
a member                          does
================================  ==================================================================
begins, or sees its leader end    follows the first leader that has not ended or left: no lower
                                  ballot counts for the member any more
waits too long                    follows the next leader that has begun: one that has not may be
                                  stopped, too
leads                             waits for all higher members that live, and for a quorum. It
                                  proposes the view that was accepted in the highest ballot, or else
                                  a new one of the members that have come
hears its leader's proposal       accepts the proposal
hears that a quorum has accepted  takes the view, and tells that first those that are not in the
its proposal                      view, and then the others
hears of a newer view             takes that view, or ends if it is not in it
has waited longer than its limit  ends: others may have gone on without it
================================  ==================================================================

A member tells each new record all members, its leader last.

This is Paxos (Lamport, *The part-time parliament*, 1998) with one decision an epoch, except for
what is known of the dead. A quorum is more than half of the members *that have not surely ended or
left*, or half of them with the first. Two quorums share a member, or members that have ended
meanwhile; what these had accepted, all know that have seen their end, as all that a member has told
is read after its end was seen. As those outside of a view are told of it first, nobody that is left
out finds its whole group ended and does not know that it went on. ``tests/resilient/model.py``
tries all interleavings.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import IntEnum
from typing import Any, NamedTuple

from ringcoll.errors import GroupBrokenError
from ringcoll.runtime.rendezvous import Address, address_of, fields_of
from ringcoll.runtime.watch import Process

_NONE = -1  # instead of a ballot


class Member(NamedTuple):
    """A process of the group: its own name, and the ports of its door and of its mailbox."""

    name: str
    host: str
    port: int
    mail: int
    process: Process

    @classmethod
    def of(cls, value: Any) -> Member:
        """A member, from JSON."""
        name, host, door, box, process = fields_of(value, str, str, int, int, list)
        (_, port), (_, mail) = address_of([host, door]), address_of([host, box])
        return cls(name, host, port, mail, Process.of(process))

    @property
    def address(self) -> str:
        """The address of its door."""
        return f"{self.host}:{self.port}"

    @property
    def mailbox(self) -> Address:
        """The address of its mailbox."""
        return self.host, self.mail


class View(NamedTuple):
    """The view that all members of an epoch agree on; ``done`` operations are complete."""

    epoch: int
    done: int
    members: tuple[Member, ...]

    @classmethod
    def of(cls, value: Any) -> View:
        """A view, from JSON."""
        epoch, done, members = fields_of(value, int, int, list)
        first, *rest = map(Member.of, members)
        return cls(epoch, done, (first, *rest))


class Record(NamedTuple):
    """The record of a member about itself.

    Parameters
    ----------
    view
        The newest view that it has taken.
    done
        Number of operations that it has seen complete.
    ballot
        The highest ballot that it has followed from this view on.
    proposed
        The ballot in which it has accepted ``proposal`` last.
    proposal
        The view that it has accepted, or, if it leads, proposed.
    has_left
        Whether it takes part in nothing any more.
    """

    view: View
    done: int
    ballot: int = _NONE
    proposed: int = _NONE
    proposal: View | None = None
    has_left: bool = False

    @classmethod
    def of(cls, value: Any) -> Record:
        """A record, from JSON."""
        kinds = list, int, int, int, list | None, bool
        view, done, ballot, proposed, proposal, has_left = fields_of(value, *kinds)
        proposal = None if proposal is None else View.of(proposal)
        return cls(View.of(view), done, ballot, proposed, proposal, has_left)

    @property
    def age(self) -> tuple[int, int, int, bool]:
        """Of two records of a member, the newer one is not smaller."""
        return self.view.epoch, self.ballot, self.proposed, self.has_left


class Patience(IntEnum):
    """How long a member waits: not for too long; for too long in a ballot; beyond its limit."""

    WAITS, LATE, OVER = range(3)


Heard = Mapping[Member, Record]


def newest(own: Record, heard: Heard) -> Record:
    """The own record, or that of a newer view of which was heard."""
    view = max((own, *heard.values()), key=lambda record: record.view.epoch).view
    return Record(view, view.done) if view.epoch > own.view.epoch else own


def check_in(me: Member, record: Record) -> None:
    """Make sure that a member is in the view of its record. Raises `GroupBrokenError`."""
    if me not in record.view.members:
        raise GroupBrokenError(
            "the others went on without this rank, which had not come for too long"
        )


def step(
    me: Member,
    own: Record,
    heard: Heard,
    ended: Collection[Member],
    patience: Patience = Patience.WAITS,
    newcomers: tuple[Member, ...] = (),
) -> Record:
    """The next record of a member; the same one if it has to wait."""
    if (taken := newest(own, heard)) is not own:
        return taken
    epoch, _, members = own.view
    peers = {
        member: heard[member]
        for member in members
        if member in heard and heard[member].view.epoch == epoch
    }
    absent = {*ended, *(member for member, record in heard.items() if record.has_left)}
    living = [member for member in members if member == me or member not in absent]
    ballot = max(own.ballot, 0, *(record.ballot for record in peers.values()))
    leaders = living
    if ballot == own.ballot and patience and leader_of(ballot, members) != me:
        ballot += 1
        begun = [member for member, record in peers.items() if record.ballot != _NONE]
        leaders = [member for member in living if member == me or member in begun]
    while leader_of(ballot, members) not in leaders:
        ballot += 1
    if patience is Patience.OVER:
        raise GroupBrokenError(
            f"only {1 + len(peers.keys() & living)} of the {len(living)} ranks that are not known "
            "to be dead have come in time: others may have gone on without them"
        )
    leader = leader_of(ballot, members)
    following = own._replace(ballot=ballot)
    if leader != me:
        if leader in peers and peers[leader].proposed == ballot:
            return following._replace(proposed=ballot, proposal=peers[leader].proposal)
        return following
    if own.proposed == ballot:
        accepted = {member for member, record in peers.items() if record.proposed == ballot}
        if own.proposal is not None and _is_quorum({me, *accepted}, living):
            return Record(own.proposal, own.proposal.done)
        return own
    followers = {peer: record for peer, record in peers.items() if record.ballot == ballot}
    voters = {me: own} | followers
    is_complete = patience is Patience.LATE or all(
        member in voters for member in living if members.index(member) > ballot
    )
    if not is_complete or not _is_quorum(voters, living):
        return following
    last = max((own, *peers.values()), key=lambda record: record.proposed)
    proposal = last.proposal or View(
        epoch + 1,
        max(record.done for record in voters.values()),
        (*(member for member in living if member in voters), *newcomers),
    )
    return following._replace(proposed=ballot, proposal=proposal)


def listeners(
    me: Member, old: Record, new: Record, heard: Heard, senders: Collection[Member]
) -> tuple[Member, ...]:
    """The members that are sent a member's new record, the first ones first."""
    members = old.view.members
    if new.view != old.view:
        if old.proposed == _NONE or leader_of(old.ballot, members) != me:
            return ()  # it heard of the view itself
        outside = [member for member in members if member not in new.view.members]
        receivers = [*outside, *new.view.members]
    else:
        receivers = [
            member
            for member in senders
            if member in heard
            and (heard[member].view.epoch, heard[member].ballot) < (new.view.epoch, new.ballot)
        ]
        if new != old:  # the leader last: what it knows of a member, all that see its end know
            leader = leader_of(new.ballot, members)
            receivers += [*(member for member in members if member != leader), leader]
    return tuple(member for member in dict.fromkeys(receivers) if member != me)


def leader_of(ballot: int, members: tuple[Member, ...]) -> Member:
    """The member that leads in a ballot."""
    return members[ballot % len(members)]


def _is_quorum(voters: Collection[Member], living: list[Member]) -> bool:
    """Whether no others can decide, or hear of this decision."""
    twice = 2 * sum(member in voters for member in living)
    return twice > len(living) or (twice == len(living) and living[0] in voters)
