"""A communicator: while its ranks meet, failures, turns, what it counts and keeps, its end."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ringcoll
from ringcoll.errors import (
    FORKED,
    CollectiveTimeoutError,
    GroupBrokenError,
    MismatchError,
    PeerLostError,
    RingcollError,
    TransportError,
)
from ringcoll.runtime.collectives import StoreGroup, communicator
from ringcoll.runtime.group import Communicator
from ringcoll.runtime.group import communicator as runtime
from ringcoll.runtime.transport import Transport, gloo, meet
from ringcoll.runtime.watch import flight_recorder
from tests.programs.threads import together

CPU = torch.device("cpu")


@pytest.mark.parametrize("by_monitor", [False, True])
def test_who_gives_up_while_the_ranks_connect_is_heard(
    monkeypatch: pytest.MonkeyPatch, by_monitor: bool
):
    """Gloo has no connections to break at that time; they must not be waited on later."""
    store = dist.HashStore()
    members: dict[int, Communicator] = {}

    def give_up(store: dist.Store, transport: Transport, *how: Any) -> tuple[int, ...]:
        hosts = meet(store, transport, *how)
        member = members[transport.rank]
        if member.rank == 0 and by_monitor:
            member.monitor.error = MismatchError("two calls", peer=1, mine="this", theirs="that")
            member.monitor.notices.tell_verdict({"kind": "lost", "peer": 0, "text": "two calls"})
            member.monitor.on_break()
        elif member.rank == 0:
            member.abort()
        return hosts

    monkeypatch.setattr(gloo, "meet", give_up)

    def main(rank: int) -> float:
        group = StoreGroup(store, rank, 2, 50.0, "gloo")
        members[rank] = group.communicator
        kind = MismatchError if by_monitor and not rank else PeerLostError
        start = time.monotonic()
        with pytest.raises(kind):
            ringcoll.all_reduce(torch.ones(3), group=group)
        with pytest.raises(GroupBrokenError):
            ringcoll.all_reduce(torch.ones(3), group=group)
        members[rank].close()
        return time.monotonic() - start

    for seconds in together(2, main):
        assert isinstance(seconds, float), seconds
        assert seconds < 25


@pytest.mark.parametrize("at", ["report", "abandon"])
def test_an_interrupt_while_a_failure_is_reported_breaks_the_group(
    monkeypatch: pytest.MonkeyPatch, at: str
):
    """Who goes on may change what its peers are still reading."""
    interrupted: list[int] = []

    def fail() -> None:
        raise OSError("the first failure")

    def main(group: ringcoll.LocalGroup) -> str:
        member = communicator(group, CPU)
        ringcoll.barrier(group=group)
        if group.rank() == 0:
            part = member.monitor if at == "report" else member.progress
            original = getattr(part, at)

            def interrupt(*arguments: Any) -> str:
                if not interrupted:
                    interrupted.append(1)
                    raise KeyboardInterrupt
                return str(original(*arguments))

            monkeypatch.setattr(part, at, interrupt)
            with pytest.raises((KeyboardInterrupt, OSError)):
                member.in_turn(fail, "turn")
            with pytest.raises(GroupBrokenError, match="the first failure"):
                ringcoll.all_reduce(torch.ones(3), group=group)
        else:
            with pytest.raises((TransportError, PeerLostError)) as caught:
                ringcoll.all_reduce(torch.ones(3), group=group, timeout=timedelta(seconds=20))
            assert not isinstance(caught.value, CollectiveTimeoutError)
        return "broken"

    assert ringcoll.run_threads(main, 2) == ["broken"] * 2
    assert interrupted == [1]


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_program_that_an_exception_has_ended_waits_for_nothing(
    monkeypatch: pytest.MonkeyPatch, is_lost: bool
):
    limits_s: list[float] = []

    class Pending:
        def close(self, limit_s: float, running_s: float) -> None:
            limits_s.append(limit_s)

    monkeypatch.setattr(runtime, "_open_communicators", [Pending(), Pending()])
    if is_lost:
        monkeypatch.setattr(sys, "last_type", KeyboardInterrupt, raising=False)
    else:
        monkeypatch.delattr(sys, "last_type", raising=False)
    runtime._close_all()
    first, second = limits_s
    assert first == second
    assert (first == 0) is is_lost


# --- what becomes of an operation that fails ------------------------------------------------


def member_of(group: Any) -> Communicator:
    member: Communicator = group.communicator
    return member


def failing(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


NO_MEMORY = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate"


@pytest.mark.parametrize("has_met", [True, False])
@pytest.mark.parametrize(
    "error, typed_if",
    [
        (RuntimeError(NO_MEMORY), {True, False}),
        (RuntimeError("something else"), set()),
        (NotImplementedError(NO_MEMORY), set()),  # a class of its own
        (OSError(24, "too many open files"), {False}),
        (KeyError("key"), set()),
        (TransportError("rank 0 lost rank 1"), {True, False}),
    ],
    ids=["no memory", "other", "no memory, other class", "no descriptors", "key", "transport"],
)
def test_lack_of_means_is_an_error_of_the_transport(
    error: Exception, typed_if: set[bool], has_met: bool, monkeypatch: pytest.MonkeyPatch
):
    """Also where the ranks have not met yet, and to connect takes descriptors."""

    def main(group: ringcoll.LocalGroup) -> BaseException:
        member = member_of(group)
        if has_met:
            member.in_turn(lambda: None, "before")
            run = partial(member.in_turn, failing(error), "turn")
        else:
            monkeypatch.setattr(member.transport, "connect", lambda limit_s: failing(error)())
            run = partial(member.in_turn, lambda: None, "turn")
        with pytest.raises(Exception) as caught:  # noqa: PT011  # looked at below
            run()
        return caught.value

    (raised,) = ringcoll.run_threads(main, 1)
    if has_met in typed_if:
        assert type(raised) is TransportError
        assert str(error.args[-1]) in str(raised)
    else:
        assert raised is error


def test_the_first_failure_is_the_one_that_later_calls_tell():
    def main(group: ringcoll.LocalGroup) -> None:
        member = member_of(group)
        member.check_usable()
        first = PeerLostError("rank 0 lost rank 7", peer=7)
        with pytest.raises(PeerLostError):
            member.in_turn(failing(first), "turn")
        member.abort()  # what has broken the group stays
        for use in (member.check_usable, partial(ringcoll.barrier, group)):
            with pytest.raises(GroupBrokenError) as caught:
                use()
            assert "rank 0: the group is broken by an earlier failure: " in str(caught.value)
            assert "lost rank 7" in str(caught.value)
            assert caught.value.peer == 7
            assert isinstance(caught.value.__cause__, PeerLostError)
        member.close()
        with pytest.raises(GroupBrokenError, match=r"^rank 0: the group was closed$"):
            member.check_usable()

    ringcoll.run_threads(main, 1)


@pytest.mark.parametrize("async_op", [False, True])
def test_a_failure_is_logged_where_it_is_not_raised(
    async_op: bool, caplog: pytest.LogCaptureFixture
):
    """One line of each rank, though two calls of each rank fail."""
    added, both, go_on = threading.Semaphore(0), threading.Barrier(2), threading.Event()

    def add(left: Tensor, right: Tensor) -> Tensor:
        added.release()
        assert go_on.wait(30)
        raise ArithmeticError("no sums on Sundays")

    def main(group: ringcoll.LocalGroup) -> None:
        operator, works = ringcoll.UserOp(add), list[Any]()
        if async_op:
            works = [ringcoll.all_reduce(torch.ones(3), operator, group, True) for _ in range(2)]
            assert added.acquire(timeout=30)  # another thread runs the first call
            both.wait(30)
        go_on.set()
        ringcoll.all_reduce(torch.ones(3), operator, group) if not async_op else works[0].wait()

    with pytest.raises(ArithmeticError):
        ringcoll.run_threads(main, 2)
    lines = [line.getMessage() for line in caplog.records if line.name == "ringcoll"]
    assert len(lines) == (2 if async_op else 0)
    assert all("no sums on Sundays" in line for line in lines)


def test_a_disagreement_that_is_raised_is_not_logged(caplog: pytest.LogCaptureFixture):
    """The monitor finds it, and the thread that waits raises it."""

    def main(group: ringcoll.LocalGroup) -> None:
        with pytest.raises(MismatchError):
            ringcoll.all_reduce(torch.ones(3), "sum" if group.rank() else "max", group)

    ringcoll.run_threads(main, 2)
    assert not [line for line in caplog.records if line.name == "ringcoll"]


def test_an_error_that_cannot_be_copied_is_told_in_words():
    class OddError(Exception):
        def __init__(self, first: int, second: int) -> None:
            super().__init__("odd")

    assert str(runtime._without_frames(OddError(1, 2))) == "OddError: odd"
    plain = PeerLostError("lost", peer=3)
    kept = runtime._without_frames(plain)
    assert kept is not plain
    assert type(kept) is PeerLostError
    assert kept.peer == 3


# --- turns ----------------------------------------------------------------------------------


def test_operations_are_counted():
    def main(group: ringcoll.LocalGroup) -> tuple[int, int]:
        member = member_of(group)
        ringcoll.all_reduce(torch.ones(5), group=group, algorithm="ring")
        before = member.num_issued, member.nbytes_sent
        assert before[0] == 1
        several = [torch.ones(50_000), torch.ones(50_000).double()]
        ringcoll.all_reduce_coalesced(several, group=group, algorithm="ring")
        return member.num_issued - before[0], member.nbytes_sent - before[1]

    assert ringcoll.run_threads(main, 2) == [(2, 50_000 * (4 + 8))] * 2


def test_a_group_remembers_only_so_many_bytes_of_calls(monkeypatch: pytest.MonkeyPatch):
    """The oldest calls are forgotten first, and nothing else keeps what they were bound to."""
    forgotten: list[weakref.ref[Any]] = []

    def main(group: ringcoll.LocalGroup) -> list[list[object]]:
        member = member_of(group)
        remembered: list[list[object]] = []
        for numel in (1, 2, 3, 1, 4, 4, 8000, 5):
            ringcoll.all_reduce(torch.ones(numel), group=group)
            operations = [*member.operations.values()]
            if len(remembered) == 0:
                (operation,) = operations
                monkeypatch.setattr(runtime, "_MOST_REMEMBERED", int(3.5 * operation.nbytes))
                forgotten.append(weakref.ref(operation))
                del operation
            remembered.append([each.request.lengths[0][1] for each in operations])
        del operations
        assert sum(each.nbytes for each in member.operations.values()) <= runtime._MOST_REMEMBERED
        assert [number for number, _ in member.monitor.progress.recent(9)] == [*range(8)]
        return remembered

    (remembered,) = ringcoll.run_threads(main, 1)
    assert remembered == [
        [1], [1, 2], [1, 2, 3], [1, 2, 3], [2, 3, 4], [2, 3, 4], [8000], [5],
    ]  # fmt: skip
    assert [reference() for reference in forgotten] == [None]


def test_what_is_in_the_queue_is_told():
    entered, go_on = threading.Event(), threading.Event()

    def main(group: ringcoll.LocalGroup) -> list[tuple[int, str]]:
        member = member_of(group)

        def hold() -> None:
            entered.set()
            assert go_on.wait(30)

        holding = threading.Thread(target=member.in_turn, args=(hold, "hold"))
        holding.start()
        assert entered.wait(30)
        works = [ringcoll.all_reduce(torch.ones(3), group=group, async_op=True) for _ in range(2)]
        queued = [(call["number"], call["call"]) for call in member.snapshot()["queued"]]
        go_on.set()
        for work in works:
            assert work is not None
            work.wait()
        holding.join()
        assert member.snapshot()["queued"] == []
        return queued

    assert ringcoll.run_threads(main, 1) == [[(1, "all_reduce"), (2, "all_reduce")]]


def test_a_blocking_call_waits_for_its_turn():
    go_on = threading.Event()

    def slow(left: Tensor, right: Tensor) -> Tensor:
        assert go_on.wait(30)
        return left + right

    def main(group: ringcoll.LocalGroup) -> list[float]:
        tensor = torch.ones(2)
        work = ringcoll.all_reduce(torch.ones(3), ringcoll.UserOp(slow), group, True)
        threading.Timer(0.2, go_on.set).start()
        assert ringcoll.all_reduce(tensor, group=group) is None
        assert work is not None
        assert work.is_completed()
        return tensor.tolist()

    assert ringcoll.run_threads(main, 2) == [[2.0, 2.0]] * 2


def test_messages_carry_the_history_of_the_group():
    """Where two ranks have called differently, and nobody has waited, their next tags differ."""

    def history_of(*numels: int) -> int:
        def main(group: ringcoll.LocalGroup) -> int:
            for numel in numels:
                ringcoll.all_reduce(torch.ones(numel), group=group)
            return member_of(group)._words[2]

        (history,) = ringcoll.run_threads(main, 1)
        assert 0 <= history < 1 << 31
        return int(history)

    calls = [(), (3,), (4,), (3, 3), (3, 4), (4, 3), (3, 3, 3)]
    assert len({history_of(*numels) for numels in calls}) == len(calls)
    assert history_of(3, 4) == history_of(3, 4)


def test_of_a_group_of_one_rank_nobody_is_told():
    def main(group: ringcoll.LocalGroup) -> tuple[bool, bool]:
        member = member_of(group)
        is_watched = any(one() is member for one in flight_recorder._watched)
        return bool(member.token), is_watched

    assert ringcoll.run_threads(main, 1) == [(False, False)]
    assert ringcoll.run_threads(main, 2) == [(True, True)] * 2


def test_alone_an_asynchronous_call_is_over_at_once():
    def main(group: ringcoll.LocalGroup) -> None:
        work = ringcoll.all_reduce(torch.ones(3), group=group, async_op=True)
        assert work is not None
        assert work.is_completed()
        assert not member_of(group)._queue.threads

    ringcoll.run_threads(main, 1)


def test_the_ranks_meet_once():
    def main(group: ringcoll.LocalGroup) -> tuple[int, ...]:
        member = member_of(group)
        assert member.meet() == member.meet() == (0, 0, 0)
        return member.num_issued, len(member.transport.hosts)

    assert ringcoll.run_threads(main, 3) == [(1, 3)] * 3


@pytest.mark.parametrize(
    "threads, num_cores, is_crowded",
    [(1, 1, False), (2, 5, True), (2, 6, False), (2, 7, False), (4, 2, True)],
)
def test_ranks_with_more_threads_than_cores_are_crowded(
    threads: int, num_cores: int, is_crowded: bool, monkeypatch: pytest.MonkeyPatch
):
    """Three ranks on one host."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(runtime, "cores", lambda: num_cores)

    def main(group: ringcoll.LocalGroup) -> bool:
        member_of(group).meet()
        return member_of(group)._is_crowded

    assert ringcoll.run_threads(main, 3) == [is_crowded] * 3


