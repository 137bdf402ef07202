"""Who is in a group: how those that are left agree after a death, and how others join.

Every member serves a store of its own, its *door*, and knows the doors of all members. So no store is
needed that may die with its process. To change the group:

1. The lowest member that lives leads. The others say at its door where they are; it waits for all that
   live and have not left.
2. The leader decides: the next epoch, the members of the newest epoch that have come, in their order,
   new members behind them, and the number of operations that any of them has seen complete. It answers
   everyone at its door.
3. If the leader dies meanwhile, the next one leads. Some may have its decision, others not: the first
   cannot form the group without the leader, and come again, with the newer epoch.

On one host, a member is dead if its process has ended, which is certain. Of a member on another host that
does not answer, nobody knows, so that the others go on only if they are more than half of those that are
not known to be dead, or half of them with the lowest: of two parts of a network, at most one goes on. A
member without which the others went on finds that at the first door that it comes to.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from ringcoll.errors import CollectiveTimeoutError, GroupBrokenError, PeerLostError
from ringcoll.runtime.lives import Process
from ringcoll.system.stores import Answer, begun, not_of_a_rank, read_json, served, within

__all__ = ["Member", "Membership", "View"]

_POLL_S = 0.002  # between two looks at a door
_LOOK_S = 0.1  # between two looks at the door of a member that does not come
_LEADING_S = 10.0  # for a leader to look at members that do not answer
_REACH_S = 2.0  # for an answer
# For a connection to a door: torch looks up the other's name, for its messages, and a name server that
# loses a question lets it wait 5 seconds, or twice 5 (resolv.conf(5)).
_CONNECT_S = 12.0
_UNREACHED = (OSError, dist.DistError)


class Member(NamedTuple):
    """A process of the group; ``name`` is its own, ``host`` and ``port`` are of its door."""

    name: str
    host: str
    port: int
    process: Process

    @classmethod
    def of(cls, told: Any) -> Member:
        """A member, from JSON. Raises `TransportError` for what no rank tells."""
        match told:
            case [str(name), str(host), int(port), process]:
                known = Process.of(process)
                if known is not None and 0 < port < 1 << 16:
                    return cls(name, host, port, known)
        raise not_of_a_rank("member", told)

    @property
    def address(self) -> str:
        """Where its door is."""
        return f"{self.host}:{self.port}"


class View(NamedTuple):
    """What all members of an epoch agree on; ``done`` is the number of operations that are complete."""

    epoch: int
    done: int
    members: tuple[Member, ...]

    @classmethod
    def of(cls, told: Any) -> View:
        """A view, from JSON. Raises `TransportError` for what no rank tells."""
        match told:
            case [int(epoch), int(done), [_, *_] as members]:
                return cls(epoch, done, tuple(map(Member.of, members)))
        raise not_of_a_rank("view", told)

    def names(self) -> list[str]:
        """Names of all members."""
        return [member.name for member in self.members]


class _Door:
    """The door of another member; who does not answer in time raises one of `_UNREACHED`."""

    def __init__(self, host: str, port: int) -> None:
        # torch would write lines to the terminal if nobody listens.
        socket.create_connection((host, port), _REACH_S).close()
        limit = timedelta(seconds=_CONNECT_S)
        self._store = begun(lambda: dist.TCPStore(host, port, None, False, timeout=limit))

    @property
    def is_connecting(self) -> bool:
        """Whether it is not known yet who listens there."""
        return not self._store.done()

    def store(self, limit_s: float = _REACH_S) -> dist.Store:
        """Its store, once there is a connection."""
        return self._store.result(limit_s)

    def has(self, key: str) -> bool:
        """Whether there is a key."""
        return self._ask(lambda store: store.check([key]))

    def read(self, key: str) -> Any:
        """What is under a key, as JSON."""
        return self._ask(lambda store: read_json(store, key))

    def write(self, key: str, value: object) -> None:
        """Put something under a key."""
        self._ask(lambda store: store.set(key, json.dumps(value)))

    def number(self, key: str) -> int:
        """A number that nobody else gets."""
        return self._ask(lambda store: store.add(key, 1)) - 1

    def _ask(self, question: Callable[[dist.Store], Answer]) -> Answer:
        store = self.store()
        return within(_REACH_S, lambda: question(store))


class Membership:
    """A member's view of its group, its own door, and the ways to the doors of others.

    Parameters
    ----------
    host
        Address that the door listens on, on a free port.
    """

    def __init__(self, host: str) -> None:
        self.door = served(host)
        self.own = Member(secrets.token_hex(8), host, self.door.port, Process.own(host))
        self.view = View(0, 0, (self.own,))
        self._ways: dict[str, _Door] = {}  # to the doors of others, by name
        self._tries = 0  # of this member to join
        self._answered: dict[str, int] = {}  # the newest try of each member
        self._num_wanted = 0  # that were read
        self._wants: list[Member] = []

    def take(self, view: View) -> None:
        """Take a view, and show it at the own door."""
        self.view = view
        names = view.names()
        self._ways = {name: way for name, way in self._ways.items() if name in names}
        self.door.set("view", json.dumps(view))

    def meeting_place(self) -> dist.Store:
        """The store at which the members of the view meet. Raises `PeerLostError` if it has gone."""
        leader = self.view.members[0]
        if leader.name == self.own.name:
            return self.door
        try:
            return self._connected(leader).store()
        except _UNREACHED as error:
            raise PeerLostError(f"rank 0 at {leader.address} is gone: {error}", peer=0) from error

    def leave(self) -> None:
        """Say that this member has left, which is as good as its end."""
        with contextlib.suppress(RuntimeError):
            self.door.set("left", "")

    def newcomers(self) -> list[Member]:
        """Processes that want to join, and have come to this member's door."""
        while self.door.check([f"want/{self._num_wanted}"]):
            self._wants.append(Member.of(read_json(self.door, f"want/{self._num_wanted}")))
            self._num_wanted += 1
        names = self.view.names()
        self._wants = [
            member
            for member in self._wants
            if member.name not in names and not self._is_gone(member)
        ]
        return [*self._wants]

    def change(self, done: int, newcomers: Iterable[Member], limit_s: float) -> View:
        """Agree with all members that are left on the next epoch; all of them call this.

        Parameters
        ----------
        done
            Number of operations that this member has seen complete.
        newcomers
            Members that the leader takes in.
        limit_s
            Time limit, in seconds, for a member that lives to come.

        Raises
        ------
        GroupBrokenError
            The others went on without this member, or may have.
        """
        deadline = time.monotonic() + limit_s
        lost: set[str] = set()  # members that did not answer
        while True:
            leader = next(
                member
                for member in self.view.members
                if member.name not in lost and not self._is_gone(member)
            )
            if leader.name == self.own.name:
                view: View | None = self._lead(done, newcomers, deadline)
            else:
                view = self._follow(leader, done, deadline + limit_s + _LEADING_S)
            if view is not None:
                self.take(view)
                return view
            lost.add(leader.name)

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
            known = View.of(door.read("view"))
        except _UNREACHED as error:
            raise PeerLostError(f"no group can be reached at {address}: {error}") from error
        while time.monotonic() < deadline:
            living = [member for member in known.members if not self._is_gone(member)]
            if not living:
                raise PeerLostError(f"no member of the group at {address} is left")
            with contextlib.suppress(*_UNREACHED):
                door = self._way_to(living[0])
                known = View.of(door.read("view"))
                if known.members[0].name == living[0].name:
                    view = self._ask(door, living[0], deadline)
                    if view is not None:
                        self.take(view)
                        return view
            time.sleep(_LOOK_S)
        raise CollectiveTimeoutError(f"the group at {address} took nobody in within {limit_s:g} s")

    # --- how it goes --------------------------------------------------------------------

    def _way_to(self, member: Member) -> _Door:
        """The door of another member; raises one of `_UNREACHED`."""
        if member.name not in self._ways:
            self._ways[member.name] = _Door(member.host, member.port)
        return self._ways[member.name]

    def _connected(self, member: Member) -> _Door:
        """The door of another member, which is waited for as long as somebody may listen there."""
        door = self._way_to(member)
        deadline = time.monotonic() + _CONNECT_S
        while door.is_connecting and time.monotonic() < deadline:
            if member.process.has_ended():
                break
            time.sleep(_POLL_S)
        return door

    def _forget(self, member: Member) -> None:
        """Connect anew the next time, to a door that has not answered."""
        door = self._ways.get(member.name)
        if door is not None and not door.is_connecting:
            del self._ways[member.name]

    def _is_gone(self, member: Member) -> bool:
        """Whether a member has surely ended, or has left."""
        if member.name == self.own.name:
            return False
        if member.process.has_ended():
            return True
        try:
            return self._way_to(member).has("left")
        except ConnectionRefusedError:
            return True  # its machine answers, and nobody listens at its door any more
        except _UNREACHED:
            self._forget(member)
            return False

    def _ask(self, door: _Door, member: Member, deadline: float) -> View | None:
        """Ask a member to be taken in; ``None`` if it has gone."""
        door.write(f"want/{door.number('wants')}", self.own)
        return self._answer(door, member, 0, deadline)

    def _answer(self, door: _Door, member: Member, number: int, deadline: float) -> View | None:
        """Wait for an answer at a member's door; ``None`` if it has gone, or does not answer."""
        key = f"answer/{self.own.name}/{number}"
        look_s = time.monotonic() + _LOOK_S
        while not door.has(key):
            now = time.monotonic()
            if now >= look_s:
                if now > deadline or self._is_gone(member):
                    return None
                look_s = now + _LOOK_S
            time.sleep(_POLL_S)
        found = door.read(key)
        match found:
            case {"refusal": str(refusal)}:
                raise GroupBrokenError(refusal)
        return View.of(found)

    def _lead(self, done: int, newcomers: Iterable[Member], deadline: float) -> View:
        newest = self.view
        came: dict[str, tuple[int, int]] = {}  # try, and number of operations
        gone: set[str] = set()
        look_s = 0.0
        while True:
            waiting = []
            for member in newest.members:
                if member.name == self.own.name:
                    continue
                said = self._said(member)
                if said is not None:
                    number, theirs = said
                    came[member.name] = number, theirs.done
                    newest = max(newest, theirs, key=lambda view: view.epoch)
                elif member.name not in came and member.name not in gone:
                    waiting.append(member)
            now = time.monotonic()
            if not waiting or now > deadline:
                break
            if now >= look_s:
                gone |= {member.name for member in waiting if self._is_gone(member)}
                self._check_not_left(member for member in waiting if member.name not in gone)
                look_s = time.monotonic() + _LOOK_S
            time.sleep(_POLL_S)
        living = [member for member in newest.members if not self._is_gone(member)]
        left = [member for member in living if member.name in came or member.name == self.own.name]
        refusal = "" if _may_go_on(left, living) else _refused(len(left), len(living))
        left += newcomers
        numbers = [done, *(count for _, count in came.values())]
        view = View(newest.epoch + 1, max(numbers), tuple(left))
        for member in left:
            number, _ = came.get(member.name, (0, 0))
            self._answered[member.name] = number
            answer = {"refusal": refusal} if refusal else view
            if member.name != self.own.name:
                self.door.set(f"answer/{member.name}/{number}", json.dumps(answer))
        if refusal:
            raise GroupBrokenError(refusal)
        return view

    def _said(self, member: Member) -> tuple[int, View] | None:
        """What a member has said at this member's door, if it has not been answered yet."""
        key = f"join/{member.name}"
        if not self.door.check([key]):
            return None
        match read_json(self.door, key):
            case [int(number), view]:
                is_new = number > self._answered.get(member.name, 0)
                return (number, View.of(view)) if is_new else None
            case told:
                raise not_of_a_rank(key, told)

    def _follow(self, leader: Member, done: int, deadline: float) -> View | None:
        """Say at the leader's door where this member is; its answer, or ``None`` if it has gone."""
        try:
            door = self._connected(leader)
            self._check_not_left([leader])
            self._tries += 1
            door.write(f"join/{self.own.name}", (self._tries, self.view._replace(done=done)))
            return self._answer(door, leader, self._tries, deadline)
        except _UNREACHED:
            self._forget(leader)
            return None

    def _check_not_left(self, members: Iterable[Member]) -> None:
        """Make sure that members have not gone on without this member."""
        for member in members:
            try:
                theirs = View.of(self._way_to(member).read("view"))
            except _UNREACHED:
                self._forget(member)
                continue
            if theirs.epoch > self.view.epoch and self.own.name not in theirs.names():
                raise GroupBrokenError(
                    "the others went on without this rank, which had not come for too long"
                )


def _may_go_on(left: list[Member], living: list[Member]) -> bool:
    """Whether no others can have gone on as well."""
    return 2 * len(left) > len(living) or (2 * len(left) == len(living) and left[0] == living[0])


def _refused(left: int, living: int) -> str:
    return (
        f"only {left} of the {living} ranks that are not known to be dead have come: "
        "others may have gone on without them"
    )
