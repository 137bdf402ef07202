"""The NCCL transport against a stand-in for NCCL: which groups it forms, and in what order.

NCCL ignores tags and can hang on messages whose groups two ranks order differently; a
machine with GPUs is needed to see that happen, but not to see that it cannot.
"""

from __future__ import annotations

import gc
import inspect
import re
import subprocess
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch._C._distributed_c10d import Backend

import ringcoll
from ringcoll import LocalGroup
from ringcoll.errors import MismatchError, PeerLostError, TransportError
from ringcoll.runtime.group import Communicator, communicator
from ringcoll.runtime.machine import settings
from ringcoll.runtime.transport import Message, nccl
from ringcoll.runtime.transport.nccl import NcclTransport, grouped
from ringcoll.schedules import Recv, RecvReduce, Send, contract
from ringcoll.schedules.algorithms import algorithms, schedule_of
from tests.cases.algorithms import each_on
from tests.cases.calls import Case, prepare, verdict
from tests.cases.effort import effort
from tests.fakes import fake_nccl
from tests.fakes.fake_nccl import FakeGroup, FakeWork, World
from tests.programs.threads import together

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
EMPTY = torch.empty(0)

Wave = list[tuple[int, int]]
"""Messages as (source, destination), in the order in which both ends post them."""


def posts(wave: Wave, world_size: int) -> list[tuple[list[Message], list[Message]]]:
    """What each rank posts: (receives, sends); the tag is the message's number."""
    found: list[tuple[list[Message], list[Message]]] = [([], []) for _ in range(world_size)]
    for number, (source, destination) in enumerate(wave):
        found[source][1].append(Message(destination, EMPTY, number))
        found[destination][0].append(Message(source, EMPTY, number))
    return found


Groups = list[list[tuple[bool, int, int]]]
"""Of one rank, in order: groups of (is send, peer, number of the message)."""


def groups_of(wave: Wave, world_size: int) -> list[Groups]:
    """The groups that each rank forms."""
    found = []
    for rank, (receives, sends) in enumerate(posts(wave, world_size)):
        found.append(
            [
                [
                    *((False, receives[i].peer, receives[i].tag) for i in incoming),
                    *((True, sends[i].peer, sends[i].tag) for i in outgoing),
                ]
                for incoming, outgoing in grouped(rank, world_size, receives, sends)
            ]
        )
    return found


def hang(every: Sequence[Groups]) -> str:
    """Run the groups of all ranks by rendezvous; says what goes wrong, or nothing.

    A group runs when the one before it is complete; a message moves when the groups of
    both ends run; and messages between two ranks meet in order, whatever their number.
    """
    current = [0] * len(every)
    left = [Counter[tuple[bool, int]]() for _ in every]

    def enter(rank: int) -> None:
        if current[rank] < len(every[rank]):
            left[rank] = Counter((kind, peer) for kind, peer, _ in every[rank][current[rank]])

    for rank in range(len(every)):
        enter(rank)
    ready = set(range(len(every)))
    while ready:
        rank = ready.pop()
        if current[rank] >= len(every[rank]):
            continue
        for kind, peer in list(left[rank]):
            moved = min(left[rank][kind, peer], left[peer][not kind, rank])
            if not moved:
                continue
            for mine, key in ((rank, (kind, peer)), (peer, (not kind, rank))):
                left[mine][key] -= moved
                if not left[mine][key]:
                    del left[mine][key]
            if not left[peer]:
                current[peer] += 1
                enter(peer)
                ready.add(peer)
        if not left[rank]:
            current[rank] += 1
            enter(rank)
            ready.add(rank)
    stuck = [rank for rank in range(len(every)) if current[rank] < len(every[rank])]
    if stuck:
        return f"ranks {stuck[:5]} hang"
    orders = Counter[tuple[int, int, int, int]]()
    for rank, groups in enumerate(every):
        places = Counter[tuple[bool, int]]()
        for group in groups:
            for kind, peer, number in group:
                ends = (rank, peer) if kind else (peer, rank)
                orders[(*ends, places[kind, peer], number)] += 1
                places[kind, peer] += 1
    wrong = [key for key, times in orders.items() if times != 2]
    return f"messages meet others: {wrong[:5]}" if wrong else ""