def test_results_in_inference_mode_are_written_by_any_thread():
    def main(group: ringcoll.LocalGroup) -> list[float]:
        with torch.inference_mode():
            tensor = torch.ones(3)
            work = ringcoll.all_reduce(tensor, group=group, async_op=True)
        assert work is not None
        work.wait()
        ringcoll.all_reduce(tensor, group=group)  # outside of it
        return tensor.tolist()

    assert ringcoll.run_threads(main, 2) == [[4.0] * 3] * 2


# --- the end --------------------------------------------------------------------------------


def test_a_closed_group_keeps_nothing():
    def main(group: ringcoll.LocalGroup) -> None:
        member = member_of(group)
        ringcoll.all_reduce(torch.ones(100).expand(3, 100).t(), out=torch.ones(100, 3), group=group)
        ringcoll.all_gather_single(torch.ones(600_000), torch.ones(300_000), group)
        assert member.operations
        assert member.memory.tensors
        member.close(30.0)
        assert not member.operations
        assert not member.memory.tensors
        assert member.monitor.progress.last == (-1, None)
        assert not any(one() is member for one in flight_recorder._watched)
        member.close()  # a second time

    ringcoll.run_threads(main, 2)


@pytest.mark.parametrize("drain_s", [0.0, 30.0])
def test_what_is_queued_is_run_or_fails_at_the_end(drain_s: float):
    both, go_on = threading.Barrier(2), threading.Event()

    def slow(left: Tensor, right: Tensor) -> Tensor:
        assert go_on.wait(30)
        return left + right

    def main(group: ringcoll.LocalGroup) -> bool:
        member, total = member_of(group), torch.ones(3)
        first = ringcoll.all_reduce(torch.ones(3), ringcoll.UserOp(slow), group, True)
        second = ringcoll.all_reduce(total, group=group, async_op=True)
        assert first is not None
        assert second is not None
        both.wait(30)
        abort = member.transport.abort

        def abort_and_go_on() -> None:
            abort()
            go_on.set()

        # The first call goes on when the group is aborted, or a while later.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(member.transport, "abort", abort_and_go_on)
            if drain_s:
                threading.Timer(0.2, go_on.set).start()
            member.close(drain_s)
        assert (member.broken is None) is (drain_s > 0)
        assert total.tolist() == [2.0 if drain_s else 1.0] * 3
        try:
            return second.wait()
        except RingcollError:
            return False

    assert ringcoll.run_threads(main, 2) == [drain_s > 0] * 2


