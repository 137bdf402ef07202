"""Reports of the ranks of a group to each other when something takes too long.

Problem: a rank that waits for a message cannot see why the message does not come. The
monitor is a thread that wakes up when an operation has been waiting for a while. The monitor
publishes through the store what this rank is doing, reads what the others are doing, and breaks
the wait when two ranks disagree or a rank has given up. In normal operation nothing is published.

An operation of a transport whose `wait` orders a stream is over for the thread that runs it long before its
messages have come. It stays here, `Issued`, until the stream has come to its end. Nothing else ends
a wait of the stream: so the monitor keeps the time limits of such operations, too. An operation's time
counts from when the operations before it are over.

What is in the store, and when: see `ringcoll.watch.notices`.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, NamedTuple

import torch.distributed as dist

from ringcoll.errors import (
    CollectiveTimeoutError,
    CorruptMessageError,
    GroupBrokenError,
    MismatchError,
    PeerLostError,
    RingcollError,
    TransportError,
)
from ringcoll.machine import (
    hang_notice_s,
    in_words,
    line_of_thread,
    started,
    unreachable,
    user_line,
    within,
)
from ringcoll.operation import Operation, Turn, Wait, Words
from ringcoll.transport import Lane, beside
from ringcoll.watch.announcement import say
from ringcoll.watch.lives import Lives
from ringcoll.watch.notices import FAILURES, STORE_S, Notices, kind_of

_POLL_S = 0.1  # between two looks of a rank that waits
_BETWEEN_S = 0.02  # between two looks of a rank that has failed: torchrun ends it in 0.1 s
_PATIENCE_S = 0.3  # longer than any healthy wait on one host; nothing breaks on it alone
_GRACE_S = 1.0  # for the last messages of a process that has ended
_DOOM_S = 5.0  # for an operation to end of which a rank is dead that is not waited for
_REMEMBERED = 1024  # runs of operations that a rank compares with those that others tell
_TOLD = 64  # operations that a rank tells the others
_BARRIER = Turn("monitored_barrier", lambda: None)


class Running(NamedTuple):
    """An operation in execution, and the message that it waits for."""

    number: int
    operation: Operation | Turn
    wait: Wait | None

    @property
    def is_barrier(self) -> bool:
        """Whether it is no operation, but a monitored barrier."""
        return self.operation is _BARRIER

    def where(self) -> str:
        """The call, and the step that it waits in, in words; calls are counted from 1 there."""
        call = self.operation.description or self.operation.name
        text = f"call {self.number + 1} of the group ({call})"
        return text if self.wait is None else f"{text}, step {self.wait.step}"


class Issued(NamedTuple):
    """An operation that is enqueued on a stream.

    ``waits`` are the messages that the stream waits for, in order, each with a function that says whether the
    message is over.
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


