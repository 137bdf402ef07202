"""Point-to-point messages over UCX: shared memory, CUDA IPC, and the network.

Installed with the extra ``ringcoll[ucx]``. Facts it rests on (ucxx 0.52, libucx 1.21):

- Nothing moves by itself: a rank that waits calls ``progress``. A rank may leave when its sends are
  complete. So `UcxTransport.connect` connects all pairs: the first message of a rank that has left
  would wait for the next operation of its receiver.
- Medium and large sends read the sender's memory in place until they are complete.
- UCX's error handling reports a peer's death, but excludes shared memory. So it is on for peers on
  other hosts only. On the same host a ``pidfd`` tells of the end of each peer's process.
- CMA, by which UCX copies long messages straight between processes of one host, ends the process
  when a peer dies in such a copy (`ucs_fatal` in cma_ep.c). So it is left out, unless ``UCX_TLS``
  says otherwise: 16 MiB then take 1.6 times as long on 2 ranks, and 2.8 times on 4 ranks of 2
  cores. The transport ``shared``, which ``"auto"`` takes on one host, copies so, and lives.
- A host that vanishes ends no connection. The kernel's keepalive does, in whole seconds
  (``TCP_KEEPIDLE`` and the like; UCX's own ``KEEPALIVE_INTERVAL`` noticed nothing), while no data
  are on their way to it; otherwise the time limit ends the wait.
- A rank that waits looks for a while and then sleeps in the kernel: a worker with ``WAKEUP`` has a
  descriptor that is ready when something has come. With two busy loops beside two ranks on two
  cores, an exchange of 4 bytes takes 0.07 ms so (median; mean 0.3), and 0.8 ms (mean 4) by yielding
  the processor. The same call reports deaths of peers, and `abort` in another thread.
- A tag of UCX has 64 bits and is matched over the whole worker, of which each transport has its
  own: the sender's rank is above the 31 bits of the message's tag.

CUDA tensors
------------
UCX reads and writes the memory of the device itself. The sources of UCX 1.21 and ucxx 0.52 say:

- UCX copies on streams of its own, which do not wait for the caller's (``CU_STREAM_NON_BLOCKING``,
  ``uct_cuda_base_init_stream``). So `post` waits on the host until the current stream has run dry:
  a send's data may still be computed, and a receive's memory still be in use.
- A message that is complete is complete on the device: long copies count as done when
  ``cuEventQuery`` says so (``uct_cuda_base_progress_event_queue``), short ones are followed by
  ``cuStreamSynchronize`` (``uct_cuda_copy_ep_rma_short``). So nothing has to wait after `wait`.
- ``cuda_ipc`` opens the whole allocation that a tensor is part of (``cuIpcGetMemHandle``), and
  knows by its ``BUFFER_ID`` when another one has taken its address. Both processes may be on one
  GPU. Within a process CUDA opens no handle of its own.
- Memory that was not made by ``cudaMalloc`` has no handle for other processes unless it can be
  exported as a fabric handle (``uct_cuda_ipc_mem_add_reg``). Torch's expandable segments cannot:
  UCX would go through host memory without a word (openucx/ucx issue 11548). So they are refused:
  `check_device` reads the allocator's settings, and `bind` asks CUDA about each tensor for a peer
  on this host. If ``UCX_TLS`` leaves ``cuda_ipc`` out, no memory is exported, and none is refused.
- Where ``libuct_cuda.so`` cannot be loaded, for want of ``libcuda.so.1`` or ``libnvidia-ml.so.1``,
  UCX takes addresses of a GPU for those of the host, and the process ends by a signal. So a context
  for CUDA tensors has to list ``cuda_copy`` among its resources. (`UCXContext.cuda_support` is
  ``True`` on machines without a GPU, too: `context.cpp`.)
- CUDA looks up for every message whether an address is of a GPU: ucxx turns UCX's cache of that off
  (``UCX_MEMTYPE_CACHE=n``), which misses what was allocated before (openucx/ucx issue 2755).
- A context asks which devices are near to the device that is current
  (``uct_cuda_base_query_devices_common``). So each device has its own, and so has CPU memory.
- UCX looks for CUDA's current context in whatever thread calls. So a thread that aborts or closes
  enters the device first.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import select
import threading
import time
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ringcoll.errors import (
    ArgumentError,
    CollectiveTimeoutError,
    MissingExtraError,
    PeerLostError,
    TransportError,
)
from ringcoll.runtime.machine import cores, expandable_segments
from ringcoll.runtime.rendezvous import read_from_ranks
from ringcoll.runtime.transport.base import (
    Handle,
    Message,
    Start,
    Transport,
    devices_of,
    left_s,
    settle,
)
from ringcoll.runtime.transport.meeting import meet

# A host that vanishes is missed after 3 + 5 * 1 seconds of silence; short outages are not.
_KEEPALIVE = {"TCP_KEEPIDLE": "3s", "TCP_KEEPINTVL": "1s", "TCP_KEEPCNT": "5"}
# Beside the memory of `sysv`, which it uses, UCX makes that of `posix`: files of 4 MiB, whose names
# it takes away when it has written them (`uct_posix_mem_alloc`), so that a process which is killed
# meanwhile leaves them behind.
_OPTIONS = {**_KEEPALIVE, "TLS": "^cma,posix"}
# Over TCP UCX would send a long message by active messages, and two hosts that send to each other
# wait for one another: 4 MiB each way on links of 200 Mbit/s take 344 ms so, and 179 ms when they
# are put into the receiver's memory.
_OVER_TCP = {"RNDV_SCHEME": "put_zcopy"}
_LOOPBACK, _RDMA = Path("/sys/class/net/lo"), Path("/sys/class/infiniband")
# Of cuda.h: two numbers of `CUpointer_attribute`, and a bit of `CUmemAllocationHandleType`.
_IS_LEGACY_CUDA_IPC_CAPABLE, _ALLOWED_HANDLE_TYPES, _FABRIC = 10, 14, 8
_ABORT = 1 << 63  # the tag of the message that says: give up
_MOVES = 1000  # times that messages are moved on, for what is on its way
_SPINS = 500  # looks before sleeping, with a core for each rank: some 0.15 ms
_CLOSING_S = 0.1  # for the connections of a broken group to be closed, on a busy machine
_SLEEP_S = 0.5  # between two looks at the clock and at peers on other hosts
_NOTHING = bytearray(1)  # the content of an empty message


@functools.cache
def core() -> Any:
    """Ucxx's core."""
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")  # it warns of every UCX_ variable
    try:
        return import_module("ucxx._lib.libucxx")
    except ImportError as error:
        raise MissingExtraError(
            "UCX comes with ringcoll[ucx]: pip install 'ringcoll[ucx]'"
        ) from error
    except OSError as error:  # an MPI library may have loaded a UCX of its own
        raise MissingExtraError(f"UCX cannot be loaded into this process: {error}") from error


