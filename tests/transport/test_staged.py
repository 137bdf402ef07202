"""CUDA tensors over transports that the host moves, with a stand-in for the GPU.

What needs a GPU is whether torch and UCX do as their sources say; the order in which this
library asks for copies, waits and messages does not.
"""

from __future__ import annotations

import inspect
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import ringcoll
from ringcoll import LocalGroup
from ringcoll.algorithms import algorithms
from ringcoll.errors import CollectiveTimeoutError
from ringcoll.runtime.communicator import Communicator
from ringcoll.schedule.contracts import contract
from ringcoll.transport import local, staged, ucx
from ringcoll.transport.base import Handle, Message, Transport, devices_of, settle
from ringcoll.transport.local import Hub, LocalTransport
from ringcoll.transport.nccl import NcclTransport
from ringcoll.transport.staged import Copies, StagedTransport
from tests.cases.calls import Case, prepare, verdict
from tests.cases.data import FLOATS, INTEGERS, values
from tests.cases.effort import effort
from tests.cases.reference import bits
from tests.fakes import fake_cuda as fake
from tests.fakes.fake_cuda import DEVICE, WHEN, FakeEvent, Looking, fake_cuda, off_device, on_device
from tests.programs.transports import CONFORMANCE

Make = Callable[[Transport], Transport]
LIMIT_S = 10.0


