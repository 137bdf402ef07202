"""What every transport has to do, as functions that all ranks run together.

Each is called with this rank's transport, and returns what is wrong, in words, or nothing.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import operator
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ringcoll
from ringcoll.errors import (
    ArgumentError,
    CollectiveTimeoutError,
    PeerLostError,
    TransportError,
)
from ringcoll.runtime.launch import report
from ringcoll.runtime.transport import (
    GlooTransport,
    Message,
    SharedTransport,
    StagedTransport,
    Transport,
    UcxTransport,
    VerifiedTransport,
)
from ringcoll.runtime.transport.shared import transport as shared
from ringcoll.tools.testing import COMPLEX, FLOATS, INTEGERS, bits, values
from tests.fakes.fake_cuda import DEVICE, Looking, fake_cuda
from tests.programs.listeners import own_segments
from tests.programs.real_cuda import ON_GPU

__all__ = [
    "CHECKS",
    "CONFORMANCE",
    "ENDINGS",
    "TRANSPORTS",
    "OnDevice",
    "conforms",
    "in_pieces",
    "spares_other_connections",
]

Check = Callable[[Transport], str]
LIMIT_S = 20.0


def order_within_a_tag(transport: Transport) -> str:
    """Messages from one peer under one tag arrive in the order in which they are posted."""
    others = [peer for peer in range(transport.world_size) if peer != transport.rank]
    count = 25
    arrived = {peer: [torch.full((3,), -1) for _ in range(count)] for peer in others}
    receives = [Message(peer, tensor, 7) for peer in others for tensor in arrived[peer]]
    sends = [
        Message(peer, torch.full((3,), 100 * transport.rank + n), 7)
        for n in range(count)
        for peer in others
    ]
    handles = []
    # In several posts, as of several waves.
    for start in range(0, len(receives), 10):
        handles += transport.post(receives[start : start + 10], sends[start : start + 10])
    for handle in reversed(handles):
        transport.wait(handle, LIMIT_S)
    for peer in others:
        got = [tensor.tolist() for tensor in arrived[peer]]
        if got != [[100 * peer + n] * 3 for n in range(count)]:
            return f"from {peer}: {got}"
    return ""


def tags_out_of_order(transport: Transport) -> str:
    """Messages match by tag, in whatever order they are posted and waited for."""
    rank, size = transport.rank, transport.world_size
    ahead, behind = (rank + 1) % size, (rank - 1) % size
    tags = [3, 1 << 30, 0, (1 << 31) - 1, 12]
    kept = [torch.tensor([rank, tag]) for tag in tags]
    sending = transport.post(
        [], [Message(ahead, t, tag) for t, tag in zip(kept, tags, strict=True)]
    )
    arrived = {tag: torch.zeros(2, dtype=torch.int64) for tag in sorted(tags)}
    receiving = transport.post([Message(behind, t, tag) for tag, t in arrived.items()], [])
    for handle in [*reversed(receiving), *sending]:
        transport.wait(handle, LIMIT_S)
    wrong = {tag: t.tolist() for tag, t in arrived.items() if t.tolist() != [behind, tag]}
    return f"{wrong}" if wrong else ""


def empty_messages(transport: Transport) -> str:
    """An empty message is a message: it matches one, and keeps its place in the order."""
    rank, size = transport.rank, transport.world_size
    ahead, behind = (rank + 1) % size, (rank - 1) % size
    lengths = [0, 2, 0, 0, 1]
    arrived = [torch.full((n,), -1) for n in lengths]
    handles = transport.post(
        [Message(behind, tensor, 5) for tensor in arrived],
        [Message(ahead, torch.full((n,), place), 5) for place, n in enumerate(lengths)],
    )
    for handle in handles:
        transport.wait(handle, LIMIT_S)
    got = [tensor.tolist() for tensor in arrived]
    return "" if got == [[], [1, 1], [], [], [4]] else f"{got}"


def all_dtypes(transport: Transport) -> str:
    """Bits arrive as they were, whatever they mean."""
    rank, size = transport.rank, transport.world_size
    ahead, behind = (rank + 1) % size, (rank - 1) % size
    wrong = []
    for dtype in (*INTEGERS, *FLOATS, *COMPLEX, torch.bool):
        kind = "special" if dtype.is_floating_point else "exact"
        own = values(dtype, 9, rank=rank, kind=kind)
        arrived = torch.zeros(9).to(dtype)
        for handle in transport.post([Message(behind, arrived, 1)], [Message(ahead, own, 1)]):
            transport.wait(handle, LIMIT_S)
        if bits(arrived) != bits(values(dtype, 9, rank=behind, kind=kind)):
            wrong.append(str(dtype))
    return ", ".join(wrong)


def many_in_flight(transport: Transport) -> str:
    """Hundreds of messages to and from every peer, none of which is waited for at first."""
    others = [peer for peer in range(transport.world_size) if peer != transport.rank]
    arrived = {(peer, n): torch.full((100,), -1) for peer in others for n in range(120)}
    handles = transport.post([Message(peer, t, n % 3) for (peer, n), t in arrived.items()], [])
    handles += transport.post(
        [],
        [
            Message(peer, torch.full((100,), 1000 * transport.rank + n), n % 3)
            for peer in others
            for n in range(120)
        ],
    )
    for handle in handles:
        transport.wait(handle, LIMIT_S)
    wrong = [
        (peer, n, tensor[0].item())
        for (peer, n), tensor in arrived.items()
        if set(tensor.tolist()) != {1000 * peer + n}
    ]
    return f"{wrong[:3]}" if wrong else ""


def tensors_that_nobody_keeps(transport: Transport) -> str:
    """A message's tensor lives as long as the message, although only its handle knows it."""
    rank, size = transport.rank, transport.world_size
    ahead, behind = (rank + 1) % size, (rank - 1) % size
    arrived = [torch.full((50_000,), -1) for _ in range(4)]
    (leaving,) = transport.post([], [Message(ahead, torch.full((50_000,), rank), 9)])
    sends = [Message(ahead, torch.full((50_000,), 10 * rank + n), n) for n in range(1, 4)]
    post = transport.bind([], sends)
    handles = [leaving, *post(0)]
    del post, sends, leaving
    junk = [torch.full((50_000,), -2) for _ in range(20)]  # where they have been, if they have gone
    tags = [9, 1, 2, 3]
    receives = [Message(behind, one, tag) for one, tag in zip(arrived, tags, strict=True)]
    for handle in [*transport.post(receives, []), *handles]:
        transport.wait(handle, LIMIT_S)
    wanted = [behind, *(10 * behind + n for n in range(1, 4))]
    got = [sorted(set(tensor.tolist())) for tensor in arrived]
    return "" if got == [[one] for one in wanted] else f"{got} of {len(junk)}"


