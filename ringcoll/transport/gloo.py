"""Point-to-point messages over torch's gloo, for CPU tensors.

The transport makes a process group of its own over the store of the user's group, so that the
library's messages and the user's never meet.

Facts it rests on (torch 2.13.0): a receive buffer of the wrong length aborts the process or is
filled in part, so tags must tell calls apart; a wait cannot be polled, and neither ``abort()`` nor
another thread wakes it, but reading the end of a connection does, within milliseconds (the
listening socket must be left alone: closing it aborts the process). But nothing wakes who waits for
a long message of which a part has come, nor who waits for a rank that died while the group was
made. In these two cases another thread of the transport waits for gloo, and is left behind when the
transport is aborted.

Nor does anything wake who waits for a message that was written into a broken connection: it stays
in a list of which gloo tells only messages of another kind (``transport/tcp/pair.cc``,
``Pair::signalException``), until its time limit. So an aborted transport first ends the reading on
its own side, where the waits end, still takes what its peers write, and breaks the connections a
moment later, when its peers have come to rest. A rank that dies has no such moment. To wait for
each send in another thread would help there; it made all-reduces of 4 bytes to 16 KiB take 1.3 to 2
times as long.

One thread of gloo reads what arrives, for all connections. Woken while the thread that sends holds
a connection's lock, and on the same core, it finds the lock taken and polls again and again, until
its time slice of some milliseconds is over (``transport/tcp/pair.cc``, ``Pair::handleEvents``). As
a *batch* thread it does not push the sender aside when it wakes up: `_wake_gently`. On 2 cores, in
the run with the least other load, that made a tree all-reduce of 4 KiB 4 times (4 ranks) and 9
times (2 ranks) as fast.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from ringcoll.errors import CollectiveTimeoutError, GroupBrokenError, PeerLostError, TransportError
from ringcoll.machine import (
    is_loopback,
    not_of_a_rank,
    private,
    read_json,
    sockets,
    started,
    with_threads,
)
from ringcoll.transport.around import staged_if_needed
from ringcoll.transport.base import Handle, Message, Transport, meet, told_by

Result = TypeVar("Result")
_Address = tuple[str, int]

_LOOPBACK = Path("/sys/class/net/lo")
_LONG = 64 << 10  # bytes; shorter messages come whole, or almost so
_JOIN_S = 1.0
_LOOK_S = 0.1  # between looks whether the transport was aborted
_CALM_S = 0.02  # for what peers are about to write; 0.005 was enough in 100 tries of 100
# A device's address is the difference of the addresses before and after its making.
_creation = threading.Lock()


def check() -> None:
    """Nothing has to be installed: torch brings gloo."""


def make(
    store: dist.Store, rank: int, world_size: int, device: torch.device, timeout_s: float
) -> Transport:
    """Make the transport; CUDA tensors pass through host memory."""
    return staged_if_needed(GlooTransport(store, rank, world_size), device)


def _listening() -> set[_Address]:
    """The addresses that the process listens on."""
    return {
        connection.getsockname()[:2]
        for connection in sockets()
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    }


def _devices(is_local: bool) -> list[Any]:
    """The devices that torch's own groups would use; for one host only, the loopback interface."""
    names = os.environ.get("GLOO_SOCKET_IFNAME")  # torch reads the variable in the same way
    if not names and is_local and _LOOPBACK.exists():
        names = _LOOPBACK.name
    if not names:
        return [dist.ProcessGroupGloo.create_default_device()]
    return [dist.ProcessGroupGloo.create_device(interface=name) for name in names.split(",")]


def _addresses_of(store: dist.Store, peer: int) -> list[_Address]:
    """The addresses on which a peer listens, as it has written them."""
    key = f"address/{peer}"
    items, addresses = read_json(store, key), []
    for item in items if isinstance(items, list) else [items]:
        match item:
            case [str(host), int(port)]:
                addresses.append((host, port))
            case _:
                raise not_of_a_rank(key, items)
    return addresses


def _loops() -> set[int]:
    """The process's threads that read for gloo."""
    threads = set()
    for task in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):  # ended meanwhile
            if (task / "comm").read_text().startswith("gloo"):
                threads.add(int(task.name))
    return threads


def _wake_gently(threads: set[int]) -> None:
    """Make batch threads of some threads; on Linux only, where this needs no privilege."""
    for thread in threads if hasattr(os, "SCHED_BATCH") else ():
        with contextlib.suppress(OSError):
            os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


