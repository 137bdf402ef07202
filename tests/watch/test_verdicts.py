"""What a monitor makes of what it sees: no ranks, a store in memory, a clock that only sleeping moves."""

from __future__ import annotations

import json
import threading
import weakref
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ringcoll.errors import (
    CollectiveTimeoutError,
    CorruptMessageError,
    MismatchError,
    PeerLostError,
    RingcollError,
    TransportError,
)
from ringcoll.runtime.operation import Wait
from ringcoll.runtime.watch import Issued, Monitor, Names, Process, Running, diagnosis, notices
from ringcoll.runtime.watch import monitor as watching
from ringcoll.runtime.watch.monitor import WatchState
from ringcoll.runtime.watch.notices import FAILURES, Notices

WORLD_SIZE = 4
CALL = "all_reduce(ring)"
FAR = Process(1, "1", "another kernel", ("192.0.2.1", 1))


class Clock:
    """Time that only sleeping moves; whoever sleeps may be told something meanwhile."""

    def __init__(self) -> None:
        self.now = 100.0
        self.naps: list[float] = []
        self.then: Any = None

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.naps.append(seconds)
        if self.then is not None and len(self.naps) == 3:
            self.then()


class Lives:
    """Processes of which some have ended; ``asked`` is for whom the monitor has looked."""

    def __init__(self) -> None:
        self.gone: set[int] = set()
        self.near = {*range(WORLD_SIZE)}  # others are looked at if they are asked for
        self.elsewhere: dict[int, Process] = {}
        self.asked: list[int | None] = []

    def ended(self, *awaited: int | None) -> set[int]:
        self.asked += awaited
        return self.gone & {*self.near, *awaited}


class Watched(Monitor):
    """The monitor of rank 0, in operation 7; ``breaks`` are the errors with which it broke the wait."""

    lives: Any

    def __init__(self) -> None:
        self.breaks: list[RingcollError | None] = []
        broken = lambda: self.breaks.append(self.error)  # noqa: E731
        super().__init__(dist.HashStore(), 0, WORLD_SIZE, broken, Lives())  # type: ignore[arg-type]
        self.clock = Clock()
        self.at(7, Wait(0, 1, 2, True))

    def at(self, number: int, wait: Wait | None, call: str = CALL, **more: Any) -> Running:
        """Let an operation run, and wait for a message."""
        called, self.progress.wait = operation(call, **more), wait
        self.ran(number, called)
        return Running(number, called, wait)

    def ran(self, number: int, called: Any) -> None:
        """Let an operation begin, with the thread as it is."""
        self.progress.current = current = number, called
        before, self.progress.last = self.progress.last, current
        if called is not before[1] or number != before[0] + 1:
            self.progress.begin_run(before)

    def tells(self, rank: int, waits: tuple[int, int] | None = None, **calls: Any) -> None:
        """Let another rank publish its state; calls are named c1, c2, ... after their numbers."""
        named = {name[1:]: [*call, ""] for name, call in calls.items() if name != "barrier"}
        state = {"calls": named, "waits": waits, "barrier": calls.get("barrier")}
        self.notices.store.set(f"state/{rank}", json.dumps(state))

    def told(self, key: str) -> Any:
        """What is in the store."""
        store = self.notices.store
        return json.loads(store.get(key)) if store.check([key]) else None

    def look(self, running: Running | None = None) -> RingcollError | None:
        """Look around once, as the thread of the monitor does."""
        running = running or self.progress.running()
        assert running is not None
        self._look_around(running)
        return self.error


def operation(call: str, lengths: dict[int, int] | None = None) -> Any:
    found = SimpleNamespace(
        description=call, name=call.partition("(")[0], lengths=lengths, device=torch.device("cpu")
    )
    found.words = found  # what is remembered of it
    return found


@pytest.fixture
def monitor(monkeypatch: pytest.MonkeyPatch) -> Watched:
    found = Watched()
    for module in (watching, diagnosis):
        monkeypatch.setattr(module, "time", found.clock)
    return found


CALL_8 = f"in call 8 of the group ({CALL})"
AWAITED = f"{CALL_8}, step 2"
LATE = f"rank 0 timed out after its timeout of 3 s: no data came from rank 1, {AWAITED}"
ENDED = f"rank 1's process has ended, {AWAITED}"


# --- where a rank is ------------------------------------------------------------------


def test_where_an_operation_waits() -> None:
    run = operation(CALL)
    plain = f"call 4 of the group ({CALL})"
    assert Running(3, run, None).where() == plain
    assert Running(3, run, Wait(0, 2, 5, True)).where() == f"{plain}, step 5"
    run.description = None
    assert Running(3, run, None).where() == "call 4 of the group (all_reduce)"


def test_what_runs(monitor: Watched) -> None:
    running = monitor.progress.running()
    assert running is not None
    assert (running.number, running.wait) == (7, Wait(0, 1, 2, True))
    monitor.progress.current = None
    assert monitor.progress.running() is None


# --- the failure of a wait ------------------------------------------------------------


def test_a_time_limit_is_told_at_once(monitor: Watched) -> None:
    error = monitor.explain(CollectiveTimeoutError("late"), 3.0)
    assert type(error) is CollectiveTimeoutError
    assert str(error) == LATE
    assert error.peer == 1
    assert monitor.clock.naps == []
    assert monitor.told("verdict") == {"kind": "timeout", "peer": 1, "text": str(error)}
    assert monitor.explain(TransportError("and then"), 3.0) is error