def large_messages_both_ways(transport: Transport) -> str:
    """8 MiB each way at once, sends posted with the receives; nobody blocks."""
    rank, size = transport.rank, transport.world_size
    ahead, behind = (rank + 1) % size, (rank - 1) % size
    own, arrived = torch.full((1 << 20,), rank), torch.full((1 << 20,), -1)
    for handle in transport.post([Message(behind, arrived, 0)], [Message(ahead, own, 0)]):
        transport.wait(handle, LIMIT_S)
    return "" if bool((arrived == behind).all()) else "wrong data"


def parts_of_tensors(transport: Transport) -> str:
    """Only the part that is named is read and written."""
    rank, size = transport.rank, transport.world_size
    ahead, behind = (rank + 1) % size, (rank - 1) % size
    own, arrived = torch.arange(10) + 100 * rank, torch.full((10,), -1)
    for handle in transport.post([Message(behind, arrived[3:7], 0)], [Message(ahead, own[5:9], 0)]):
        transport.wait(handle, LIMIT_S)
    wanted = [-1] * 3 + [100 * behind + n for n in (5, 6, 7, 8)] + [-1] * 3
    return "" if arrived.tolist() == wanted else f"{arrived.tolist()}"


def time_limit(transport: Transport) -> str:
    """A message that does not come ends in a time-out; for good, on some transports."""
    if transport.rank != 0:
        time.sleep(1.0)
        return ""
    (handle,) = transport.post([Message(1, torch.zeros(1), 0)], [])
    begin = time.monotonic()
    try:
        transport.wait(handle, 0.3)
    except CollectiveTimeoutError:
        seconds = time.monotonic() - begin
        return "" if 0.2 < seconds < 0.9 else f"after {seconds} s"
    return "no time-out"


