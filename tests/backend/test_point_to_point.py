"""The user's sends and receives of CUDA tensors, over a stand-in for NCCL."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import ringcoll
from ringcoll.errors import (
    ArgumentError,
    CollectiveTimeoutError,
    PeerLostError,
    TransportError,
)
from ringcoll.runtime.transport import streams
from ringcoll.runtime.watch import flight_recorder, read_record, report, waits
from ringcoll.training.backend import point_to_point
from ringcoll.training.backend import process_group as backend
from ringcoll.training.backend.point_to_point import PointToPointWork
from tests.fakes import fake_nccl
from tests.fakes.fake_nccl import FakeGroup, World
from tests.fakes.second_device import FIRST, Elsewhere
from tests.fakes.without_memory import WITHOUT, Wrapper, pending
from tests.programs.threads import together

CPU = torch.device("cpu")


def alone() -> backend.ProcessGroup:
    return backend.ProcessGroup(dist.HashStore(), 0, 1, timedelta(seconds=20))


def with_another() -> backend.ProcessGroup:
    """Rank 0 of two."""
    store = dist.HashStore()
    make = lambda rank: backend.ProcessGroup(store, rank, 2, timedelta(seconds=20))  # noqa: E731
    first, second = together(2, make)
    second.shutdown()
    return first  # type: ignore[no-any-return]


class Channel(FakeGroup):
    """Takes single messages, too: each waits for the one before it, as on NCCL's stream."""

    def __init__(self, world: World, rank: int, options: Any) -> None:
        super().__init__(world, rank)
        self.timeout = options._timeout

    def _add(self, is_send: bool, tensors: list[torch.Tensor], peer: int) -> Any:
        if self._open is not None:
            return super()._add(is_send, tensors, peer)
        self._start_coalescing()
        super()._add(is_send, tensors, peer)
        return self._end_coalescing()

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        return self._add(True, tensors, peer)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        return self._add(False, tensors, peer)

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout


@pytest.fixture
def channels(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, Channel]]:
    """The NCCL groups that groups of the backend make for their users' messages, by rank."""
    found: dict[int, Channel] = {}
    worlds: dict[int, World] = {}

    class Nccl:
        class Options:
            _timeout = timedelta(0)

        def __new__(cls, store: dist.Store, rank: int, world_size: int, options: Any) -> Channel:  # type: ignore[misc]
            assert rank not in found
            world = worlds.setdefault(world_size, World(world_size))
            found[rank] = Channel(world, rank, options)
            return found[rank]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(streams, "with_streams", frozenset())  # there is no device to enter
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    known = c10d._world.pg_group_ranks
    before = set(known)
    yield found
    for group in set(known) - before:
        del known[group]


def around_a_ring(rank: int, world_size: int, store: dist.Store, in_a_batch: bool) -> list[float]:
    """What a rank gets from the one before it, if all send first."""
    group = backend.ProcessGroup(store, rank, world_size, timedelta(seconds=20))
    ahead, behind = (rank + 1) % world_size, (rank - 1) % world_size
    sent, got = torch.full((3,), float(rank)), torch.zeros(3)
    device = [one.as_subclass(Elsewhere) for one in (sent, got)]
    c10d._world.pg_group_ranks[group] = {peer: peer for peer in range(world_size)}
    works: list[Any]
    if in_a_batch:
        messages = [
            dist.P2POp(dist.isend, device[0], ahead, group),
            dist.P2POp(dist.irecv, device[1], behind, group),
        ]
        works = dist.batch_isend_irecv(messages)
    else:
        works = [dist.isend(device[0], ahead, group), dist.irecv(device[1], behind, group)]
    for work in works:
        work.wait()
    return got.tolist()


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_batch_is_one_operation_over_nccl(channels: dict[int, Channel], world_size: int):
    store = dist.HashStore()
    results = together(world_size, lambda rank: around_a_ring(rank, world_size, store, True))
    assert results == [[float((rank - 1) % world_size)] * 3 for rank in range(world_size)]
    for rank, channel in channels.items():
        ahead, behind = (rank + 1) % world_size, (rank - 1) % world_size
        assert channel.calls == ["start", f"send {ahead}", f"recv {behind}", "end"]


def test_one_by_one_they_would_hang(channels: dict[int, Channel], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fake_nccl, "LIMIT_S", 0.5)
    store = dist.HashStore()
    for error in together(3, lambda rank: around_a_ring(rank, 3, store, False)):
        assert isinstance(error, AssertionError), error
        assert "NCCL hangs" in str(error)


