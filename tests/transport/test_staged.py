"""CUDA tensors over transports that the host moves, with a stand-in for the GPU.

What needs a GPU is whether torch and UCX do as their sources say; the order in which this
library asks for copies, waits and messages does not.
"""

from __future__ import annotations

import inspect
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import ringcoll
from ringcoll import LocalGroup
from ringcoll.errors import CollectiveTimeoutError, PeerLostError
from ringcoll.runtime.group import Communicator
from ringcoll.runtime.transport import (
    Handle,
    Hub,
    LocalTransport,
    Message,
    NcclTransport,
    Transport,
    local,
    settle,
    staged,
    ucx,
)
from ringcoll.runtime.transport.base import devices_of
from ringcoll.runtime.transport.staged import PINNED_BYTES, SEGMENT_BYTES, Copies, StagedTransport
from ringcoll.schedules import contract
from ringcoll.schedules.algorithms import algorithms
from ringcoll.tools.testing import FLOATS, INTEGERS, bits, values
from tests.cases.algorithms import worlds_of
from tests.cases.calls import Case, prepare, verdict
from tests.cases.effort import effort
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
    def download(self, piece: Tensor, host: Tensor, after: Any) -> Any:
        with mock.patch.object(self._stream, "wait_event"):
            return super().download(piece, host, after)


class WaitsForTheStreamOfItsOwnThread(Copies):
    def download(self, piece: Tensor, host: Tensor, after: Any) -> Any:
        return super().download(piece, host, self.mark())


class ForgetsTheEvents(Copies):
    def download(self, piece: Tensor, host: Tensor, after: Any) -> Any:
        super().download(piece, host, after)
        return FakeEvent()


class UploadsOnItsOwnStream(Copies):
    def upload(self, host: Tensor, into: Tensor) -> Any:
        with torch.cuda.stream(self._stream):
            return super().upload(host, into)


class UsesPinnedMemoryAgainTooSoon(Copies):
    """Whichever piece arrives later is uploaded in the place of one before."""

    def upload(self, host: Tensor, into: Tensor) -> Any:
        super().upload(host, into)
        return FakeEvent()


class SendsPinnedMemory(StagedTransport):
    """It is used again while it is being sent."""

    def _out_of(self, pinned: Tensor, nbytes: int) -> Tensor:
        return pinned[:nbytes]


class UploadsTooSoon(StagedTransport):
    def wait(self, handle: Handle, timeout_s: float) -> None:
        assert isinstance(handle, staged._Flight)
        for piece in handle.pieces:
            if piece.into is not piece.host:
                self._upload(piece.host, piece.into)
        handle.pieces = deque(piece._replace(into=piece.host) for piece in handle.pieces)
        super().wait(handle, timeout_s)


class PostsSendsBackwards(StagedTransport):
    def _pieces(self, tensor: Tensor) -> Any:
        pieces = super()._pieces(tensor)
        return pieces[::-1] if self.rank else pieces


class LetsShortPostsOvertake(StagedTransport):
    """A short post is sent while a thread still sees to a long one."""

    def _send(self, pieces: Any) -> None:
        if len(pieces) > self._downs.length:
            super()._send(pieces)
            return
        for flight, piece in pieces:
            self._pass_on(self._download(flight, piece))


def sent_before_received(transport: Transport) -> str:
    """More pieces than the window has are sent before the peer takes any; a short one follows."""
    rank, wrong = transport.rank, []
    for turn in range(3):
        wanted = [values(torch.uint8, n, rank=0, block=turn) for n in (40 * 7 + 3, 5)]
        tensors = [on_device(torch.zeros_like(one)) for one in wanted]
        token = Message(1 - rank, torch.zeros(1), 1)
        if rank == 0:
            handles = []
            for tensor, content in zip(tensors, wanted, strict=True):
                tensor.copy_(content, non_blocking=True)
                handles += transport.post([], [Message(1, tensor, 0)])
            handles += transport.post([], [token])
        else:
            for handle in transport.post([token], []):
                transport.wait(handle, LIMIT_S)
            handles = [
                handle
                for tensor in tensors
                for handle in transport.post([Message(0, tensor, 0)], [])
            ]
        for handle in handles:
            transport.wait(handle, LIMIT_S)
        torch.cuda.current_stream().synchronize()
        if [bits(off_device(one)) for one in tensors] != [*map(bits, wanted)]:
            wrong.append(f"turn {turn}")
    return ", ".join(wrong)