def abort_wakes_all(transport: Transport) -> str:
    """`abort` wakes whoever waits, here and at the peers, at once."""
    rank, size = transport.rank, transport.world_size
    (handle,) = transport.post([Message((rank + 1) % size, torch.zeros(1), 0)], [])
    if rank == 0:
        threading.Timer(0.3, transport.abort).start()
    begin = time.monotonic()
    try:
        transport.wait(handle, LIMIT_S)
    except PeerLostError:
        seconds = time.monotonic() - begin
        transport.abort()  # as whoever fails does; and again, it is harmless
        transport.abort()
        return "" if seconds < 3 else f"after {seconds} s"
    return "no error"


def abort_after_a_failure(transport: Transport) -> str:
    """A rank whose own wait has failed, and that aborts, still wakes the others."""
    rank, size = transport.rank, transport.world_size
    (handle,) = transport.post([Message((rank + 1) % size, torch.zeros(1), 0)], [])
    begin = time.monotonic()
    try:
        transport.wait(handle, 0.3 if rank == 0 else LIMIT_S)
    except (CollectiveTimeoutError, PeerLostError) as error:
        seconds = time.monotonic() - begin
        transport.abort()
        wanted = CollectiveTimeoutError if rank == 0 else PeerLostError
        return "" if type(error) is wanted and seconds < 3 else f"{error!r} after {seconds} s"
    return "no error"


def closed_while_waiting(transport: Transport) -> str:
    """Not allowed by the contract; whoever waits is told all the same, where that can be."""
    (handle,) = transport.post([Message((transport.rank + 1) % 2, torch.zeros(1), 0)], [])
    threading.Timer(0.3, transport.close).start()
    try:
        transport.wait(handle, LIMIT_S)
    except PeerLostError as error:
        return "" if "broken" in str(error) else str(error)
    return "no error"


CONFORMANCE: dict[str, Check] = {
    check.__name__: check
    for check in (
        order_within_a_tag,
        tags_out_of_order,
        empty_messages,
        all_dtypes,
        many_in_flight,
        tensors_that_nobody_keeps,
        large_messages_both_ways,
        parts_of_tensors,
        time_limit,
        abort_wakes_all,
        abort_after_a_failure,
    )
}
ENDINGS = ("time_limit", "abort_wakes_all", "abort_after_a_failure")
"""Those after which the transport serves nobody any more."""
CHECKS = {**CONFORMANCE, closed_while_waiting.__name__: closed_while_waiting}

_numbers = itertools.count()


class OnDevice(Looking):
    """A transport of CUDA tensors, with a stand-in for the GPU as long as it is open."""

    def __init__(self, make: Callable[[], Transport]) -> None:
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(fake_cuda())
        super().__init__(make())

    def close(self) -> None:
        super().close()
        self._stack.close()


def in_pieces(below: Transport) -> Transport:
    """CUDA tensors over another transport, in pieces that cut elements in two."""
    return OnDevice(lambda: StagedTransport(below, DEVICE, segment_bytes=10_007))


def _staged(*group: Any) -> Transport:
    return in_pieces(GlooTransport(*group))


def _ucx_on_device(*group: Any) -> Transport:
    """UCX looks at addresses by itself, and finds the CPU's memory."""
    return OnDevice(lambda: UcxTransport(*group))


class InPieces(SharedTransport):
    """As where the kernel lets no process read another's memory."""

    def connect(self, timeout_s: float) -> None:
        super().connect(timeout_s)
        for channel in self.channels.values():
            channel.peer_reads = channel.reads_peer = False
        self.direct_from = self.direct_from  # which channels heed as far as their peers read


class Direct(SharedTransport):
    """As where it never pays to copy a long message twice."""

    def connect(self, timeout_s: float) -> None:
        super().connect(timeout_s)
        self.direct_from = 0


def _shared(store: dist.Store, rank: int, world_size: int) -> Transport:
    """As programs get it: beside another transport if there are several hosts."""
    return shared.make(store, rank, world_size, torch.device("cpu"), LIMIT_S)


def _verified(*group: Any) -> Transport:
    return VerifiedTransport(_shared(*group))


TRANSPORTS: dict[str, Callable[..., Transport]] = {
    "gloo": GlooTransport,
    "shared": _shared,
    "shared, in pieces": InPieces,
    "shared, read": Direct,
    "shared, verified": _verified,
    "ucx": UcxTransport,
    "staged gloo": _staged,
    "ucx, CUDA tensors": _ucx_on_device,
}