@pytest.mark.parametrize(
    "waits,chain",
    [
        ({1: (7, 2), 2: (7, 3)}, [1, 2, 3]),
        ({1: (7, 2), 2: (6, 3)}, [1, 2]),
        ({1: (7, 2), 2: None}, [1, 2]),
        ({1: (7, 0)}, [1]),
        ({1: (7, 1)}, [1]),
        ({1: (7, 2), 2: (7, 1)}, [1, 2]),
        ({2: (7, 3)}, [1]),
    ],
)
def test_who_waits_for_whom(
    monitor: Watched, waits: dict[int, tuple[int, int] | None], chain: list[int]
) -> None:
    for rank, wait in waits.items():
        monitor.tells(rank, wait)
    error = monitor.explain(CollectiveTimeoutError("late"), 3.0)
    further = "".join(f"; rank {a} waits for rank {b}" for a, b in pairwise(chain))
    assert str(error) == f"{LATE}{further}"
    assert isinstance(error, TransportError)
    assert error.peer == chain[-1]


def test_a_broken_connection_waits_for_a_verdict(monitor: Watched) -> None:
    """A peer that has found a mismatch writes its verdict, then ends its connections."""
    verdict = {"kind": "timeout", "peer": 3, "text": "rank 2 timed out"}
    monitor.clock.then = lambda: monitor.notices.tell_verdict(verdict)
    error = monitor.explain(TransportError("[x.cc:1] connection closed. More"), 3.0)
    assert type(error) is CollectiveTimeoutError
    assert error.peer == 3
    assert str(error) == "rank 0 stops: rank 2 timed out"
    assert monitor.clock.naps == [watching._BETWEEN_S] * 3
    assert monitor.told("verdict") == verdict
    assert monitor.error is error


def test_what_the_monitors_thread_tells_first_is_raised(monitor: Watched) -> None:
    """Its own verdict in the store is not read as that of another rank."""
    monitor.at(3, Wait(0, 1, 0, True))
    told = PeerLostError("rank 0 lost rank 1: it has closed the group", peer=1)

    class Lock:
        def __enter__(self) -> None:  # the thread has had the lock until now
            monitor._fail(told)

        def __exit__(self, *error: object) -> None:
            pass

    monitor._lock = Lock()  # type: ignore[assignment]
    assert monitor.explain(TransportError("connection closed"), 3.0) is told


def test_a_broken_connection_that_nobody_explains(monitor: Watched) -> None:
    monitor.tells(1, (7, 2))  # a chain is of time limits only
    error = monitor.explain(TransportError("[x.cc:1] closed by peer. More of it"), 3.0)
    assert type(error) is TransportError
    assert error.peer == 1
    assert str(error) == f"rank 0 lost rank 1: closed by peer, {AWAITED}"
    assert sum(monitor.clock.naps) == pytest.approx(watching._PATIENCE_S, abs=0.021)
    assert monitor.told("verdict") == {"kind": "transport", "peer": 1, "text": str(error)}


@pytest.mark.parametrize(
    "of_own,of_peer,is_own_fault",
    [(0, 0, False), (1, 0, False), (1, 2, False), (2, 0, True), (3, 1, True)],
)
def test_whose_fault_a_broken_connection_is(
    monitor: Watched, of_own: int, of_peer: int, *, is_own_fault: bool
) -> None:
    """Other ranks say which connections of theirs are broken; this rank's own, to rank 1, is added."""
    for peer, count in ((0, of_own), (1, of_peer)):
        for _ in range(count):
            monitor.notices.tell_broken(peer)
    error = monitor.explain(PeerLostError("closed"), 3.0)
    assert type(error) is PeerLostError
    assert error.peer == (0 if is_own_fault else 1)
    lost = f"rank 0 lost rank 1: closed, {AWAITED}"
    assert str(error) == lost + (f"; {of_own} ranks have lost rank 0" if is_own_fault else "")
    assert monitor.told("verdict") == {"kind": "lost", "peer": error.peer, "text": str(error)}
    assert monitor.notices.broken(1) == of_peer + 1, "told before this rank waits for a verdict"


@pytest.mark.parametrize(
    "error", [CollectiveTimeoutError("late"), CorruptMessageError("wrong", peer=1)]
)
def test_a_connection_that_is_not_broken(monitor: Watched, error: TransportError) -> None:
    for _ in range(3):
        monitor.notices.tell_broken(0)
    error = monitor.explain(error, 3.0)  # type: ignore[assignment]
    assert error.peer == 1
    assert monitor.notices.broken(1) == 0


@pytest.mark.parametrize("peer", [1, 2])
def test_a_process_that_has_ended_is_the_cause(monitor: Watched, peer: int) -> None:
    for _ in range(3):
        monitor.notices.tell_broken(0)
    monitor.lives.gone = {peer}
    error = monitor.explain(PeerLostError("closed"), 3.0)
    assert error.peer == peer  # type: ignore[attr-defined]


def test_a_process_that_has_ended_writes_no_verdict(monitor: Watched) -> None:
    monitor.lives.gone = {1}
    error = monitor.explain(PeerLostError("closed"), 3.0)
    assert type(error) is PeerLostError
    assert str(error) == f"rank 0 lost rank 1: {ENDED}"
    assert monitor.clock.naps == []
    told = {"kind": "lost", "peer": 1, "text": f"rank 0 reports that {ENDED}"}
    assert monitor.told("verdict") == told