class Slow(Copies):
    """Its downloads take a while, in which a short post could overtake a long one."""

    def download(self, piece: Tensor, host: Tensor, after: Any) -> Any:
        if threading.current_thread().name.startswith("ringcoll-staging"):
            time.sleep(0.002)
        return super().download(piece, host, after)


def broken_when_late(make: Make, when: Callable[[], bool]) -> list[str]:
    def slow(below: Transport) -> Transport:
        transport = make(below)
        assert isinstance(transport, StagedTransport)
        if type(transport._copies) is Copies:
            transport._copies = Slow(DEVICE)
        return transport

    with fake_cuda(when):
        return all_ranks([slow(end) for end in Hub(2).transports()], sent_before_received)


@pytest.mark.parametrize("when", WHEN)
def test_what_is_sent_before_it_is_received_is_kept_in_order(when: str):
    assert broken_when_late(cut, WHEN[when]) == ["", ""]


@pytest.mark.parametrize(
    "wrong",
    [
        DoesNotWaitForTheStream,
        WaitsForTheStreamOfItsOwnThread,
        ForgetsTheEvents,
        UploadsOnItsOwnStream,
        UsesPinnedMemoryAgainTooSoon,
        SendsPinnedMemory,
        UploadsTooSoon,
        PostsSendsBackwards,
        LetsShortPostsOvertake,
    ],
)
def test_what_staging_could_get_wrong_is_seen(wrong: Any):
    def make(below: Transport) -> Transport:
        kind = wrong if issubclass(wrong, StagedTransport) else StagedTransport
        transport: StagedTransport = kind(below, DEVICE, segment_bytes=7)
        if issubclass(wrong, Copies):
            transport._copies = wrong(DEVICE)
        return transport

    assert any(
        any(look(make, WHEN[when]))
        for look in (broken, broken_when_late)
        for when in ("late", "early")
    )


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
        start = super().bind(receives, sends)

        def post(mixed: int) -> list[Handle]:
            self.posted += [(False, one.tensor.nbytes) for one in receives]
            self.posted += [(True, one.tensor.nbytes) for one in sends]
            return start(mixed)

        return post


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


class Gated(Copies):
    """A download beyond the window waits for an upload, and an upload for the downloads before it."""

    def __init__(self, device: torch.device, num_pieces: int, window: int) -> None:
        super().__init__(device)
        self._num_pieces, self._window = num_pieces, window
        self._changed = threading.Condition()
        self._downs = self._ups = 0

    def _wait(self, is_due: Callable[[], bool]) -> None:
        with self._changed:
            if not self._changed.wait_for(is_due, LIMIT_S):
                raise RuntimeError(f"stuck after {self._downs} downloads and {self._ups} uploads")

    def _note(self, downs: int, ups: int) -> None:
        with self._changed:
            self._downs, self._ups = self._downs + downs, self._ups + ups
            self._changed.notify_all()

    def download(self, piece: Tensor, host: Tensor, after: Any) -> Any:
        self._wait(lambda: self._downs <= self._ups + self._window)
        copied = super().download(piece, host, after)
        self._note(1, 0)
        return copied

    def upload(self, host: Tensor, into: Tensor) -> Any:
        self._wait(lambda: self._downs >= min(self._ups + self._window, self._num_pieces))
        copied = super().upload(host, into)
        self._note(0, 1)
        return copied


