"""A checker of the rules by which a group goes on: all interleavings of what its members can do.

The rules are the ones that run: `ringcoll.training.resilient.succession`. A member is its record, the newest
records that have come to it, the records that it still has to send, and whether it has waited too long. In one
transition a member sends one record, or reads all that have come and does one step; or it dies, leaves, or
ends after its group has gone on; or time passes for it. As a member may do nothing for as long as others do
anything, every transition is also a pause of all other members.

``python -m tests.resilient.model`` tries all the `CASES`, and prints how many states each has.
"""

from __future__ import annotations

import gc
import operator
import sys
import time
from collections.abc import Iterator
from enum import Enum
from typing import Any, NamedTuple

from ringcoll.errors import GroupBrokenError
from ringcoll.runtime.watch import Process
from ringcoll.training.resilient import Member, Patience, Record, View, succession


class Doing(Enum):
    """What a member does."""

    CHANGING = "agrees with others"
    FORMING = "has taken a view, and connects with its members"
    ON = "has gone on"
    ENDED = "has raised an error, or left"
    DEAD = "is no process any more"


class Budget(NamedTuple):
    """How often something may happen that need not happen."""

    deaths: int = 0
    leaves: int = 0
    lates: int = 0  # members for which a wait has become too long


_FREE = Budget()


class Part(NamedTuple):
    """A member in a state of the model."""

    doing: Doing
    record: Record
    heard: tuple[Record | None, ...]
    fresh: frozenset[int] = frozenset()
    to_send: tuple[tuple[int, Record], ...] = ()
    is_late: bool = False


class State(NamedTuple):
    """A state of the model; ``on`` is the view with which a group has gone on."""

    parts: tuple[int, ...]  # numbers of the `Part`s
    budget: Budget
    on: int = -1  # its number; there is none below 0


class BrokenRulesError(AssertionError):
    """The rules do not hold what they promise."""


