"""Failures over NCCL, whose waits only order streams: the monitor sees them, and names them.

The stand-in says nothing when a message never comes: the stream goes no further, and the host goes on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import ringcoll
from ringcoll import LocalGroup
from ringcoll.errors import (
    CollectiveTimeoutError,
    GroupBrokenError,
    MismatchError,
    PeerLostError,
    RingcollError,
    TransportError,
)
from ringcoll.runtime.operation import operation
from ringcoll.runtime.transport import Message, NcclTransport, nccl
from ringcoll.runtime.watch import Progress
from ringcoll.schedules.algorithms import algorithms
from tests.fakes.fake_nccl import FakeGroup, World
from tests.fakes.fake_streams import FakeCuda, StreamedGroup, in_place, run

CPU = torch.device("cpu")
SHORT, LONG = timedelta(seconds=1), timedelta(seconds=600)


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    with in_place() as stand_in:
        yield stand_in


def ring(group: LocalGroup, numel: int = 8, **options: Any) -> Any:
    return ringcoll.all_reduce(torch.ones(numel), group=group, algorithm="ring", **options)


def until(is_so: Callable[[], bool]) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def met(function: Callable[[], object]) -> BaseException:
    """The error that a function raises."""
    with pytest.raises(RingcollError) as caught:
        function()
    return caught.value


def broken(group: LocalGroup) -> BaseException:
    """The error that has broken a group, once it has."""
    member = group.communicator
    until(lambda: member.broken is not None)
    assert member.broken is not None
    return member.broken


@pytest.mark.slow
@pytest.mark.parametrize("wire_dtype", [None, torch.bfloat16], ids=["plain", "narrow"])
def test_a_rank_that_does_not_come_is_named_by_all_others(cuda: FakeCuda, wire_dtype: Any):
    absent = threading.Barrier(3)

    def main(group: LocalGroup) -> BaseException | None:
        ring(group, wire_dtype=wire_dtype)  # so that the next call is compared no more
        if group.rank() == 1:
            absent.wait(30)
            return None
        ring(group, wire_dtype=wire_dtype, timeout=SHORT)  # is enqueued, and returns
        cuda.current_stream().synchronize()  # the stream goes on, once the communicator is aborted
        error = broken(group)
        with pytest.raises(GroupBrokenError, match="rank 1"):
            ring(group)
        absent.wait(30)
        return error

    first, nothing, last = run(cuda, 3, main)
    assert nothing is None
    for error in (first, last):
        assert isinstance(error, CollectiveTimeoutError), error
        assert error.peer == 1
        assert "all_reduce(sum, float32, 8 elements" in str(error)


@pytest.mark.slow
def test_the_work_has_the_error(cuda: FakeCuda):
    done = threading.Event()

    def main(group: LocalGroup) -> None:
        ring(group)
        if group.rank() == 1:
            assert done.wait(30)
            return
        work = ring(group, async_op=True, timeout=SHORT)
        work.wait()  # orders the stream, and says nothing
        assert not work.is_completed()
        until(work.is_completed)
        broken(group)
        assert not work.is_success()
        assert isinstance(work.exception(), CollectiveTimeoutError)
        assert isinstance(met(work.wait), CollectiveTimeoutError)
        assert isinstance(met(ring(group, async_op=True).wait), GroupBrokenError)

    def last(group: LocalGroup) -> None:
        try:
            main(group)
        except GroupBrokenError:
            assert group.rank() == 0
        finally:
            done.set()

    assert run(cuda, 2, last) == [None, None]


def test_an_asynchronous_call_is_enqueued_by_its_caller(cuda: FakeCuda):
    def main(group: LocalGroup) -> int:
        ring(group)
        for _ in range(3):
            ring(group, async_op=True).wait()
        return len(group.communicator._queue.threads)

    assert run(cuda, 2, main) == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("async_op", [False, True])
def test_a_barrier_raises_the_error_itself(cuda: FakeCuda, async_op: bool):
    done = threading.Event()

    def main(group: LocalGroup) -> BaseException | None:
        ringcoll.barrier(group)
        if group.rank() == 1:
            assert done.wait(30)
            return None
        group.communicator.timeout_s = 1.0

        def meet() -> None:
            work = ringcoll.barrier(group, async_op)
            if work is not None:
                work.wait()

        try:
            return met(meet)
        finally:
            done.set()

    error, _ = run(cuda, 2, main)
    assert isinstance(error, CollectiveTimeoutError), error
    assert error.peer == 1


def test_calls_that_have_both_run_before_are_compared_when_their_stream_does_not_go_on(
    cuda: FakeCuda,
):
    """Long before the time limit."""

    def main(group: LocalGroup) -> BaseException:
        for numel in (8, 9):
            ring(group, numel)
        for numel in (8, 9)[:: 1 - 2 * group.rank()]:
            ring(group, numel, timeout=LONG)
        cuda.current_stream().synchronize()
        return broken(group)

    for rank, error in enumerate(run(cuda, 2, main)):
        assert isinstance(error, MismatchError), error
        assert error.peer == 1 - rank
        assert f"{8 + rank} elements" in error.mine
        assert f"{9 - rank} elements" in error.theirs


@pytest.mark.slow
@pytest.mark.parametrize(
    "last,kind,why",
    [
        (None, PeerLostError, "process has ended"),
        ("0", PeerLostError, "has closed the group"),
        ("1", CollectiveTimeoutError, "timed out"),
    ],
    ids=["killed", "closed before", "closed after"],
)
def test_a_rank_whose_process_has_ended(
    cuda: FakeCuda,
    monkeypatch: pytest.MonkeyPatch,
    last: str | None,
    kind: type[PeerLostError | CollectiveTimeoutError],
    why: str,
):
    """A rank that has closed the group after an operation was done with that operation."""
    done = threading.Event()

    def main(group: LocalGroup) -> BaseException | None:
        ring(group)
        cuda.current_stream().synchronize()
        member = group.communicator
        if group.rank() == 1:
            if last is not None:
                member.store.set("left/1", last)
            assert done.wait(30)
            return None
        if last is not None:
            until(lambda: member.store.check(["left/1"]))
        monkeypatch.setattr(member.monitor.lives, "ended", lambda *_: {1})
        try:
            ring(group, timeout=2 * SHORT if last == "1" else LONG)
            cuda.current_stream().synchronize()
            return broken(group)
        finally:
            done.set()

    error, _ = run(cuda, 2, main)
    assert isinstance(error, kind), error
    assert why in str(error)
    assert error.peer == 1


def test_a_rank_that_fails_is_told_to_those_whose_streams_wait(cuda: FakeCuda):
    def main(group: LocalGroup) -> BaseException:
        ring(group)
        if group.rank() == 1:
            group.communicator.monitor.report(ValueError("no more"), 3.0)
            return ValueError()
        ring(group, timeout=LONG)
        cuda.current_stream().synchronize()
        return broken(group)

    error, _ = run(cuda, 2, main)
    assert isinstance(error, PeerLostError), error
    assert "rank 1 failed with ValueError: no more" in str(error)


@pytest.mark.slow
def test_the_time_of_an_operation_counts_from_its_turn(cuda: FakeCuda):
    """Many may be enqueued, and each takes its time."""

    def main(group: LocalGroup) -> bool:
        ring(group)
        cuda.current_stream().synchronize()
        member = group.communicator
        for _ in range(4):
            ring(group, timeout=SHORT)
            if group.rank() == 1:
                time.sleep(0.6)
        cuda.current_stream().synchronize()
        return member.broken is None

    assert run(cuda, 2, main) == [True, True]


def test_operations_are_let_go_of_when_their_streams_have_come_to_their_ends(cuda: FakeCuda):
    def main(group: LocalGroup) -> None:
        member = group.communicator
        for _ in range(20):
            ring(group)
        until(lambda: not member.monitor.progress.issued)
        until(lambda: not member.monitor.awake)

    assert run(cuda, 2, main) == [None, None]


def test_the_monitor_disturbs_no_capture_of_another_thread(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
):
    """While it looks at the events of an operation that is not over."""
    looks = threading.Semaphore(0)
    take_away = Progress.take_away

    def counted(own: Progress) -> None:
        take_away(own)
        looks.release()

    monkeypatch.setattr(Progress, "take_away", counted)

    def main(group: LocalGroup) -> None:
        ring(group)
        cuda.current_stream().synchronize()
        meeting.wait(30)
        if group.rank():
            assert done.wait(30)
        ring(group)
        if group.rank() == 0:
            with cuda.graph():
                torch.ones(3).add_(1)
                for _ in range(12):
                    assert looks.acquire(timeout=30)
            done.set()
        cuda.current_stream().synchronize()

    meeting, done = threading.Barrier(2), threading.Event()
    assert run(cuda, 2, main) == [None, None]
    assert cuda.strays == []


def test_the_stand_in_sees_threads_that_have_not_begun(cuda: FakeCuda):
    event = cuda.current_stream().record_event()
    thread = threading.Thread(target=event.query, name="stray")
    with cuda.graph():
        thread.start()
        thread.join(30)
    assert cuda.strays == [
        "stray asks for an event without a device",
        "stray asks for an event during a capture of another thread",
    ]


# --- connecting ----------------------------------------------------------------------------


def connecting(cuda: FakeCuda, rank: int, store: dist.Store, world: World) -> NcclTransport:
    return NcclTransport(StreamedGroup(world, rank, cuda), CPU, store)


@pytest.mark.parametrize("ends", ["limit", "abort"])
def test_nobody_waits_for_ever_for_nccl_to_connect(cuda: FakeCuda, ends: str):
    """A rank that has met the others, and is lost before NCCL has."""
    store, world = dist.HashStore(), World(2)
    transport, other = (connecting(cuda, rank, store, world) for rank in (0, 1))
    other._make_communicator = lambda: None  # type: ignore[method-assign]
    thread = threading.Thread(target=other.connect, args=(30.0,))
    thread.start()
    if ends == "abort":
        threading.Timer(0.2, transport.abort).start()
    expected = CollectiveTimeoutError if ends == "limit" else PeerLostError
    with pytest.raises(expected, match="NCCL"):
        transport.connect(0.5 if ends == "limit" else 30.0)
    thread.join(30)
    world.connect(1)  # so that no thread stays behind
    assert cuda.strays == []


# --- works that are missing ------------------------------------------------------------------


def test_messages_without_a_work_are_an_error(cuda: FakeCuda):
    """`None` says that nothing was started, or that nobody has to wait; here it is neither."""

    class Silent(StreamedGroup):
        def _end_coalescing(self) -> None:
            super()._end_coalescing()

    transport = NcclTransport(Silent(World(2), 0, cuda), CPU, dist.HashStore())
    message = Message(1, torch.ones(3), 0)
    with pytest.raises(TransportError, match="rank 0 gave NCCL 1 messages, and got no work"):
        transport.post([], [message])


# --- loading kernels -------------------------------------------------------------------------


CALLS: list[dict[str, Any]] = [
    *({"algorithm": entry.name} for entry in algorithms("all_reduce") if not entry.restriction(3)),
    {"algorithm": "ring", "wire_dtype": torch.bfloat16},
    {"algorithm": "direct", "wire_dtype": torch.bfloat16},
    {"algorithm": "ring", "op": dist.ReduceOp.AVG},
    {"algorithm": "rabenseifner", "op": dist.ReduceOp.MAX},
]


def loads(cuda: FakeCuda, dtype: torch.dtype) -> list[str]:
    """The kernels that are loaded after the first message of an operation."""

    def main(group: LocalGroup) -> None:
        for options in CALLS:
            if "wire_dtype" in options and not dtype.is_floating_point:
                continue
            for tensor in (torch.ones(700, dtype=dtype), torch.ones(70, 2, dtype=dtype).T):
                cuda.sent(has_sent=False)
                ringcoll.all_reduce(tensor, group=group, **options)

    assert run(cuda, 3, main) == [None] * 3
    return cuda.late_loads


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_the_kernels_of_a_plan_are_loaded_before_its_first_message(
    cuda: FakeCuda, dtype: torch.dtype
):
    assert loads(cuda, dtype) == []


def test_without_a_rehearsal_they_are_loaded_late(cuda: FakeCuda):
    with mock.patch.object(operation, "rehearse"):
        assert any("add" in kernel for kernel in loads(cuda, torch.float32))


def test_a_function_of_the_users_is_not_rehearsed(cuda: FakeCuda):
    calls = []

    def add(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        calls.append(left.numel())
        return left + right

    def main(group: LocalGroup) -> float:
        tensor = torch.ones(6)
        op = ringcoll.UserOp(add, commutative=True, name="plus")
        ringcoll.all_reduce(tensor, op, group=group, algorithm="direct")
        return tensor[0].item()

    assert run(cuda, 2, main) == [2.0, 2.0]
    assert len(calls) == 2


def test_torchs_watchdog_leaves_the_time_limits_to_the_monitor(monkeypatch: pytest.MonkeyPatch):
    """It would end the process, and name nobody."""
    limits = []

    class Nccl(FakeGroup):
        class Options:
            _timeout = timedelta(0)

        def __init__(self, store: dist.Store, rank: int, world_size: int, options: Any) -> None:
            super().__init__(World(world_size), rank)
            limits.append(options._timeout)

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setattr(nccl, "nccl_version", lambda: (2, 30))
    monkeypatch.setattr(nccl, "ranks_may_share_gpus", lambda version: True)
    nccl.make(dist.HashStore(), 0, 2, CPU, 30.0).close()
    assert limits[0] > timedelta(hours=1)