def test_in_a_process_that_was_forked_off_nothing_is_the_childs():
    def main(group: ringcoll.LocalGroup) -> None:
        member = member_of(group)
        ringcoll.barrier(group)
        turn = member._queue.turn
        member.disown()
        for use in (member.check_usable, partial(ringcoll.barrier, group)):
            with pytest.raises(GroupBrokenError) as caught:
                use()
            assert str(caught.value) == FORKED
        assert member._queue.turn is not turn
        # What the parent has is not touched, whatever is called.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(member.transport, "abort", failing(AssertionError("it is the parent's")))
            patch.setattr(member.transport, "close", failing(AssertionError("it is the parent's")))
            member.abort()
            member.close()
        member.state = runtime.GroupState.OPEN

    ringcoll.run_threads(main, 1)


def test_only_the_memory_of_the_operation_that_runs_is_in_use() -> None:
    def main(group: ringcoll.LocalGroup) -> list[bool]:
        member = communicator(group, torch.device("cpu"))
        own, other = torch.ones(2), torch.ones(2)
        places = [{tensor.untyped_storage()._cdata} for tensor in (own, other)]
        found = [member.uses(place) for place in places]
        with member._queue.serving:
            found += [member.uses(place) for place in places]  # it has not begun: nobody knows yet
            member._running = (own,)
            found += [member.uses(place) for place in places]
            member._running = None
        return found

    assert ringcoll.run_threads(main, 1) == [[False, False, True, True, True, False]]