class Model:
    """The rules, for some members, of which those of the first view are ``size``, and others join.

    ``rules`` has the functions of `succession`, which a test replaces by wrong ones.
    """

    def __init__(
        self, size: int, budget: Budget, joiners: int = 0, rules: Any = succession
    ) -> None:
        self.rules, self.size = rules, size
        process = Process(0, "", "")
        self.members = [Member(f"{i}", "", 1, 1, process) for i in range(size + joiners)]
        self.numbers = {member.name: i for i, member in enumerate(self.members)}
        self.view = View(1, 0, tuple(self.members[:size]))
        nobody = (None,) * len(self.members)
        views = [self.view] * size + [View(0, 0, (member,)) for member in self.members[size:]]
        self.first_parts = [Part(Doing.CHANGING, Record(view, 0), nobody) for view in views]
        self._parts: list[Part] = []
        self._numbers: dict[Part, int] = {}
        self._views: list[View] = []
        self._moves: dict[Any, Any] = {}
        self._sends: dict[Any, Any] = {}
        self._hears: dict[Any, Any] = {}
        self.first = State(
            tuple(self.number_of(i, part) for i, part in enumerate(self.first_parts)), budget
        )

    # --- one member -------------------------------------------------------------------------

    def numbers_of(self, members: tuple[Member, ...]) -> tuple[int, ...]:
        """Numbers of members."""
        return tuple(self.numbers[member.name] for member in members)

    def step(self, number: int, part: Part, gone: frozenset[int], patience: Patience) -> Part:
        me, old = self.members[number], part.record
        heard = {
            self.members[peer]: record
            for peer, record in enumerate(part.heard)
            if record is not None
        }
        ended = [self.members[peer] for peer in gone]
        try:
            if old.view.epoch == 0:
                new = self.rules.newest(old, heard)
                if patience:
                    raise GroupBrokenError("nobody takes it in")
            else:
                wanting = self.members[self.size :] if number == 0 and old.view.epoch == 1 else []
                newcomers = tuple(
                    member
                    for member in wanting
                    if member not in ended and not (member in heard and heard[member].has_left)
                )
                new = self.rules.step(me, old, heard, ended, patience, newcomers)
        except GroupBrokenError:
            return self.ended(number, part)
        fresh = [self.members[peer] for peer in part.fresh]
        told = self.rules.listeners(me, old, new, heard, fresh)
        to_send = tuple((peer, new) for peer in self.numbers_of(told) if peer not in gone)
        is_late = part.is_late and new.ballot == old.ballot
        doing = part.doing
        if new.view != old.view:
            doing = Doing.FORMING if me in new.view.members else Doing.ENDED
            is_late = False
        return Part(doing, new, part.heard, frozenset(), to_send, is_late)

    def ended(self, number: int, part: Part) -> Part:
        """A member that leaves, and tells that everybody."""
        record = part.record._replace(has_left=True)
        peers = self.numbers_of(self.view.members if number >= self.size else record.view.members)
        to_send = tuple((peer, record) for peer in peers if peer != number)
        return Part(Doing.ENDED, record, (), frozenset(), to_send)

    # --- all members ------------------------------------------------------------------------

    def number_of(self, i: int, part: Part) -> int:
        """The number of a part; equal parts have equal numbers."""
        if part.doing is Doing.DEAD or not (
            part.to_send or part.doing in (Doing.CHANGING, Doing.FORMING)
        ):
            part = Part(
                part.doing, self.first_parts[i].record, ()
            )  # the rest plays no part any more
        number = self._numbers.setdefault(part, len(self._parts))
        if number == len(self._parts):
            self._parts.append(part)
        return number

    def moves(self, i: int, number: int, gone: frozenset[int]) -> list[tuple[str, Any, Budget]]:
        """What a member can do by itself: in words, the part that it is then, and of what budget."""
        key = i, number, gone
        if key not in self._moves:
            self._moves[key] = [
                (f"{i} {name}", self.number_of(i, after), cost)
                for name, after, cost in self._moves_of(i, self._parts[number], gone)
            ]
        return self._moves[key]  # type: ignore[no-any-return]

    def _moves_of(
        self, i: int, part: Part, gone: frozenset[int]
    ) -> Iterator[tuple[str, Part, Budget]]:
        death, leave, late = Budget(1, 0, 0), Budget(0, 1, 0), Budget(0, 0, 1)
        if part.doing not in (Doing.ENDED, Doing.ON):
            yield "dies", part._replace(doing=Doing.DEAD), death
        if part.to_send:
            return
        if part.doing in (Doing.ENDED, Doing.ON):
            yield "ends", part._replace(doing=Doing.DEAD), _FREE
        if part.doing is not Doing.CHANGING:
            return
        after = self.step(i, part, gone, Patience.LATE if part.is_late else Patience.WAITS)
        if after != part:
            yield "does a step", after, _FREE
        if part.is_late or part.record.view.epoch == 0:
            yield "has waited for its limit", self.step(i, part, gone, Patience.OVER), late
        else:
            yield "is late", part._replace(is_late=True), late
        if part.record.ballot < 0 < part.record.view.epoch:
            yield "leaves", self.ended(i, part), leave

    def sends(self, i: int, number: int) -> tuple[int, int, Record]:
        """A member after it has sent a record, to whom, and the record."""
        key = i, number
        if key not in self._sends:
            part = self._parts[number]
            (peer, record), *rest = part.to_send
            after = self.number_of(i, part._replace(to_send=tuple(rest)))
            self._sends[key] = after, peer, record
        return self._sends[key]  # type: ignore[no-any-return]

    def hears(self, peer: int, number: int, i: int, record: Record) -> int:
        """A member after a record has come to it."""
        key = peer, number, i, id(record)  # that all lives as long as the model
        if key not in self._hears:
            part = self._parts[number]
            if part.heard:
                heard = (*part.heard[:i], record, *part.heard[i + 1 :])
                part = part._replace(heard=heard, fresh=part.fresh | {i})
            self._hears[key] = self.number_of(peer, part)
        return self._hears[key]  # type: ignore[no-any-return]

    def transitions(self, state: State) -> Iterator[tuple[str, State]]:
        """What can happen next."""
        numbers, budget, _ = state
        parts = [self._parts[number] for number in numbers]
        gone = frozenset(i for i, part in enumerate(parts) if part.doing is Doing.DEAD)
        for i, part in enumerate(parts):
            if i in gone:
                continue
            number = numbers[i]
            for name, after, cost in self.moves(i, number, gone):
                left = budget if cost is _FREE else Budget(*map(operator.sub, budget, cost))
                if min(left) >= 0:
                    yield name, State(_with(numbers, i, after), left, state.on)
            if part.to_send:
                after, peer, record = self.sends(i, number)
                heard = self.hears(peer, numbers[peer], i, record)
                sent = _with(_with(numbers, i, after), peer, heard)
                yield f"{i} tells {peer}", State(sent, budget, state.on)
            elif part.doing is Doing.FORMING:
                yield from self.of_one_that_connects(state, i, parts)

    def of_one_that_connects(
        self, state: State, i: int, parts: list[Part]
    ) -> Iterator[tuple[str, State]]:
        """What a member can do that connects with those of its view."""
        view = parts[i].record.view
        peers = self.numbers_of(view.members)
        if all(
            parts[peer].doing is Doing.FORMING
            and parts[peer].record.view == view
            and not parts[peer].to_send
            for peer in peers
        ):
            if state.on >= 0:
                raise BrokenRulesError(
                    f"{self.shown(view)} goes on beside {self.shown(self._views[state.on])}"
                )
            numbers = state.parts
            for peer in peers:
                on = self.number_of(peer, parts[peer]._replace(doing=Doing.ON))
                numbers = _with(numbers, peer, on)
            yield (
                f"{self.shown(view)} goes on",
                State(numbers, state.budget, self.number_of_view(view)),
            )
            return
        again = self.number_of(i, parts[i]._replace(doing=Doing.CHANGING))
        after = state._replace(parts=_with(state.parts, i, again))
        if any(parts[peer].doing in (Doing.DEAD, Doing.ENDED) for peer in peers):
            yield f"{i} cannot connect", after
        elif state.budget.lates:
            left = state.budget._replace(lates=state.budget.lates - 1)
            yield f"{i} waits in vain for a connection", after._replace(budget=left)

    def number_of_view(self, view: View) -> int:
        """The number of a view."""
        if view not in self._views:
            self._views.append(view)
        return self._views.index(view)

    def shown(self, view: View) -> str:
        """A view in words."""
        return f"view {view.epoch} of {self.numbers_of(view.members)}"

    # --- what has to hold -------------------------------------------------------------------

    def check_at_rest(self, state: State) -> None:
        """Check a state in which nothing happens any more until time passes."""
        for i, number in enumerate(state.parts):
            part = self._parts[number]
            if part.doing in (Doing.CHANGING, Doing.FORMING) and part.record.view.epoch:
                if state.on >= 0:
                    shown = self.shown(self._views[state.on])
                    raise BrokenRulesError(f"{i} waits, and {shown} has gone on")
                if not self.first.budget.lates:
                    raise BrokenRulesError(f"{i} waits for nobody")

    def explore(self, limit: int = 6_000_000) -> int:
        """Try all that can happen; return the number of states. Raises `BrokenRulesError`, with the way there."""
        before: dict[State, tuple[str, State] | None] = {self.first: None}
        left = [self.first]
        while left:
            state = left.pop()
            try:
                rests = True
                for name, after in self.transitions(state):
                    rests = rests and after.budget != state.budget
                    if after not in before:
                        before[after] = name, state
                        left.append(after)
                if rests:
                    self.check_at_rest(state)
            except BrokenRulesError as broken:
                raise BrokenRulesError(
                    f"{broken}, after: {'; '.join(self.way_to(state, before))}"
                ) from None
            if len(before) > limit:
                raise MemoryError(f"more than {limit} states")
        return len(before)

    def way_to(self, state: State, before: dict[State, tuple[str, State] | None]) -> list[str]:
        """What has happened until a state."""
        names: list[str] = []
        while (came := before[state]) is not None:
            name, state = came
            names.append(name)
        return names[::-1]