@pytest.mark.slow
@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("num_pieces, segment_bytes", [(20, SEGMENT_BYTES), (500, 1 << 10)])
def test_uploads_go_on_between_downloads_in_little_pinned_memory(
    num_pieces: int, segment_bytes: int, when: str
):
    """A long message each way; the timeline is that of rank 0 alone, as its peer has CPU tensors."""
    nbytes = num_pieces * segment_bytes - 3
    wanted = [torch.arange(nbytes, dtype=torch.int32).add_(rank).to(torch.uint8) for rank in (0, 1)]

    def main(transport: Transport) -> bool:
        rank, peer = transport.rank, 1 - transport.rank
        own, arrived = wanted[rank].clone(), torch.zeros_like(wanted[peer])
        if rank == 0:
            receives, sends = [on_device(arrived)], [on_device(own)]
        else:  # pieces as the other end has them
            receives, sends = arrived.split(segment_bytes), own.split(segment_bytes)
        messages = [[Message(peer, one, 0) for one in some] for some in (receives, sends)]
        for handle in transport.post(*messages):
            transport.wait(handle, LIMIT_S)
        torch.cuda.current_stream().synchronize()
        return torch.equal(arrived, wanted[peer])

    window, most = 8, 2 * 8 * segment_bytes
    with fake_cuda(WHEN[when]) as timeline:
        below = Hub(2).transports()
        transport = StagedTransport(below[0], DEVICE, segment_bytes=segment_bytes)
        transport._copies = Gated(DEVICE, num_pieces, window)
        assert all_ranks([transport, below[1]], main) == [True, True]
        order = timeline.order()
        assert order.count("d") == order.count("u") == num_pieces
        assert order.startswith("d" * window)
        together = order[window : order.rindex("d") + 1]
        assert together.count("u") >= num_pieces - window - 1
        assert "ddd" not in together, order
        assert "uuu" not in together, order
        assert timeline.most_pinned <= most <= PINNED_BYTES, timeline
        if when == "late":  # copies take as long as they may
            assert timeline.most_pinned == most
            assert timeline.overlaps() >= num_pieces, f"\n{timeline}"
        assert timeline.pinned == timeline.most_pinned, "it is kept for the next message"
        transport.close()
        del transport
        assert timeline.pinned == 0


def test_pinned_memory_is_taken_when_it_is_needed_and_used_again():
    """Short messages, of which each is waited for, need one piece in each direction."""
    with fake_cuda(WHEN["early"]) as timeline:
        ends = [cut(end) for end in Hub(2).transports()]
        device = [on_device(torch.zeros(5, dtype=torch.int8)) for _ in range(2)]
        receive = ends[0].bind([Message(1, device[0], 0)], [])
        send = ends[1].bind([], [Message(0, device[1], 0)])
        for _ in range(5):
            (arriving,), (leaving,) = receive(0), send(0)
            ends[1].wait(leaving, LIMIT_S)
            ends[0].wait(arriving, LIMIT_S)
        assert timeline.most_pinned == timeline.pinned == 2 * 7


def test_the_window_fits_into_the_limit():
    with fake_cuda():
        for segment_bytes, length in [(7, 8), (SEGMENT_BYTES, 8), (6 << 20, 2), (16 << 20, 1)]:
            transport = StagedTransport(Hub(1).transports()[0], DEVICE, segment_bytes=segment_bytes)
            assert transport._downs.length == transport._ups.length == length
            assert 2 * length * segment_bytes <= PINNED_BYTES == 32 << 20


# --- no rank waits for another one longer than its messages make it wait ---------------------------


def circle(make: Make, ways: tuple[str, str], num_messages: int, order: int = 1) -> list[Any]:
    """Rank 0 posts messages with rank 1 and rank 2; rank 1 begins when those of rank 2 are through.

    ``ways`` says what rank 0 does with each of the two, ``order`` is -1 if it posts for rank 2 first.
    """
    others = {"send": "receive", "receive": "send"}

    def main(transport: Transport) -> list[int]:
        rank = transport.rank
        handles: list[Handle] = []
        arrived: list[Tensor] = []

        def post(way: str, peer: int) -> None:
            value = rank if way == "send" else 99
            tensors = [torch.full((700,), value, dtype=torch.uint8) for _ in range(num_messages)]
            messages = [Message(peer, on_device(tensor), 0) for tensor in tensors]
            handles.extend(transport.post(*([[], messages] if way == "send" else [messages, []])))
            if way == "receive":
                arrived.extend(tensors)

        def wait() -> None:
            while handles:
                transport.wait(handles.pop(0), LIMIT_S)

        token = Message(3 - rank, torch.zeros(1), 1)
        if rank == 0:
            for peer in (1, 2)[::order]:
                post(ways[peer - 1], peer)
        elif rank == 2:
            post(others[ways[1]], 0)
            wait()
            handles.extend(transport.post([], [token]))
        else:
            handles.extend(transport.post([token], []))
            wait()
            post(others[ways[0]], 0)
        wait()
        torch.cuda.current_stream().synchronize()
        return [int(value) for one in arrived for value in one.unique()]

    return all_ranks([make(end) for end in Hub(3).transports()], main)


WAYS = [("receive", "send"), ("receive", "receive"), ("send", "send"), ("send", "receive")]