class _Aside:
    """A thread that makes calls of gloo which may never return."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def call(self, function: Callable[[], Result], given_up: Callable[[], bool]) -> Result:
        """Call a function, and raise what it raises."""
        if self._thread is None:
            try:
                self._thread = started(self._serve, "ringcoll-gloo")
            except GroupBrokenError:  # the program ends
                return function()
        future, over = Future[Result](), threading.Event()
        future.add_done_callback(lambda _: over.set())

        def run() -> None:
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001  # raised in the other thread
                future.set_exception(error)

        self._calls.put(run)
        while not over.wait(_LOOK_S):
            if given_up():
                raise PeerLostError("the connection was broken")
        return future.result()

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # it holds a message's tensor

    def end(self, *, at_once: bool) -> None:
        """Let the thread end: at once, or when gloo lets it."""
        self._calls.put(None)
        if self._thread is not None and at_once:
            self._thread.join(_JOIN_S)


class _Long(NamedTuple):
    """The handle of a message that may come in parts."""

    work: Any

    def wait(self, timeout: timedelta) -> None:
        self.work.wait(timeout)


class _Lost(NamedTuple):
    """The handle of a message that could not be started."""

    error: RuntimeError

    def wait(self, timeout: timedelta) -> None:
        raise self.error


class GlooTransport(Transport):
    """Messages over a private group of gloo; nobody else uses the store."""

    name = "gloo"
    ordered = False

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.hosts: tuple[int, ...] = ()
        # Apart from the keys at which the ranks meet, whatever transport they have.
        self._meeting, self._store = store, dist.PrefixStore(self.name, store)
        self._aborted = False
        self._group: Any = None
        self._addresses: set[_Address] = set()
        self._aside = _Aside()

    def connect(self, timeout_s: float) -> None:
        """Make the group; see `Transport.connect`."""
        store, rank, world_size = self._store, self.rank, self.world_size
        since_s = time.monotonic()
        self.hosts = meet(self._meeting, self, timeout_s, lambda: self._aborted)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # stubs lack it
        left_s = since_s + timeout_s - time.monotonic()
        options._timeout = timedelta(seconds=max(left_s, 0.001))
        try:
            with _creation:
                before, loops = _listening(), _loops()
                options._devices = _devices(len(set(self.hosts)) == 1)
                own = _listening() - before
            options._threads = 2 * len(options._devices)  # torch's default
            # Connecting takes all ranks: no lock is held, or two groups that are made in
            # another order elsewhere would wait for each other.
            store.set(f"address/{rank}", json.dumps(sorted(own)))
            self._check_addresses(timeout_s, since_s)
            self._group = self._aside.call(
                lambda: with_threads(
                    dist.ProcessGroupGloo(private(store), rank, world_size, options)
                ),
                lambda: self._aborted,
            )
            self._group._set_default_timeout(timedelta(seconds=timeout_s))
            # One end of each of the group's connections is an address that a rank listens on.
            self._addresses = {
                address for peer in range(world_size) for address in _addresses_of(store, peer)
            }
            _wake_gently(_loops() - loops)  # by now each device's thread has its name
        except CollectiveTimeoutError:
            raise
        except RuntimeError as error:
            raise TransportError(f"rank {rank} could not connect to the others: {error}") from error

    def _check_addresses(self, timeout_s: float, since_s: float) -> None:
        """Refuse a rank that listens on the loopback interface, where gloo would try in vain.

        A rank does if its host's name resolves to that interface, as in many a ``/etc/hosts``.
        """
        if len(set(self.hosts)) == 1:
            return
        peers = range(self.world_size)
        # To read what is not there yet would block the store for the monitor, too.
        given_up = lambda: self._aborted  # noqa: E731
        told_by(self._store, "address", self.rank, peers, timeout_s, given_up, since_s=since_s)
        for peer in peers:
            for address, _ in _addresses_of(self._store, peer):
                if is_loopback(address):
                    raise TransportError(
                        f"rank {self.rank} could not connect to the others: rank {peer} listens "
                        f"on {address}, which other hosts cannot reach; set GLOO_SOCKET_IFNAME "
                        "to the network's interface"
                    )

    def bind(
        self, receives: Sequence[Message], sends: Sequence[Message]
    ) -> Callable[[int], list[Handle]]:
        """Make messages ready; see `Transport.bind`."""
        recv, send = self._group.recv, self._group.send
        ready = [(recv, message) for message in receives]
        ready += [(send, message) for message in sends]

        def post(mixed: int) -> list[Handle]:
            handles: list[Handle] = []
            for start, (peer, tensor, tag, _) in ready:
                try:
                    work = start([tensor], peer, tag ^ mixed)
                    handles.append(work if tensor.nbytes < _LONG else _Long(work))
                except RuntimeError as error:  # the connection is gone: the wait raises the error
                    handles.append(_Lost(error))
            return handles

        return post

    def wait(self, handle: Handle, timeout_s: float) -> None:
        """Wait for one message; see `Transport.wait`."""
        limit = timedelta(seconds=timeout_s)
        try:
            message: Any = handle
            if isinstance(handle, _Long):
                self._aside.call(lambda: message.wait(limit), lambda: self._aborted)
            else:
                message.wait(limit)
        except PeerLostError:
            raise
        except RuntimeError as error:
            text = str(error)
            if "imed out" in text or "imeout" in text:
                raise CollectiveTimeoutError(text) from error
            raise PeerLostError(text) from error

    def abort(self) -> None:
        """Wake all who wait: here by an end of reading, at the peers by breaking connections."""
        self._aborted = True
        addresses, self._addresses = self._addresses, set()
        with contextlib.ExitStack() as stack:
            held = []  # so that gloo, which closes its own, does not break them
            for connection in sockets() if addresses else ():
                with contextlib.suppress(OSError):
                    # The listening socket has no peer, and this fails: it must be left alone.
                    ends = {connection.getpeername()[:2], connection.getsockname()[:2]}
                    if ends & addresses:
                        connection.shutdown(socket.SHUT_RD)
                        held.append(stack.enter_context(connection.dup()))
            if held:
                time.sleep(_CALM_S)
            for connection in held:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Drop the group and its connections."""
        self._addresses = set()
        self._aside.end(at_once=not self._aborted)
        self._group = None