def _with(numbers: tuple[int, ...], i: int, number: int) -> tuple[int, ...]:
    return (*numbers[:i], number, *numbers[i + 1 :])


class Case(NamedTuple):
    """Members of the first view, what may happen, how many join, and the number of states."""

    size: int
    budget: Budget
    joiners: int
    states: int


CASES = {
    "2 ranks: 2 deaths, a leave, 4 waits": Case(2, Budget(2, 1, 4), 0, 12_055),
    "2 ranks, one joins: a death, a wait": Case(2, Budget(1, 0, 1), 1, 8_605),
    "2 ranks, one joins: a death, a leave, 2 waits": Case(2, Budget(1, 1, 2), 1, 95_403),
    "3 ranks: a death": Case(3, Budget(1, 0, 0), 0, 3_790),
    "3 ranks: 2 deaths, a leave": Case(3, Budget(2, 1, 0), 0, 8_788),
    "3 ranks: a wait": Case(3, Budget(0, 0, 1), 0, 30_322),
    "3 ranks: a death, a leave, a wait": Case(3, Budget(1, 1, 1), 0, 150_870),
    "3 ranks, one joins: a death": Case(3, Budget(1, 0, 0), 1, 45_879),
    "4 ranks: a leave": Case(4, Budget(0, 1, 0), 0, 315_819),
}


def main() -> None:
    """Try all cases, or those whose names begin with the arguments."""
    gc.disable()  # the states are in no cycles, and many
    for name, case in CASES.items():
        if name.startswith(tuple(sys.argv[1:]) or ""):
            begin_s = time.monotonic()
            number = Model(case.size, case.budget, case.joiners).explore()
            took_s = time.monotonic() - begin_s
            print(f"{name}: {number:,} states, {took_s:.1f} s", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