@st.composite
def waves(draw: st.DrawFn) -> tuple[Wave, int]:
    world_size = draw(st.one_of(st.integers(2, 12), st.integers(13, 300)))
    random = Random(draw(st.integers(0, 1 << 32)))
    count = random.choice([1, 5, world_size, 4 * world_size])
    wave = []
    for _ in range(count):
        source, destination = random.sample(range(world_size), 2)
        wave += [(source, destination)] * random.choice([1, 1, 1, 2, 5])
    random.shuffle(wave)
    return wave, world_size


@effort(150)
@given(waves())
def test_random_waves_neither_hang_nor_mix(drawn: tuple[Wave, int]):
    wave, world_size = drawn
    every = groups_of(wave, world_size)
    assert max(len(group) for groups in every for group in groups) < 256
    assert not hang(every)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3, 64, 65, 128, 129, 200, 257, 300])
def test_everyone_to_everyone(world_size: int):
    """The largest wave there is, and every rank has another order of peers."""
    wave = [
        (rank, (rank + step) % world_size)
        for step in range(1, world_size)
        for rank in range(world_size)
    ]
    every = groups_of(wave, world_size)
    sizes = [len(group) for groups in every for group in groups]
    assert max(sizes) < 256
    assert sum(sizes) == 2 * len(wave)
    assert not hang(every)


def test_one_to_everyone_and_back():
    wave = [(0, peer) for peer in range(1, 300)] + [(peer, 0) for peer in range(1, 300)]
    every = groups_of(wave, 300)
    assert max(len(group) for groups in every for group in groups) < 256
    assert not hang(every)


@effort(60)
@given(waves())
def test_both_ends_of_a_message_put_it_in_the_same_group(drawn: tuple[Wave, int]):
    """By the place among the groups of its pair: those that hold messages of both ranks."""
    wave, world_size = drawn
    every = groups_of(wave, world_size)
    together: dict[int, list[frozenset[int]]] = {}
    for groups in every:
        for group in groups:
            for kind, peer, number in group:
                between = frozenset(n for k, p, n in group if (k, p) == (kind, peer))
                together.setdefault(number, []).append(between)
    for number, (one, two) in together.items():
        assert one == two, number


def by_position(wave: Wave, world_size: int, most: int) -> list[Groups]:
    """How not to do it: cut each rank's own list wherever it gets too long."""
    found = []
    for receives, sends in posts(wave, world_size):
        whole = [(False, m.peer, m.tag) for m in receives] + [(True, m.peer, m.tag) for m in sends]
        found.append([whole[start : start + most] for start in range(0, len(whole), most)])
    return found


def test_the_simulation_sees_what_hangs():
    wave = [(rank, (rank + step) % 9) for step in range(1, 9) for rank in range(9)]
    assert "hang" in hang(by_position(wave, 9, 3))
    assert not hang(by_position(wave, 9, 100))
    exchange = [[[(True, 1, 0)], [(False, 1, 1)]], [[(True, 0, 1)], [(False, 0, 0)]]]
    assert "hang" in hang(exchange)
    crossed = [[[(True, 1, 0), (True, 1, 1)]], [[(False, 0, 1), (False, 0, 0)]]]
    assert "meet others" in hang(crossed)


@pytest.mark.slow
@pytest.mark.parametrize("entry, world_size", each_on(2, 5, 8, 70))
def test_the_waves_of_every_algorithm(entry, world_size: int):
    """Step by step, as they are posted without segments."""
    schedule = schedule_of(entry.collective, entry.name, world_size)
    programs = [list(schedule.steps(rank)) for rank in range(world_size)]
    whole: list[Groups] = [[] for _ in range(world_size)]
    number = 0
    for step in range(max(map(len, programs))):
        now = [program[step] if step < len(program) else () for program in programs]
        sent: dict[tuple[int, int], list[int]] = {}
        received = Counter[tuple[int, int]]()
        lists: list[tuple[list[Message], list[Message]]] = [([], []) for _ in range(world_size)]
        for rank in range(world_size):
            for operation in now[rank]:
                if isinstance(operation, Send):
                    sent.setdefault((rank, operation.peer), []).append(number)
                    lists[rank][1].append(Message(operation.peer, EMPTY, number))
                    number += 1
        for rank in range(world_size):
            for operation in now[rank]:
                if isinstance(operation, Recv | RecvReduce):
                    pair = (operation.peer, rank)
                    lists[rank][0].append(
                        Message(operation.peer, EMPTY, sent[pair][received[pair]])
                    )
                    received[pair] += 1
        for rank, (receives, sends) in enumerate(lists):
            for incoming, outgoing in grouped(rank, world_size, receives, sends):
                whole[rank].append(
                    [
                        *((False, receives[i].peer, receives[i].tag) for i in incoming),
                        *((True, sends[i].peer, sends[i].tag) for i in outgoing),
                    ]
                )
    assert not hang(whole)