@functools.cache
def context_of(device: torch.device, is_local: bool) -> Any:
    """The context of the process for a device, which has to be current.

    If it is for ranks of this host only (``is_local``), it listens on the loopback interface.
    """
    ucx = core()
    asked = dict(_OPTIONS)
    if is_local and _LOOPBACK.exists():
        asked["NET_DEVICES"] = _LOOPBACK.name
    if not is_local and device.type == "cpu" and not (_RDMA.exists() and [*_RDMA.iterdir()]):
        asked |= _OVER_TCP
    options = {key: value for key, value in asked.items() if f"UCX_{key}" not in os.environ}
    context = ucx.UCXContext(options, (ucx.Feature.TAG, ucx.Feature.WAKEUP))
    if device.type == "cuda" and not lists(context, "cuda_copy"):
        raise ArgumentError(
            "UCX has no CUDA support in this process: it needs libuct_cuda.so, libcuda.so.1 and "
            "libnvidia-ml.so.1, and UCX_TLS, if it is set, has to allow cuda_copy and cuda_ipc; "
            "ucx_info -d shows what UCX has, UCX_LOG_LEVEL=debug why not more"
        )
    return context


def lists(context: Any, resource: str) -> bool:
    """Whether a context has some of UCX's ways to move data; see the module."""
    return f" {resource}/" in context.info