def test_the_rank_that_has_ended_is_blamed_not_the_one_that_gave_up(monitor: Watched) -> None:
    monitor.lives.gone = {2, 3}
    error = monitor.explain(PeerLostError("closed"), 3.0)
    assert isinstance(error, PeerLostError)
    assert error.peer == 2
    assert str(error) == f"rank 0 lost rank 2: rank 2's process has ended, {AWAITED}"
    assert monitor.clock.naps, "rank 1 may have written a verdict"


@pytest.mark.parametrize("may", ["hold up", "have left", "have had the store"])
def test_the_dead_may_hold_up_those_who_do_not_wait_for_them(monitor: Watched, may: str) -> None:
    """Rank 1 is waited for, which lives; rank 2 is dead, or has closed its group, which a store tells."""
    monitor.lives.gone = {2}
    if may == "have left":
        monitor.notices.store.set("left/2", "7")
    monitor.notices.is_gone = may == "have had the store"
    assert monitor.look() is None
    monitor.clock.now += diagnosis._DEAD_RANK_S - 0.1
    assert monitor.look() is None
    monitor.clock.now += 0.2
    error = monitor.look()
    if may != "hold up":
        assert error is None
        return
    assert isinstance(error, PeerLostError)
    assert error.peer == 2


def test_the_host_of_the_store_is_blamed_not_who_gave_up_after_it(monitor: Watched) -> None:
    """Without a store, who gave up could not tell why; it may have ended, too."""
    monitor.lives.gone = {0, 1}
    monitor.rank = monitor.diagnosis.rank = 2
    monitor.lives.near = {1, 3}
    monitor.notices.is_gone = True
    gone = "the store, which rank 0 or the launcher holds, cannot be reached"
    error = monitor.explain(PeerLostError("closed"), 3.0)
    assert isinstance(error, PeerLostError)
    assert error.peer == 0
    assert str(error) == f"rank 2 lost rank 0: rank 0's process has ended, {AWAITED}; {gone}"
    monitor.error = None
    monitor.look()
    monitor.clock.now += 2 * diagnosis._GRACE_S
    missed = monitor.look()
    assert isinstance(missed, PeerLostError)
    assert missed.peer == 0


def test_with_a_store_who_is_waited_for_is_blamed(monitor: Watched) -> None:
    """Whoever gave up before has told why."""
    monitor.lives.gone = {0, 1}
    monitor.rank = monitor.diagnosis.rank = 2
    error = monitor.explain(PeerLostError("closed"), 3.0)
    assert isinstance(error, PeerLostError)
    assert error.peer == 1


def test_the_end_of_the_stores_host_is_waited_for(monitor: Watched) -> None:
    """Of another host, it is seen later than that of a peer on this host which has given up."""
    monitor.lives.gone = {1}
    monitor.rank = monitor.diagnosis.rank = 2
    monitor.notices.store = Gone(dist.DistNetworkError)
    monitor.clock.then = lambda: monitor.lives.gone.add(0)
    error = monitor.explain(PeerLostError("closed"), 3.0)
    assert isinstance(error, PeerLostError)
    assert error.peer == 0
    assert len(monitor.clock.naps) == 3
    # It may live, and another process have had the store.
    other = Watched()
    other.lives.gone, other.notices.is_gone = {1}, True
    other.rank = other.diagnosis.rank = 2
    other.clock = monitor.clock
    assert getattr(other.explain(PeerLostError("closed"), 3.0), "peer", None) == 1
    assert sum(monitor.clock.naps[3:]) == pytest.approx(watching._PATIENCE_S, abs=0.021)


def test_before_ranks_have_met_any_death_is_the_cause(monitor: Watched) -> None:
    monitor.at(7, None)
    monitor.lives.gone = {3}
    error = monitor.explain(PeerLostError("no connection", peer=1), 3.0)
    assert isinstance(error, PeerLostError)
    assert error.peer == 3
    assert monitor.clock.naps == []


@pytest.mark.parametrize(
    "text,peer,expected",
    [
        ("no connection", None, "no connection, "),
        ("no connection to rank 2", 2, "no connection to rank 2, "),
        ("no connection", 2, "rank 0 lost rank 2: no connection, "),
    ],
)
def test_ranks_that_have_not_met(
    monitor: Watched, text: str, peer: int | None, expected: str
) -> None:
    monitor.at(7, None)
    error = monitor.explain(TransportError(text, peer=peer), 3.0)
    assert type(error) is TransportError
    assert str(error) == f"{expected}{CALL_8}"
    assert error.peer == peer


def test_a_time_limit_before_ranks_have_met_has_no_chain(monitor: Watched) -> None:
    monitor.at(7, None)
    error = monitor.explain(CollectiveTimeoutError("rank 3 did not come", peer=3), 3.0)
    assert type(error) is CollectiveTimeoutError
    assert str(error).startswith("rank 3 did not come, in ")


def test_a_corrupt_message_is_told_at_once_even_of_the_dead(monitor: Watched) -> None:
    monitor.lives.gone = {2}
    error = monitor.explain(CorruptMessageError("another checksum"), 3.0)
    assert type(error) is CorruptMessageError
    assert str(error) == f"another checksum, {AWAITED}"
    assert error.peer == 1
    assert monitor.clock.naps == []
    assert monitor.told("verdict")["kind"] == "corrupt"