def test_a_batch_that_fails_leaves_no_group_open(
    channels: dict[int, Channel], monkeypatch: pytest.MonkeyPatch
):
    group, far = alone(), torch.zeros(3).as_subclass(Elsewhere)
    c10d._world.pg_group_ranks[group] = {0: 0}
    messages = [
        dist.P2POp(dist.isend, far, 0, group),
        dist.P2POp(dist.irecv, far.clone(), 0, group),
    ]
    monkeypatch.setattr(Channel, "recv", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        dist.batch_isend_irecv(messages)
    assert channels[0].calls == ["start", "send 0", "end"]


def test_no_message_of_a_batch_is_started_if_one_cannot_be():
    """A receive that had been started would take the next message."""
    store = dist.HashStore()
    odd = (*WITHOUT, "strided", "conjugate")

    def main(rank: int) -> list[float]:
        group = backend.ProcessGroup(store, rank, 2, timedelta(seconds=20))
        for says in odd:
            wrong: Any = torch.zeros(8)[::2]
            if says == "conjugate":
                wrong = torch.zeros(3, dtype=torch.complex64).conj()
            elif says != "strided":
                wrong = WITHOUT[says](torch.zeros(4))
            method, peer = "recv" if says == "conjugate" else "send", 1 - rank
            messages = [("recv", torch.zeros(4), peer, 0), (method, wrong, peer, 0)]
            with pytest.raises(ArgumentError):
                group.batched(lambda: pytest.fail("a message was started"), messages)
        arrived = torch.zeros(4)
        peer = 1 - rank
        works = [group.recv([arrived], peer), group.send([torch.full((4,), rank + 1.0)], peer)]
        for work in works:
            work.wait()
        return arrived.tolist()

    assert together(2, main) == [[2.0] * 4, [1.0] * 4]


WRONG_PEERS = [2, 9, -1, -(2**31), 2**31, 2**70, None, 0.5, "1", 0]
WRONG_TAGS = [-1, 2**31, 2**70, None, 0.5, "1"]


@pytest.mark.parametrize("argument, wrong", [
    *(("peer", peer) for peer in WRONG_PEERS),
    *(("tag", tag) for tag in WRONG_TAGS),
    *(("tensors", tensors) for tensors in (
        [], [torch.ones(2)] * 2, torch.ones(2), [2.0], [[torch.ones(2)]], None, [None],
    )),
])  # fmt: skip
def test_gloo_gets_no_message_that_it_cannot_send(argument: str, wrong: Any) -> None:
    """gloo ends the process on a peer that is not there; the rank is 0 of two."""
    group: Any = with_another()
    right: dict[str, Any] = {"tensors": [torch.ones(2)], "peer": 1, "tag": 0}
    tensors, peer, tag = (right | {argument: wrong}).values()
    calls: dict[str, Callable[[], Any]] = {
        "dst": lambda: group.send(tensors, peer, tag),
        "src": lambda: group.recv(tensors, peer, tag),
    }
    if argument != "peer":
        calls["any"] = lambda: group.recv_anysource(tensors, tag)
    if argument != "tensors":
        batch = [("recv", torch.ones(2), 1, 0), ("send", torch.ones(2), peer, tag)]
        calls["dst of a batch"] = lambda: group.batched(
            lambda: pytest.fail("a message was started"), batch
        )
    for name, call in calls.items():
        with pytest.raises(ArgumentError) as caught:
            call()
        told = {"peer": name[:3]}.get(argument, argument)
        assert str(caught.value).startswith(f"rank 0: argument '{told}': ")
        assert caught.value.expected is not None
        if argument != "tensors":
            assert caught.value.got == wrong


@pytest.fixture
def world() -> Iterator[None]:
    dist.init_process_group("ringcoll", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_no_function_of_torch_reaches_a_peer_that_is_not_there(world: None) -> None:
    tensor, group = torch.ones(2), cast("Any", dist.group.WORLD)
    calls: list[Callable[[], Any]] = [
        lambda: dist.send(tensor, 9),
        lambda: dist.isend(tensor, 9),
        lambda: dist.isend(tensor, 0),
        lambda: dist.recv(tensor, -1),
        lambda: dist.irecv(tensor, 0),
        lambda: dist.irecv(tensor, group_src=9),
        lambda: dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, 9)]),
        lambda: dist.batch_isend_irecv([dist.P2POp(dist.irecv, tensor, 0)]),
        lambda: dist.send_object_list([1], 9),
        lambda: dist.recv_object_list([1], 9),
        lambda: group.send([tensor], dst=9, tag=1),
        lambda: torch.ops._c10d_functional.isend(tensor, 9, 0, "0"),
        lambda: torch.ops._c10d_functional.batch_p2p_ops(["irecv"], [9], [0], [tensor], "0"),
    ]
    for call in calls:
        with pytest.raises(ArgumentError, match=r"argument '(src|dst)'.* in 0 to 0, got"):
            call()