@pytest.mark.slow
@pytest.mark.parametrize("ways", WAYS)
@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("num_messages", [1, 30])
def test_a_peer_that_comes_late_holds_up_nobody(
    ways: tuple[str, str], order: int, num_messages: int
):
    with fake_cuda() as timeline:
        found = circle(cut, ways, num_messages, order)
        assert timeline.most_pinned <= 3 * 2 * 8 * 7
    wanted: list[list[int]] = [[], [], []]
    for peer, way in zip((1, 2)[::order], ways[::order], strict=True):
        source, into = (0, peer) if way == "send" else (peer, 0)
        wanted[into] += [source] * num_messages
    assert found == wanted


class HoldsPinnedMemory(StagedTransport):
    """It is in use until the peer has got the piece: the circle must show it."""

    def _pass_on(self, download: Any) -> None:
        super()._pass_on(download)
        if download.pinned is not None and download.flight.pieces:
            self.below.wait(download.flight.pieces[-1].handle, 1.0)


@pytest.mark.slow
def test_pieces_that_are_held_until_the_peer_has_them_close_the_circle():
    with fake_cuda():
        found = circle(
            lambda below: HoldsPinnedMemory(below, DEVICE, segment_bytes=7), ("send", "send"), 1
        )
    assert any(isinstance(error, str) for error in found), found


class Stuck(Copies):
    """The GPU does nothing until the test lets it."""

    def __init__(self, device: torch.device, error: BaseException | None = None) -> None:
        super().__init__(device)
        self.free, self.error = threading.Event(), error

    def download(self, piece: Tensor, host: Tensor, after: Any) -> Any:
        self.free.wait(LIMIT_S)
        if self.error is not None:
            raise self.error
        return super().download(piece, host, after)


def stuck(error: BaseException | None = None) -> tuple[StagedTransport, Stuck, list[Handle]]:
    """A rank with a receive, and a long send that is not on its way yet."""
    transport = StagedTransport(Noting(Hub(2), 0), DEVICE, segment_bytes=7)
    transport._copies = copies = Stuck(DEVICE, error)
    tensor = on_device(torch.zeros(700, dtype=torch.uint8))
    return transport, copies, transport.post([Message(1, tensor, 0)], [Message(1, tensor, 0)])


def test_a_send_that_does_not_leave_the_gpu_has_a_time_limit():
    with fake_cuda():
        transport, copies, (_, send) = stuck()
        with pytest.raises(
            CollectiveTimeoutError, match=r"not copied to the host within 0\.01 s"
        ) as it:
            transport.wait(send, 0.01)
        assert it.value.peer == 1
        copies.free.set()
        transport.close()


def test_cpu_tensors_are_sent_behind_what_is_still_to_be_sent():
    """Receives of CPU tensors are posted at once."""
    with fake_cuda():
        transport, copies, (_, send) = stuck()
        host = torch.zeros(5, dtype=torch.uint8)
        _, behind = transport.post([Message(1, host, 0)], [Message(1, host, 0)])
        below = transport.below
        assert isinstance(below, Noting)
        assert below.posted == [(False, 7)] * 100 + [(False, 5)]
        assert transport._thread is not None
        copies.free.set()
        transport._thread.join(20)
        assert below.posted[101:] == [(True, 7)] * 100 + [(True, 5)]
        transport.post([], [Message(1, host, 0)])
        assert below.posted[-2:] == [(True, 5)] * 2, "now it goes straight to the transport below"
        arriving = [torch.zeros(7, dtype=torch.uint8) for _ in range(100)] + [
            torch.zeros_like(host)
        ] * 2
        below.hub.transports()[1].post([Message(0, one, 0) for one in arriving], [])
        for handle in (behind, send):
            transport.wait(handle, LIMIT_S)


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("end", ["abort", "close"])
def test_who_waits_is_woken_when_the_transport_ends(which: int, end: str):
    with fake_cuda():
        transport, copies, handles = stuck()
        raised: list[BaseException] = []

        def wait() -> None:
            try:
                transport.wait(handles[which], 100.0)
            except PeerLostError as error:
                raised.append(error)

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        if end == "close":  # the transport below wakes nobody when it is closed
            transport.abort()
        getattr(transport, end)()
        thread.join(20)
        assert [error.peer for error in raised] == [1]  # type: ignore[attr-defined]
        copies.free.set()
        assert transport._thread is not None
        transport._thread.join(20)
        assert not transport._thread.is_alive()
        with pytest.raises(PeerLostError):
            transport.wait(handles[1], 0.01)
        assert isinstance(transport.below, Noting)
        assert not any(is_send for is_send, _ in transport.below.posted), "nothing is sent any more"