def test_a_store_that_is_gone_may_be_the_cause(monitor: Watched) -> None:
    monitor.notices.is_gone = True
    gone = "the store, which rank 0 or the launcher holds, cannot be reached"
    error = monitor.explain(PeerLostError("closed"), 3.0)
    assert str(error) == f"rank 0 lost rank 1: closed, {AWAITED}; {gone}"
    monitor.error = None
    error = monitor.explain(PeerLostError(gone), 3.0)
    assert str(error).count(gone) == 1
    monitor.error = None
    error = monitor.explain(CollectiveTimeoutError("late"), 3.0)
    assert gone not in str(error)


def test_a_store_that_does_not_answer(monitor: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error names who is waited for, and waits for the store at most a quarter of its limit."""
    patience_s: list[float] = []

    def never(store: Any, limit_s: float, question: Any) -> Any:
        patience_s.append(limit_s)
        raise TimeoutError

    monkeypatch.setattr(notices, "poll_store", never)
    error = monitor.explain(CollectiveTimeoutError("late"), 3.0)
    assert str(error) == LATE
    assert isinstance(error, TransportError)
    assert error.peer == 1
    assert monitor.error is error
    assert {*patience_s} == {0.75}
    assert monitor.notices.is_silent
    monitor.error, monitor.progress.wait = None, None
    error = monitor.explain(CollectiveTimeoutError("late"), 3600.0)
    assert str(error) == f"late, {CALL_8}"
    assert patience_s[-1] == 5.0


def test_a_group_of_some_ranks_is_named_with_the_ranks_of_the_program(monitor: Watched) -> None:
    """The peer of an error stays the rank in the group."""
    monitor.notices.names_of = lambda: Names([4, 6, 7, 9], "tp")
    call = f"in call 8 of the group tp of ranks 4, 6, 7, 9 ({CALL})"
    monitor.tells(1, waits=(7, 3))
    error = monitor.explain(CollectiveTimeoutError("late"), 3.0)
    late = f"rank 4 timed out after its timeout of 3 s: no data came from rank 6, {call}, step 2"
    assert str(error) == f"{late}; rank 6 waits for rank 9"
    assert isinstance(error, TransportError)
    assert error.peer == 3
    assert monitor.told("verdict")["text"] == str(error)
    monitor.error = None
    assert str(monitor.explain(PeerLostError("closed"), 3.0)) == f"rank 4 stops: {error}"
    monitor.notices.store = dist.HashStore()
    monitor.error = None
    error = monitor.explain(PeerLostError("rank 1 and rank 12 are gone"), 3.0)
    assert str(error).startswith("rank 4 lost rank 6: rank 6 and rank 12 are gone, in call 8")
    assert monitor.told("verdict")["text"].startswith("rank 4 reports that rank 6 and rank 12")
    monitor.notices.store = dist.HashStore()
    monitor.error = None
    monitor.tells(2, c7=["broadcast(linear)", None])
    error = monitor.explain(PeerLostError("closed"), 3.0)
    assert str(error).startswith("rank 4: the ranks disagree on call 8 of the group tp of ranks 4,")
    assert f"rank 4 called {CALL} and rank 7 called broadcast(linear)" in str(error)
    assert error.peer == 2  # type: ignore[attr-defined]
    assert Names([*range(3, 13)]).group == "the group of ranks 3, 4, 5, 6, 7, 8, 9, 10 and 2 more"
    assert (Names().group, Names(name="dp").group) == ("the group", "the group dp")


@pytest.mark.parametrize("numel, is_other", [(3, True), (4, False)])
def test_a_rank_that_has_left_has_told_its_last_calls(
    monitor: Watched, numel: int, is_other: bool
) -> None:
    """A connection that it closes breaks the wait at once, before anybody has looked."""
    peer = Watched()
    peer.notices = Notices(monitor.notices.store, 1)
    peer.at(7, None, lengths={1: numel})
    peer.progress.current = None
    monitor.at(7, Wait(0, 1, 2, True), lengths={1: 4})
    peer.leave(3.0)
    error = monitor.explain(PeerLostError("the connection was broken"), 3.0)
    assert isinstance(error, MismatchError) is is_other, error
    if is_other:
        assert f"rank 1 called {CALL} with 3 elements from rank 0 to rank 1" in str(error)
        assert monitor.told("verdict")["kind"] == "mismatch"


@pytest.mark.parametrize("ends", ["verdict", "left", ""])
def test_who_holds_the_store_keeps_it_for_those_that_may_wait_for_it(
    monitor: Watched, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    monkeypatch.setattr(watching, "is_served_here", lambda store: True)

    def end() -> None:
        if ends == "verdict":
            monitor.notices.tell_verdict({"kind": "lost", "peer": 1, "text": "x"})
        for peer in range(1, WORLD_SIZE) if ends == "left" else ():
            monitor.notices.store.set(f"left/{peer}", "7")

    monitor.clock.then = end
    monitor.leave(3.0)
    assert monitor.clock.naps == [], "an all-reduce waits for all"
    monitor.at(8, None, "broadcast(linear)")
    monitor.leave(3.0)
    most = round(watching._STAY_S / watching._BETWEEN_S)
    assert len(monitor.clock.naps) in ((3,) if ends else (most, most + 1))


def test_an_error_of_this_rank(monitor: Watched) -> None:
    assert monitor.report(PeerLostError("of the library"), 3.0) == "of the library"
    text = f"rank 0 failed with PeerLostError: of the library, {CALL_8}"
    assert monitor.told("verdict") == {"kind": "lost", "peer": 0, "text": text}
    own = "rank 0 failed with ValueError: mine"
    assert monitor.report(ValueError("mine"), 3.0) == f"{own}, {CALL_8}"
    monitor.progress.current = None
    assert monitor.report(ValueError("mine"), 3.0) == own
    assert monitor.told("verdict")["text"] == text, "the first one counts"


# --- what is believed -----------------------------------------------------------------


class Gone(dist.Store):
    """A store that cannot be reached; counts who asks it."""

    def __init__(self, error: type[Exception]) -> None:
        super().__init__()
        self.error, self.asked = error, 0

    def check(self, keys: list[str]) -> bool:
        self.asked += 1
        raise self.error("gone")

    def set_timeout(self, timeout: Any) -> None:
        pass


def test_a_store_that_is_gone_is_asked_once(monitor: Watched) -> None:
    monitor.notices.store = gone = Gone(dist.DistNetworkError)
    assert monitor.notices.verdict() is None
    assert monitor.notices.is_gone
    assert monitor.notices.state(1) is None
    assert gone.asked == 1
    late = Gone(RuntimeError)
    notices = Notices(late, 0)
    assert notices.last_of(1) is None
    assert notices.last_of(1) is None
    assert late.asked == 2
    assert not notices.is_gone


# --- looking around -------------------------------------------------------------------


def test_a_state_is_published(monitor: Watched) -> None:
    monitor.progress.forget()
    for number in range(100):
        monitor.ran(number, operation(f"call{number}", {1: number}))
    unknown = operation("unknown")
    unknown.description = None
    monitor.ran(100, unknown)
    monitor.at(101, Wait(0, 3, 0, False), "last")
    assert monitor.look() is None
    told = monitor.told("state/0")
    assert told["waits"] == [101, 3]
    assert [*told["calls"]] == [*map(str, range(38, 100)), "101"]
    assert told["calls"]["40"] == ["call40", {"1": 40}, ""]
    assert told["calls"]["101"] == ["last", None, ""]
    monitor.progress.wait = None
    monitor.look()
    assert monitor.told("state/0")["waits"] is None
    assert monitor.breaks == []


def test_thousands_of_the_same_operation_are_remembered(monitor: Watched) -> None:
    monitor.progress.forget()
    first, loop, last = (operation(name) for name in ("first", "loop", "last"))
    for number, called in enumerate([first, *[loop] * 5000, last]):
        monitor.ran(number, called)
    monitor.ran(5010, last)  # numbers may be left out
    assert monitor.progress.recent(1) == [(5010, last)]
    assert [number for number, _ in monitor.progress.recent(3)] == [5000, 5001, 5010]
    assert monitor.progress.recent(9999)[0] == (0, first)
    assert len(monitor.progress.recent(9999)) == 5003
    called = [monitor.progress.called(number) for number in (0, 1, 5000, 5001, 5005, 5010, 5011)]
    assert called == [first, loop, loop, last, None, last, None]
    for number in range(2 * diagnosis._REMEMBERED):  # of other operations, the last ones
        monitor.ran(6000 + number, operation("one of many"))
    assert monitor.progress.called(5001) is None
    assert len(monitor.progress.recent(9999)) == diagnosis._REMEMBERED


def test_a_rank_that_calls_something_else(monitor: Watched) -> None:
    monitor.tells(1, c7=[CALL, None], c9=["later", None])
    monitor.tells(2, c7=["broadcast(linear)", None])
    error = monitor.look()
    assert isinstance(error, MismatchError)
    assert str(error) == (
        "rank 0: the ranks disagree on call 8 of the group: "
        f"rank 0 called {CALL} and rank 2 called broadcast(linear)"
    )
    assert (error.peer, error.mine, error.theirs) == (2, CALL, "broadcast(linear)")
    assert monitor.breaks == [error]
    assert monitor.told("verdict") == {
        "kind": "mismatch",
        "calls": [[0, CALL, ""], [2, "broadcast(linear)", ""]],
        "number": 7,
    }
    assert monitor.look() is error
    assert len(monitor.breaks) == 1


def test_a_rank_that_has_gone_on_tells_where_it_is(
    monitor: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A root that waits for nobody; the lines of calls that run where they are made are not noted."""
    lines = {8: "train.py:5"}
    monkeypatch.setattr(monitor.progress, "site", lambda number: lines.get(number, ""))
    monitor.at(8, Wait(0, 1, 2, True), "later")
    monitor.tells(1, c7=["broadcast", None])
    assert f"rank 0 called {CALL} before train.py:5 and rank 1 called broadcast" in str(
        monitor.look()
    )
    lines[7] = "train.py:4"
    assert monitor.progress.place(7) == " at train.py:4"


@pytest.mark.parametrize("own,is_mismatch", [(0, True), (1, True), (2, False)])
def test_a_rank_in_a_barrier_before_a_call_that_this_rank_has_made(
    monitor: Watched, own: int, is_mismatch: bool
) -> None:
    monitor.progress.num_barriers = own
    monitor.tells(1, barrier=[2, 8, "a.py:1"])
    assert monitor.look() is None, "it may have come first"
    monitor.tells(1, barrier=[2, 7, "a.py:1"])
    error = monitor.look()
    assert (error is not None) == is_mismatch
    if error is not None:
        assert f"rank 0 called {CALL} and rank 1 called monitored_barrier at a.py:1" in str(error)


def test_what_cannot_be_compared_is_no_mismatch(monitor: Watched) -> None:
    unknown: Any = monitor.at(6, None, "unknown").operation
    unknown.description = None
    monitor.at(7, Wait(0, 1, 2, True))
    monitor.tells(1, c6=["broadcast", None], c8=["other", None], c7=[CALL, {"1": 4}])
    assert monitor.look() is None
    assert monitor.breaks == []
    assert monitor.told("verdict") is None


@pytest.mark.parametrize(
    "own,other,way",
    [
        ({6: 3}, {"6": 4}, ("3", "4", "from rank 1 to rank 2")),
        ({6: 3, 9: 1}, {"6": 3, "9": 2}, ("1", "2", "from rank 2 to rank 1")),
    ],
)
def test_blocks_of_other_lengths(
    monitor: Watched, own: dict[int, int], other: dict[str, int], way: tuple[str, str, str]
) -> None:
    monitor.at(7, Wait(0, 1, 2, True), lengths=own)
    monitor.tells(3, c7=[CALL, other])
    error = monitor.look()
    assert isinstance(error, MismatchError)
    mine, theirs, where = way
    assert error.mine == f"{CALL} with {mine} elements {where}"
    assert error.theirs == f"{CALL} with {theirs} elements {where}"


@pytest.mark.parametrize("lengths", [None, {}, {"6": 3}, {"1": 8}])
def test_blocks_of_the_same_lengths(monitor: Watched, lengths: dict[str, int] | None) -> None:
    monitor.at(7, Wait(0, 1, 2, True), lengths={6: 3})
    monitor.tells(3, c7=[CALL, lengths])
    assert monitor.look() is None


def test_a_verdict_of_two_others(monitor: Watched) -> None:
    """The peer of a third rank is the rank whose call is not its own."""
    for calls, peer in (([[1, CALL, ""], [2, "x", ""]], 2), ([[1, "x", ""], [2, CALL, ""]], 1)):
        monitor.error = None
        monitor.notices.store.set(
            "verdict", json.dumps({"kind": "mismatch", "calls": calls, "number": 7})
        )
        error = monitor.look()
        assert isinstance(error, MismatchError)
        assert (error.peer, error.mine, error.theirs) == (peer, CALL, "x")
    assert monitor.told("state/0") is None, "nothing has to be told any more"


@pytest.mark.parametrize("kind", FAILURES)
def test_a_verdict_of_each_kind(monitor: Watched, kind: str) -> None:
    monitor.notices.tell_verdict({"kind": kind, "peer": 2, "text": "a reason"})
    error = monitor.look()
    assert type(error) is FAILURES[kind]
    assert str(error) == "rank 0 stops: a reason"
    assert error.peer == 2
    assert monitor.breaks == [error]


# --- ranks that come no more ----------------------------------------------------------


def test_a_rank_that_has_closed_the_group(monitor: Watched) -> None:
    monitor.notices.store.set("left/1", "6")
    error = monitor.look()
    assert type(error) is PeerLostError
    assert error.peer == 1
    left = f"rank 1 has closed the group, {AWAITED}"
    assert str(error) == f"rank 0 lost rank 1: {left}"
    told = {"kind": "lost", "peer": 1, "text": f"rank 0 reports that {left}"}
    assert monitor.told("verdict") == told


def test_a_rank_that_has_done_this_operation_may_close_the_group(monitor: Watched) -> None:
    monitor.notices.store.set("left/1", "7")
    monitor.notices.store.set("left/2", "1")  # nobody waits for it
    assert monitor.look() is None


@pytest.mark.parametrize("text,last", [("0", 0), ("-1", -1), ("", None), ("no number", None)])
def test_what_a_rank_that_left_may_tell(monitor: Watched, text: str, last: int | None) -> None:
    assert monitor.notices.last_of(1) is None
    monitor.notices.store.set("left/1", text)
    assert monitor.notices.last_of(1) == last


def looked_twice(monitor: Watched, after_s: float) -> RingcollError | None:
    assert monitor.look() is None, "its last messages may still come"
    monitor.clock.now += after_s
    return monitor.look()


@pytest.mark.parametrize("after_s", [diagnosis._GRACE_S, 5.0])
def test_a_rank_that_has_ended(monitor: Watched, after_s: float) -> None:
    monitor.lives.gone = {1}
    error = looked_twice(monitor, after_s)
    assert type(error) is PeerLostError
    assert error.peer == 1
    assert str(error) == f"rank 0 lost rank 1: {ENDED}"


def test_a_rank_that_has_ended_just_now_or_that_nobody_waits_for(monitor: Watched) -> None:
    monitor.lives.gone = {2, 1}
    assert looked_twice(monitor, diagnosis._GRACE_S - 0.01) is None
    monitor.lives.gone = {2}
    assert looked_twice(monitor, 2.0) is None
    monitor.progress.wait = None  # it waits for nothing
    assert looked_twice(monitor, 2.0) is None
    monitor.progress.meets = True  # for all
    error = monitor.look()
    assert isinstance(error, PeerLostError)
    assert error.peer == 2


@pytest.mark.parametrize(
    "last,is_far,is_lost", [("7", False, True), ("7", True, False), ("8", True, False)]
)
def test_a_rank_that_ended_after_it_was_done(
    monitor: Watched, last: str, is_far: bool, is_lost: bool
) -> None:
    monitor.lives.gone = {1}
    monitor.lives.elsewhere = {1: FAR} if is_far else {}
    monitor.notices.store.set("left/1", last)
    assert (looked_twice(monitor, 5.0) is not None) == is_lost


def test_a_far_rank_that_left_before_is_lost_to_those_who_meet(monitor: Watched) -> None:
    monitor.lives.gone, monitor.lives.elsewhere = {1}, {1: FAR}
    monitor.notices.store.set("left/1", "6")
    monitor.progress.meets, monitor.progress.wait = True, None
    assert looked_twice(monitor, 5.0) is not None


# --- operations that are enqueued on a stream -----------------------------------------


class Enqueued:
    """A lane, and messages some of which are over."""

    def __init__(self) -> None:
        self.over = False
        self.errors: list[BaseException] = []

    def is_over(self) -> bool:
        return self.over

    def fail(self, error: BaseException) -> None:
        self.errors.append(error)


def enqueue(
    monitor: Watched, number: int, *waits: tuple[int, int, bool], limit_s: float = 3.0
) -> Enqueued:
    """Enqueue an operation; its messages are (step, peer, whether it is over)."""
    lane = Enqueued()
    messages = [
        (Wait(i, peer, step, True), lambda is_over=is_over: is_over)
        for i, (step, peer, is_over) in enumerate(waits)
    ]
    monitor.progress.issued.append(
        Issued(number, operation(CALL), limit_s, messages, lane)  # type: ignore[arg-type]
    )
    return lane


def test_a_stream_waits_for_its_first_operation(monitor: Watched) -> None:
    monitor.progress.current = None
    enqueue(monitor, 5, (0, 1, True), (1, 3, False), (2, 2, False))
    enqueue(monitor, 6, (0, 1, False))
    running = monitor.progress.running()
    assert running is not None
    assert (running.number, running.wait) == (5, None), "nobody has looked for its message"
    assert monitor.look() is None
    running = monitor.progress.running()
    assert running is not None
    assert (running.number, running.wait) == (5, Wait(1, 3, 1, True))
    assert monitor.told("state/0")["waits"] == [5, 3]
    monitor.progress.issued.popleft()
    running = monitor.progress.running()
    assert running is not None
    assert (running.number, running.wait) == (6, None)


@pytest.mark.parametrize(
    "gone,waits,suspect",
    [
        (set(), {}, 1),
        (set(), {1: (5, 0)}, 2),
        (set(), {1: (5, 0), 2: (4, 0)}, 2),
        (set(), {1: (5, 0), 2: (6, 0)}, 3),
        (set(), {1: (5, 0), 2: (6, 0), 3: (5, 1)}, 1),
        (set(), {1: None}, 1),
        ({3}, {1: (5, 0)}, 3),
    ],
)
def test_of_messages_that_come_together_the_most_suspicious_counts(
    monitor: Watched, gone: set[int], waits: dict[int, tuple[int, int] | None], suspect: int
) -> None:
    enqueue(monitor, 5, (1, 1, False), (1, 2, False), (1, 3, False), (2, 0, False))
    for rank, wait in waits.items():
        monitor.tells(rank, wait)
    monitor.lives.gone = gone
    monitor.look()
    assert monitor.told("state/0")["waits"] == [5, suspect]


def test_a_rank_that_left_a_stream_its_last_messages_is_not_lost(monitor: Watched) -> None:
    monitor.lives.gone = {1}
    enqueue(monitor, 5, (0, 1, False))
    monitor.notices.store.set("left/1", "5")
    assert looked_twice(monitor, 5.0) is None
    monitor.notices.store.delete_key("left/1")
    assert monitor.look() is not None


def test_operations_to_whose_end_a_stream_has_come_are_taken_away(monitor: Watched) -> None:
    lanes = [enqueue(monitor, number) for number in (4, 5, 6)]
    lanes[0].over = lanes[2].over = True
    monitor.progress.take_away()
    assert [item.number for item in monitor.progress.issued] == [5, 6]
    lanes[1].over = True
    monitor.progress.take_away()
    assert not monitor.progress.issued
    monitor.progress.take_away()


def test_operations_that_are_given_up_get_the_error(monitor: Watched) -> None:
    lanes = [enqueue(monitor, number) for number in (4, 5)]
    error = ValueError("no more")
    monitor.progress.abandon(error)
    assert [lane.errors for lane in lanes] == [[error], [error]]
    assert not monitor.progress.issued


def test_a_streams_time_limit(monitor: Watched) -> None:
    enqueue(monitor, 5, (0, 1, False), limit_s=3.0)
    monitor.look()
    since = monitor.clock.now
    monitor.clock.now += 3.0
    monitor._keep_limit(since)
    assert monitor.breaks == []
    monitor.clock.now += 0.5
    monitor._keep_limit(since)
    error = monitor.error
    assert isinstance(error, CollectiveTimeoutError)
    assert error.peer == 1
    assert str(error) == (
        f"rank 0 timed out after its timeout of 3 s: no data came from rank 1, in call 6 of the group ({CALL}), step 0"
    )
    assert monitor.breaks == [error]
    monitor._keep_limit(since)
    assert len(monitor.breaks) == 1


def test_an_operation_of_the_host_keeps_its_own_limit(monitor: Watched) -> None:
    monitor._keep_limit(monitor.clock.now - 100)
    assert monitor.error is None


# --- the thread -----------------------------------------------------------------------


def until(condition: Any) -> None:
    for _ in range(1000):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it did not come about within 10 s")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "_POLL_S", 0.005)
    monkeypatch.setattr(watching, "_PATIENCE_S", 0.1)


def test_a_wait_is_looked_at_and_its_end_is_told(quick: None) -> None:
    monitor = Watched()
    monitor.wake()
    try:
        until(lambda: monitor.told("state/0"))
        assert monitor.told("state/0")["waits"] == [7, 1]
        assert monitor.awake
        monitor.at(8, None)
        until(lambda: monitor.told("state/0")["waits"] is None)
        monitor.progress.current = monitor.progress.wait = None
        until(lambda: not monitor.awake)
        monitor.at(9, Wait(0, 2, 0, True))
        monitor.wake()
        until(lambda: monitor.told("state/0")["waits"] == [9, 2])
        monitor.notices.tell_verdict({"kind": "lost", "peer": 3, "text": "a reason"})
        until(lambda: monitor.breaks)
        assert isinstance(monitor.error, PeerLostError)
    finally:
        monitor.close()
    assert monitor._thread is not None
    assert not monitor._thread.is_alive()


def test_a_short_wait_is_not_looked_at(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "_PATIENCE_S", 30.0)
    monitor = Watched()
    monitor.wake()
    try:
        threading.Event().wait(0.1)
        assert monitor.told("state/0") is None
    finally:
        monitor.close()


def test_a_stream_is_watched_by_the_thread(quick: None) -> None:
    monitor = Watched()
    monitor.progress.current = monitor.progress.wait = None
    done, late = enqueue(monitor, 5), enqueue(monitor, 6, (0, 2, False), limit_s=0.2)
    done.over = True
    monitor.wake()
    try:
        until(lambda: monitor.breaks)
        assert not monitor.breaks[1:]
        assert "call 7 of the group" in str(monitor.error)
        assert [item.lane for item in monitor.progress.issued] == [late]
    finally:
        monitor.close()


def test_a_group_of_one_rank_needs_no_thread_and_tells_nobody() -> None:
    monitor = Watched()
    monitor.world_size = 1
    monitor.wake()
    monitor.leave(3.0)
    assert not monitor.awake
    assert monitor._thread is None
    assert not monitor.notices.store.check(["left/0"])
    monitor.close()


@pytest.mark.parametrize("world_size", [2, WORLD_SIZE])
def test_leaving_tells_the_last_operation(world_size: int) -> None:
    fresh = Monitor(dist.HashStore(), 1, world_size, lambda: None, Lives())  # type: ignore[arg-type]
    fresh.leave(3.0)
    assert fresh.notices.last_of(1) == -1
    monitor = Watched()
    monitor.world_size = world_size
    monitor.leave(3.0)
    assert monitor.told("left/0") == 7
    monitor.progress.forget()
    monitor.leave(3.0)
    assert monitor.told("left/0") == -1


def test_what_is_forgotten_is_kept_alive_by_nobody() -> None:
    """An operation is bound to connections."""

    class Called(SimpleNamespace):
        """One that can be referred to weakly."""

    monitor, called = Watched(), Called(description=CALL, words=None)
    monitor.ran(8, called)
    kept = weakref.ref(called)
    del called
    monitor.progress.current = None
    assert kept() is not None
    monitor.progress.forget()
    assert kept() is None


# --- the states of the thread -----------------------------------------------------------------


@pytest.mark.parametrize(
    "is_new, runs_s, state",
    [
        (False, 0.0, WatchState.RUNNING),
        (False, watching._PATIENCE_S, WatchState.RUNNING),
        (False, watching._PATIENCE_S + 0.01, WatchState.LATE),
        (False, 5.0, WatchState.LATE),
        (False, 5.01, WatchState.NOTED),
        (True, 99.0, WatchState.RUNNING),
    ],
)
def test_the_state_follows_from_how_long_an_operation_runs(
    monitor: Watched, is_new: bool, runs_s: float, state: WatchState
) -> None:
    monitor._notice_s = 5.0
    running = monitor.progress.running()
    assert monitor.state(running, is_new, runs_s) is state
    assert monitor.state(None, is_new, runs_s) is WatchState.ASLEEP
    monitor.error = PeerLostError("gone")
    assert monitor.state(running, is_new, runs_s) is WatchState.OVER


def test_a_closed_group_ends_the_thread_in_every_state(monitor: Watched) -> None:
    monitor.close()
    for running in (None, monitor.progress.running()):
        assert monitor.state(running, False, 99.0) is WatchState.OVER


@pytest.mark.parametrize(
    "peer, ended, is_gone, cause",
    [
        (2, {1, 3}, False, 1),  # it gave up because of one that has ended
        (3, {1, 3}, False, 3),  # its own end is reason enough
        (None, {3}, False, 3),
        (2, set(), False, 2),
        (2, {0, 2}, True, 0),  # without the store nobody could tell why
        (2, {2, 3}, True, 2),
        (2, {0, 2}, False, 2),
    ],
)
def test_whose_end_is_the_cause(
    peer: int | None, ended: set[int], is_gone: bool, cause: int
) -> None:
    found: Any = SimpleNamespace(_notices=SimpleNamespace(is_gone=is_gone))
    assert diagnosis.Diagnosis._cause(found, peer, ended) == cause


def test_a_rank_in_a_barrier_is_at_the_call_before_it() -> None:
    progress = diagnosis.Progress()
    assert progress.on_host() is None
    assert progress.enter_barrier(7) == 1
    running = progress.on_host()
    assert running is not None
    assert (running.number, running.wait) == (7, None)
    assert progress.barrier is not None
    assert "test_verdicts.py" in progress.barrier[1]