def test_a_batch_sends_the_values_of_a_conjugate_view(monkeypatch: pytest.MonkeyPatch):
    """torch refuses the view, when the receive before it has been started."""
    store = dist.HashStore()
    make = lambda rank: backend.ProcessGroup(store, rank, 2, timedelta(seconds=20))  # noqa: E731
    groups = together(2, make)
    for group in groups:
        monkeypatch.setitem(c10d._world.pg_group_ranks, group, {0: 0, 1: 1})

    def main(rank: int) -> Any:
        arrived = torch.zeros(2, dtype=torch.complex64)
        sent = torch.tensor([1 + 2j, 3 - 1j * rank]).conj()
        both = [(dist.irecv, arrived), (dist.isend, sent)]
        group, peer = groups[rank], 1 - rank
        messages = [dist.P2POp(op, each, group=group, group_peer=peer) for op, each in both]
        for work in dist.batch_isend_irecv(messages):
            work.wait()
        return arrived.tolist()

    assert together(2, main) == [[1 - 2j, 3 + 1j], [1 - 2j, 3 + 0j]]


@pytest.mark.parametrize("numel", [0, 3])
def test_a_batch_without_a_work(
    channels: dict[int, Channel], monkeypatch: pytest.MonkeyPatch, numel: int
):
    """NCCL starts nothing for empty messages; that it says nothing of others is an error."""
    group, far = alone(), torch.zeros(numel).as_subclass(Elsewhere)
    c10d._world.pg_group_ranks[group] = {0: 0}
    end = Channel._end_coalescing

    def say_nothing(channel: Channel) -> None:
        end(channel)

    monkeypatch.setattr(Channel, "_end_coalescing", say_nothing)
    messages = [dist.P2POp(call, far, 0, group) for call in (dist.isend, dist.irecv)]
    if numel:
        with pytest.raises(
            TransportError, match="a batch of 2 sends and receives, and got no work"
        ):
            dist.batch_isend_irecv(messages)
        return
    (work,) = dist.batch_isend_irecv(messages)
    assert work.is_completed()
    assert work.wait()
    assert work.is_success()


def test_nccl_is_made_when_the_first_message_comes(channels: dict[int, Channel]):
    """And not by what torch does for a ``device_id``."""
    group, far = alone(), torch.zeros(3).as_subclass(Elsewhere)
    group._get_backend(FIRST).eager_connect_single_device(FIRST)
    group.set_timeout(timedelta(seconds=30))
    assert not channels
    group.send([far], 0)
    group.recv([far], 0)
    assert channels[0].timeout == timedelta(seconds=30)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=40), group)
    group.send([far], 0)
    assert channels[0].timeout == timedelta(seconds=40)


@pytest.mark.parametrize("end", ["shutdown", "abort"])
def test_nccl_ends_with_its_group(channels: dict[int, Channel], end: str):
    group = alone()
    getattr(group, end)()  # nothing has been made yet
    group.send([torch.zeros(3).as_subclass(Elsewhere)], 0)
    getattr(group, end)()
    assert channels[0].calls[-1] == end


class Asked:
    """A work of torch's."""

    waits = 0

    def wait(self, timeout: timedelta) -> bool:
        self.waits += 1
        return True

    def is_completed(self) -> bool:
        return False


@pytest.mark.parametrize("device, waits, completed", [(CPU, 1, True), (FIRST, 2, False)])
def test_waits_order_each_stream(device: torch.device, waits: int, completed: bool):
    """A work of NCCL's is asked each time; one of gloo's hangs if it is asked twice."""
    asked: Any = Asked()
    tensor = torch.zeros(1) if device == CPU else torch.zeros(1).as_subclass(Elsewhere)
    message = PointToPointWork(alone()._messages, [asked], "recv", tensor, 1)
    assert not message.is_completed()
    assert message.wait()
    assert message.wait()
    assert asked.waits == waits
    assert (message.is_completed(), message.is_success()) == (completed, completed)