def all_ranks(ends: Sequence[Transport], function: Callable[[Transport], Any]) -> list[Any]:
    """Run a function on all ranks, in threads."""
    found: list[Any] = ["not done"] * len(ends)

    def main(rank: int) -> None:
        try:
            ends[rank].connect(LIMIT_S)
            found[rank] = function(ends[rank])
        except BaseException as error:  # noqa: BLE001  # told below
            found[rank] = repr(error)
            ends[rank].abort()

    threads = [threading.Thread(target=main, args=(rank,)) for rank in range(len(ends))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


# --- the order that streams give --------------------------------------------------------


def keeps_order(transport: Transport) -> str:
    """Messages among work on a stream of this rank's own; says what is wrong, or nothing."""
    rank, size = transport.rank, transport.world_size
    ahead, behind = (rank + 1) % size, (rank - 1) % size
    shapes = [(torch.float32, 5), (torch.bfloat16, 9), (torch.int64, 0), (torch.uint8, 31)]
    wrong = []
    with torch.cuda.stream(torch.cuda.Stream()):
        for turn in range(3):  # memory is used again, as training does
            sent, arrived, seen = (
                [on_device(torch.zeros(n).to(dtype)) for dtype, n in shapes] for _ in range(3)
            )
            for index, (dtype, n) in enumerate(shapes):
                sent[index].copy_(values(dtype, n, rank=rank, block=turn), non_blocking=True)
                arrived[index].copy_(torch.ones(n).to(dtype), non_blocking=True)
            handles = transport.post(
                [Message(behind, one, 3) for one in arrived],
                [Message(ahead, one, 3) for one in sent],
            )
            for handle in handles:
                transport.wait(handle, LIMIT_S)
            for index, (dtype, n) in enumerate(shapes):
                seen[index].copy_(arrived[index])
                arrived[index].copy_(torch.ones(n).to(dtype), non_blocking=True)
                sent[index].copy_(torch.ones(n).to(dtype), non_blocking=True)
            torch.cuda.current_stream().synchronize()
            for index, (dtype, n) in enumerate(shapes):
                want = bits(values(dtype, n, rank=behind, block=turn))
                got = bits(off_device(seen[index]))
                wrong += [] if got == want else [f"turn {turn}, message {index}"]
    return ", ".join(wrong)


def broken(make: Make, when: Callable[[], bool], world_size: int = 2) -> list[str]:
    """What is wrong on each rank, where copies run early or late."""
    with fake_cuda(when):
        return all_ranks([make(end) for end in Hub(world_size).transports()], keeps_order)


def cut(below: Transport) -> Transport:
    return StagedTransport(below, DEVICE, segment_bytes=7)


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("make", [cut, lambda below: below], ids=["staged", "local"])
def test_streams_order_messages(make: Make, world_size: int, when: str):
    assert broken(make, WHEN[when], world_size) == [""] * world_size


class DoesNotWaitForTheStream(Copies):
    def download(self, pieces: Sequence[Tensor]) -> Any:
        with mock.patch.object(self._stream, "wait_stream"):
            return super().download(pieces)


class ForgetsTheEvents(Copies):
    def download(self, pieces: Sequence[Tensor]) -> Any:
        return [(host, FakeEvent()) for host, _ in super().download(pieces)]


class UploadsOnItsOwnStream(Copies):
    def upload(self, host: Tensor, into: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            super().upload(host, into)


class OneBufferForAll(Copies):
    """Whichever piece arrives last is uploaded everywhere."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._buffer = torch.zeros(64, dtype=torch.uint8)

    def upload(self, host: Tensor, into: Tensor) -> None:
        buffer = self._buffer[: host.numel()]
        buffer.copy_(host)
        super().upload(buffer, into)


class OneBufferForSends(Copies):
    """Its memory is used again while it is being sent."""

    def download(self, pieces: Sequence[Tensor]) -> Any:
        found = super().download(pieces)
        buffer = torch.zeros(64, dtype=torch.uint8)
        for host, ready in found:
            ready.synchronize()
            buffer[: host.numel()].copy_(host)
        return [(buffer[: host.numel()], ready) for host, ready in found]


class UploadsTooSoon(StagedTransport):
    def wait(self, handle: Handle, timeout_s: float) -> None:
        assert isinstance(handle, staged._Flight)
        for piece in handle.pieces:
            if piece.into is not piece.host:
                self._copies.upload(piece.host, piece.into)
        while handle.pieces:
            self.below.wait(handle.pieces.popleft().handle, timeout_s)


class PostsSendsBackwards(StagedTransport):
    def _pieces(self, tensor: Tensor) -> Any:
        pieces = super()._pieces(tensor)
        return pieces[::-1] if self.rank else pieces


@pytest.mark.parametrize(
    "wrong",
    [
        DoesNotWaitForTheStream,
        ForgetsTheEvents,
        UploadsOnItsOwnStream,
        OneBufferForAll,
        OneBufferForSends,
        UploadsTooSoon,
        PostsSendsBackwards,
    ],
)
def test_what_staging_could_get_wrong_is_seen(wrong: Any):
    def make(below: Transport) -> Transport:
        kind = wrong if issubclass(wrong, StagedTransport) else StagedTransport
        transport: StagedTransport = kind(below, DEVICE, segment_bytes=7)
        if issubclass(wrong, Copies):
            transport._copies = wrong(DEVICE)
        return transport

    assert any(any(broken(make, WHEN[when])) for when in ("late", "early"))


@pytest.mark.parametrize("forgets", ["nothing", "post", "transfer"])
def test_threads_that_do_not_wait_for_their_streams_are_seen(
    forgets: str, monkeypatch: pytest.MonkeyPatch
):
    """The one that sends comes last, so the copy is made on its stream, not the receiver's."""

    def sometimes(devices: Any) -> None:
        if inspect.stack()[1].function != forgets:
            settle(devices)

    monkeypatch.setattr(local, "settle", sometimes)
    with fake_cuda():
        receiver, sender = Hub(2).transports()
        first, second = torch.cuda.Stream(), torch.cuda.Stream()
        sent, arrived, seen = (on_device(torch.zeros(3)) for _ in range(3))
        with torch.cuda.stream(first):
            arrived.copy_(torch.ones(3), non_blocking=True)
            (handle,) = receiver.post([Message(1, arrived, 0)], [])
        with torch.cuda.stream(second):
            sent.copy_(torch.full((3,), 7.0), non_blocking=True)
            sender.post([], [Message(0, sent, 0)])
        with torch.cuda.stream(first):
            receiver.wait(handle, LIMIT_S)
            seen.copy_(arrived)
            first.synchronize()
    assert (off_device(seen).tolist() == [7.0] * 3) == (forgets == "nothing")


# --- pieces -------------------------------------------------------------------------------


class Noting(LocalTransport):
    """Notes what is posted, as (is a send, bytes)."""

    def __init__(self, hub: Hub, rank: int) -> None:
        super().__init__(hub, rank)
        self.posted: list[tuple[bool, int]] = []

    def bind(
        self, receives: Sequence[Message], sends: Sequence[Message]
    ) -> Callable[[int], list[Handle]]:
        self.posted += [(False, one.tensor.nbytes) for one in receives]
        self.posted += [(True, one.tensor.nbytes) for one in sends]
        return super().bind(receives, sends)


@pytest.mark.parametrize(
    "nbytes, pieces", [(0, [0]), (1, [1]), (7, [7]), (8, [7, 1]), (20, [7, 7, 6])]
)
def test_messages_are_cut_by_bytes_and_receives_come_first(nbytes: int, pieces: list[int]):
    with fake_cuda():
        below = Noting(Hub(2), 0)
        transport = StagedTransport(below, DEVICE, segment_bytes=7)
        tensor = on_device(torch.zeros(nbytes, dtype=torch.int8))
        transport.post([Message(1, tensor, 0)] * 2, [Message(1, tensor, 0)] * 2)
    assert below.posted == [(False, n) for n in pieces * 2] + [(True, n) for n in pieces * 2]


def test_cpu_tensors_go_straight_below():
    with fake_cuda():
        below = Noting(Hub(2), 0)
        transport = StagedTransport(below, DEVICE, segment_bytes=7)
        host = torch.zeros(20, dtype=torch.int8)
        (handle,) = transport.post([Message(1, host, 0)], [])
        assert isinstance(handle, local.Half)
        assert handle.message.tensor is host
        handles = transport.post([Message(1, host, 0)], [Message(1, on_device(host), 0)])
        assert below.posted == [(False, 20)] * 2 + [(True, 7), (True, 7), (True, 6)]
        with pytest.raises(CollectiveTimeoutError):
            transport.wait(handles[0], 0.01)


def test_cpu_and_device_tensors_keep_their_order_in_one_tag():
    def main(transport: Transport) -> list[list[int]]:
        peer = 1 - transport.rank
        own = [torch.full((20,), 10 * transport.rank + n, dtype=torch.int8) for n in range(4)]
        arrived = [torch.zeros(20, dtype=torch.int8) for _ in range(4)]

        def messages(tensors: list[Tensor]) -> list[Message]:
            device = [on_device(one) if n % 2 else one for n, one in enumerate(tensors)]
            return [Message(peer, one, 0) for one in device]

        for handle in transport.post(messages(arrived), messages(own)):
            transport.wait(handle, LIMIT_S)
        torch.cuda.current_stream().synchronize()
        return [sorted(set(one.tolist())) for one in arrived]

    with fake_cuda():
        found = all_ranks([cut(end) for end in Hub(2).transports()], main)
    assert found == [[[10], [11], [12], [13]], [[0], [1], [2], [3]]]


def test_pinned_memory_is_taken_when_posted_and_goes_with_each_piece():
    taken: list[weakref.ref[Tensor]] = []

    def pinned(nbytes: int) -> Tensor:
        host = fake.pinned(nbytes)
        taken.append(weakref.ref(host))
        return host

    def living() -> int:
        return sum(one() is not None for one in taken)

    with fake_cuda(WHEN["early"]), mock.patch.object(staged, "_pinned", pinned):
        ends = [cut(end) for end in Hub(2).transports()]
        device = [on_device(torch.zeros(20, dtype=torch.int8)) for _ in range(4)]
        receive = ends[0].bind([Message(1, one, 0) for one in device[:2]], [])
        send = ends[1].bind([], [Message(0, one, 0) for one in device[2:]])
        assert living() == 0
        arriving, leaving = receive(0), send(0)
        assert living() == 12
        for handle in leaving:
            ends[1].wait(handle, LIMIT_S)
        ends[0].wait(arriving[0], LIMIT_S)
        del handle, leaving, arriving[0]
        assert living() == 3
        ends[0].wait(arriving[0], LIMIT_S)
        assert living() == 0


def test_pinned_memory_is_the_cpus_and_nobodys_inference_tensor(monkeypatch: pytest.MonkeyPatch):
    """Whatever mode and default device the thread has that takes it."""
    empty, asked = torch.empty, []

    def without_cuda(*shape: int, pin_memory: bool, device: str, dtype: torch.dtype) -> Tensor:
        asked.append((pin_memory, device))
        return empty(*shape, device=device, dtype=dtype)

    monkeypatch.setattr(torch, "empty", without_cuda)
    with torch.inference_mode():
        host = staged._pinned(3)
    assert asked == [(True, "cpu")]
    assert host.nbytes == 3
    assert not host.is_inference()


class Forgetful(LocalTransport):
    """Keeps nothing of its messages, none of which comes."""

    def bind(
        self, receives: Sequence[Message], sends: Sequence[Message]
    ) -> Callable[[int], list[Handle]]:
        return lambda mixed: [None] * len([*receives, *sends])

    def wait(self, handle: Handle, timeout_s: float) -> None:
        raise CollectiveTimeoutError("no message")


def test_memory_of_what_failed_is_kept_until_the_transport_is_closed():
    with fake_cuda():
        transport = cut(Forgetful(Hub(2), 0))
        tensor = on_device(torch.zeros(20, dtype=torch.int8))
        (handle,) = transport.post([Message(1, tensor, 0)], [])
        with pytest.raises(CollectiveTimeoutError):
            transport.wait(handle, 0.01)
        assert isinstance(handle, staged._Flight)
        alive = weakref.ref(handle.pieces[0].host)
        del handle
        assert alive() is not None
        transport.close()
        assert alive() is None


def test_pieces_share_one_deadline(monkeypatch: pytest.MonkeyPatch):
    """A clock that goes on by 3 s for each piece."""
    limits = []

    class Slow(LocalTransport):
        def wait(self, handle: Handle, timeout_s: float) -> None:
            limits.append(timeout_s)
            now[0] += 3.0

    now = [100.0]
    with fake_cuda():
        transport = cut(Slow(Hub(2), 0))
        (handle,) = transport.post([Message(1, on_device(torch.zeros(7)), 0)], [])
        monkeypatch.setattr(time, "monotonic", lambda: now[0])
        transport.wait(handle, 8.0)
    assert limits == [8.0, 5.0, 2.0, 0.001]


# --- collectives --------------------------------------------------------------------------


EVERY = tuple(entry for entry in algorithms() if entry.collective != "barrier")


@st.composite
def cases(draw: st.DrawFn) -> tuple[Case, int]:
    entry = draw(st.sampled_from(EVERY))
    world_size = draw(st.sampled_from([k for k in (1, 2, 3, 5) if not entry.restriction(k)]))
    dtype = draw(st.sampled_from([*INTEGERS[:4], *FLOATS, torch.bool, torch.complex64]))
    return (
        Case(
            entry.collective,
            entry.name,
            dtype=dtype,
            lengths=(draw(st.integers(0, 40)),),
            root=draw(st.integers(0, world_size - 1)) if contract(entry.collective).rooted else 0,
            segment_bytes=draw(st.sampled_from([None, 16])),
            async_op=draw(st.booleans()),
            seed=draw(st.integers(0, 99)),
        ),
        world_size,
    )


@effort(80)
@given(cases(), st.sampled_from([1, 3, 7, 64]), st.sampled_from(sorted(WHEN)))
def test_collectives_over_pieces(drawn: tuple[Case, int], segment_bytes: int, when: str):
    case, world_size = drawn
    store = dist.HashStore()

    def main(transport: Transport) -> list[str]:
        member = Communicator(transport, dist.PrefixStore("monitor", store), LIMIT_S)
        group = LocalGroup(member)
        prepared = prepare(case, transport.rank, world_size)
        try:
            work = prepared.start(ringcoll, group)
            if work is not None:
                work.wait()
            return verdict(prepared, transport.rank, world_size)
        finally:
            member.close()

    with fake_cuda(WHEN[when]):
        ends = [
            Looking(StagedTransport(end, DEVICE, segment_bytes=segment_bytes))
            for end in Hub(world_size).transports()
        ]
        assert all_ranks(ends, main) == [[]] * world_size


@pytest.mark.parametrize("name", CONFORMANCE)
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("how", ["staged", "local"])
def test_conformance(how: str, name: str, world_size: int):
    with fake_cuda():
        ends = [
            Looking(StagedTransport(end, DEVICE, segment_bytes=10_007) if how == "staged" else end)
            for end in Hub(world_size).transports()
        ]
        assert all_ranks(ends, CONFORMANCE[name]) == [""] * world_size


# --- what transports say of themselves ------------------------------------------------------


def test_only_nccl_does_not_wait_on_the_host():
    assert not NcclTransport.waits_on_host
    assert all(one.waits_on_host for one in (StagedTransport, LocalTransport, ucx.UcxTransport))


def test_devices_are_those_of_cuda_tensors_once_each():
    device, host = on_device(torch.zeros(1)), torch.zeros(1)
    assert devices_of([Message(0, one, 0) for one in (host, device, host, device)]) == (DEVICE,)
    assert devices_of([Message(0, host, 0)]) == ()


def test_the_stand_in_runs_copies_as_late_as_it_may():
    random = Random(1)
    with fake_cuda():
        first, second = torch.cuda.Stream(), torch.cuda.Stream()
        source, middle, end = (torch.zeros(1) for _ in range(3))
        source.fill_(random.random())
        with torch.cuda.stream(first):
            on_device(middle).copy_(source, non_blocking=True)
        with torch.cuda.stream(second):
            on_device(end).copy_(on_device(middle))
        assert middle.item() == end.item() == 0
        second.synchronize()
        assert middle.item() == end.item() == 0, "nothing made it wait for the first"
        second.wait_stream(first)
        with torch.cuda.stream(second):
            on_device(end).copy_(on_device(middle))
            event = second.record_event()
        event.synchronize()
        assert middle.item() == end.item() == source.item()