# --- the transport itself -------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "_start_coalescing",
        "_end_coalescing",
        "eager_connect_single_device",
        "send",
        "recv",
        "abort",
        "shutdown",
        "rank",
        "size",
    ],
)
def test_the_stand_in_takes_what_torch_takes(name: str):
    """A ``ProcessGroup`` takes other arguments than a backend, which is what there is here."""
    signature = (getattr(Backend, name).__doc__ or "").splitlines()[0]
    theirs = re.findall(r"(\w+): ", signature)
    assert len(theirs) == len(inspect.signature(getattr(FakeGroup, name)).parameters)


def test_empty_messages_are_not_posted_and_keep_no_one_waiting():
    group = FakeGroup(World(2), 0)
    transport = NcclTransport(group, CPU, dist.HashStore())
    for handle in transport.post([Message(1, EMPTY, 0)], [Message(1, EMPTY, 0)]):
        transport.wait(handle, 1.0)
    assert group.calls == []
    handles = transport.post([Message(1, EMPTY, 0)], [Message(1, torch.ones(2), 0)])
    assert group.calls == ["start", "send 1", "end"]
    transport.wait(handles[0], 1.0)


class Memory(bytearray):
    """Memory of which one can tell whether it is still there."""


class Forgetful(FakeGroup):
    """NCCL knows addresses only."""

    def _add(self, is_send: bool, tensors: list[torch.Tensor], peer: int) -> None:
        assert self._open is not None

    def _end_coalescing(self) -> FakeWork:
        work, self._open = FakeWork([]), None
        work.finished.set()
        return work


@pytest.mark.slow
def test_messages_live_until_they_are_waited_for():
    memory = Memory(100)
    alive = weakref.ref(memory)
    transport = NcclTransport(Forgetful(World(2), 0), CPU, dist.HashStore())
    message = Message(1, torch.frombuffer(memory, dtype=torch.uint8), 0)
    (handle,) = transport.post([], [message])
    del memory, message
    gc.collect()
    assert alive() is not None
    transport.wait(handle, 5.0)
    gc.collect()
    assert alive() is None
    transport.wait(handle, 5.0)  # more than once does no harm


def test_calls_and_handles():
    world = World(3)
    group = FakeGroup(world, 0)
    transport = NcclTransport(group, CPU, dist.HashStore())
    tensors = [torch.zeros(1) for _ in range(5)]
    handles = transport.post(
        [Message(1, tensors[0], 4), Message(2, tensors[1], 4), Message(1, tensors[2], 4)],
        [Message(2, tensors[3], 4), Message(1, tensors[4], 4)],
    )
    first, second = group.calls[:6], group.calls[6:]
    assert first == ["start", "recv 1", "recv 2", "send 2", "send 1", "end"]
    assert second == ["start", "recv 1", "end"]
    assert len(handles) == 5
    assert handles[0] is handles[1] is handles[3] is handles[4]
    assert handles[2] is not handles[0]
    assert transport.post([], []) == []


# --- the end, and failures -----------------------------------------------------------------


class Stuck(FakeGroup):
    """Ends only when it is let."""

    def __init__(self, world: World, rank: int) -> None:
        super().__init__(world, rank)
        self.let = threading.Event()

    def abort(self) -> None:
        super().abort()
        self.let.wait()

    def shutdown(self) -> None:
        super().shutdown()
        self.let.wait()


