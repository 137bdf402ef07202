"""The monitor of a rank finds out why an operation takes too long, and tells the other ranks.

Problem: a rank that waits for a message cannot see why the message does not come. The monitor is a
thread that wakes up when an operation has been waiting for a while. It publishes through the store
what this rank is doing (`ringcoll.runtime.watch.notices`), reads what the others are doing, and
breaks the wait when two ranks disagree or a rank has given up
(`ringcoll.runtime.watch.diagnosis`). In normal operation nothing is published.

Only the monitor ends a wait of a stream. So it keeps the time limits of `Issued` operations, too.
An operation's time counts from when the operations before it are over.

`CallComparison` compares calls through the store, before anything is sent: on transports whose
messages have no tags to tell calls apart each kind of call once; on all transports each call, if
``RINGCOLL_DEBUG`` is ``detail``.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from enum import Enum, auto
from functools import partial

import torch.distributed as dist

from ringcoll.errors import (
    CollectiveTimeoutError,
    CorruptMessageError,
    GroupBrokenError,
    PeerLostError,
    RingcollError,
    TransportError,
    described,
)
from ringcoll.runtime.machine import compares_calls, hang_notice_s
from ringcoll.runtime.process import start_thread
from ringcoll.runtime.rendezvous import ask_store, is_served_here, read_text, wait_for_keys
from ringcoll.runtime.watch.diagnosis import Diagnosis, Progress, Running
from ringcoll.runtime.watch.lives import Lives
from ringcoll.runtime.watch.notices import LEFT, Notices, patience_s, say
from ringcoll.schedules import CONTRACTS, contract

_POLL_S = 0.1  # between two looks of a rank that waits
_BETWEEN_S = 0.02  # between two looks of a rank that has failed: torchrun ends it in 0.1 s
_PATIENCE_S = 0.3  # longer than any healthy wait on one host; nothing breaks on it alone
_STAY_S = 1.0  # with the store, for ranks that wait; they look after `_PATIENCE_S`
_END_S = 5.0  # for a last look, and what it may break
_PUBLISHED = 64  # operations that a rank tells the others
_MOST_KNOWN = 4096  # kinds of calls that are remembered as compared


class WatchState(Enum):
    """The states of a monitor's thread; `Monitor.state` says when it is in which of them."""

    ASLEEP = auto()  # no operation runs: the thread waits until one begins
    RUNNING = auto()  # an operation runs, for no longer than healthy ones do: nothing is done
    LATE = auto()  # it takes longer: the rank publishes where it is, and looks at the others
    NOTED = auto()  # as `LATE`, and the log says for which ranks the rank waits
    OVER = auto()  # the group is closed or broken: the thread ends


