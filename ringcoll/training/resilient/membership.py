"""Membership: the ranks that are left agree after a death, and others join.

`ringcoll.training.resilient.succession` has the rules; this file has the messages. Each member has
a *mailbox*, in which the kernel keeps the others' records while the member does something else, is
stopped, or is slow; and a *door*, a store of its own, at which the members of a view meet if it is
the first of them. So no store is needed that may die with its process.

On one host, a member has ended if its process has, which is certain; of another host's, lines tell
it (`ringcoll.runtime.rendezvous.lines`). A member that leaves says so, and closes its mailbox.

A wait ends within the time limit. The leader waits for three quarters of the limit for a member
that lives and does not come; the others wait for seven eighths of it for the leader; the rest of
the limit is for the next leader. Only time counts in which the member itself was awake.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ringcoll.errors import CollectiveTimeoutError, PeerLostError, TransportError
from ringcoll.runtime.machine import place
from ringcoll.runtime.process import Answer, call_in_thread, call_within
from ringcoll.runtime.rendezvous import Inbox, deliver, parse_json, read_json, serve_store
from ringcoll.runtime.watch import Process
from ringcoll.training.resilient import succession
from ringcoll.training.resilient.succession import (
    Member,
    Patience,
    Record,
    View,
    check_in,
    leader_of,
    listeners,
    step,
)

_log = logging.getLogger("ringcoll")
_POLL_S = 0.002  # between two looks into the mailbox
_LOOK_S = 0.1  # between two looks whether members have ended
_AWAKE = 0.125  # share of the limit: a process that does not look for longer was stopped meanwhile
_REACH_S = 2.0  # for an answer
# For a connection to a door: torch looks up the other's name, for its messages, and a name server
# that loses a question lets it wait 5 seconds, or twice 5 (resolv.conf(5)).
_CONNECT_S = 12.0
_UNREACHED = (OSError, dist.DistError)
# Shares of the time limit after which a wait in a ballot is too long, by when the ballot has begun.
_FOR_MEMBERS = (0.75, 0.9375)
_FOR_A_LEADER = (0.875, 1.0)


class _Door:
    """The door of another member; one that does not answer in time raises one of `_UNREACHED`."""

    def __init__(self, host: str, port: int) -> None:
        # torch would write lines to the terminal if nobody listens.
        socket.create_connection((host, port), _REACH_S).close()
        limit = timedelta(seconds=_CONNECT_S)
        self._store = call_in_thread(lambda: dist.TCPStore(host, port, None, False, timeout=limit))

    @property
    def is_connecting(self) -> bool:
        """Whether the connection is still being made."""
        return not self._store.done()

    def store(self, limit_s: float = _REACH_S) -> dist.Store:
        """Its store, once there is a connection."""
        return self._store.result(limit_s)

    def view(self) -> View:
        """The view that its member shows."""
        view: View = self._ask(lambda store: read_json(store, "view", View.of))
        return view

    def has_left(self) -> bool:
        """Whether its member has left."""
        return self._ask(lambda store: store.check(["left"]))

    def _ask(self, question: Callable[[dist.Store], Answer]) -> Answer:
        store = self.store()
        return call_within(_REACH_S, lambda: question(store))


def _mail(message: Any) -> tuple[Member, Record | None]:
    """The sender of a message, and its record; ``None`` if the sender wants to join."""
    sender, record = message
    return Member.of(sender), None if record is None else Record.of(record)


class Membership:
    """A member's view of its group, its own door and mailbox, and the ways to those of others.

    Parameters
    ----------
    host
        Address that door and mailbox listen on, on free ports.
    """

    def __init__(self, host: str) -> None:
        self.door = serve_store(host)
        self._mailbox = Inbox(host)
        process = Process.own(host)
        name = secrets.token_hex(8)
        self.own = Member(name, host, self.door.port, self._mailbox.port, process)
        self.record = Record(View(0, 0, (self.own,)), 0)
        self._heard: dict[Member, Record] = {}
        self._senders: set[Member] = set()  # members whose records came since the last step
        self._ended: set[Member] = set()
        self._last_look_s = 0.0  # time of the last look at the members' processes
        self._applicants: dict[Member, None] = {}
        self._others_group: set[Member] = set()  # members of a group that it asks to join
        self._has_left = False

    @property
    def view(self) -> View:
        """The members, as of the last change."""
        return self.record.view

    def take(self, view: View) -> None:
        """Take a view, and show it at the own door."""
        self.record = Record(view, view.done)
        self._heard = {
            member: record for member, record in self._heard.items() if member in view.members
        }
        self.door.set("view", json.dumps(view))

    def meeting_place(self, limit_s: float) -> dist.Store:
        """The store at which the members of the view meet; `PeerLostError` if it is gone."""
        leader = self.view.members[0]
        if leader == self.own:
            return self.door
        try:
            door = _Door(leader.host, leader.port)
            deadline = time.monotonic() + min(_CONNECT_S, limit_s)
            while door.is_connecting and time.monotonic() < deadline:
                if leader.process.has_ended():
                    break
                time.sleep(_POLL_S)
            return door.store(0)
        except _UNREACHED as error:
            why = str(error) or "no answer"
            raise PeerLostError(f"rank 0 at {leader.address} is gone: {why}", peer=0) from error

    def has_news(self) -> bool:
        """Whether others have begun to change this member's view, or have changed it."""
        self._read()
        begun_by = (self.view.epoch, 0)  # the first ballot from this view on
        return any((heard.view.epoch, heard.ballot) >= begun_by for heard in self._heard.values())

    def leave(self) -> None:
        """Tell the others that this member has left, and close its mailbox."""
        if self._has_left or os.getpid() != self.own.process.pid:
            return
        self._has_left = True
        with contextlib.suppress(RuntimeError):
            self.door.set("left", "")
        self._mailbox.close()
        self.record = self.record._replace(has_left=True)
        self._tell({*self.view.members, *self._others_group})

    def newcomers(self) -> list[Member]:
        """Processes that want to join, and have told this member."""
        self._read()
        members = self.view.members
        self._applicants = {
            member: None
            for member in self._applicants
            if member not in members
            and not member.process.has_ended()
            and not (member in self._heard and self._heard[member].has_left)
        }
        return [*self._applicants]

    def change(self, done: int, newcomers: Iterable[Member], limit_s: float) -> View:
        """Agree with all members that are left on the next epoch; all of them call this.

        Parameters
        ----------
        done
            Number of operations that this member has seen complete.
        newcomers
            Members that it takes in, if it leads.
        limit_s
            Time limit, in seconds.

        Raises
        ------
        GroupBrokenError
            The others went on without this member, or may have.
        """
        before = self.view
        self.record = self.record._replace(done=done)
        joining = tuple(newcomers)
        awake_s, seen_s, self._last_look_s = 0.0, time.monotonic(), 0.0
        late_s = limit_s
        while True:
            # Before the mailbox is read: it then has all messages of the members that have ended.
            self._look(before.members)
            self._read()
            now_s = time.monotonic()
            awake_s, seen_s = awake_s + min(now_s - seen_s, _AWAKE * limit_s), now_s
            patience = Patience.OVER if awake_s > limit_s else Patience(awake_s > late_s)
            old = self.record
            new = step(self.own, old, self._heard, self._ended, patience, joining)
            if new != old or self._senders:
                self.record = new
                receivers = listeners(self.own, old, new, self._heard, self._senders)
                self._senders.clear()
                outside = [member for member in receivers if member not in new.view.members]
                for members in (outside, set(receivers).difference(outside)):
                    self._tell(members, min(_REACH_S, limit_s / 16))
            if new.view != before:
                check_in(self.own, new)
                self.take(new.view)
                return new.view
            if new.ballot != old.ballot:
                leads = leader_of(new.ballot, before.members) == self.own
                shares = _FOR_MEMBERS if leads else _FOR_A_LEADER
                limits_s = [share * limit_s for share in shares]
                late_s = next((late_s for late_s in limits_s if late_s > awake_s), limit_s)
            time.sleep(_POLL_S)

    def join(self, host: str, port: int, limit_s: float) -> View:
        """Join the group of the member whose door is at an address.

        Raises
        ------
        CollectiveTimeoutError, PeerLostError
            Its members did not take this process in; none of them can be reached.
        """
        deadline = time.monotonic() + limit_s
        address = f"{host}:{port}"
        try:
            door = _Door(host, port)
            door.store(_CONNECT_S)
            known = door.view()
        except _UNREACHED as error:
            raise PeerLostError(f"no group can be reached at {address}: {error}") from error
        self._others_group = {*known.members}
        doors = {(host, port): door}
        asked: Member | None = None
        look_s = 0.0
        while time.monotonic() < deadline:
            self._read()
            record = succession.newest(self.record, self._heard)
            if record is not self.record:
                self.take(record.view)
                return record.view
            time.sleep(_POLL_S)
            if time.monotonic() < look_s:
                continue
            look_s = time.monotonic() + _LOOK_S
            self._look(known.members)
            leader = next((member for member in known.members if member not in self._ended), None)
            if leader is None:
                raise PeerLostError(f"no member of the group at {address} is left")
            there = leader.host, leader.port
            try:
                if there not in doors:
                    doors[there] = _Door(*there)
                if doors[there].has_left():
                    self._ended.add(leader)
                    continue
                known = doors[there].view()
                self._others_group |= {*known.members}
                if known.members[0] == leader != asked:
                    deliver(json.dumps([self.own, None]), [leader.mailbox], _REACH_S)
                    asked = leader
            except ConnectionRefusedError:  # its machine answers, and nobody listens at its door
                self._ended.add(leader)
            except _UNREACHED:
                if there in doors and not doors[there].is_connecting:
                    del doors[there]
        self.leave()
        raise CollectiveTimeoutError(f"the group at {address} took nobody in within {limit_s:g} s")

    # --- how it goes --------------------------------------------------------------------

    def _look(self, members: Iterable[Member]) -> None:
        """See which members have ended, now and then."""
        if time.monotonic() - self._last_look_s > _LOOK_S:
            self._ended |= {member for member in members if member.process.has_ended()}
            self._last_look_s = time.monotonic()

    def _tell(self, members: Iterable[Member], limit_s: float = _REACH_S) -> None:
        """Send the own record to members that have not ended."""
        receivers = {
            member.mailbox: member
            for member in members
            if member != self.own and member not in self._ended
        }
        for address in deliver(json.dumps([self.own, self.record]), receivers, limit_s):
            # On this host, only the end of a process, or `leave`, closes a mailbox.
            if receivers[address].process.place == place():
                self._ended.add(receivers[address])

    def _read(self) -> None:
        """Read the mailbox."""
        for text in self._mailbox.read():
            try:
                sender, record = parse_json("mail", text, _mail)
            except TransportError as error:
                _log.warning("a message in the mailbox of a resilient group: %s", error)
                continue
            if record is None:
                self._applicants[sender] = None
            elif self._concerns(sender, record):
                self._heard[sender] = record
                self._senders.add(sender)

    def _concerns(self, sender: Member, record: Record) -> bool:
        """Whether a record concerns this member, and is no older than the one that is known."""
        known = self._heard.get(sender)
        if known is not None and known.age > record.age:
            return False
        return (
            sender in self.view.members
            or sender in self._applicants
            or (sender in record.view.members and self.own in record.view.members)
        )