@contextlib.contextmanager
def current(device: torch.device) -> Iterator[None]:
    """Make a CUDA device current, and its context too."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        settle([device])  # before the first work there may be no context
        yield


@contextlib.contextmanager
def entered(device: torch.device) -> Iterator[None]:
    """Make a CUDA device current, and its context too, without waiting for its work.

    A device that has failed is let be: who aborts or closes goes on.
    """
    with contextlib.ExitStack() as stack:
        if device.type == "cuda":
            with contextlib.suppress(RuntimeError):
                stack.enter_context(torch.cuda.device(device))
                # Before the first call there is no context.
                torch.cuda.current_stream(device).query()
        yield


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def is_exportable(address: int) -> bool:
    """Whether CUDA IPC lets other processes open memory, as far as CUDA says."""
    attribute, pointer = _driver().cuPointerGetAttribute, ctypes.c_uint64(address)
    is_legacy, handles = ctypes.c_int(), ctypes.c_uint64()
    if attribute(ctypes.byref(is_legacy), _IS_LEGACY_CUDA_IPC_CAPABLE, pointer) or is_legacy.value:
        return True
    failed = attribute(ctypes.byref(handles), _ALLOWED_HANDLE_TYPES, pointer)
    return not failed and bool(handles.value & _FABRIC)


def _process_and_address(about: Any) -> tuple[int, bytes]:
    return about["pid"], bytes.fromhex(about["address"])


@functools.cache
def array_type() -> Any:
    """Ucxx's class of memory that can be sent."""
    return import_module("ucxx._lib.arr").Array


@functools.lru_cache(maxsize=4096)
def _at(address: int, nbytes: int, kind: str) -> Any:
    """Some bytes of memory as ucxx takes them, which takes 5 us; it keeps no memory alive.

    An address of the host may later be an address of a device, so the kind of device is in the key.
    """
    if kind != "cuda":
        return array_type()((ctypes.c_char * nbytes).from_address(address))
    # As bytes, whatever the dtype. Of the interface, ucxx reads these, and `strides`.
    interface = {"data": (address, False), "typestr": "|u1", "shape": (nbytes,), "version": 3}
    return array_type()(SimpleNamespace(__cuda_array_interface__=interface))


def buffer_of(tensor: Tensor) -> Any:
    """The memory of a tensor as ucxx takes it."""
    nbytes = tensor.nbytes
    return _at(tensor.data_ptr(), nbytes, tensor.device.type) if nbytes else array_type()(_NOTHING)


def check() -> None:
    """Make sure that UCX is installed."""
    core()


def check_device(device: torch.device) -> None:
    """Make sure that UCX can send the memory of a CUDA device."""
    try:
        with current(device):
            context = context_of(device, True)
    except core().UCXError as error:
        raise TransportError(f"UCX cannot start: {error}") from error
    setting = expandable_segments()
    if setting and lists(context, "cuda_ipc"):
        raise ArgumentError(
            f"{setting} makes torch allocate memory that CUDA IPC cannot export; leave "
            "expandable_segments out, or take another transport"
        )


def make(
    store: dist.Store, rank: int, world_size: int, device: torch.device, timeout_s: float
) -> Transport:
    """Make the transport."""
    return UcxTransport(store, rank, world_size, device)


