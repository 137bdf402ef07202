"""What the ranks of a group tell each other when something takes too long.

Problem: a rank that waits for a message cannot see why it does not come. The
monitor is a thread that wakes up when an operation has been waiting for a while.
It publishes through the store what this rank is doing, reads what the others are
doing, and breaks the wait when two ranks disagree or one has given up. In normal
operation nothing is ever published.

Keys in the store: ``state/RANK`` holds a rank's last operations as JSON, ``verdict``
why the group is broken; whoever comes first writes the verdict.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist

from ringcoll.errors import (
    CollectiveTimeoutError,
    MismatchError,
    PeerLostError,
    RingcollError,
    TransportError,
)
from ringcoll.runtime.plan import Wait
from ringcoll.system.stores import appears

__all__ = ["Monitor", "Running", "monitored_barrier"]

_POLL_S = 0.1  # how often a rank that waits looks around
_PATIENCE_S = 0.3  # longer than any healthy wait on one host; nothing breaks on it alone
_STORE_S = 5.0  # time limit of a look into the store
_REMEMBERED = 64  # operations that are compared between ranks


class Watched(Protocol):
    """What the monitor has to know of an operation."""

    name: str
    """Name of the collective."""
    description: str | None
    """Equal on all ranks that call the same operation; ``None`` before the ranks have met."""

    @property
    def lengths(self) -> dict[int, int] | None:
        """Elements of each block that this rank sends or receives.

        Blocks are numbered source * world_size + destination. ``None`` if the description has
        the lengths, as all ranks know them.
        """
        ...


class Running(NamedTuple):
    """An operation in execution, and the message that it waits for."""

    number: int
    operation: Watched
    wait: Wait | None

    def where(self) -> str:
        """What is being waited for, in words."""
        call = self.operation.description or self.operation.name
        operation = f"{call}, operation {self.number} of the group"
        if self.wait is None:
            return operation
        verb = "data from" if self.wait.is_receive else "taking of data by"
        return f"{verb} rank {self.wait.peer} in step {self.wait.step} of {operation}"


def _kind(error: RingcollError) -> str:
    """What a failure is called in a verdict."""
    if isinstance(error, CollectiveTimeoutError):
        return "timeout"
    # As such it is nobody's death, but the way in which the ranks were to be connected.
    return "transport" if type(error) is TransportError else "lost"


class Monitor:
    """Watches the operations of one rank of a group.

    Parameters
    ----------
    store
        Seen by all ranks of the group, and used by nobody else.
    rank, world_size
        This rank, and the number of ranks.
    on_break
        Called, on the monitor's thread, when the wait has to be broken.
    """

    def __init__(
        self, store: dist.Store, rank: int, world_size: int, on_break: Callable[[], None]
    ) -> None:
        self.store, self.rank, self.world_size, self.on_break = store, rank, world_size, on_break
        self.error: RingcollError | None = None
        # Set by whoever runs operations: the number and the operation that runs, and its wait.
        self.current: tuple[int, Watched] | None = None
        self.wait: Wait | None = None
        self.recent: deque[tuple[int, Watched]] = deque(maxlen=_REMEMBERED)
        self.awake = False  # the same as the event, and quicker to look at
        self._said_to_wait = False
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        """Begin to look, as an operation has begun."""
        if self.world_size > 1:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._watch, name=f"ringcoll-monitor-{self.rank}", daemon=True
                )
                self._thread.start()
            self.awake = True
            self._wake.set()

    def _running(self) -> Running | None:
        """What runs now."""
        current = self.current
        return None if current is None else Running(*current, self.wait)

    def close(self) -> None:
        """Stop the thread."""
        self._stop.set()
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(2 * _STORE_S)

    def explain(self, error: RingcollError, limit_s: float) -> RingcollError:
        """Turn the failure of a wait into an error that says what is behind it.

        The connection to a peer may have gone because the peer found a mismatch and
        broke it. It has written its verdict before, so that is looked for first.
        """
        if self.error is not None:
            return self.error
        running = self._running()
        assert running is not None
        explained: list[RingcollError] = []
        # From a host that is cut off, the store gives no answer, and no time limit ends that.
        asking = threading.Thread(
            target=lambda: explained.append(self._ask(error, running, limit_s)),
            name=f"ringcoll-monitor-{self.rank}-asks",
            daemon=True,
        )
        asking.start()
        asking.join(_PATIENCE_S + _STORE_S)
        if not explained:
            chain = [] if running.wait is None else [running.wait.peer]
            explained.append(self._in_words(error, running, limit_s, chain))
            self.error = explained[0]
        return explained[0]

    def _ask(self, error: RingcollError, running: Running, limit_s: float) -> RingcollError:
        """Look for what is known to others, and tell them what is known here."""
        with self._lock:
            timed_out = isinstance(error, CollectiveTimeoutError)
            verdict = self._verdict()
            # Who timed out has nobody to hear from; and others lose their connection to
            # it at once, and wait for its verdict.
            deadline = time.monotonic() + (0 if timed_out else _PATIENCE_S)
            while verdict is None and time.monotonic() < deadline:
                time.sleep(_POLL_S / 2)
                verdict = self._verdict()
            if verdict is not None:
                self.error = self._from_verdict(verdict, running)
                return self.error
            chain = self._waiting_for(running) if running.wait and timed_out else []
            self.error = self._in_words(error, running, limit_s, chain)
            told: dict[str, object] = {
                "kind": _kind(self.error),
                "peer": getattr(self.error, "peer", None),
                "text": str(self.error),
            }
            self._publish_verdict(told)
            return self.error

    def _in_words(
        self, error: RingcollError, running: Running, limit_s: float, chain: Sequence[int]
    ) -> TransportError:
        """What happened, as far as this rank knows; ``chain`` is who waits for whom."""
        timed_out = isinstance(error, CollectiveTimeoutError)
        peer = running.wait.peer if running.wait else getattr(error, "peer", None)
        if running.wait is None:
            text = f"{error}, in {running.where()}"  # the ranks had not met yet
        elif timed_out:
            text = f"rank {self.rank} timed out after {limit_s:g} s, waiting for {running.where()}"
            text += "".join(f"; rank {one} waits for rank {two}" for one, two in pairwise(chain))
            peer = chain[-1]
        else:
            text = (
                f"rank {self.rank} lost rank {peer}, while it waited for "
                f"{running.where()}: {_short(str(error))}"
            )
        if _kind(error) == "transport":
            return TransportError(text)
        return (CollectiveTimeoutError if timed_out else PeerLostError)(text, peer=peer)

    def report(self, error: BaseException) -> None:
        """Tell the others that this rank failed by itself, and how."""
        text = f"rank {self.rank} failed with {type(error).__name__}: {error}"
        with self._lock:
            self._publish_verdict({"kind": "lost", "peer": self.rank, "text": text})

    def _watch(self) -> None:
        last, since = -1, 0.0
        while True:
            self._wake.wait()
            if self._stop.is_set() or self.error is not None:
                return
            running = self._running()
            if self._said_to_wait and (running is None or running.number != last):
                with self._lock:
                    self._publish_state(None)  # it does not wait any more
            if running is None:
                self._wake.clear()
                self.awake = False
                # In between an operation may have begun, and seen the flag still set, or
                # the end have come.
                if self.current is None and not self._stop.is_set():
                    continue
                self.awake = True
                self._wake.set()
            elif running.number != last:
                last, since = running.number, time.monotonic()
            elif time.monotonic() - since > _PATIENCE_S:
                with self._lock:
                    self._look_around(running)
            self._stop.wait(_POLL_S)

    def _look_around(self, running: Running) -> None:
        if self.error is not None:
            return
        verdict = self._verdict()
        if verdict is None:
            self._publish_state(running)
            verdict = self._disagreement()
            if verdict is not None:
                self._publish_verdict(verdict)
        if verdict is not None:
            self.error = self._from_verdict(verdict, running)
            self.on_break()

    def _publish_state(self, running: Running | None) -> None:
        calls = {
            number: (operation.description, operation.lengths)
            for number, operation in tuple(self.recent)
            if operation.description is not None
        }
        waits = (running.number, running.wait.peer) if running and running.wait else None
        self._said_to_wait = waits is not None
        state = {"calls": calls, "waits": waits}
        with contextlib.suppress(RuntimeError):
            self.store.set(f"state/{self.rank}", json.dumps(state))

    def _disagreement(self) -> dict[str, object] | None:
        """The first operation that some rank does differently, if there is one."""
        mine = dict(tuple(self.recent))
        for peer in range(self.world_size):
            state = self._read(f"state/{peer}") if peer != self.rank else None
            for key, (description, lengths) in state["calls"].items() if state else ():
                own = mine.get(int(key))
                if own is None or own.description is None:
                    continue
                pair = (own.description, description)
                if own.description == description:
                    pair = self._other_lengths(own, description, lengths)
                if pair[0] != pair[1]:
                    calls = sorted([(self.rank, pair[0]), (peer, pair[1])])
                    return {"kind": "mismatch", "calls": calls, "number": int(key)}
        return None

    def _waiting_for(self, running: Running) -> list[int]:
        """The rank that is waited for, the one that it waits for itself, and so on."""
        assert running.wait is not None
        chain = [running.wait.peer]
        while True:
            state = self._read(f"state/{chain[-1]}")
            waits = state["waits"] if state else None
            if waits is None or waits[0] != running.number or waits[1] in (self.rank, *chain):
                return chain
            chain.append(waits[1])

    def _other_lengths(
        self, own: Watched, description: str, lengths: dict[str, int] | None
    ) -> tuple[str, str]:
        """Both calls in words, with the length of a block that they disagree on, if any."""
        for key, theirs in (lengths or {}).items():
            ours = (own.lengths or {}).get(int(key), theirs)
            if ours != theirs:
                source, target = divmod(int(key), self.world_size)
                way = f"from rank {source} to rank {target}"
                return (
                    f"{own.description} with {ours} elements {way}",
                    f"{description} with {theirs} elements {way}",
                )
        return own.description or own.name, description

    def _from_verdict(self, verdict: dict[str, object], running: Running) -> RingcollError:
        if verdict["kind"] == "mismatch":
            calls = dict(verdict["calls"])  # type: ignore[call-overload]
            told = " and ".join(f"rank {rank} called {what}" for rank, what in calls.items())
            mine = calls.get(self.rank, running.operation.description or running.operation.name)
            # Neither may be this rank; then it is the one that called something else.
            others = [rank for rank, what in calls.items() if rank != self.rank and what != mine]
            text = (
                f"rank {self.rank}: the ranks disagree on operation {verdict['number']} "
                f"of the group: {told}"
            )
            return MismatchError(text, peer=others[0], mine=mine, theirs=calls[others[0]])
        peer = verdict["peer"]
        assert peer is None or isinstance(peer, int)
        text = f"rank {self.rank} gave up waiting for {running.where()}: {verdict['text']}"
        if verdict["kind"] == "transport":
            return TransportError(text)
        return (CollectiveTimeoutError if verdict["kind"] == "timeout" else PeerLostError)(
            text, peer=peer
        )

    def _verdict(self) -> dict[str, object] | None:
        return self._read("verdict")

    def _publish_verdict(self, verdict: dict[str, object]) -> None:
        with contextlib.suppress(RuntimeError):
            self.store.compare_set("verdict", "", json.dumps(verdict))

    def _read(self, key: str) -> dict[str, Any] | None:
        # Without its host the store is gone; then there is nothing to be learnt from it.
        with contextlib.suppress(RuntimeError):
            self.store.set_timeout(timedelta(seconds=_STORE_S))
            if self.store.check([key]):
                found: dict[str, Any] = json.loads(self.store.get(key))
                return found
        return None


def _short(text: str) -> str:
    """The first sentence of a transport's message, without its source location."""
    return text.split("] ", 1)[-1].partition(". ")[0]