class Monitor:
    """Watches the operations of one rank of a group.

    Nobody else uses the store. The monitor's thread calls ``on_break`` to break the wait. ``error``
    is the reason why the group is broken, once this rank or another has found it.
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
        self.progress, self.notices, self.lives = Progress(), Notices(store, rank), lives
        self.diagnosis = Diagnosis(rank, world_size, self.progress, self.notices, lives)
        self.error: RingcollError | None = None
        self.awake = False  # the same as the event, and quicker to read
        self._says_it_waits = False  # in the published state
        self._notice_s = hang_notice_s()
        self._wake, self._stop = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        """Begin to watch, as an operation has begun."""
        if self.world_size > 1:
            if self._thread is None:
                try:
                    self._thread = start_thread(self._watch, f"ringcoll-monitor-{self.rank}")
                except GroupBrokenError:  # the program ends: the waits have their time limits
                    return
            self.awake = True
            self._wake.set()

    def leave(self, limit_s: float) -> None:
        """Tell ranks that wait for this rank that it has closed the group, and what it did last."""
        if self.world_size > 1:
            self.notices.patience_s = patience_s(limit_s)
            self._publish(None)
            self.notices.leave(self.progress.last[0])
            # In a rooted operation, others may wait for a rank that waits for nobody.
            last = self.progress.last[1]
            is_rooted = last is not None and last.name in CONTRACTS and contract(last.name).rooted
            if is_rooted and is_served_here(self.notices.store):
                self._await_others()

    def _await_others(self) -> None:
        """Keep the store for a while, until the others have left, or have said what is wrong."""
        peers, deadline = {*range(self.world_size)} - {self.rank}, time.monotonic() + _STAY_S
        while time.monotonic() < deadline and self.notices.verdict() is None:
            peers -= {peer for peer in peers if self.notices.last_of(peer) is not None}
            if not peers:
                break
            time.sleep(_BETWEEN_S)

    def close(self) -> None:
        """Stop the thread."""
        self._stop.set()
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_END_S)

    # --- the thread that has met a failure --------------------------------------------------

    def explain(self, error: RingcollError, limit_s: float) -> RingcollError:
        """Turn the failure of a wait into an error that names the cause.

        The verdict is read first: a peer that sees a mismatch writes it, and then disconnects.
        """
        if self.error is not None:
            return self.error
        running = self.progress.on_host()
        assert running is not None
        return self._explain(error, running, limit_s)

    def _explain(self, error: RingcollError, running: Running, limit_s: float) -> RingcollError:
        """Read the verdict of another rank, or write this rank's verdict."""
        diagnosis = self.diagnosis
        with self._lock:
            if self.error is not None:  # the monitor's thread has told it meanwhile
                return self.error
            self.notices.patience_s = patience_s(limit_s)
            timed_out = isinstance(error, CollectiveTimeoutError)
            is_cause = timed_out or isinstance(error, CorruptMessageError)
            broken = None if is_cause else running.peer
            if broken is not None:
                self.notices.tell_broken(broken)
            # A rank that is the cause waits for no verdict: the others lose their connections to it
            # at once, and wait for its verdict. A process that has ended writes none any more.
            deadline = time.monotonic() + (0 if is_cause else _PATIENCE_S)
            while True:
                is_late, has_lost = time.monotonic() >= deadline, diagnosis.has_lost(running)
                verdict = self.notices.verdict()
                if verdict is not None or is_late or (has_lost and not diagnosis.is_unsure()):
                    break
                time.sleep(_BETWEEN_S)
            # A rank that has left tells its last calls: this rank may have made another one.
            if verdict is None and (verdict := diagnosis.disagreement()) is not None:
                self.notices.tell_verdict(verdict)
            if verdict is not None:
                self.error = diagnosis.from_verdict(verdict)
                return self.error
            chain = diagnosis.chain(running) if running.wait and timed_out else []
            failure = diagnosis.failure(error, running, limit_s, chain)
            if broken is not None and broken == failure.peer and not has_lost:
                failure = diagnosis.weighed(failure, broken)
            self._fail(failure)
            return failure

    def _fail(self, failure: TransportError) -> None:
        self.error = failure
        self.notices.tell_verdict(self.diagnosis.verdict_of(failure))

    def report(self, error: BaseException, limit_s: float) -> str:
        """Publish the error of this rank, which no other rank has caused; return it in words."""
        text = f"{self.notices.names.of(self.rank)} failed with {described(error)}"
        running = self.progress.on_host()
        if running is not None:
            text += f", in {running._replace(wait=None).where(self.notices.names.group)}"
        self.notices.patience_s = patience_s(limit_s)
        with self._lock:
            self.notices.tell_verdict({"kind": "lost", "peer": self.rank, "text": text})
        return str(error) if isinstance(error, RingcollError) else text

    def mismatch(self, call: str, peer: int, other: str, site: str) -> RingcollError:
        """Publish that a peer has made another call, at ``site``; return the error."""
        running = self.progress.on_host()
        assert running is not None
        place = f" at {site}" * bool(site)
        verdict = self.diagnosis.difference(running.number, call, peer, other, place)
        with self._lock:
            self.notices.tell_verdict(verdict)
        return self.diagnosis.from_verdict(verdict)

    # --- the monitor's own thread -----------------------------------------------------------

    def state(self, running: Running | None, is_new: bool, runs_s: float) -> WatchState:
        """The state of the thread; ``is_new``: another operation runs than at the last look."""
        if self._stop.is_set() or self.error is not None:
            return WatchState.OVER
        if running is None:
            return WatchState.ASLEEP
        if is_new or runs_s <= _PATIENCE_S:
            return WatchState.RUNNING
        return WatchState.NOTED if runs_s > self._notice_s else WatchState.LATE

    def _watch(self) -> None:
        operation, since, state = None, 0.0, WatchState.ASLEEP
        while True:
            self._wake.wait()
            self.progress.take_away()
            running, now = self.progress.running(), time.monotonic()
            is_new = running is not None and running[:2] != operation
            if running is not None and is_new:
                operation, since = running[:2], now
            before, state = state, self.state(running, is_new, now - since)
            if state is WatchState.OVER:
                return
            if self._says_it_waits and (running is None or is_new):
                with self._lock:
                    self._publish(None)  # it does not wait any more
            if running is None:
                self._sleep()
                continue
            if state in (WatchState.LATE, WatchState.NOTED):
                with self._lock:
                    self._look_around(running)
                self._keep_limit(since)
            if state is WatchState.NOTED is not before and self.error is None:
                self._say_it_waits()
            self._stop.wait(_POLL_S)

    def _sleep(self) -> None:
        self._wake.clear()
        self.awake = False
        # Meanwhile an operation may have begun, and seen the flag still set, or `close`
        # may have been called.
        if self.progress.on_host() or self.progress.issued or self._stop.is_set():
            self.awake = True
            self._wake.set()

    def _look_around(self, running: Running) -> None:
        """Tell where this rank is, and break the wait if it is in vain."""
        if self.error is not None:
            return
        diagnosis = self.diagnosis
        if (first := self.progress.first()) is not None:
            running = self.progress.awaits(first, diagnosis.suspect(first))
        verdict = self.notices.verdict()
        if verdict is None:
            self._publish(running)
            verdict = diagnosis.disagreement()
            if verdict is not None:
                self.notices.tell_verdict(verdict)
        if verdict is not None:
            self.error = diagnosis.from_verdict(verdict)
        elif (failure := diagnosis.missed(running)) is not None:
            self._fail(failure)
        if self.error is not None:
            self.on_break()

    def _publish(self, running: Running | None) -> None:
        """Publish the last calls, and for whom this rank waits; itself, if it waits for all."""
        progress = self.progress
        calls = {
            number: (operation.description, operation.lengths, progress.place(number))
            for number, operation in progress.recent(_PUBLISHED)
            if operation.description is not None
        }
        waits, barrier = None, progress.barrier
        if running and (running.wait or progress.meets):
            waits = running.number, self.rank if running.peer is None else running.peer
        self._says_it_waits = waits is not None or barrier is not None
        self.notices.tell_state(calls, waits, barrier and (progress.num_barriers, *barrier))

    def _keep_limit(self, since: float) -> None:
        """Break off the operation that a stream is at, if its time limit is over."""
        first, running = self.progress.first(), self.progress.running()
        if self.error is not None or first is None or running is None:
            return
        if time.monotonic() - since > first.limit_s:
            text = f"rank {self.rank} timed out after its timeout of {first.limit_s:g} s"
            self.error = self._explain(CollectiveTimeoutError(text), running, first.limit_s)
            self.on_break()

    def _say_it_waits(self) -> None:
        running = self.progress.running()
        if running is None:
            return
        peers = self.diagnosis.missing(running)
        of, group = self.notices.names.of, self.notices.names.group
        whom = ", ".join(map(of, peers)) or "its turn"
        site = self.progress.site(running.number)
        say(
            f"{of(self.rank)} has waited {self._notice_s:g} s for {whom} in "
            f"{running.operation.name} #{running.number + 1}"
            f"{f' of {group}' * bool(self.notices.names.members)}{f' ({site})' * bool(site)}; "
            f"`ringcoll dump {os.getpid()}` shows all ranks"
        )