def test_a_message_that_does_not_come_is_late_and_nobody_is_lost():
    group = backend.ProcessGroup(dist.HashStore(), 0, 1, timedelta(seconds=0.3))
    with pytest.raises(CollectiveTimeoutError) as caught:
        group.recv_anysource([torch.empty(3)], 7).wait()
    text = "rank 0 timed out waiting for a rank, while it received from any with tag 7: "
    assert str(caught.value).startswith(text)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


# What both ranks of two wait in, and what they say.
MUTE = {
    "recv": (lambda group, peer: group.recv([torch.empty(3)], peer, 7), "received from it"),
    "send": (lambda group, peer: group.send([torch.empty(3)], peer, 7), "sent to it"),
    "recv_anysource": (lambda group, peer: group.recv_anysource([torch.empty(3)], 7), "any"),
}


@pytest.mark.slow
@pytest.mark.parametrize("hears", [False, True])
@pytest.mark.parametrize("method", MUTE)
def test_ranks_that_wait_for_each_others_messages_say_so_and_are_shown(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, method: str, hears: bool
):
    """Whether the program hears signals or not: the wait is in another thread if it does."""
    monkeypatch.setenv("RINGCOLL_HANG_NOTICE", "0.3")
    monkeypatch.setattr(point_to_point, "hears_signals", lambda: hears)
    call, doing = MUTE[method]
    store, both_wait = dist.HashStore(), threading.Barrier(3, timeout=30)
    make = lambda rank: backend.ProcessGroup(store, rank, 2, timedelta(seconds=40))  # noqa: E731
    groups = together(2, make)

    def main(rank: int) -> bool:
        work = call(groups[rank], 1 - rank)
        both_wait.wait()
        return work.wait()  # type: ignore[no-any-return]

    def notices() -> list[str]:
        said = [item.getMessage() for item in caplog.records]
        return sorted(text for text in said if "has waited" in text)

    results: list[Any] = []
    ranks = threading.Thread(target=lambda: results.extend(together(2, main)))
    ranks.start()
    both_wait.wait()
    deadline = time.monotonic() + 20
    while len(notices()) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    told = report([read_record(json.dumps(flight_recorder.record()))])
    time.sleep(0.5)  # nothing is said twice
    said = notices()
    answers = [
        (group.recv if method == "send" else group.send)([torch.empty(3)], 1 - rank, 7)
        for rank, group in enumerate(groups)
    ]
    assert all(answer.wait() for answer in answers)
    ranks.join(30)
    assert results == [True, True]
    for group in groups:
        group.shutdown()
    assert len(said) == 2
    for rank, text in enumerate(said):
        whom = "a rank" if method == "recv_anysource" else f"rank {1 - rank}"
        assert text.startswith(f"rank {rank} has waited 0.3 s for {whom}, while it "), text
        place = (
            rf"{doing} with tag 7 \(.*test_point_to_point\.py:\d+\); `ringcoll dump {os.getpid()}`"
        )
        assert re.search(place, text), text
    assert told[0] == "group 1, 2 ranks over sends and receives: 2 in an operation"
    for rank, line in enumerate(told[1:3]):
        waits = {
            "recv": f"waits for data of rank {1 - rank}",
            "send": f"waits until rank {1 - rank} takes data",
            "recv_anysource": "waits for data of any rank",
        }[method]
        start = f"  rank {rank} (pid {os.getpid()}) is in {method} #1, {waits}; at "
        assert line.startswith(start), line


def test_a_wait_that_is_over_is_said_by_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv("RINGCOLL_HANG_NOTICE", "0.3")

    def main(group: backend.ProcessGroup) -> None:
        tensor, peer = torch.zeros(2), 1 - group.rank()
        for _ in range(3):
            works = [group.recv([torch.zeros(2)], peer), group.send([tensor], peer)]
            for work in works:
                work.wait()
            time.sleep(0.2)
        assert not [each for each in waits.copy() if each.group == id(group._messages)]

    assert on_threads(main) == [None, None]
    assert not [item for item in caplog.records if "waited" in item.getMessage()]


