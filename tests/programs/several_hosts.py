"""What ranks on several hosts do; see `tests.fakes.hosts`."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ringcoll
from ringcoll.errors import ArgumentError, MissingExtraError, RingcollError, TransportError
from ringcoll.runtime.collectives import close, communicator, share_for
from ringcoll.runtime.launch import rendezvous, report
from ringcoll.runtime.machine import place, sockets
from ringcoll.runtime.transport import Message, catalogue, ucx
from ringcoll.schedules import Schedule
from tests.programs.transports import TRANSPORTS

__all__ = [
    "connected_hosts",
    "first_run",
    "last_words",
    "lose_a_rank",
    "lose_a_rank_before_they_meet",
    "lose_a_rank_that_is_measured",
    "meet_in_vain",
    "named",
    "run_schedule",
    "share",
    "time_all_reduce",
    "whereabouts",
]


def whereabouts() -> tuple[str, str, str]:
    """The place, the host's name, and a file of shared memory that only this host has."""
    mine = Path(f"/dev/shm/ringcoll-of-rank-{dist.get_rank()}")
    mine.write_bytes(b"")
    dist.barrier()
    found = " ".join(sorted(path.name for path in mine.parent.glob("ringcoll-of-rank-*")))
    dist.barrier()
    mine.unlink()
    return place(), socket.gethostname(), found


def share() -> str:
    """What a rank is told that asks for shared memory in a group of several hosts."""
    tensor = torch.ones(20_000)
    try:
        share_for(_group("gloo"), tensor)
    except ArgumentError as error:
        return f"{error}; {'moved' if tensor.is_shared() else 'not moved'}"
    return "nothing"


def _hide_ucx() -> None:
    """From now on, as if UCX were not installed."""

    def missing() -> None:
        raise MissingExtraError("hidden")

    ucx.check = missing
    catalogue._automatic.cache_clear()


def named(pool: Any, name: str) -> str:
    """The name of a transport on a pool, where ``"..., without ucx"`` hides UCX first."""
    transport, _, _ = name.partition(", without ucx")
    if name != transport:
        pool.run(_hide_ucx)
    return transport


def _group(transport: str) -> Any:
    group = dist.new_group()
    ringcoll.use(group, transport=transport)
    return group


def connected_hosts(transport: str) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """The hosts before and after connecting, and what an all-reduce gives."""
    group = _group(transport)
    member = communicator(group, torch.device("cpu"))
    before = tuple(member.transport.hosts)
    tensor = torch.full((100_000,), 1 + dist.get_rank())
    ringcoll.all_reduce(tensor, group=group)
    (found,) = set(tensor.tolist())
    return before, member.transport.hosts, found


def meet_in_vain(transport: str) -> str:
    """The error of a transport that cannot connect."""
    store, rank, world_size = rendezvous()
    made = TRANSPORTS[transport](dist.PrefixStore("in vain", store), rank, world_size)
    try:
        made.connect(5.0)
    except TransportError as error:
        return str(error)
    finally:
        made.close()
    return "connected"


def first_run(
    name: str, interfaces: Sequence[str | None], timeout_s: float
) -> tuple[str, float, list[str]]:
    """A first program: the sum of the ranks, or the error; seconds; the addresses that gloo has.

    Rank 0 serves the store under the name of its host. ``interfaces`` are each rank's
    ``GLOO_SOCKET_IFNAME``; UCX is as if it were not installed.
    """
    _hide_ucx()
    meeting, rank, world_size = rendezvous()
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    if (interface := interfaces[rank]) is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    limit = timedelta(seconds=timeout_s)
    if rank == 0:
        store = dist.TCPStore(name, 0, None, True, timeout=limit, wait_for_workers=False)
        meeting.set("port", str(store.port))
    else:
        store = dist.TCPStore(name, int(meeting.get("port")), None, False, timeout=limit)
    begin = time.monotonic()
    try:
        dist.init_process_group(
            "ringcoll", store=store, rank=rank, world_size=world_size, timeout=limit
        )
        total = torch.tensor([1 + rank])
        dist.all_reduce(total)
        received = torch.zeros(1)
        works = [dist.isend(total.float(), (rank + 1) % world_size), dist.irecv(received)]
        for work in works:
            assert work is not None
            work.wait()
        listens = {connection.getsockname()[0] for connection in sockets() if _listens(connection)}
        dist.destroy_process_group()
    except RingcollError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - begin, []
    finally:
        meeting.set(f"over/{rank}", "")
        meeting.wait([f"over/{peer}" for peer in range(world_size)])  # the store lives so long
    return f"{int(total)} {int(received)}", time.monotonic() - begin, sorted(listens)