class Monitor:
    """Watches the operations of one rank of a group.

    Nobody else uses the store. The monitor's thread calls ``on_break`` to break the wait.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        on_break: Callable[[], None],
        lives: Lives,
    ) -> None:
        self.rank, self.world_size, self.on_break = rank, world_size, on_break
        self.notices = Notices(store, rank)
        self.error: RingcollError | None = None
        # The thread that runs operations sets these: number and operation, and its wait.
        self.current: tuple[int, Operation | Turn] | None = None
        self.wait: Wait | None = None
        self.issued: deque[Issued] = deque()  # the monitor's thread takes away what is over
        self._awaited: tuple[int, Wait | None] = (-1, None)  # number of the first, and its message
        self.failed: Running | None = None  # what has broken the group
        self.meets = False  # whether it waits in the store, for all ranks
        self.thread = 0  # that runs ``current``
        # The call that was looked for last, and its place.
        self._site: tuple[object, str] = (None, "")
        # Calls that are not run where they are made: numbers from, to; file, line.
        self.sites: deque[tuple[int, int, str, int]] = deque(maxlen=_REMEMBERED)
        # Monitored barriers so far; and the one that it is in: number of calls before it, and its site.
        self.num_barriers = 0
        self.barrier: tuple[int, str] | None = None
        self.lives = lives
        self._ended: dict[int, float] = {}  # ranks whose process has ended, and when that was seen
        # The last operation, which that thread sets, too, and the first ones of runs of the same operation: a
        # root may be thousands of broadcasts ahead of ranks that do something else.
        # Only words: an operation has memory.
        self._runs: deque[tuple[int, Words | None]] = deque(maxlen=_REMEMBERED)
        self.last: tuple[int, Operation | Turn | None] = (-1, None)
        self.awake = False  # the same as the event, and quicker to read
        self._says_it_waits = False  # in the published state
        self._notice_s = hang_notice_s()
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._taking = threading.Lock()  # operations away from `issued`
        self._thread: threading.Thread | None = None

    def begin_run(self, before: tuple[int, Operation | Turn | None]) -> None:
        """Note that the last operation is another one than that before it, or does not follow it."""
        number, operation = self.last
        if number != before[0] + 1:
            self._runs.append((before[0] + 1, None))  # numbers that were left out
        self._runs.append((number, None if operation is None else operation.words))

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

    def _called(self, number: int) -> Words | None:
        """The operation of a number; ``None`` if it has not begun, or was too long ago."""
        if number > self.last[0]:
            return None
        runs = reversed(tuple(self._runs))
        return next((operation for start, operation in runs if start <= number), None)

    def note_site(self, number: int, num_parts: int) -> None:
        """Note where the user makes a call that another thread may run."""
        self.sites.append((number, number + num_parts, *user_line(sys._getframe(1))))

    def site(self, number: int) -> str:
        """File and line of a call; empty if they are not known.

        To note them for each call would take time. So for a call that runs where it was made its thread is
        looked at, when something is wrong.
        """
        for first, end, file, line in reversed(tuple(self.sites)):
            if first <= number < end:
                return in_words(file, line)
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
            self._site = current, in_words(*where)
        return self._site[1]

    def _place(self, number: int) -> str:
        """Where a call was made, in words with a space before them, as far as that is known."""
        if site := self.site(number):
            return f" at {site}"
        running = self.running()
        site = self.site(running.number) if running and running.number > number else ""
        return f" before {site}" if site else ""

    def forget(self) -> None:
        """Let go of all operations, which are bound to connections."""
        self.issued.clear()
        self._runs.clear()
        self.last, self.failed = (-1, None), None

    def wake(self) -> None:
        """Begin to watch, as an operation has begun."""
        if self.world_size > 1:
            if self._thread is None:
                try:
                    self._thread = started(self._watch, f"ringcoll-monitor-{self.rank}")
                except GroupBrokenError:  # the program ends: the waits have their time limits
                    return
            self.awake = True
            self._wake.set()

    def running(self) -> Running | None:
        """The operation that runs now, or that a stream has not finished; other threads may ask, too."""
        first = self._first()
        if first is None:
            return self._on_host()
        number, wait = self._awaited
        return Running(first.number, first.operation, wait if number == first.number else None)

    def _first(self) -> Issued | None:
        """The earliest operation that is enqueued on a stream."""
        try:
            return self.issued[0]
        except IndexError:
            return None

    def _on_host(self) -> Running | None:
        """The operation that the thread of operations is at."""
        current, wait, barrier = self.current, self.wait, self.barrier
        if current is None:
            return None if barrier is None else Running(barrier[0], _BARRIER, None)
        return Running(*current, wait if self.current is current else None)

    def abandon(self, error: BaseException) -> None:
        """Give an error to all whose operations a stream has not come to the end of."""
        with self._taking:
            while self.issued:
                self.issued.popleft().lane.fail(error)

    def leave(self) -> None:
        """Tell ranks that wait for this rank in a later operation that it has closed the group."""
        if self.world_size > 1:
            last = self.last[0]
            with suppress(TimeoutError):
                within(STORE_S, lambda: self.notices.leave(last))

    def close(self) -> None:
        """Stop the thread."""
        self._stop.set()
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(2 * STORE_S)

    def explain(self, error: RingcollError, limit_s: float) -> RingcollError:
        """Turn the failure of a wait into an error that names the cause.

        A peer that sees a mismatch writes its verdict, and then breaks the connection. So the
        verdict is read first.
        """
        if self.error is not None:
            return self.error
        running = self._on_host()
        assert running is not None
        return self._explain(error, running, limit_s)

    def _explain(self, error: RingcollError, running: Running, limit_s: float) -> RingcollError:
        # From a host that is cut off, the store gives no answer, and no time limit ends that.
        try:
            return within(_PATIENCE_S + STORE_S, lambda: self._ask(error, running, limit_s))
        except TimeoutError:
            chain = [] if running.wait is None else [running.wait.peer]
            self.error = self._in_words(error, running, limit_s, chain)
            return self.error

    def _ask(self, error: RingcollError, running: Running, limit_s: float) -> RingcollError:
        """Read the verdict of another rank, or write this rank's verdict."""
        with self._lock:
            timed_out = isinstance(error, CollectiveTimeoutError)
            is_cause = timed_out or isinstance(error, CorruptMessageError)
            broken = None if is_cause or running.wait is None else running.wait.peer
            if broken is not None:
                self.notices.tell_broken(broken)
            # Such a rank waits for no verdict: the others lose their connections to it at once, and
            # wait for its verdict. A process that has ended writes none any more.
            deadline = time.monotonic() + (0 if is_cause else _PATIENCE_S)
            while True:
                is_late, has_lost = time.monotonic() >= deadline, self._has_lost(running)
                verdict = self.notices.verdict()
                if verdict is not None or is_late or (has_lost and not self._is_unsure()):
                    break
                time.sleep(_BETWEEN_S)
            if verdict is not None:
                self.error = self._from_verdict(verdict)
                return self.error
            chain = self._waiting_for(running) if running.wait and timed_out else []
            failure = self._in_words(error, running, limit_s, chain)
            if broken is not None and broken == failure.peer and not has_lost:
                failure = self._weighed(failure, broken)
            self._fail(failure)
            return failure

    def _fail(self, failure: TransportError) -> None:
        """Take a failure for this rank's, and tell it to the others."""
        self.error, text = failure, str(failure)
        lead, _, cause = text.partition(": ")
        if lead == f"rank {self.rank} lost rank {failure.peer}" and cause.startswith("rank "):
            text = f"rank {self.rank} reports that {cause}"
        self.notices.tell_verdict({"kind": kind_of(failure), "peer": failure.peer, "text": text})

    def _weighed(self, failure: TransportError, peer: int) -> TransportError:
        """The loss of a peer that lives; this rank's own fault if more ranks have lost it than the peer."""
        count = self.notices.broken(self.rank)
        if count <= self.notices.broken(peer):
            return failure
        text = f"{failure}; {count} ranks have lost rank {self.rank}"
        return type(failure)(text, peer=self.rank)

    def _has_lost(self, running: Running) -> bool:
        """Whether the process of the rank that this rank waits for has ended; of any rank, as they meet."""
        peer = None if running.wait is None else running.wait.peer
        ended = self.lives.ended(peer)
        return bool(ended) if peer is None else peer in ended

    def _is_unsure(self) -> bool:
        """Whether the store is gone, and rank 0, which may be the cause, has not surely ended.

        The end of a process of another host is sure only after a while.
        """
        return self.notices.is_gone and self.rank != 0 and 0 not in self.lives.ended(0)

    def _in_words(
        self, error: RingcollError, running: Running, limit_s: float, chain: Sequence[int]
    ) -> TransportError:
        """The failure as this rank knows it; in ``chain`` each rank waits for the next rank."""
        timed_out = isinstance(error, CollectiveTimeoutError)
        is_corrupt = isinstance(error, CorruptMessageError)
        peer = running.wait.peer if running.wait else getattr(error, "peer", None)
        ended = set() if timed_out or is_corrupt else self.lives.ended(peer, 0)
        lost = self._cause(peer, ended)
        if lost is not None and lost != peer:
            return self._lost(lost, running)
        where = f"in {running.where()}"
        if running.wait is None:
            text = f"{error}, {where}"  # the ranks had not met yet
            if peer is not None and f"rank {peer}" not in text:
                text = f"rank {self.rank} lost rank {peer}: {text}"
        elif timed_out:
            what = "no data came from" if running.wait.is_receive else "no data were taken by"
            text = f"rank {self.rank} timed out after {limit_s:g} s: {what} rank {peer}, {where}"
            text += "".join(f"; rank {a} waits for rank {b}" for a, b in pairwise(chain))
            peer = chain[-1]
        elif is_corrupt:
            text = f"{error}, {where}"
        else:
            cause = f"rank {peer}'s process has ended" if peer in ended else _short(str(error))
            text = f"rank {self.rank} lost rank {peer}: {cause}, {where}"
        if self.notices.is_gone and not timed_out:  # its host may be the cause
            gone = unreachable(self.notices.store)
            text += "" if gone in text else f"; {gone}"
        return FAILURES[kind_of(error)](text, peer=peer)

    def _cause(self, peer: int | None, ended: set[int]) -> int | None:
        """The rank whose end is the cause, where the message of a peer does not come.

        Those that gave up because of it may have ended since. If the store has ended with rank 0, they
        could not tell why.
        """
        if self.notices.is_gone and 0 in ended:
            return 0
        return min(ended) if ended and peer not in ended else peer

    def _lost(self, peer: int, running: Running, cause: str = "") -> PeerLostError:
        cause = cause or f"rank {peer}'s process has ended"
        text = f"rank {self.rank} lost rank {peer}: {cause}, in {running.where()}"
        if self.notices.is_gone:
            text += f"; {unreachable(self.notices.store)}"
        return PeerLostError(text, peer=peer)

    def _tell(self, verdict: dict[str, Any]) -> None:
        with self._lock:
            self.notices.tell_verdict(verdict)

    def report(self, error: BaseException) -> str:
        """Publish the error of this rank, which no other rank has caused; return it in words."""
        text = f"rank {self.rank} failed with {type(error).__name__}: {error}"
        running = self._on_host()
        if running is not None:
            text += f", in {running._replace(wait=None).where()}"
        verdict = {"kind": "lost", "peer": self.rank, "text": text}
        with suppress(TimeoutError):
            within(_PATIENCE_S + STORE_S, lambda: self._tell(verdict))
        return str(error) if isinstance(error, RingcollError) else text

    def mismatch(self, call: str, peer: int, other: str, site: str) -> RingcollError:
        """Publish that a peer has called something else than this rank, and where; return the error."""
        running = self._on_host()
        assert running is not None
        verdict = self._differ(running.number, call, peer, other, f" at {site}" * bool(site))
        self._tell(verdict)
        return self._from_verdict(verdict)

    def _watch(self) -> None:
        last, since, notice_s = None, 0.0, self._notice_s
        while True:
            self._wake.wait()
            if self._stop.is_set() or self.error is not None:
                return
            self._take_away()
            running = self.running()
            if self._says_it_waits and (running is None or running[:2] != last):
                with self._lock:
                    self._publish_state(None)  # it does not wait any more
            if running is None:
                self._wake.clear()
                self.awake = False
                # Meanwhile an operation may have begun, and seen the flag still set, or `close`
                # may have been called.
                if self._on_host() is None and not self.issued and not self._stop.is_set():
                    continue
                self.awake = True
                self._wake.set()
            elif running[:2] != last:
                last, since, notice_s = running[:2], time.monotonic(), self._notice_s
            elif time.monotonic() - since > _PATIENCE_S:
                with self._lock:
                    self._look_around(running)
                self._keep_limit(since)
                if time.monotonic() - since > notice_s and self.error is None:
                    self._say_it_waits(notice_s)
                    notice_s = math.inf
            self._stop.wait(_POLL_S)

    def _say_it_waits(self, notice_s: float) -> None:
        """Say for which ranks this rank waits, and where."""
        running = self.running()
        if running is None:
            return
        peers = self._missing(running)
        whom = ", ".join(f"rank {peer}" for peer in peers) or "its turn"
        site = self.site(running.number)
        say(
            f"rank {self.rank} has waited {notice_s:g} s for {whom} in {running.operation.name} "
            f"#{running.number + 1}{f' ({site})' * bool(site)}; `ringcoll dump {os.getpid()}` shows all ranks"
        )

    def _missing(self, running: Running) -> list[int]:
        """The ranks for which this rank waits: of those that meet, the ranks that do not tell that they have come."""
        if running.wait is not None:
            return [running.wait.peer]
        is_barrier = running.is_barrier
        missing = []
        for peer in range(self.world_size) if self.meets or is_barrier else ():
            state = self.notices.state(peer)
            at = state and (state["barrier"][:1] if is_barrier else state["waits"])
            if peer != self.rank and (
                not at or at[0] < (self.num_barriers if is_barrier else running.number)
            ):
                missing.append(peer)
        return missing

    def _take_away(self) -> None:
        """Take away the operations to whose end their streams have come."""
        while (first := self._first()) is not None:
            with beside(first.operation.device), self._taking:
                if first is not self._first():
                    return  # they are abandoned
                if not first.lane.is_over():
                    return
                self.issued.popleft()

    def _keep_limit(self, since: float) -> None:
        """Break off the operation that a stream is at, if its time limit is over."""
        first, running = self._first(), self.running()
        if self.error is not None or first is None or running is None:
            return
        if time.monotonic() - since > first.limit_s:
            late = CollectiveTimeoutError(f"rank {self.rank} timed out after {first.limit_s:g} s")
            self.error = self._explain(late, running, first.limit_s)
            self.on_break()

    def _look_for_message(self, first: Issued) -> Running:
        """Note which message a stream waits for.

        Of messages that come together, it is more likely one whose peer has ended, or is not known
        to be in this operation.
        """
        with beside(first.operation.device):
            waits = first.awaited()
        ended = self.lives.ended(*(wait.peer for wait in waits))

        def suspicion(wait: Wait) -> int:
            if wait.peer in ended:
                return 0
            state = self.notices.state(wait.peer)
            is_there = state and state["waits"] and state["waits"][0] >= first.number
            return 2 if is_there else 1

        wait = min(waits, key=suspicion, default=None)
        self._awaited = first.number, wait
        return Running(first.number, first.operation, wait)

    def _look_around(self, running: Running) -> None:
        if self.error is not None:
            return
        if (first := self._first()) is not None:
            running = self._look_for_message(first)
        verdict = self.notices.verdict()
        if verdict is None:
            self._publish_state(running)
            verdict = self._disagreement()
            if verdict is not None:
                self.notices.tell_verdict(verdict)
        if verdict is not None:
            self.error = self._from_verdict(verdict)
        elif (failure := self._missed(running)) is not None:
            self._fail(failure)
        if self.error is not None:
            self.on_break()

    def _missed(self, running: Running) -> PeerLostError | None:
        """The loss of a rank that this rank waits for, and that comes to this operation no more."""
        if running.is_barrier:
            return None  # it names itself who does not come
        now, awaited = time.monotonic(), None if running.wait is None else running.wait.peer
        if awaited is not None:
            last = self.notices.last_of(awaited)
            if last is not None and last < running.number:
                return self._lost(awaited, running, f"rank {awaited} has closed the group")
        ended = self.lives.ended(awaited, 0)  # rank 0 may have had the store
        for peer in ended:
            dead_s = now - self._ended.setdefault(peer, now)
            # It was done: its message may be in a group with that of another rank, or on a slow network.
            last, is_far = self.notices.last_of(peer), peer in self.lives.elsewhere
            if last is not None and (self.issued or (is_far and last >= running.number)):
                continue
            is_awaited = self.meets if awaited is None else awaited == peer
            # It may have blocked the others, too: UCX's queues in shared memory wait for a sender that was
            # killed while it wrote.
            is_doom = last is None and not self.notices.is_gone and dead_s >= _DOOM_S
            if (is_awaited and dead_s >= _GRACE_S) or is_doom:
                cause = self._cause(peer, ended)
                assert cause is not None
                return self._lost(cause, running)
        return None

    def _publish_state(self, running: Running | None) -> None:
        calls = {
            number: (operation.description, operation.lengths, self._place(number))
            for number, operation in self.recent(_TOLD)
            if operation.description is not None
        }
        waits = None
        if running and (running.wait or self.meets):  # for itself, where it waits for all
            waits = running.number, self.rank if running.wait is None else running.wait.peer
        barrier = None if self.barrier is None else (self.num_barriers, *self.barrier)
        self._says_it_waits = waits is not None or barrier is not None
        self.notices.tell_state(calls, waits, barrier)

    def _disagreement(self) -> dict[str, Any] | None:
        """The first operation in which some rank differs from this rank, or ``None``."""
        for peer in range(self.world_size):
            state = self.notices.state(peer) if peer != self.rank else None
            for key, (description, lengths, place) in state["calls"].items() if state else ():
                own = self._called(int(key))
                if own is None or own.description is None:
                    continue
                pair = (own.description, description)
                if own.description == description:
                    pair = self._other_lengths(own, description, lengths)
                if pair[0] != pair[1]:
                    return self._differ(int(key), pair[0], peer, pair[1], place)
            # A rank that is in a barrier has not made the call that this rank has made before that barrier.
            if state and state["barrier"] and state["barrier"][0] > self.num_barriers:
                _, number, site = state["barrier"]
                own, place = self._called(number), f" at {site}" * bool(site)
                if own is not None:
                    call = own.description or own.name
                    return self._differ(number, call, peer, _BARRIER.name, place)
        return None

    def _differ(self, number: int, call: str, peer: int, other: str, place: str) -> dict[str, Any]:
        """The verdict that this rank and a peer, at another place, have made different calls."""
        calls = sorted([(self.rank, call, self._place(number)), (peer, other, place)])
        return {"kind": "mismatch", "calls": calls, "number": number}

    def _waiting_for(self, running: Running) -> list[int]:
        """The rank that this rank waits for, the rank that that rank waits for, and so on."""
        assert running.wait is not None
        chain = [running.wait.peer]
        while True:
            state = self.notices.state(chain[-1])
            waits = state["waits"] if state else None
            if waits is None or waits[0] != running.number or waits[1] in (self.rank, *chain):
                return chain
            chain.append(waits[1])

    def _other_lengths(
        self, own: Words, description: str, lengths: dict[str, int] | None
    ) -> tuple[str, str]:
        """Both calls in words, with the length of the first block on which they disagree."""
        for key, numel in (lengths or {}).items():
            own_numel = (own.lengths or {}).get(int(key), numel)
            if own_numel != numel:
                source, target = divmod(int(key), self.world_size)
                way = f"from rank {source} to rank {target}"
                return (
                    f"{own.description} with {own_numel} elements {way}",
                    f"{description} with {numel} elements {way}",
                )
        return own.description or own.name, description

    def _from_verdict(self, verdict: dict[str, Any]) -> RingcollError:
        if verdict["kind"] == "mismatch":
            calls: dict[int, str] = {rank: call for rank, call, _ in verdict["calls"]}
            both = " and ".join(
                f"rank {rank} called {call}{place}" for rank, call, place in verdict["calls"]
            )
            mine = calls.get(self.rank, "")
            # If this rank is neither of the two, its peer is the rank with another call.
            if not mine and (own := self._called(verdict["number"])) is not None:
                mine = own.description or own.name
            peer = next(rank for rank, call in calls.items() if rank != self.rank and call != mine)
            text = (
                f"rank {self.rank}: the ranks disagree on call {verdict['number'] + 1} "
                f"of the group: {both}"
            )
            return MismatchError(text, peer=peer, mine=mine, theirs=calls[peer])
        text = f"rank {self.rank} stops: {verdict['text']}"
        return FAILURES[verdict["kind"]](text, peer=verdict["peer"])


def _short(text: str) -> str:
    """The first sentence of a transport's message, without its source location."""
    return text.split("] ", 1)[-1].partition(". ")[0]