@pytest.mark.slow
@pytest.mark.parametrize("by", ["set_timeout", "_set_pg_timeout"])
@pytest.mark.parametrize("method", MUTE)
@pytest.mark.parametrize("before", [True, False])
def test_a_limit_that_is_set_later_holds_for_messages(
    monkeypatch: pytest.MonkeyPatch, by: str, method: str, before: bool
):
    """Also for a message that was started before, as long as nobody waits for it yet."""

    def main(group: backend.ProcessGroup) -> float:
        monkeypatch.setitem(c10d._world.pg_group_ranks, cast("Any", group), {0: 0, 1: 1})
        work = MUTE[method][0](group, 1 - group.rank()) if before else None
        if by == "set_timeout":
            group.set_timeout(timedelta(seconds=0.4))
        else:
            c10d._set_pg_timeout(timedelta(seconds=0.4), group)
        work = work or MUTE[method][0](group, 1 - group.rank())
        start = time.monotonic()
        with pytest.raises((CollectiveTimeoutError, PeerLostError)):
            work.wait()
        return time.monotonic() - start

    for waited_s in on_threads(main):
        assert waited_s < 10, waited_s  # and not the 20 s of before


@pytest.mark.parametrize("limit", [timedelta(seconds=30), timedelta.max])
def test_a_limit_may_become_longer_and_as_long_as_one_likes(limit: timedelta):
    def main(rank: int) -> list[float]:
        group = backend.ProcessGroup(store, rank, 2, timedelta(seconds=0.3))
        arrived = torch.zeros(2)
        group.set_timeout(limit)
        if rank == 0:
            group.recv([arrived], 1).wait()
        else:
            time.sleep(0.8)
            group.send([torch.tensor([3.0, 4.0])], 0).wait(timedelta.max)
        return arrived.tolist()

    store = dist.HashStore()
    assert together(2, main) == [[3.0, 4.0], [0.0, 0.0]]


def on_threads(main: Callable[[backend.ProcessGroup], Any]) -> list[Any]:
    store = dist.HashStore()
    make = lambda rank: backend.ProcessGroup(store, rank, 2, timedelta(seconds=20))  # noqa: E731
    return together(2, lambda rank: main(make(rank)))


class TestMemory:
    """Messages are read from, and written to, memory that a tensor has."""

    @pytest.mark.parametrize("says", WITHOUT)
    def test_without_memory_nothing_is_started(self, says: str) -> None:
        group = with_another()
        for start in (group.send, group.recv):
            with pytest.raises(ArgumentError, match=says):
                start([WITHOUT[says](torch.arange(4.0))], 1)
        with pytest.raises(ArgumentError, match=says):
            group.recv_anysource([WITHOUT[says](torch.arange(4.0))])

    def test_what_stands_behind_a_tensor_is_sent(self) -> None:
        conjugate = torch.tensor([1 + 2j, 3 - 4j]).conj()
        odd: dict[str, torch.Tensor] = {
            "pending": pending(torch.arange(5.0)),
            "wrapper": Wrapper(torch.arange(5.0) + 1),
            "conjugate": conjugate,
            "negative": torch._neg_view(torch.arange(5.0)),
        }

        def main(group: backend.ProcessGroup) -> dict[str, list[complex]]:
            arrived = {}
            for tag, (name, tensor) in enumerate(odd.items()):
                if group.rank() == 0:
                    group.send([tensor], 1, tag).wait()
                else:
                    into = torch.zeros(tensor.shape, dtype=tensor.dtype)
                    wraps = name == "wrapper"
                    group.recv([Wrapper(into) if wraps else into], 0, tag).wait()
                    assert into._version == 0
                    arrived[name] = into.tolist()
            return arrived

        ramp = [0.0, 1.0, 2.0, 3.0, 4.0]
        assert on_threads(main)[1] == {
            "pending": ramp,
            "wrapper": [one + 1 for one in ramp],
            "conjugate": [1 - 2j, 3 + 4j],
            "negative": [-one for one in ramp],
        }

    def test_no_message_arrives_in_a_conjugate_view(self) -> None:
        for odd in (torch.zeros(3, dtype=torch.complex64).conj(), torch._neg_view(torch.ones(3))):
            with pytest.raises(ArgumentError, match="conjugate or negative"):
                with_another().recv([odd], 1)

    def test_memory_does_not_move_under_a_message(self) -> None:
        def main(group: backend.ProcessGroup) -> Any:
            tensor = torch.full((20_000,), group.rank() + 1.0)
            start = group.recv if group.rank() else group.send
            work = start([tensor], 1 - group.rank())
            with pytest.raises(ArgumentError, match="a receive is under way"):
                ringcoll.share(tensor)
            work.wait()
            ringcoll.share(tensor)
            return tensor.unique().tolist()

        assert on_threads(main) == [[1.0], [1.0]]