@pytest.mark.parametrize("first, second", [("abort", "close"), ("close", "abort")])
def test_a_group_ends_once(first: str, second: str):
    group = FakeGroup(World(2), 0)
    transport = NcclTransport(group, CPU, dist.HashStore())
    getattr(transport, first)()
    getattr(transport, second)()
    assert group.calls == ["abort" if first == "abort" else "shutdown"]


def test_a_group_that_nobody_ends_is_let_go_of():
    group = FakeGroup(World(2), 0)
    alive = weakref.ref(group)
    transport = NcclTransport(group, CPU, dist.HashStore())
    thread = transport._ending._thread
    assert thread.is_alive()
    del group, transport
    gc.collect()
    assert alive() is None
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.parametrize("way", ["abort", "close"])
def test_nobody_waits_for_ever_for_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, way: str
):
    monkeypatch.setattr(nccl, "_ABORT_S", 0.1)
    monkeypatch.setattr(nccl, "_SHUTDOWN_S", 0.1)
    group = Stuck(World(2), 0)
    transport = NcclTransport(group, CPU, dist.HashStore())

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")  # as 3.12 says

    monkeypatch.setattr(threading.Thread, "start", start)
    getattr(transport, way)()
    assert len(group.calls) == 1
    assert "NCCL has not ended a group" in caplog.text
    transport.close()
    assert len(group.calls) == 1
    group.let.set()


EXITS = """
import torch, torch.distributed as dist
from ringcoll import LocalGroup, all_reduce
from ringcoll.runtime.group.communicator import Communicator
from ringcoll.runtime.transport import nccl
from tests.transport.test_nccl import Stuck
from tests.fakes.fake_nccl import World

nccl._SHUTDOWN_S = 0.2
group, store = Stuck(World(1), 0), dist.HashStore()
member = Communicator(nccl.NcclTransport(group, torch.device("cpu"), store), store, 20.0)
all_reduce(torch.ones(3), group=LocalGroup(member))
print("the end")
"""