@pytest.mark.parametrize("which", [0, 1])
def test_an_error_while_sending_is_told_whoever_waits(which: int):
    with fake_cuda():
        transport, copies, handles = stuck(RuntimeError("CUDA error: out of memory"))
        threading.Timer(0.05, copies.free.set).start()
        with pytest.raises(RuntimeError, match="out of memory"):
            transport.wait(handles[which], LIMIT_S)
        assert transport.below.hub.aborted  # type: ignore[attr-defined]
        with pytest.raises(RuntimeError, match="out of memory"):
            transport.post(
                [Message(1, torch.zeros(1), 0)], [Message(1, on_device(torch.zeros(1)), 0)]
            )


def test_an_error_of_a_short_send_is_raised_where_it_is_posted():
    with fake_cuda():
        transport = cut(Hub(2).transports()[0])
        assert isinstance(transport, StagedTransport)
        transport._copies = copies = Stuck(DEVICE, RuntimeError("CUDA error"))
        copies.free.set()
        with pytest.raises(RuntimeError, match="CUDA error"):
            transport.post([], [Message(1, on_device(torch.zeros(1)), 0)])


# --- random messages, against a model --------------------------------------------------------------


class Planned(NamedTuple):
    """A message of a program: which step it is of, and whether its tensors are on the device."""

    src: int
    dst: int
    tag: int
    nbytes: int
    step: int
    is_staged: bool

    def content(self, number: int) -> Tensor:
        return values(torch.uint8, self.nbytes, rank=self.src, block=number)


@st.composite
def programs(draw: st.DrawFn) -> tuple[int, list[Planned]]:
    world_size = draw(st.integers(2, 4))
    ranks = st.integers(0, world_size - 1)
    around = [k * 7 + n for k in (1, 2, 7, 8, 9, 16, 17, 25) for n in (-1, 0, 1)]
    messages = draw(
        st.lists(
            st.builds(
                Planned,
                ranks,
                ranks,
                st.integers(0, 1),
                st.sampled_from([0, 1, *around]),
                st.integers(0, 2),
                st.booleans() | st.just(True),
            ).filter(lambda one: one.src != one.dst),
            max_size=12,
        )
    )
    return world_size, messages


@pytest.mark.slow
@effort(600)
@given(programs(), st.randoms(use_true_random=False), st.sampled_from(sorted(WHEN)))
def test_random_messages_arrive_as_in_the_model(
    program: tuple[int, list[Planned]], random: Random, when: str
):
    """The model: what is sent under a tag arrives in order. Ranks post a step, in parts, and wait for it."""
    world_size, messages = program
    seeds = [random.random() for _ in range(world_size)]

    def main(transport: Transport) -> list[str]:
        rank, mine, wrong = transport.rank, Random(seeds[transport.rank]), []
        plain = {
            number: message.content(number)
            if message.src == rank
            else torch.full((message.nbytes,), 0xEE, dtype=torch.uint8)
            for number, message in enumerate(messages)
        }
        with torch.cuda.stream(torch.cuda.Stream()):
            for step in range(3):
                handles: list[Handle] = []
                posts: tuple[list[Message], list[Message]] = [], []
                for number, message in enumerate(messages):
                    if message.step != step or rank not in (message.src, message.dst):
                        continue
                    is_send, tensor = message.src == rank, plain[number]
                    if message.is_staged:
                        tensor = on_device(tensor)
                    peer = message.dst if is_send else message.src
                    posts[is_send].append(Message(peer, tensor, message.tag))
                    if mine.random() < 0.3:
                        handles += transport.post(*posts)
                        posts = [], []
                handles += transport.post(*posts)
                mine.shuffle(handles)
                for handle in handles:
                    transport.wait(handle, LIMIT_S)
            torch.cuda.current_stream().synchronize()
        for number, message in enumerate(messages):
            if message.dst == rank and bits(plain[number]) != bits(message.content(number)):
                wrong.append(f"{number}: {message}")
        transport.close()
        return wrong

    with fake_cuda(WHEN[when]) as timeline:
        assert (
            all_ranks([cut(end) for end in Hub(world_size).transports()], main) == [[]] * world_size
        )
    assert timeline.most_pinned <= world_size * 2 * 8 * 7


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
    monkeypatch.undo()
    with torch.inference_mode():
        assert not staged._ordinary(3).is_inference()


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
    world_size = draw(st.sampled_from(worlds_of(entry, 1, 2, 3, 5)))
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


@pytest.mark.slow
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


@pytest.mark.slow
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