class CallComparison:
    """The calls that a rank has compared with the other ranks."""

    def __init__(self, store: dist.Store, monitor: Monitor) -> None:
        self._store, self._monitor = store, monitor
        self.known: set[str] = set()
        self.compares_each = compares_calls()
        self._count = 0

    def compare(self, description: str, timeout_s: float, *, capturing: bool) -> None:
        """Compare a call with those of all other ranks: each kind once, or each for debugging."""
        is_detailed = self.compares_each or dist.get_debug_level() == dist.DebugLevel.DETAIL
        if description in self.known and (capturing or not is_detailed):
            return
        if len(self.known) >= _MOST_KNOWN:  # on all ranks at once
            self.known.clear()
        self.known.add(description)
        self._count += 1
        progress = self._monitor.progress
        site = "" if progress.current is None else progress.site(progress.current[0])
        compare = partial(self._with_others, description, site, timeout_s)
        with progress.meeting():
            ask_store(self._store, timeout_s, compare)

    def _with_others(self, description: str, site: str, timeout_s: float) -> None:
        rank, monitor = self._monitor.rank, self._monitor
        keys = [f"call/{self._count}/{peer}" for peer in range(monitor.world_size)]
        self._store.set(keys[rank], f"{description}\n{site}")
        deadline = time.monotonic() + timeout_s
        for peer, key in enumerate(keys):
            left = LEFT.format(peer)
            given_up = lambda left=left: bool(monitor.error or self._store.check([left]))  # noqa: E731
            # A rank may have come, and left afterwards.
            if not (
                wait_for_keys(self._store, [key], deadline, given_up) or self._store.check([key])
            ):
                if monitor.error is not None:
                    raise PeerLostError(f"rank {rank} gave up rank {peer}", peer=peer)
                if self._store.check([left]):
                    raise PeerLostError(f"rank {peer} has closed the group", peer=peer)
                raise CollectiveTimeoutError(
                    f"rank {rank} waited {timeout_s:g} s for rank {peer}", peer=peer
                )
            other, _, where = read_text(self._store, key).rpartition("\n")
            if other != description:
                raise monitor.mismatch(description, peer, other, where)
        # All ranks have come to this comparison, so nobody reads the previous one any more.
        self._store.delete_key(f"call/{self._count - 1}/{rank}")
