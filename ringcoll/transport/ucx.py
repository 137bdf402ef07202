"""Point-to-point messages over UCX, for CPU tensors: shared memory, CMA, and the network.

Installed with the extra ``ringcoll[ucx]``. Facts it rests on (ucxx 0.52, libucx 1.21):

- Nothing moves by itself: whoever waits calls ``progress``. A rank may leave as soon as its
  sends are complete; so all pairs are connected at once, in `UcxTransport.connect`, or
  the first message of a rank that has left would wait for its next operation.
- Medium and large sends read the sender's memory in place until they are complete.
- With UCX's error handling a peer's death is reported, but shared memory is excluded. So
  it is on for peers on other hosts only, where all goes through the network anyway: the
  connection ends with the peer's process. On the same host the process of each peer is
  watched by a ``pidfd``. Both are looked at while waiting.
- A host that vanishes ends no connection. The kernel's keepalive does, in whole seconds
  (``TCP_KEEPIDLE`` and the like; UCX's own ``KEEPALIVE_INTERVAL`` found nothing), where no
  data are on their way to it; what is sent to it is missed by the time limit.
- With more ranks than cores, a rank that spins keeps the one it waits for from running.

A tag of UCX has 64 bits and is matched over the whole worker, of which each transport has
its own: the sender's rank is above the 31 bits of the message's tag.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import time
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ringcoll.errors import CollectiveTimeoutError, MissingExtraError, PeerLostError
from ringcoll.transport.base import Handle, Message, meet

__all__ = ["UcxTransport"]

_ABORT = 1 << 63  # the tag of the message that says: give up
_SPINS = 2000  # looks before the processor is given away: some 0.5 ms
# A host that vanishes is missed after 3 + 5 * 1 seconds of silence; short outages are not.
_KEEPALIVE = {"TCP_KEEPIDLE": "3s", "TCP_KEEPINTVL": "1s", "TCP_KEEPCNT": "5"}
_LOOKS = 200  # between two looks at the clock, the peers and `abort`


@functools.cache
def _ucx() -> Any:
    """Ucxx's core.

    Raises
    ------
    MissingExtraError
        It is not installed.
    """
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")  # it warns of every UCX_ variable
    try:
        return import_module("ucxx._lib.libucxx")
    except ImportError as error:
        raise MissingExtraError(
            "UCX comes with ringcoll[ucx]: pip install 'ringcoll[ucx]'"
        ) from error


@functools.cache
def _context() -> Any:
    """One for the process."""
    ucx = _ucx()
    told = {key: value for key, value in _KEEPALIVE.items() if f"UCX_{key}" not in os.environ}
    return ucx.UCXContext(told, (ucx.Feature.TAG,))


@functools.cache
def _array() -> Any:
    return import_module("ucxx._lib.arr").Array


_NOTHING = bytearray(1)  # what an empty message carries


def _buffer(tensor: Tensor) -> Any:
    if tensor.numel() == 0:
        return _array()(_NOTHING)
    # A tensor of one element may have any stride, which no view of its bytes can have.
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return _array()(flat.view(torch.uint8).numpy())


class _Request(NamedTuple):
    """A message on its way; the tensor must outlive it."""

    request: Any
    peer: int
    tensor: Tensor


class UcxTransport:
    """Messages over UCX.

    Parameters
    ----------
    store
        Seen by all ranks of the group, and used by nobody else.
    rank, world_size
        This rank, and the number of ranks.

    Raises
    ------
    MissingExtraError
        ucxx is not installed.
    """

    name = "ucx"
    ordered = False

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self._ucx = _ucx()
        self.rank, self.world_size = rank, world_size
        self.hosts: tuple[int, ...] = ()
        self._store = store
        self._aborted = self._closed = False
        self._worker: Any = None
        self._endpoints: dict[int, Any] = {}
        self._lives: dict[int, int] = {}  # pidfds of peers on this host
        self._far: set[int] = set()  # peers on other hosts, whose endpoints know when they end
        self._heard: Any = None  # the request that an `abort` of a peer completes
        self._spins = _SPINS
        self._keep: list[object] = []

    @staticmethod
    def check() -> None:
        """Make sure that UCX is there.

        Raises
        ------
        MissingExtraError
            It is not.
        """
        _ucx()

    def connect(self, timeout_s: float) -> None:
        """Connect to all ranks; see `Transport.connect`."""
        store, ucx = self._store, self._ucx
        deadline = time.monotonic() + timeout_s
        self._worker = ucx.UCXWorker(_context())
        about = {"pid": os.getpid(), "address": bytes(self._worker.address).hex()}
        store.set(f"ucx/{self.rank}", json.dumps(about))
        self.hosts = meet(
            store, self.rank, self.world_size, timeout_s, self.name, lambda: self._aborted
        )
        own_host = self.hosts[self.rank]
        for peer in range(self.world_size):
            if peer == self.rank:
                continue
            theirs = json.loads(store.get(f"ucx/{peer}"))
            far = self.hosts[peer] != own_host
            if far:
                self._far.add(peer)
            else:
                with contextlib.suppress(OSError):  # gone already: its messages will not come
                    self._lives[peer] = os.pidfd_open(theirs["pid"])
            self._endpoints[peer] = ucx.UCXEndpoint.create_from_worker_address(
                self._worker,
                ucx.UCXAddress.create_from_buffer(bytes.fromhex(theirs["address"])),
                endpoint_error_handling=far,
            )
        if self.hosts.count(own_host) > len(os.sched_getaffinity(0)):
            self._spins = 0
        told = _array()(bytearray(1))
        self._keep.append(told)
        self._heard = self._worker.tag_recv(told, ucx.UCXXTag(_ABORT), ucx.UCXXTagMask(_ABORT))
        # Everybody hears from everybody: so all are connected, and nobody leaves before.
        token = [torch.zeros(1, dtype=torch.uint8) for _ in range(2 * self.world_size)]
        peers = list(self._endpoints)
        handles = self.post(
            [Message(peer, token[2 * peer], 0) for peer in peers],
            [Message(peer, token[2 * peer + 1], 0) for peer in peers],
        )
        for handle in handles:
            self.wait(handle, max(deadline - time.monotonic(), 0.001))

    def post(self, receives: Sequence[Message], sends: Sequence[Message]) -> list[Handle]:
        """Start messages; see `Transport.post`."""
        ucx, worker = self._ucx, self._worker
        handles: list[Handle] = []
        for peer, tensor, tag in receives:
            key = ucx.UCXXTag(peer << 31 | tag)
            request = worker.tag_recv(_buffer(tensor), key, ucx.UCXXTagMaskFull)
            handles.append(_Request(request, peer, tensor))
        for peer, tensor, tag in sends:
            key = ucx.UCXXTag(self.rank << 31 | tag)
            handles.append(
                _Request(self._endpoints[peer].tag_send(_buffer(tensor), key), peer, tensor)
            )
        return handles

    def wait(self, handle: Handle, timeout_s: float) -> None:
        """Wait for one message; see `Transport.wait`."""
        assert isinstance(handle, _Request)
        request, progress = handle.request, self._worker.progress
        looks, deadline = 0, time.monotonic() + timeout_s
        while not request.completed:
            progress()
            looks += 1
            if looks > self._spins:
                time.sleep(0)  # gives away the processor, and Python's lock
            if looks % _LOOKS == 0:
                self._look_around(handle, deadline, timeout_s)
        try:
            request.check_error()
        except self._ucx.UCXError as error:
            raise PeerLostError(f"UCX: {error}", peer=handle.peer) from error

    def _look_around(self, handle: _Request, deadline: float, timeout_s: float) -> None:
        """Whether there is a reason to stop waiting."""
        if self._aborted or (self._heard is not None and self._heard.completed):
            self._give_up()
            raise PeerLostError("the connection was broken", peer=handle.peer)
        life = self._lives.get(handle.peer)
        if life is not None and select.select([life], [], [], 0)[0]:
            # What it sent before may still be on its way.
            for _ in range(1000):
                self._worker.progress()
            if not handle.request.completed:
                self._give_up()
                raise PeerLostError(
                    f"the process of rank {handle.peer} has ended", peer=handle.peer
                )
        gone = handle.peer in self._far and not self._endpoints[handle.peer].alive
        if gone and not handle.request.completed:  # it may have come before the end
            self._give_up()
            raise PeerLostError(
                f"the connection to rank {handle.peer}, on another host, has ended",
                peer=handle.peer,
            )
        if time.monotonic() > deadline:
            self._give_up()
            raise CollectiveTimeoutError(f"no message within {timeout_s:g} s", peer=handle.peer)

    def _give_up(self) -> None:
        """Take back what is in flight, so that nothing is written any more."""
        self._aborted = True
        self._worker.cancel_inflight_requests()

    def abort(self) -> None:
        """Wake all who wait, here and at the peers."""
        already, self._aborted = self._aborted, True
        if self._worker is None or already:
            return
        said = _array()(bytearray(1))
        key = self._ucx.UCXXTag(_ABORT | self.rank)
        self._keep.append(said)
        self._keep += [endpoint.tag_send(said, key) for endpoint in self._endpoints.values()]
        for _ in range(1000):
            self._worker.progress()

    def close(self) -> None:
        """Let go of the connections."""
        if self._closed:
            return
        self._closed = True
        if self._worker is not None:
            self._worker.cancel_inflight_requests()
        self._endpoints.clear()
        self._heard = self._worker = None
        self._keep.clear()
        for life in self._lives.values():
            os.close(life)
        self._lives.clear()