def transport_of_all(name: str, limit_s: float = LIMIT_S) -> Transport:
    """A transport among all ranks of the pool."""
    store = dist.distributed_c10d._get_default_store()
    transport = {**TRANSPORTS, **ON_GPU}[name](
        dist.PrefixStore(f"transport {next(_numbers)}", store),
        dist.get_rank(),
        dist.get_world_size(),
    )
    transport.connect(limit_s)
    return transport


def conforms(transport_name: str, name: str) -> str:
    """Run one check over a transport between processes."""
    transport = transport_of_all(transport_name)
    try:
        return CHECKS[name](transport)
    finally:
        transport.close()


def different_transports() -> str:
    """What each rank is told when rank 1 comes with another transport."""
    try:
        transport_of_all("ucx" if dist.get_rank() == 1 else "gloo")
    except TransportError as error:
        return str(error)
    return "nothing"


def die_over_ucx(dying: int) -> None:
    """One rank ends while the others wait for it over shared memory."""
    group = dist.new_group()
    ringcoll.use(group, transport="ucx")
    ringcoll.barrier(group)
    if dist.get_rank() == dying:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    try:
        ringcoll.all_reduce(torch.ones(1 << 20), group=group, algorithm="ring")
    except PeerLostError as error:
        report((dist.get_rank(), str(error), error.peer, time.monotonic() - begin))


def _held() -> tuple[int, int, int]:
    """Descriptors, threads and shared segments of this process."""
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    return descriptors, threading.active_count(), len(own_segments())


def groups_come_and_go(num_groups: int) -> list[tuple[int, int, int]]:
    """What this process holds after some groups, and after each of two rounds of many.

    On a busy machine, what has been ended takes a while to be gone: it has 10 seconds.
    """
    held: list[tuple[int, int, int]] = []
    for groups in (5, num_groups, num_groups):
        for _ in range(groups):
            group = dist.new_group()
            ringcoll.use(group, transport="ucx")
            tensor = torch.ones(10)
            ringcoll.all_reduce(tensor, group=group)
            assert tensor[0] == dist.get_world_size()
            dist.barrier()
            ringcoll.close(group)
            dist.destroy_process_group(group)
        now, deadline = _held(), time.monotonic() + 10
        while held and time.monotonic() < deadline and any(map(operator.gt, now, held[-1])):
            gc.collect()  # a group's parts refer to each other
            time.sleep(0.1)
            now = _held()
        held.append(now)
    return held


def leaves_when_others_have_given_up(transport: str) -> float:
    """Seconds in which a group ends on a rank that has missed that the others gave up waiting for it."""
    limit, options = timedelta(seconds=20), ringcoll.Options(transport=transport)
    group = dist.new_group(timeout=limit, backend="ringcoll", pg_options=options)
    ringcoll.barrier(group)
    if dist.get_rank() != 1:
        with contextlib.suppress(CollectiveTimeoutError, PeerLostError):
            ringcoll.all_reduce(torch.ones(1), group=group, timeout=0.5)
            return -1.0
    dist.barrier()
    begin = time.monotonic()
    dist.destroy_process_group(group)
    return time.monotonic() - begin


def late_choice() -> list[str]:
    """The errors of `ringcoll.use` when it comes too late, or asks for what there is not."""
    group = dist.new_group()
    found = []
    for name in ("pigeons", "gloo"):
        try:
            ringcoll.use(group, transport=name)
        except ArgumentError as error:
            found.append(str(error))
        ringcoll.barrier(group)
    return found


def spares_other_connections() -> list[str]:
    """`abort` shuts the transport's own connections down, and no others of the process."""
    transport, other = transport_of_all("gloo"), transport_of_all("gloo")
    server = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(server.getsockname())
    accepted, _ = server.accept()
    transport.abort()
    wrong = []
    client.sendall(b"still here")
    if accepted.recv(10) != b"still here":
        wrong.append("a connection of the user's")
    if many_in_flight(other):
        wrong.append("another transport")
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    if tensor.item() != dist.get_world_size():
        wrong.append("the default group")
    second = socket.create_connection(server.getsockname())
    for item in (second, client, accepted, server):
        item.close()
    other.close()
    transport.close()
    return wrong