class UcxTransport(Transport):
    """Messages over UCX, which chooses its ways for the memory of a device.

    Messages of CPU tensors may be sent as well. Raises `MissingExtraError` without ucxx.
    """

    name = "ucx"
    ordered = False

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        device: torch.device = torch.device("cpu"),  # noqa: B008  # it is immutable
    ) -> None:
        self._ucx = core()
        self._device = device
        self.rank, self.world_size = rank, world_size
        self.hosts: tuple[int, ...] = ()
        self._store, self._aborted = store, False
        self._peers_know = False  # the peers know that this transport is at its end
        self._at_end = threading.RLock()  # `abort` may run in one thread, `close` in another
        self._worker: Any = None
        self._endpoints: dict[int, Any] = {}
        self._abouts: dict[int, tuple[int, bytes]] = {}  # what peers have told: process, address
        self._lives: dict[int, int] = {}  # pidfds of peers on this host
        self._ended: set[int] = set()  # peers on this host whose process has ended
        self._far: set[int] = set()  # peers on other hosts, whose endpoints know when they end
        self._heard: Any = None  # the request that an `abort` of a peer completes
        self._spins = _SPINS
        self._exports = False  # whether peers on this host open this process's memory
        self._keep: list[object] = []
        # It wakes the thread that sleeps.
        self._alarm = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._sleeper = select.poll()

    def connect(self, timeout_s: float) -> None:
        """Connect to all ranks; see `Transport.connect`."""
        store, ucx = self._store, self._ucx
        since_s = time.monotonic()
        deadline = since_s + timeout_s
        given_up = lambda: self._aborted  # noqa: E731
        self.hosts = meet(store, self, timeout_s, given_up)
        own_host = self.hosts[self.rank]
        try:
            with current(self._device):
                context = context_of(self._device, len(set(self.hosts)) == 1)
                self._worker = ucx.UCXWorker(context)
            self._exports = self._device.type == "cuda" and lists(context, "cuda_ipc")
            self._worker.init_blocking_progress_mode()
        except ucx.UCXError as error:  # of memory to share, for instance
            raise TransportError(f"rank {self.rank} cannot start UCX: {error}") from error
        self._descriptor = self._worker.epoll_file_descriptor
        for descriptor in (self._descriptor, self._alarm):
            self._sleeper.register(descriptor, select.POLLIN)
        about = {"pid": os.getpid(), "address": bytes(self._worker.address).hex()}
        store.set(f"ucx/{self.rank}", json.dumps(about))
        tag, mask = ucx.UCXXTag(_ABORT), ucx.UCXXTagMask(_ABORT)
        self._heard = self._worker.tag_recv(self._byte(), tag, mask)
        if self.hosts.count(own_host) > cores():
            self._spins = 0
        # Every rank hears from every rank: so all are connected, and no rank leaves before. The
        # lower rank of a pair connects, and the higher rank answers. So UCX does not get two
        # connections of a pair at once, of which it drops one (`uct_tcp_cm_handle_simult_conn`).
        # A connection inside the host that carries nothing would only be missed at its end: TCP is
        # among its ways, without error handling, and whoever closes it last is told of a reset.
        peers = [
            peer
            for peer, host in enumerate(self.hosts)
            if peer != self.rank and not (self.is_far and host == own_host)
        ]
        self._abouts = read_from_ranks(
            store,
            "ucx",
            self.rank,
            peers,
            timeout_s,
            given_up,
            _process_and_address,
            since_s=since_s,
        )
        self._watch_peers(peers)
        # That happens twice: after the second time nothing that UCX says while it connects is on
        # its way. The kernel resets a connection that is closed with something unread, and forgets
        # what was sent on it.
        for _ in range(2):
            self._greet(peers, deadline)

    def _greet(self, peers: Sequence[int], deadline: float) -> None:
        """Send a message to every peer, and receive one; connect where that is to be done."""
        token = torch.zeros(2 * self.world_size, 1, dtype=torch.uint8, device="cpu")
        receives = self.post([Message(p, token[2 * p], 0) for p in peers], [])
        arriving = dict(zip(peers, receives, strict=True))
        higher = [peer for peer in peers if peer > self.rank]
        for peer in higher:
            self._connect_to(peer)
        leaving = self.post([], [Message(p, token[2 * p + 1], 0) for p in higher])
        for lower in peers[: len(peers) - len(higher)]:
            self.wait(arriving.pop(lower), left_s(deadline))
            self._connect_to(lower)
            leaving += self.post([], [Message(lower, token[2 * lower + 1], 0)])
        for handle in (*leaving, *arriving.values()):
            self.wait(handle, left_s(deadline))

    def _watch_peers(self, peers: Sequence[int]) -> None:
        """Begin to watch the processes on this host, and remember the peers on other hosts."""
        for peer in peers:
            if self.hosts[peer] != self.hosts[self.rank]:
                self._far.add(peer)
                continue
            try:
                self._lives[peer] = os.pidfd_open(self._abouts[peer][0])
            except (OSError, OverflowError):  # gone already: its messages will not come
                self._ended.add(peer)
            else:
                self._sleeper.register(self._lives[peer], select.POLLIN)

    def _connect_to(self, peer: int) -> None:
        """Make the endpoint of a peer, unless there is one."""
        if peer in self._endpoints:
            return
        try:
            self._endpoints[peer] = self._ucx.UCXEndpoint.create_from_worker_address(
                self._worker,
                self._ucx.UCXAddress.create_from_buffer(self._abouts[peer][1]),
                endpoint_error_handling=peer in self._far,
            )
        except self._ucx.UCXError as error:  # the peer has ended
            raise PeerLostError(f"UCX: {error}", peer=peer) from error

    def bind(self, receives: Sequence[Message], sends: Sequence[Message]) -> Start:
        """As `Transport.bind`; `ArgumentError` for memory of the GPU that cannot be exported."""
        if self._exports:
            for message in (*receives, *sends):
                self._check_memory(message)
        recv, of, everything = self._worker.tag_recv, self._ucx.UCXXTag, self._ucx.UCXXTagMaskFull
        own = self.rank << 31
        arriving = [
            (buffer_of(tensor), peer << 31 | tag, peer, tensor) for peer, tensor, tag, _ in receives
        ]
        leaving = [
            (self._endpoints[peer].tag_send, buffer_of(tensor), own | tag, peer, tensor)
            for peer, tensor, tag, _ in sends
        ]
        devices = devices_of((*receives, *sends))

        # The tensors are in the handles as well: they must not go while UCX uses their memory.
        def post(mixed: int) -> list[Handle]:
            if devices:
                settle(devices)  # before anything is started
            try:
                handles: list[Handle] = [
                    (recv(buffer, of(tag ^ mixed), everything), peer, tensor)
                    for buffer, tag, peer, tensor in arriving
                ]
                handles += [
                    (send(buffer, of(tag ^ mixed)), peer, tensor)
                    for send, buffer, tag, peer, tensor in leaving
                ]
            except self._ucx.UCXError as error:
                raise PeerLostError(f"UCX: {error}") from error
            return handles

        return post

    def _check_memory(self, message: Message) -> None:
        """Refuse memory that a peer on this host cannot open."""
        peer, tensor, _, _ = message
        is_opened = self.hosts[peer] == self.hosts[self.rank] and tensor.device.type == "cuda"
        if is_opened and tensor.nbytes and not is_exportable(tensor.data_ptr()):
            expected = "memory that cudaMalloc has made"
            got = f"{tensor.nbytes} bytes at {tensor.data_ptr():#x} on {tensor.device}"
            fault = (
                f"rank {peer} cannot open this memory by CUDA IPC; torch's expandable segments, "
                "for instance, are such memory (PYTORCH_ALLOC_CONF). Let torch allocate it without "
                'them, or take another transport: cuda_transport="gloo"'
            )
            raise ArgumentError(fault, "tensor", expected, got, self.rank)

    def wait(self, handle: Handle, timeout_s: float) -> None:
        """Wait for one message; see `Transport.wait`."""
        request, peer, _ = cast("tuple[Any, int, Tensor]", handle)
        progress = self._worker.progress
        if not request.completed:
            for _ in range(self._spins):
                progress()
                if request.completed:
                    break
            else:
                self._wait_long(request, peer, timeout_s)
        try:
            request.check_error()
        except self._ucx.UCXError as error:
            raise PeerLostError(f"UCX: {error}", peer=peer) from error

    def move(self) -> bool:
        """Move messages on; see `Transport.move`."""
        if self._worker is not None:
            self._worker.progress()
        return True

    def _wait_long(self, request: Any, peer: int, timeout_s: float) -> None:
        """Wait for a message asleep, and look around when something else happens."""
        worker, deadline = self._worker, time.monotonic() + timeout_s
        left_s, is_disturbed = timeout_s, peer in self._ended
        while True:
            worker.progress()
            if request.completed:
                return
            if is_disturbed or self._peer_gave_up() or left_s <= 0:
                self._look_around(request, peer, timeout_s if left_s <= 0 else None)
            is_asleep = worker.arm()  # nothing has come meanwhile
            pause_s = max(0.0, min(left_s, _SLEEP_S)) if is_asleep else 0.0
            ready = self._sleeper.poll(1000 * pause_s)
            is_disturbed = self._disturbs(ready) if ready else is_asleep
            left_s = deadline - time.monotonic()

    def _peer_gave_up(self) -> bool:
        return self._heard is not None and self._heard.completed

    def _disturbs(self, ready: list[tuple[int, int]]) -> bool:
        """Whether anything but the worker is ready; each peer's end makes it so once."""
        others = {descriptor for descriptor, _ in ready} - {self._descriptor}
        for peer, life in self._lives.items():
            if life in others:
                self._ended.add(peer)
                self._sleeper.unregister(life)
        return bool(others)

    def _look_around(self, request: Any, peer: int, exceeded_s: float | None) -> None:
        endpoint = self._endpoints.get(peer)  # not made yet while a lower rank connects
        error: TransportError | None = None
        if self._aborted or self._peer_gave_up():
            self._give_up()  # `close` may have completed the request, by cancelling it
            raise PeerLostError("the connection was broken", peer=peer)
        if peer in self._ended:
            self._progress()  # its last messages may still be on their way
            error = PeerLostError(f"the process of rank {peer} has ended", peer=peer)
        elif peer in self._far and endpoint is not None and not endpoint.alive:
            text = f"the connection to rank {peer}, on another host, has ended"
            error = PeerLostError(text, peer=peer)
        elif exceeded_s is not None:
            error = CollectiveTimeoutError(f"no message within {exceeded_s:g} s", peer=peer)
        if error is not None and not request.completed:  # it may have come before the end
            self._give_up()
            try:
                raise error
            finally:
                del error  # or its traceback keeps this frame, and the frame keeps it

    def _wake(self) -> None:
        self._aborted = True
        with contextlib.suppress(OSError, ValueError):  # closed
            os.eventfd_write(self._alarm, 1)

    def _give_up(self) -> None:
        """Take back what is in flight, so that nothing is written any more."""
        self._aborted = True
        with self._at_end, entered(self._device):
            if self._worker is not None:
                self._worker.cancel_inflight_requests()

    def abort(self) -> None:
        """Wake all who wait, here and at the peers."""
        self._wake()
        with self._at_end, entered(self._device):
            if self._worker is None or self._peers_know:
                return
            self._peers_know = True
            memory, key = self._byte(), self._ucx.UCXXTag(_ABORT | self.rank)
            for endpoint in self._endpoints.values():
                with contextlib.suppress(self._ucx.UCXError):  # its connection has ended
                    self._keep.append(endpoint.tag_send(memory, key))
            self._progress()

    def _byte(self) -> Any:
        """Memory of one byte, which stays until `close`."""
        memory = array_type()(bytearray(1))
        self._keep.append(memory)
        return memory

    def _progress(self) -> None:
        """Move messages on, for what is on its way to come here or to leave."""
        for _ in range(_MOVES):
            self.move()

    def _let_go(self, *, is_broken: bool) -> None:
        """Close the endpoints whose peers may not be there any more.

        An endpoint that is only dropped waits until its peer has taken everything: for ever, if the
        peer has ended, or has let go of a broken group first.
        """
        self._disturbs(self._sleeper.poll(0))
        for peer, endpoint in self._endpoints.items():
            # ucxx 0.52 ends the process if an endpoint is closed whose connection has failed: there
            # is nothing to wait for, and the request that it returns is none (`Endpoint::close`).
            if endpoint.alive and (is_broken or peer in self._ended):
                with contextlib.suppress(self._ucx.UCXError):
                    endpoint.close()
        # When the worker goes, it waits without end for endpoints that are not closed by then.
        deadline = time.monotonic() + (_CLOSING_S if is_broken or self._ended else 0.0)
        self._progress()
        while time.monotonic() < deadline:
            self._worker.progress()

    def close(self) -> None:
        """Let go of the connections."""
        is_broken = self._aborted
        self._wake()
        with self._at_end, entered(self._device):
            if self._worker is not None:
                if self._heard is not None and not self._heard.completed:
                    self._progress()  # a peer may have given up while this rank waited for nothing
                is_broken = is_broken or self._peer_gave_up()
                self._worker.cancel_inflight_requests()
                self._let_go(is_broken=is_broken)
            self._endpoints.clear()
            self._heard = self._worker = None
            self._keep.clear()
            for life in self._lives.values():
                os.close(life)
            self._lives.clear()
            if self._alarm >= 0:
                os.close(self._alarm)
                self._alarm = -1