def test_bytes_of_what_was_begun_at_once_and_ended_later_are_counted(
    monkeypatch: pytest.MonkeyPatch,
):
    """An asynchronous call that another rank is late for goes on in another thread."""
    monkeypatch.setenv("RINGCOLL_TRANSPORT", "shared")
    store, has_begun = dist.HashStore(), threading.Event()
    go_on, resumed = Communicator._go_on, []

    def noted(member: Communicator, *call: Any) -> None:
        resumed.append(member.rank)
        go_on(member, *call)

    monkeypatch.setattr(Communicator, "_go_on", noted)

    def main(rank: int) -> list[int]:
        group = StoreGroup(dist.PrefixStore("group", store), rank, 2, 30.0)
        ringcoll.all_reduce(torch.ones(1), group=group)
        sent = [ringcoll.bytes_sent(group)]
        if rank:
            assert has_begun.wait(30)
        work = ringcoll.all_reduce(torch.ones(300), group=group, algorithm="ring", async_op=True)
        has_begun.set()
        assert work is not None
        work.wait()
        sent.append(ringcoll.bytes_sent(group))
        ringcoll.all_reduce(torch.ones(500), group=group, algorithm="ring")
        sent.append(ringcoll.bytes_sent(group))
        ringcoll.close(group)
        return [after - before for before, after in pairwise(sent)]

    assert together(2, main) == [[1200, 2000]] * 2
    assert 0 in resumed