@pytest.mark.processes
def test_a_process_ends_although_nccl_does_not():
    done = subprocess.run(
        [sys.executable, "-c", EXITS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "the end\n"), done.stderr
    assert "NCCL has not ended a group" in done.stderr


def test_at_exit_groups_are_closed_in_the_order_in_which_they_were_made(
    monkeypatch: pytest.MonkeyPatch,
):
    """Closing a group of NCCL's may take all its ranks."""
    open_ones = type(communicator._open_communicators)
    monkeypatch.setattr(communicator, "_open_communicators", open_ones())
    closed: list[int] = []

    class Noting(NcclTransport):
        number: int

        def close(self) -> None:
            super().close()
            closed.append(self.number)

    members = []
    for number in range(30):
        store = dist.HashStore()
        transport = Noting(FakeGroup(World(1), 0), CPU, store)
        transport.number = number
        members.append(Communicator(transport, store, 20.0))
    communicator._close_all()
    assert closed == list(range(30))


def test_who_fails_keeps_its_error_whatever_abort_says(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fake_nccl, "LIMIT_S", 0.5)  # for its peer, if it waits

    class Refusing(FakeGroup):
        def abort(self) -> None:
            super().abort()
            raise RuntimeError("ProcessGroup abort timed out")

    def main(group: LocalGroup) -> None:
        ringcoll.all_reduce(torch.ones(4), lambda one, two: 1 // 0, group=group)

    results, _ = run_over_nccl(2, main, Refusing)
    assert any(isinstance(error, ZeroDivisionError) for error in results), results
    assert not any("abort timed out" in str(error) for error in results), results


def test_abort_wakes_who_meets_the_others():
    transport = NcclTransport(FakeGroup(World(2), 0), CPU, dist.HashStore())
    threading.Timer(0.1, transport.abort).start()
    with pytest.raises(PeerLostError, match="rank 0 gave up meeting the others"):
        transport.connect(60.0)


@pytest.mark.parametrize("where", ["send", "_end_coalescing"])
def test_a_failure_within_a_group_closes_it_and_is_the_loss_of_a_peer(where: str):
    """NCCL's group is the thread's: left open, it takes in whatever the thread calls next."""

    class Failing(FakeGroup):
        failing = True

        def _fail(self, at: str) -> None:
            if self.failing and at == where:
                self.failing = False
                raise RuntimeError("NCCL communicator was aborted")

        def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
            self._fail("send")
            super().send(tensors, peer, tag)

        def _end_coalescing(self) -> FakeWork | None:
            self._fail("_end_coalescing")
            return super()._end_coalescing()

    group = Failing(World(2), 0)
    transport = NcclTransport(group, CPU, dist.HashStore())
    messages = [Message(1, torch.zeros(1), 0)], [Message(1, torch.zeros(1), 0)]
    with pytest.raises(PeerLostError, match="was aborted"):
        transport.post(*messages)
    transport.post(*messages)  # the stand-in's groups do not nest
    assert group.calls[-4:] == ["start", "recv 1", "send 1", "end"]


def test_a_failure_is_the_loss_of_a_peer():
    class Broken:
        def wait(self) -> None:
            raise RuntimeError("NCCL communicator was aborted")

    transport = NcclTransport(FakeGroup(World(2), 0), CPU, dist.HashStore())
    with pytest.raises(PeerLostError, match="was aborted"):
        transport.wait(nccl._Batch(Broken(), [torch.ones(1)]), 1.0)


def run_over_nccl(world_size: int, main, make=FakeGroup) -> tuple[list[object], World]:
    """Run a function on ranks whose messages go by the stand-in."""
    world, store = World(world_size), dist.HashStore()
    results: list[object] = [None] * world_size

    def rank_main(rank: int) -> None:
        transport = NcclTransport(make(world, rank), CPU, dist.PrefixStore("meet", store))
        member = Communicator(transport, dist.PrefixStore("monitor", store), 20.0)
        try:
            results[rank] = main(LocalGroup(member))
        except Exception as error:  # noqa: BLE001  # looked at by the test
            results[rank] = error
        finally:
            member.close()

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    return results, world


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_every_algorithm_without_tags(world_size: int):
    """All algorithms, with segments too, one after the other and some asynchronous."""
    batch = []
    for entry in algorithms(world_size=world_size):
        rules = contract(entry.collective)
        for numel in (0, 1, 9):
            for segment_bytes in (None, 16):
                case = Case(
                    entry.collective,
                    entry.name,
                    lengths=(numel,),
                    root=world_size - 1 if rules.rooted else 0,
                    segment_bytes=segment_bytes,
                    async_op=bool(numel),
                )
                batch.append(case)

    def main(group: LocalGroup) -> list[str]:
        calls = []
        for case in batch:
            prepared = prepare(case, group.rank(), world_size)
            calls.append((prepared, prepared.start(ringcoll, group)))
        wrong = []
        for prepared, work in calls:
            if work is not None:
                work.wait()
            wrong += [
                f"{prepared.case}: {item}" for item in verdict(prepared, group.rank(), world_size)
            ]
        return wrong

    results, world = run_over_nccl(world_size, main)
    assert results == [[]] * world_size
    assert max(world.group_sizes, default=0) < 256
    assert not any(world.running)


def test_ranks_that_disagree_are_told_apart_before_anything_is_posted():
    """Where tags are ignored, calls are compared through the store."""

    def main(group: LocalGroup) -> None:
        tensor = torch.ones(4 + (group.rank() == 1))
        ringcoll.all_reduce(tensor, group=group, algorithm="ring")

    results, world = run_over_nccl(2, main)
    for rank, error in enumerate(results):
        assert isinstance(error, MismatchError), error
        assert error.peer == 1 - rank
        assert "4 elements" in str(error)
        assert "5 elements" in str(error)
    assert world.group_sizes == []


def swapped(group: LocalGroup) -> list[float]:
    """Two calls in another order on one of the ranks, when both have run before."""
    first, second = torch.ones(4), torch.ones(4)
    sum_, max_ = dist.ReduceOp.SUM, dist.ReduceOp.MAX
    for _ in range(2):
        ringcoll.all_reduce(torch.ones(4), sum_, group=group, algorithm="ring")
        ringcoll.all_reduce(torch.ones(4), max_, group=group, algorithm="ring")
    for tensor, op in ((first, sum_), (second, max_))[:: 1 - 2 * group.rank()]:
        ringcoll.all_reduce(tensor, op, group=group, algorithm="ring")
    return [first[0].item(), second[0].item()]


def test_each_call_is_compared_on_request(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dist, "get_debug_level", lambda: dist.DebugLevel.DETAIL)
    results, world = run_over_nccl(2, swapped)
    for rank, error in enumerate(results):
        assert isinstance(error, MismatchError), error
        assert error.peer == 1 - rank
        assert ("sum", "max")[rank] in error.mine
        assert ("max", "sum")[rank] in error.theirs
    sent = len(world.group_sizes)

    monkeypatch.undo()
    results, world = run_over_nccl(2, swapped)  # otherwise it goes unseen: the documents say so
    assert not any(isinstance(found, Exception) for found in results), results
    assert len(world.group_sizes) > sent


def test_a_rank_that_compares_hears_of_the_failure_of_another():
    """Long before its time limit."""

    def main(group: LocalGroup) -> None:
        ringcoll.all_reduce(torch.ones(4), group=group)
        if group.rank():
            group.communicator.monitor.report(ValueError("no more"), 3.0)
        else:
            limit = timedelta(seconds=600)
            ringcoll.all_reduce(torch.ones(5), group=group, timeout=limit)

    (error, _), _ = run_over_nccl(2, main)
    assert isinstance(error, PeerLostError), error
    assert "rank 1 failed with ValueError: no more" in str(error)


# --- ranks that share a GPU -----------------------------------------------------------


def connected(gpus: list[str | None]) -> tuple[list[Any], list[list[str]]]:
    """Connect ranks with these GPUs: what comes of it, and what NCCL was asked for."""
    world, store = World(len(gpus)), dist.HashStore()
    ends = [FakeGroup(world, rank) for rank in range(len(gpus))]
    transports = [NcclTransport(end, CPU, store, gpu) for end, gpu in zip(ends, gpus, strict=True)]
    results = together(len(gpus), lambda rank: transports[rank].connect(10.0))
    return results, [end.calls for end in ends]


def test_ranks_that_share_a_gpu_are_named_before_nccl_is_asked():
    results, calls = connected(["one", "two", "one"])
    for rank, error in enumerate(results):
        assert isinstance(error, TransportError), error
        text = str(error)
        assert text.startswith(f"rank {rank}: ranks 0, 2 share one GPU (one)")
        assert 'cuda_transport="ucx" or "gloo"' in text
    assert calls == [[], [], []]


def test_an_operation_of_ranks_that_share_a_gpu_says_so():
    """As what it is, and not as the death of a peer."""
    world, store = World(2), dist.HashStore()

    def main(rank: int) -> None:
        transport = NcclTransport(FakeGroup(world, rank), CPU, store, "one")
        member = Communicator(transport, dist.PrefixStore("monitor", store), 20.0)
        try:
            ringcoll.all_reduce(torch.ones(3), group=LocalGroup(member))
        finally:
            member.close()

    for error in together(2, main):
        assert type(error) is TransportError
        assert "ranks 0, 1 share one GPU (one)" in str(error)
        assert "all_reduce" in str(error)


@pytest.mark.parametrize("gpus", [["one", "two", "three"], [None, None, None], ["one"]])
def test_ranks_that_may_be_where_they_are(gpus: list[str | None]):
    results, calls = connected(gpus)
    assert results == [None] * len(gpus)
    assert calls == [["connect"]] * len(gpus)


@pytest.mark.parametrize("kind", [RuntimeError, ValueError])
def test_what_nccl_says_against_it_is_a_typed_error(kind: type[Exception]):
    class Refusing(FakeGroup):
        def eager_connect_single_device(self, device: torch.device) -> None:
            raise kind("ncclInvalidUsage")

    transport = NcclTransport(Refusing(World(1), 0), CPU, dist.HashStore())
    with pytest.raises(TransportError, match=r"rank 0 could not connect.*ncclInvalidUsage"):
        transport.connect(5.0)


def test_newer_versions_of_nccl_may_be_told_to_allow_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    assert not settings.ranks_may_share_gpus((2, 30, 1))
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert settings.ranks_may_share_gpus((2, 30, 1))
    assert not settings.ranks_may_share_gpus((2, 29, 7))
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "0")
    assert not settings.ranks_may_share_gpus((2, 31, 0))
