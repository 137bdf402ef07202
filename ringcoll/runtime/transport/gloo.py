"""Point-to-point messages over torch's gloo, for CPU tensors.

The transport makes a process group of its own over the store of the user's group, so that the
library's messages and the user's never meet.

Facts it rests on (torch 2.13.0): a receive buffer of the wrong length aborts the process or is
filled in part, so tags must tell calls apart; a wait cannot be polled, and neither ``abort()`` nor
another thread wakes it, but an end of reading on the connection does, within milliseconds (the
listening socket must be left alone: closing it aborts the process). Nothing wakes a thread that
waits for a long message of which a part has come, or for a rank that died while the group was made.
So another thread waits in these two cases, and is left behind when the transport is aborted.

Nor does anything wake a wait for a message that was written into a broken connection: it stays in a
list of which gloo tells only messages of another kind (``transport/tcp/pair.cc``,
``Pair::signalException``), until its time limit. So an aborted transport first ends the reading on
its own side, where the waits end, still takes what its peers write, and breaks the connections a
moment later, when its peers have come to rest. A rank that dies has no such moment. A wait for each
send in another thread would help there; it made all-reduces of 4 bytes to 16 KiB take 1.3 to 2
times as long.

One thread of gloo reads what arrives, for all connections. Woken while the thread that sends holds
a connection's lock, and on the same core, it polls until its time slice of some milliseconds is
over (``transport/tcp/pair.cc``, ``Pair::handleEvents``). As a *batch* thread it does not push the
sender aside when it wakes up: `_wake_gently`. On 2 cores, in the run with the least other load,
that made a tree all-reduce of 4 KiB 4 times (4 ranks) and 9 times (2 ranks) as fast. Beside two
busy loops it is still better than without. Two other ways were worse: a time slice of 20 ms for
gloo's thread and, beside busy loops, one of 0.1 ms for the sender.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ringcoll.errors import CollectiveTimeoutError, GroupBrokenError, PeerLostError, TransportError
from ringcoll.runtime.machine import (
    hosts_of,
    is_address,
    is_loopback,
    own_address,
    place,
    sockets,
)
from ringcoll.runtime.process import (
    MESSAGES,
    Answer,
    call_in_thread,
    keep_in_forks,
    settle_call,
    start_thread,
)
from ringcoll.runtime.rendezvous import Address, own_connection, read_from_ranks, store_host
from ringcoll.runtime.transport.base import Handle, Message, Start, Transport, left_s
from ringcoll.runtime.transport.meeting import meet
from ringcoll.runtime.transport.staged import staged_if_needed

_LOOPBACK = Path("/sys/class/net/lo")
_LONG = 64 << 10  # bytes; messages up to these come whole, or almost so
_INTERFACE = "GLOO_SOCKET_IFNAME"
_ADVICE = f"set {_INTERFACE} to the network's interface on each host"
_JOIN_S = 1.0
_LATE_S = 0.5  # for an error that comes at the time limit, and says more
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


def _listening() -> set[Address]:
    return {
        connection.getsockname()[:2]
        for connection in sockets()
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    }


def _way(store: dist.Store) -> str:
    """The address of this machine on the way to the host of a store; empty if there is no way."""
    with contextlib.suppress(OSError):
        return own_address(store_host(store))
    return ""


def _devices(rank: int, hosts: Sequence[int], ways: Sequence[str]) -> list[Any]:
    """The devices of a rank: of the interfaces that are named, or on its way to the others."""
    device = dist.ProcessGroupGloo.create_device
    if names := os.environ.get(_INTERFACE):  # torch reads the variable in the same way
        return [device(interface=name) for name in names.split(",")]
    if len(set(hosts)) == 1 and _LOOPBACK.exists():
        return [device(interface=_LOOPBACK.name)]
    for way in (ways[rank], *ways):
        # The host that serves the store may know itself by a loopback address, as Debian does.
        if is_address(way) and not is_loopback(way):
            return [device(hostname=own_address(way))]
    return [dist.ProcessGroupGloo.create_default_device()]  # of the host's name


def _addresses_or_fault(value: Any) -> str | list[Address]:
    """The addresses on which a rank listens, or why it cannot listen, from JSON."""
    return value if isinstance(value, str) else [(host, port) for host, port in value]


def _reachable(rank: int, hosts: Sequence[int], listens: Mapping[int, Any]) -> set[Address]:
    """The addresses on which the ranks listen; `TransportError` if one cannot be reached."""
    addresses = set[Address]()
    for peer, items in listens.items():
        fault = f"cannot listen for gloo {items}" if isinstance(items, str) else ""
        for host, port in () if fault else items:
            addresses.add((host, port))
            # Of an interface without another address gloo takes a link-local one.
            if len(set(hosts)) > 1 and (is_loopback(host) or host.startswith("fe80:")):
                fault = f"listens on {host}, which other hosts cannot reach"
        if fault:  # gloo would try in vain, and for longer than its time limit
            text = f"rank {rank} could not connect to the others: rank {peer} {fault}; {_ADVICE}"
            raise TransportError(text, peer=peer)
    return addresses


class GlooMesh(NamedTuple):
    """A process group of gloo; one end of each of its connections is one of the addresses."""

    group: Any
    addresses: set[Address]

    @classmethod
    def connect(
        cls,
        store: dist.Store,
        rank: int,
        world_size: int,
        timeout_s: float,
        given_up: Callable[[], bool] = lambda: False,
    ) -> GlooMesh:
        """Connect all ranks; nobody else uses the store.

        Raises as `meet`; or `TransportError`, on all ranks, if a rank cannot be reached.
        """
        since_s = time.monotonic()
        deadline = since_s + timeout_s

        def exchanged(name: str, own: object, parse: Callable[[Any], Any]) -> Any:
            store.set(f"{name}/{rank}", json.dumps(own))
            # To read what is not there yet would block the store for the monitor, too.
            ranks = rank, range(world_size), timeout_s, given_up
            return read_from_ranks(store, name, *ranks, parse, since_s=since_s)

        own_way = {"place": place(), "way": _way(store)}
        places_and_ways = exchanged("way", own_way, lambda each: (each["place"], each["way"]))
        places, ways = zip(*places_and_ways.values(), strict=True)
        hosts = hosts_of(places)
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # stubs lack it
        fault = ""
        with _creation:
            before = _listening()
            try:
                options._devices = _devices(rank, hosts, ways)
            except (OSError, RuntimeError) as error:
                fault = f"on {os.environ.get(_INTERFACE) or 'any interface'} ({error})"
            own = _listening() - before
        # Connecting takes all ranks: no lock is held, or two groups that are made in another order
        # elsewhere would wait for each other.
        listens = exchanged("address", fault or sorted(own), _addresses_or_fault)
        addresses = _reachable(rank, hosts, listens)
        options._threads = 2 * len(options._devices)  # torch's default
        options._timeout = timedelta(seconds=left_s(deadline))
        make = partial(dist.ProcessGroupGloo, store, rank, world_size, options)
        group = call_in_thread(lambda: keep_in_forks(make()), MESSAGES)
        try:
            # Where no answer comes from an address, gloo may try for longer than its time limit.
            while not wait([group], _LOOK_S).done and time.monotonic() < deadline + _LATE_S:
                if given_up():
                    raise PeerLostError("the connection was broken")
            group.result(0)._set_default_timeout(timedelta(seconds=timeout_s))
            return cls(group.result(), addresses)
        except PeerLostError:
            raise
        except (RuntimeError, TimeoutError) as error:
            is_late = time.monotonic() > deadline
            listening = [f"rank {peer} on {each[0][0]}" for peer, each in listens.items() if each]
            why = f"no way within {timeout_s:.3g} s" if is_late else str(error)
            raise (CollectiveTimeoutError if is_late else TransportError)(
                f"rank {rank} could not connect to the others: {why}. They listen: "
                f"{', '.join(listening)}. If one of these cannot be reached, {_ADVICE}"
            ) from error
        finally:
            del group  # or its error, which refers to this frame, would keep it


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

    def call(self, function: Callable[[], Answer], given_up: Callable[[], bool]) -> Answer:
        """Call a function, and raise what it raises."""
        if self._thread is None:
            try:
                self._thread = start_thread(self._serve, "ringcoll-gloo")
            except GroupBrokenError:  # the program ends
                return function()
        call, is_over = Future[Answer](), threading.Event()
        call.add_done_callback(lambda _: is_over.set())
        self._calls.put(partial(settle_call, function, call))
        while not is_over.wait(_LOOK_S):
            if given_up():
                raise PeerLostError("the connection was broken")
        return call.result()

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
        self._addresses: set[Address] = set()
        self._aside = _Aside()

    def connect(self, timeout_s: float) -> None:
        """Make the group; see `Transport.connect`."""
        deadline, given_up = time.monotonic() + timeout_s, lambda: self._aborted
        self.hosts = meet(self._meeting, self, timeout_s, given_up)
        try:
            store, loops = own_connection(self._store), _loops()
        except TransportError as error:
            raise TransportError(f"rank {self.rank} could not connect: {error}") from error
        limits = left_s(deadline), given_up
        mesh = GlooMesh.connect(store, self.rank, self.world_size, *limits)
        self._group, self._addresses = mesh
        self._group._set_default_timeout(timedelta(seconds=timeout_s))
        _wake_gently(_loops() - loops)  # by now each device's thread has its name

    def bind(self, receives: Sequence[Message], sends: Sequence[Message]) -> Start:
        """Make messages ready; see `Transport.bind`."""
        recv, send = self._group.recv, self._group.send
        ready = [(recv, message) for message in receives]
        ready += [(send, message) for message in sends]

        def post(mixed: int) -> list[Handle]:
            handles: list[Handle] = []
            for start, (peer, tensor, tag, _) in ready:
                try:
                    work = start([tensor], peer, tag ^ mixed)
                    handles.append(work if tensor.nbytes <= _LONG else _Long(work))
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
