"""Point-to-point messages over torch's NCCL, for CUDA tensors.

NCCL ignores tags: messages between two ranks match by order, and operations posted one by one can
hang. So all messages of a wave are posted as one group. A group must stay under 256 operations, and
both ends of a message must put it in the same group; values that both compute alike decide that:
how far the receiver is from the sender, and which of the messages of that pair it is. Messages are
bytes, as NCCL has no int16, bool, complex and other types of torch.

What it rests on, in torch (``ProcessGroupNCCL.cpp``, main of 2025, and 2.13's bindings):

- ``batch_isend_irecv`` is ``_start_coalescing``, sends and receives, ``_end_coalescing`` of the
  group (``distributed_c10d.py``, ``_coalescing_manager``). On a backend, as here, these two take no
  argument; on a ``ProcessGroup``, which passes them on, they take the device.
- The first batch would make the communicator, and all ranks would have to join it. So
  ``eager_connect_single_device`` makes it before; ``pointToPoint`` uses it for every message.
  Making it waits on the host for all ranks; `abort` does not end that wait.
- Messages run on a stream of the group's. ``pointToPoint`` lets it wait for the current stream
  (``syncStream``) and tells the allocator that it uses the tensor (``recordStream``);
  ``endCoalescing`` records an event after the group's end, and returns a work; it returns
  ``nullptr`` if it was given no message, or takes the messages for synchronous ones
  (``coalescedAsync_``). ``WorkNCCL::wait`` makes the current stream wait for that event
  (``synchronizeStream``), and the host only if ``TORCH_NCCL_BLOCKING_WAIT`` says so. It raises
  nothing: a message whose peer is dead occupies the stream until the communicator is aborted, and
  the host goes on. `Monitor` looks after that.
- In a capture ``endCoalescing`` does not give the work to the watchdog, which would query its
  event. The group's stream joins the capture by ``syncStream``, and is joined by ``wait``.
- By default the watchdog ends the process when a work takes longer than the group's time limit.
  Once a group is aborted, the watchdog looks at nothing.
- ``shutdown`` waits for what is enqueued, for the ranks of the node to come too, and for CUDA
  graphs that hold messages of the group, without a limit, and with a lock that ``abort`` needs.
  ``abort`` waits as long as the group's time limit, then raises. Both let go of the GIL.
- NCCL up to 2.29 refuses ranks that share a GPU ("Duplicate GPU detected", ``init.cc``).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringcoll.errors import ArgumentError, CollectiveTimeoutError, PeerLostError, TransportError
from ringcoll.runtime.machine import ranks_may_share_gpus
from ringcoll.runtime.process import call_in_thread, start_thread
from ringcoll.runtime.transport.base import Handle, Message, Start, Transport
from ringcoll.runtime.transport.meeting import meet_with_texts
from ringcoll.runtime.transport.streams import beside, gpu, nccl_version

_log = logging.getLogger("ringcoll")
_ABORT_S = 5.0  # for a group to be aborted; the caller has an error to raise
_WATCHDOG = timedelta(days=1)  # torch's, which ends the process; `Monitor` keeps time limits
_BETWEEN_S = 0.02  # between two looks whether `connect` is given up
_SHUTDOWN_S = 10.0  # for a group to finish what is enqueued, and its peers too
_OTHERWISE = (
    'CUDA tensors travel otherwise: cuda_transport="ucx" or "gloo", or RINGCOLL_CUDA_TRANSPORT'
)
# Distances in one group; each is a send and a receive, so half of 256 at most.
_DISTANCES = 64
_METHODS = (
    "_start_coalescing", "_end_coalescing", "eager_connect_single_device", "send", "recv", "abort",
    "shutdown",
)  # fmt: skip


def grouped(
    rank: int, world_size: int, receives: Sequence[Message], sends: Sequence[Message]
) -> list[tuple[list[int], list[int]]]:
    """Divide the messages of a wave into groups that all ranks form alike.

    Each is (receives, sends): indices into the arguments, in the order in which to post them.
    """
    groups: dict[tuple[int, int], tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for kind, messages in enumerate((receives, sends)):
        seen: dict[int, int] = defaultdict(int)
        for index, message in enumerate(messages):
            ahead = message.peer - rank if kind else rank - message.peer
            key = (seen[message.peer], ahead % world_size // _DISTANCES)
            seen[message.peer] += 1
            groups[key][kind].append(index)
    return [groups[key] for key in sorted(groups)]


def as_one(group: Any, calls: Iterable[Callable[[], object]]) -> Any:
    """Make calls that start messages of a group of NCCL, as one group call.

    Returns the work, or ``None`` if NCCL has started nothing.
    """
    try:
        group._start_coalescing()
        for call in calls:
            call()
        return group._end_coalescing()
    except BaseException:
        with contextlib.suppress(RuntimeError):
            group._end_coalescing()  # an open batch would take in all later calls of this thread
        raise


def check() -> None:
    """Raise `ArgumentError` if torch has no NCCL."""
    if not dist.is_nccl_available():
        raise ArgumentError("this torch has no NCCL")


def private_group(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> Any:
    """A group of NCCL that nobody else uses, of the class that this module describes.

    From torch 2.15 on the name ``nccl`` means another class, ``ProcessGroupNCCL2``, unless
    ``TORCH_DIST_USE_NCCL2=0``. ``ProcessGroupNCCL`` stays what it was (pytorch 192281, and the
    bindings of torch's main branch of September 2026). Raises `TransportError` if this torch has no
    such class, or another class of that name.
    """
    try:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        group = dist.ProcessGroupNCCL(store, rank, world_size, options)
        lacks = [name for name in _METHODS if not hasattr(group, name)]
    except (AttributeError, TypeError) as error:
        lacks = [str(error)]
    if lacks:
        raise TransportError(
            f"rank {rank}: ProcessGroupNCCL of torch {torch.__version__} is not the class that "
            f"ringcoll knows (it lacks {', '.join(lacks)}). Let {_OTHERWISE}"
        )
    return group


def make(
    store: dist.Store, rank: int, world_size: int, device: torch.device, timeout_s: float
) -> Transport:
    """Make the transport, with a group of NCCL of its own."""
    inner = private_group(dist.PrefixStore("nccl", store), rank, world_size, _WATCHDOG)
    shared = ranks_may_share_gpus(nccl_version())
    return NcclTransport(inner, device, store, None if shared else gpu(device))


class Ending:
    """Ends a ``ProcessGroupNCCL``, once, in a thread: `abort` and `shutdown` may wait for ever.

    The thread is there from the beginning: while the interpreter ends, Python starts no thread
    any more (3.12 on). It enters the device of the group, as CUDA's current device is the thread's.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self._group, self._ended = group, False
        self._calls: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._thread = start_thread(_call, "ringcoll-nccl-end", self._calls, device)
        # If nobody ends the group, the thread ends with this object.
        weakref.finalize(self, self._calls.put, lambda: None).atexit = False

    def abort(self) -> None:
        """End the group at once, without an error of NCCL."""
        self._end(self._group.abort, _ABORT_S)

    def shutdown(self) -> None:
        """End the group when all enqueued work is done here and at the peers; wait some seconds."""
        self._end(self._group.shutdown, _SHUTDOWN_S)

    def _end(self, call: Callable[[], object], limit_s: float) -> None:
        if self._ended:
            return
        self._ended = True
        self._calls.put(call)
        self._thread.join(limit_s)
        if self._thread.is_alive():
            _log.warning("NCCL has not ended a group within %g s; nobody waits any more", limit_s)


def _call(calls: queue.SimpleQueue[Callable[[], object]], device: torch.device) -> None:
    call = calls.get()
    with contextlib.suppress(RuntimeError), beside(device):
        call()


@dataclass(slots=True, eq=False)
class _Batch:
    """A group of messages on its way: torch's work, and the tensors, which it keeps alive."""

    work: Any
    tensors: Sequence[Tensor]


_NOTHING = _Batch(None, ())


class NcclTransport(Transport):
    """Messages over a ``ProcessGroupNCCL`` that nobody else uses.

    Completion is ordered by the stream: after `wait`, later work on the current stream sees the
    data; the host does not block. ``gpu`` is the identity of this rank's GPU; ``None`` if ranks may
    share a GPU.
    """

    name = "nccl"
    ordered = True
    waits_on_host = False

    def __init__(
        self, group: Any, device: torch.device, store: dist.Store, gpu: str | None = None
    ) -> None:
        self._group, self.device, self._store, self._gpu = group, device, store, gpu
        self.rank, self.world_size = group.rank(), group.size()
        self.hosts: tuple[int, ...] = ()
        self._aborted = False
        self._ending = Ending(group, device)

    def connect(self, timeout_s: float) -> None:
        """Connect all ranks; see `Transport.connect`."""
        given_up = lambda: self._aborted  # noqa: E731
        self.hosts, gpus = meet_with_texts(self._store, self, timeout_s, given_up, self._gpu or "")
        self._check_gpus(gpus)
        # NCCL does not wake a thread that waits in it: the thread stays behind.
        connected = call_in_thread(self._make_communicator)
        deadline = time.monotonic() + timeout_s
        while not connected.done():
            if self._aborted:
                raise PeerLostError(f"rank {self.rank} gave up connecting over NCCL")
            if time.monotonic() >= deadline:
                raise CollectiveTimeoutError(
                    f"rank {self.rank} waited {timeout_s:g} s for NCCL to connect the ranks"
                )
            wait([connected], _BETWEEN_S)
        try:
            connected.result()
        except (RuntimeError, ValueError) as error:
            raise TransportError(
                f"rank {self.rank} could not connect to the others over NCCL: {error}"
            ) from error

    def _make_communicator(self) -> None:
        with beside(self.device):
            self._group.eager_connect_single_device(self.device)

    def _check_gpus(self, gpus: Sequence[str]) -> None:
        """Refuse ranks that share a GPU, on all ranks, before NCCL does with less words."""
        for shared, count in Counter(gpus).items():
            if self._gpu and shared and count > 1:
                ranks = ", ".join(str(peer) for peer, other in enumerate(gpus) if other == shared)
                raise TransportError(
                    f"rank {self.rank}: ranks {ranks} share one GPU ({shared}), over which NCCL "
                    "does not connect them (from 2.30 on it does with "
                    "NCCL_MULTI_RANK_GPU_ENABLE=1). "
                    f"Give each rank a GPU of its own, or let {_OTHERWISE}"
                )

    def bind(self, receives: Sequence[Message], sends: Sequence[Message]) -> Start:
        """Make messages ready; see `Transport.bind`."""
        tensors = [message.tensor.view(torch.uint8) for message in (*receives, *sends)]
        recv, send = self._group.recv, self._group.send
        batches = []
        for incoming, outgoing in grouped(self.rank, self.world_size, receives, sends):
            batch = [(recv, index, receives[index].peer) for index in incoming]
            batch += [(send, len(receives) + index, sends[index].peer) for index in outgoing]
            # Nobody misses empty messages; torch does not give them to NCCL either.
            batch = [message for message in batch if tensors[message[1]].numel()]
            calls = [functools.partial(start, [tensors[i]], peer, 0) for start, i, peer in batch]
            batches += [(calls, [index for _, index, _ in batch])] if batch else []

        def post(mixed: int) -> list[Handle]:  # tags are ignored
            handles: list[Handle] = [_NOTHING] * len(tensors)
            for calls, indices in batches:
                try:
                    work = as_one(self._group, calls)
                except RuntimeError as error:
                    raise PeerLostError(str(error)) from error
                if work is None:
                    raise TransportError(
                        f"rank {self.rank} gave NCCL {len(calls)} messages, and got no work "
                        "for them"
                    )
                handle = _Batch(work, [tensors[index] for index in indices])
                for index in indices:
                    handles[index] = handle
            return handles

        return post

    def wait(self, handle: Handle, timeout_s: float) -> None:
        """Order the current stream after the message; see `Transport.wait`."""
        assert isinstance(handle, _Batch)
        try:
            if handle.tensors:  # in one operation, once is enough
                handle.work.wait()
                handle.tensors = ()
        except RuntimeError as error:  # with ``TORCH_NCCL_BLOCKING_WAIT``
            raise PeerLostError(str(error)) from error

    def is_over(self, handle: Handle) -> bool:
        """Whether the GPU is done with the message; see `Transport.is_over`."""
        assert isinstance(handle, _Batch)
        return handle.work is None or bool(handle.work.is_completed())

    def abort(self) -> None:
        """Abort the group's communicators."""
        self._aborted = True
        self._ending.abort()

    def close(self) -> None:
        """Shut the group down, unless it was aborted."""
        self._ending.shutdown()