def _listens(connection: socket.socket) -> bool:
    return bool(connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def lose_a_rank(transport: str, dying: int, numel: int, timeout_s: float) -> None:
    """Rank ``dying`` is killed, or, if it is none, a host is unplugged; the others report it at their end."""
    group, rank = _group(transport), dist.get_rank()
    ringcoll.barrier(group)
    dist.barrier()
    if dying < 0:
        report((rank, "ready"))
        time.sleep(1.0)
    elif rank == dying:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    try:
        ringcoll.all_reduce(torch.ones(numel), group=group, algorithm="ring", timeout=timeout_s)
    except RingcollError as error:
        peer, seconds = getattr(error, "peer", None), time.monotonic() - begin
        if dying >= 0:
            close(group)
        report((rank, type(error).__name__, str(error), peer, seconds))


def lose_a_rank_that_is_measured(dying: int) -> None:
    """Rank ``dying`` is killed while all pairs are measured; the others report it."""
    if (rank := dist.get_rank()) == dying:
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGKILL)).start()
    try:
        while True:
            ringcoll.probe(budget_s=5.0)
    except RingcollError as error:
        report((rank, type(error).__name__, getattr(error, "peer", None), str(error)))


def lose_a_rank_before_they_meet(dying: int) -> None:
    """Rank ``dying`` is killed before the first operation; the others report it."""
    rank, (store, _, world_size) = dist.get_rank(), rendezvous()
    store.set(f"made/{rank}", "")
    if rank == dying:
        store.wait([f"made/{peer}" for peer in range(world_size)])
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)
    begin = time.monotonic()
    try:
        dist.all_reduce(torch.ones(3))
    except RingcollError as error:
        peer, seconds = getattr(error, "peer", None), time.monotonic() - begin
        report((rank, type(error).__name__, str(error), peer, seconds))


def last_words(transport: str, numel: int, count: int) -> int:
    """Rank 0 sends and is gone; how much of it the last rank gets."""
    store, rank, world_size = rendezvous()
    last = world_size - 1
    made = TRANSPORTS[transport](dist.PrefixStore("last words", store), rank, world_size)
    made.connect(20.0)
    tensors = [torch.full((numel,), n if rank == 0 else -1) for n in range(count)]
    if rank == 0:
        for handle in made.post([], [Message(last, tensor, 3) for tensor in tensors]):
            made.wait(handle, 20.0)
        made.close()
        return count
    if rank == last:
        time.sleep(0.5)
        for handle in made.post([Message(0, tensor, 3) for tensor in tensors], []):
            made.wait(handle, 20.0)
    made.close()
    return sum(set(tensor.tolist()) == {n} for n, tensor in enumerate(tensors))


def run_schedule(transport: str, text: str, numel: int) -> list[float]:
    """An all-reduce by a schedule: the different elements of what comes out."""
    group = _group(transport)
    tensor = torch.arange(numel) + 1000 * dist.get_rank()
    ringcoll.all_reduce(tensor, group=group, algorithm=Schedule.from_text(text))
    total = dist.get_world_size() * torch.arange(numel) + 1000 * sum(range(dist.get_world_size()))
    return [float((tensor - total).abs().max())]


def time_all_reduce(
    transport: str, algorithms: Sequence[str], numel: int, repetitions: int
) -> list[list[float]]:
    """Seconds of all-reduces, in turns; an algorithm is a name, or a schedule as text."""
    group = _group(transport)
    choices = [
        Schedule.from_text(item) if item.startswith("schedule ") else item for item in algorithms
    ]
    times: list[list[float]] = [[] for _ in choices]
    tensor = torch.ones(numel)
    for repetition in range(repetitions + 1):
        for choice, found in zip(choices, times, strict=True):
            tensor.fill_(1.0)
            ringcoll.barrier(group)
            begin = time.perf_counter()
            ringcoll.all_reduce(tensor, group=group, algorithm=choice)
            seconds = time.perf_counter() - begin
            assert tensor[0].item() == tensor[-1].item() == dist.get_world_size()
            if repetition:  # the first is not timed
                found.append(seconds)
    return times
