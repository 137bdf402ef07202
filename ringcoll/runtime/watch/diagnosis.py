"""The record of what a rank does, and the diagnosis of an operation that does not end.

The record has the operations that the rank has begun, and what it waits for.

The thread that runs operations writes the record, and asks for nothing; the `Monitor` and the
flight recorder read it from other threads. So an operation costs a few assignments only.

On a transport whose `wait` orders a stream, an operation is over for its thread long before its
messages have come. The operation stays here, `Issued`, until the stream has come to its end.

The diagnosis is the cause, from what this rank does and knows of the others. Nothing here waits,
and nothing is published: the `Monitor` asks, and decides what to do with the answer.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import Any, NamedTuple

from ringcoll.errors import (
    CollectiveTimeoutError,
    CorruptMessageError,
    MismatchError,
    PeerLostError,
    RingcollError,
    TransportError,
)
from ringcoll.runtime.operation import Operation, Turn, Wait, Words
from ringcoll.runtime.process import line_in_words, line_of_thread, user_line
from ringcoll.runtime.rendezvous import unreachable
from ringcoll.runtime.transport import Lane, beside
from ringcoll.runtime.watch.lives import Lives
from ringcoll.runtime.watch.notices import FAILURES, Notices, kind_of

_REMEMBERED = 1024  # runs of operations that a rank compares with those that others tell
BARRIER = Turn("monitored_barrier", lambda: None)


class Running(NamedTuple):
    """An operation in execution, and the message that it waits for."""

    number: int
    operation: Operation | Turn
    wait: Wait | None

    @property
    def is_barrier(self) -> bool:
        """Whether it is no operation, but a monitored barrier."""
        return self.operation is BARRIER

    @property
    def peer(self) -> int | None:
        """The rank that is waited for."""
        return None if self.wait is None else self.wait.peer

    def where(self, group: str = "the group") -> str:
        """The call, and the step that it waits in, in words; calls are counted from 1 there."""
        call = self.operation.description or self.operation.name
        text = f"call {self.number + 1} of {group} ({call})"
        return text if self.wait is None else f"{text}, step {self.wait.step}"


class Issued(NamedTuple):
    """An operation that is enqueued on a stream, and the messages that the stream waits for.

    ``waits`` are in order, each with a function that says whether the message is over.
    """

    number: int
    operation: Operation | Turn
    limit_s: float
    waits: Sequence[tuple[Wait, Callable[[], bool]]]
    lane: Lane

    def awaited(self) -> list[Wait]:
        """The messages of the earliest step that are not over; those of a step come together."""
        left = [wait for wait, is_over in self.waits if not is_over()]
        return [wait for wait in left if wait.step == left[0].step]


class Progress:
    """The operations of one rank of a group: the last, the one that runs, and those of streams."""

    def __init__(self) -> None:
        # Number and operation of what `thread` runs, and the message that this thread waits for.
        self.current: tuple[int, Operation | Turn] | None = None
        self.thread = 0
        self.wait: Wait | None = None
        self.meets = False  # whether the rank waits in the store, for all ranks
        # Operations of streams; the monitor's thread takes away the operations that are over.
        self.issued: deque[Issued] = deque()
        # The monitored barrier that the rank is in: number of calls before it, and its place.
        self.barrier: tuple[int, str] | None = None
        self.num_barriers = 0  # so far
        self.failed: Running | None = None  # the operation that has broken the group
        self.last: tuple[int, Operation | Turn | None] = (-1, None)  # to begin
        # First ones of runs of the same operation: a root may be thousands of broadcasts ahead of
        # ranks that do something else. Only words: an operation has memory.
        self._runs: deque[tuple[int, Words | None]] = deque(maxlen=_REMEMBERED)
        self._awaited: tuple[int, Wait | None] = (-1, None)  # number of the first issued; message
        self._taking = threading.Lock()  # operations away from `issued`
        # Calls that are not run where they are made: numbers from, to; file, line.
        self._sites: deque[tuple[int, int, str, int]] = deque(maxlen=_REMEMBERED)
        # The call that was looked for last, and its place.
        self._site: tuple[object, str] = (None, "")

    # --- the thread that runs operations ----------------------------------------------------

    # An operation begins with four assignments, where it is run: a call of a function takes longer.

    def begin_run(self, before: tuple[int, Operation | Turn | None]) -> None:
        """Note that the last operation differs from that before it, or does not follow it."""
        number, operation = self.last
        if number != before[0] + 1:
            self._runs.append((before[0] + 1, None))  # numbers that were left out
        self._runs.append((number, None if operation is None else operation.words))

    def end(self) -> None:
        """Note that the operation is over."""
        self.current = self.wait = None

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """Note that this rank waits for all ranks in the block; after an error it still does."""
        self.meets = True
        yield
        self.meets = False

    def note_site(self, number: int, num_parts: int) -> None:
        """Note where the user makes a call that another thread may run."""
        self._sites.append((number, number + num_parts, *user_line(sys._getframe(1))))

    def enter_barrier(self, number: int) -> int:
        """Note that the rank enters a monitored barrier after so many calls; its own number."""
        self.barrier = number, line_in_words(*user_line(sys._getframe(1)))
        self.num_barriers += 1
        return self.num_barriers

    def forget(self) -> None:
        """Let go of all operations, which are bound to connections."""
        self.issued.clear()
        self._runs.clear()
        self.last, self.failed = (-1, None), None

    # --- threads that look ------------------------------------------------------------------

    def running(self) -> Running | None:
        """The operation that runs now, or that a stream has not finished."""
        first = self.first()
        if first is None:
            return self.on_host()
        number, wait = self._awaited
        return Running(first.number, first.operation, wait if number == first.number else None)

    def first(self) -> Issued | None:
        """The earliest operation that is enqueued on a stream."""
        with suppress(IndexError):
            return self.issued[0]
        return None

    def on_host(self) -> Running | None:
        """The operation that the thread of operations is at."""
        current, wait, barrier = self.current, self.wait, self.barrier
        if current is None:
            return None if barrier is None else Running(barrier[0], BARRIER, None)
        return Running(*current, wait if self.current is current else None)

    def awaits(self, first: Issued, wait: Wait | None) -> Running:
        """Note which message a stream waits for."""
        self._awaited = first.number, wait
        return Running(first.number, first.operation, wait)

    def take_away(self) -> None:
        """Take away the operations to whose end their streams have come."""
        while (first := self.first()) is not None:
            with beside(first.operation.device), self._taking:
                if first is not self.first():
                    return  # they are abandoned
                if not first.lane.is_over():
                    return
                self.issued.popleft()

    def abandon(self, error: BaseException) -> None:
        """Give an error to all whose operations a stream has not come to the end of."""
        with self._taking:
            while self.issued:
                self.issued.popleft().lane.fail(error)

    def recent(self, most: int) -> list[tuple[int, Words]]:
        """The last operations that have begun, in order, with their numbers."""
        end, operations = self.last[0] + 1, list[tuple[int, Words]]()
        for start, operation in reversed(tuple(self._runs)):
            first = max(start, end - most + len(operations))
            if operation is not None:
                operations += [(number, operation) for number in reversed(range(first, end))]
            end = start
            if len(operations) >= most:
                break
        return operations[::-1]

    def called(self, number: int) -> Words | None:
        """The operation of a number; ``None`` if it has not begun, or was too long ago."""
        if number > self.last[0]:
            return None
        runs = reversed(tuple(self._runs))
        return next((operation for start, operation in runs if start <= number), None)

    def site(self, number: int) -> str:
        """File and line of a call; empty if they are not known.

        To note them for each call would take time. So for a call that runs where it was made its
        thread is looked at, when something is wrong.
        """
        for first, end, file, line in reversed(tuple(self._sites)):
            if first <= number < end:
                return line_in_words(file, line)
            if end <= number:
                break
        current, barrier = self.current, self.barrier
        if current is None:
            return barrier[1] if barrier is not None and barrier[0] == number else ""
        if current[0] != number:
            return ""
        if self._site[0] is not current:
            is_own = self.thread == threading.get_ident()
            where = user_line(sys._getframe()) if is_own else line_of_thread(self.thread)
            if self.current is not current:  # the thread has gone on meanwhile
                return ""
            self._site = current, line_in_words(*where)
        return self._site[1]

    def place(self, number: int) -> str:
        """Where a call was made, in words with a space before them, as far as that is known."""
        if site := self.site(number):
            return f" at {site}"
        running = self.running()
        site = self.site(running.number) if running and running.number > number else ""
        return f" before {site}" if site else ""


_GRACE_S = 1.0  # for the last messages of a process that has ended
_DEAD_RANK_S = 5.0  # for an operation to go on without a dead rank that is not waited for


class Diagnosis:
    """The causes that one rank of a group can tell."""

    def __init__(
        self, rank: int, world_size: int, progress: Progress, notices: Notices, lives: Lives
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self._progress, self._notices, self._lives = progress, notices, lives
        self._ended: dict[int, float] = {}  # ranks whose process has ended, and when that was seen

    def missing(self, running: Running) -> list[int]:
        """The ranks for which this rank waits: of those that meet, those not known to have come."""
        if running.peer is not None:
            return [running.peer]
        is_barrier, progress = running.is_barrier, self._progress
        missing = []
        for peer in range(self.world_size) if progress.meets or is_barrier else ():
            state = self._notices.state(peer)
            at = state and (state["barrier"][:1] if is_barrier else state["waits"])
            if peer != self.rank and (
                not at or at[0] < (progress.num_barriers if is_barrier else running.number)
            ):
                missing.append(peer)
        return missing

    def chain(self, running: Running) -> list[int]:
        """The rank that this rank waits for, the rank that that rank waits for, and so on."""
        assert running.peer is not None
        chain = [running.peer]
        while True:
            state = self._notices.state(chain[-1])
            waits = state["waits"] if state else None
            if waits is None or waits[0] != running.number or waits[1] in (self.rank, *chain):
                return chain
            chain.append(waits[1])

    def suspect(self, first: Issued) -> Wait | None:
        """The message that a stream waits for.

        Of messages that come together, it is more likely that of a peer that has ended, or is not
        known to be in this operation.
        """
        with beside(first.operation.device):
            waits = first.awaited()
        ended = self._lives.ended(*(wait.peer for wait in waits))

        def suspicion(wait: Wait) -> int:
            if wait.peer in ended:
                return 0
            state = self._notices.state(wait.peer)
            is_there = state and state["waits"] and state["waits"][0] >= first.number
            return 2 if is_there else 1

        return min(waits, key=suspicion, default=None)

    def missed(self, running: Running) -> PeerLostError | None:
        """An error for an awaited rank that will never come to this operation."""
        if running.is_barrier:
            return None  # the barrier itself names the missing rank
        now, awaited, notices = time.monotonic(), running.peer, self._notices
        if awaited is not None:
            last = notices.last_of(awaited)
            if last is not None and last < running.number:
                reason = f"{notices.names.of(awaited)} has closed {notices.names.group}"
                return self._lost(awaited, running, reason)
        ended = self._lives.ended(awaited, 0)  # rank 0 may have had the store
        for peer in ended:
            dead_s = now - self._ended.setdefault(peer, now)
            # The peer was done: its message may be in a group with that of another rank, or on a
            # slow network.
            last, is_far = notices.last_of(peer), peer in self._lives.elsewhere
            is_late = is_far and last is not None and last >= running.number
            if last is not None and (self._progress.issued or is_late):
                continue
            is_awaited = self._progress.meets if awaited is None else awaited == peer
            # The peer may have blocked the others: UCX's queues in shared memory wait for a sender
            # that was killed while it wrote.
            is_unknown = notices.is_gone or notices.is_silent
            blocks_others = last is None and not is_unknown and dead_s >= _DEAD_RANK_S
            if (is_awaited and dead_s >= _GRACE_S) or blocks_others:
                cause = self._cause(peer, ended)
                assert cause is not None
                return self._lost(cause, running)
        return None

    def has_lost(self, running: Running) -> bool:
        """Whether the process that this rank waits for has ended; any process, as ranks meet."""
        ended = self._lives.ended(running.peer)
        return bool(ended) if running.peer is None else running.peer in ended

    def is_unsure(self) -> bool:
        """Whether the store is gone, and rank 0, which may be the cause, has not surely ended.

        The end of a process of another host is sure only after a while.
        """
        return self._notices.is_gone and self.rank != 0 and 0 not in self._lives.ended(0)

    def weighed(self, failure: TransportError, peer: int) -> TransportError:
        """The loss of a peer that lives; this rank's own fault if more ranks have lost it."""
        count = self._notices.broken(self.rank)
        if count <= self._notices.broken(peer):
            return failure
        text = f"{failure}; {count} ranks have lost {self._notices.names.of(self.rank)}"
        return type(failure)(text, peer=self.rank)

    def failure(
        self, error: RingcollError, running: Running, limit_s: float, chain: Sequence[int]
    ) -> TransportError:
        """The failure of a wait as this rank knows it; ranks in ``chain`` wait for the next."""
        timed_out = isinstance(error, CollectiveTimeoutError)
        is_corrupt = isinstance(error, CorruptMessageError)
        peer = running.peer if running.wait else getattr(error, "peer", None)
        ended = set() if timed_out or is_corrupt else self._lives.ended(peer, 0)
        lost = self._cause(peer, ended)
        if lost is not None and (lost != peer or (running.wait is None and lost in ended)):
            return self._lost(lost, running)
        names, of = self._notices.names, self._notices.names.of
        where, reason = f"in {running.where(names.group)}", names.translated(str(error))
        if running.wait is None:
            text = f"{reason}, {where}"  # the ranks had not met yet
            if peer is not None and of(peer) not in text:
                text = f"{of(self.rank)} lost {of(peer)}: {text}"
        elif timed_out:
            what = "no data came from" if running.wait.is_receive else "no data were taken by"
            text = f"{of(self.rank)} timed out after its timeout of {limit_s:g} s: "
            text += f"{what} {of(peer)}, {where}"
            text += "".join(f"; {of(a)} waits for {of(b)}" for a, b in pairwise(chain))
            peer = chain[-1]
        elif is_corrupt:
            text = f"{reason}, {where}"
        else:
            cause = f"{of(peer)}'s process has ended" if peer in ended else _short(reason)
            text = f"{of(self.rank)} lost {of(peer)}: {cause}, {where}"
        if self._notices.is_gone and not timed_out:  # its host may be the cause
            gone = unreachable(self._notices.store)
            text += "" if gone in text else f"; {gone}"
        return FAILURES[kind_of(error)](text, peer=peer)

    def _cause(self, peer: int | None, ended: set[int]) -> int | None:
        """The rank whose end is the cause, where the message of a peer does not come.

        Ranks that gave up because of it may have ended since. If the store has ended with rank 0,
        these ranks could not tell why.
        """
        if self._notices.is_gone and 0 in ended:
            return 0
        return min(ended) if ended and peer not in ended else peer

    def _lost(self, peer: int, running: Running, cause: str = "") -> PeerLostError:
        names = self._notices.names
        cause = cause or f"{names.of(peer)}'s process has ended"
        lost = f"{names.of(self.rank)} lost {names.of(peer)}"
        text = f"{lost}: {cause}, in {running.where(names.group)}"
        if self._notices.is_gone:
            text += f"; {unreachable(self._notices.store)}"
        return PeerLostError(text, peer=peer)

    def disagreement(self) -> dict[str, Any] | None:
        """The verdict on the first operation in which a rank differs from this one, or ``None``."""
        progress = self._progress
        for peer in range(self.world_size):
            state = self._notices.state(peer) if peer != self.rank else None
            for key, (description, lengths, place) in state["calls"].items() if state else ():
                own = progress.called(key)
                if own is None or own.description is None:
                    continue
                pair = (own.description, description)
                if own.description == description:
                    pair = self._other_lengths(own, description, lengths)
                if pair[0] != pair[1]:
                    return self.difference(key, pair[0], peer, pair[1], place)
            # A rank in a barrier has not made the call that this rank has made before that barrier.
            if state and state["barrier"] and state["barrier"][0] > progress.num_barriers:
                _, number, site = state["barrier"]
                if (own := progress.called(number)) is not None:
                    call, place = own.description or own.name, f" at {site}" * bool(site)
                    return self.difference(number, call, peer, BARRIER.name, place)
        return None

    def difference(
        self, number: int, call: str, peer: int, other: str, place: str
    ) -> dict[str, Any]:
        """The verdict that this rank and a peer, at another place, have made different calls."""
        calls = sorted([(self.rank, call, self._progress.place(number)), (peer, other, place)])
        return {"kind": "mismatch", "calls": calls, "number": number}

    def _other_lengths(
        self, own: Words, description: str, lengths: dict[int, int]
    ) -> tuple[str, str]:
        """Two calls of one description, with the length of the first block that differs."""
        for key, numel in lengths.items():
            own_numel = (own.lengths or {}).get(key, numel)
            if own_numel != numel:
                source, target = divmod(key, self.world_size)
                way = f"from {self._notices.names.of(source)} to {self._notices.names.of(target)}"
                return (
                    f"{own.description} with {own_numel} elements {way}",
                    f"{description} with {numel} elements {way}",
                )
        return description, description

    def verdict_of(self, failure: TransportError) -> dict[str, Any]:
        """The failure of this rank, as the others are to read it."""
        text, of = str(failure), self._notices.names.of
        own = of(self.rank)
        lead, _, cause = text.partition(": ")
        if lead == f"{own} lost {of(failure.peer)}" and cause.startswith("rank "):
            text = f"{own} reports that {cause}"
        return {"kind": kind_of(failure), "peer": failure.peer, "text": text}

    def from_verdict(self, verdict: dict[str, Any]) -> RingcollError:
        """The error of this rank after a verdict, of another rank or its own."""
        of, group = self._notices.names.of, self._notices.names.group
        if verdict["kind"] == "mismatch":
            calls: dict[int, str] = {rank: call for rank, call, _ in verdict["calls"]}
            both = " and ".join(
                f"{of(rank)} called {call}{place}" for rank, call, place in verdict["calls"]
            )
            number, mine = verdict["number"], calls.get(self.rank, "")
            # If this rank is neither of the two, its peer is the rank with another call.
            if not mine and (own := self._progress.called(number)) is not None:
                mine = own.description or own.name
            peer = next(rank for rank, call in calls.items() if rank != self.rank and call != mine)
            text = f"{of(self.rank)}: the ranks disagree on call {number + 1} of {group}: {both}"
            return MismatchError(text, peer=peer, mine=mine, theirs=calls[peer])
        text = f"{of(self.rank)} stops: {verdict['text']}"
        return FAILURES[verdict["kind"]](text, peer=verdict["peer"])


def _short(text: str) -> str:
    """The first sentence of a transport's message, without its source location."""
    return text.split("] ", 1)[-1].partition(". ")[0]