def monitored_barrier(
    store: dist.Store,
    rank: int,
    world_size: int,
    number: int,
    timeout_s: float,
    wait_all_ranks: bool,
) -> None:
    """Wait until all ranks have come, and say which ones do not.

    Rank 0 looks for the others' keys, and tells them what has come of it.

    Parameters
    ----------
    store
        Seen by all ranks, and used for nothing else.
    rank, world_size
        This rank, and the number of ranks.
    number
        Of this barrier, counted alike on all ranks.
    timeout_s
        How long to wait.
    wait_all_ranks
        Whether rank 0 names all that are missing, or the first one.

    Raises
    ------
    CollectiveTimeoutError
        Some rank did not come.
    """
    keys = [f"{number}/{peer}" for peer in range(world_size)]
    limit = f"{1000 * timeout_s:g} ms"
    store.set(keys[rank], "")
    deadline = time.monotonic() + timeout_s
    if rank:
        # Rank 0 may have come later by as long as it may wait, and then has to speak.
        if not appears(store, [keys[0]], deadline):
            raise CollectiveTimeoutError(
                f"rank {rank}: rank 0 failed to pass monitored_barrier in {limit}", peer=0
            )
        if not appears(store, [f"{number}/over"], deadline + timeout_s + _STORE_S):
            raise CollectiveTimeoutError(
                f"rank {rank}: rank 0 was lost in monitored_barrier", peer=0
            )
        told = store.get(f"{number}/over").decode()
        if told:
            raise CollectiveTimeoutError(  # in gloo's words, which programs look for
                f"Rank {rank} successfully reached monitoredBarrier, but received errors while "
                f"waiting for send/recv from rank 0: {told}"
            )
        return
    missing = []
    for peer in range(1, world_size):
        if not appears(store, [keys[peer]], deadline):
            missing.append(peer)
            if not wait_all_ranks:
                break
    ranks = ", ".join(map(str, missing))
    told = (
        f"Rank{'s' * (len(missing) > 1)} {ranks} failed to pass monitoredBarrier in {limit}, "
        "Rank 0 timed out in monitoredBarrier"
    )
    store.set(f"{number}/over", told if missing else "")
    if missing:
        raise CollectiveTimeoutError(told, peer=missing[0])
    for key in (f"{number - 1}/over", *(f"{number - 1}/{peer}" for peer in range(world_size))):
        store.delete_key(key)  # everybody has left the barrier before
