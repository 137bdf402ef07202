"""Groups of the ranks of an MPI program; torch needs no process group for them.

::

    # mpiexec -n 4 python program.py
    import ringcoll, torch

    group = ringcoll.mpi_group()
    tensor = torch.arange(4.0) + group.rank()
    ringcoll.all_reduce(tensor, group=group, algorithm="ring")

Data travel by MPI's point-to-point messages: see `ringcoll.transport.mpi`; CUDA tensors pass
through host memory. What ranks say about each other when something takes too long goes
through a store that rank 0 holds, on the loopback interface if all ranks are on one host.
"""

from __future__ import annotations

import ctypes
import json
import socket
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ringcoll import __version__
from ringcoll.communicator import Communicator
from ringcoll.errors import ArgumentError, TransportError
from ringcoll.groups import OwnGroup
from ringcoll.launch import local_store
from ringcoll.streams import current_device
from ringcoll.transport.mpi import Channels, MpiTransport, channels, mpi, wait_for
from ringcoll.transport.staged import StagedTransport

__all__ = ["MpiGroup", "mpi_group"]

_LONGEST = 1024  # bytes of the store's address


class MpiGroup(OwnGroup):
    """One rank of a group of an MPI program; see `mpi_group`."""

    def __init__(self, communicator: Communicator, store: dist.Store) -> None:
        super().__init__(communicator)
        self._store, self._making = store, threading.Lock()
        _open.add(self)

    def on(self, device: torch.device) -> Communicator:
        """The communicator for tensors on a device; for CUDA tensors it is made on first use."""
        if device.type not in ("cpu", "cuda"):
            raise ArgumentError(
                "tensors on this device cannot be sent",
                rank=self.rank(),
                argument="tensor",
                expected="cpu or cuda",
                got=device,
            )
        if device.type == "cpu" or self not in _open:  # one that is closed says so
            return self.communicator
        with self._making:
            if len(self.members) == 1:
                self.members.append(self._for_cuda(device))
        return self.members[1]

    def _for_cuda(self, device: torch.device) -> Communicator:
        if device == torch.device("cuda"):  # whichever is current
            device = torch.device("cuda", current_device())
        store = dist.PrefixStore("cuda", self._store)
        below = MpiTransport(dist.PrefixStore("transport", store), self.rank(), self.size())
        return Communicator(
            StagedTransport(below, device),
            dist.PrefixStore("monitor", store),
            self.communicator.timeout_s,
            device,
        )

    def close(self, drain_s: float = 0.0) -> None:
        """Release what the group holds, on all its ranks; it cannot be used any more."""
        _open.discard(self)
        super().close(drain_s)


_open: set[MpiGroup] = set()  # a group that is dropped lives on: peers may wait for it


def mpi_group(comm: Any = None, *, timeout_s: float = 1800.0) -> MpiGroup:
    """Make a group of the ranks of an MPI communicator, in their order.

    All ranks of the communicator have to call this, as often and in the same order. The
    group has communicators of its own: its messages never meet the program's. It lives
    until `MpiGroup.close`, or the end of the process.

    Parameters
    ----------
    comm
        An intracommunicator of mpi4py; by default ``MPI.COMM_WORLD``.
    timeout_s
        How long to wait for the other ranks, here and in every operation that says
        nothing else, in seconds.

    Returns
    -------
    MpiGroup
        To be given as ``group=`` to the public functions; roots and peers are ranks of it.

    Raises
    ------
    MissingExtraError
        mpi4py, or an MPI library, is not installed.
    TransportError
        MPI does not allow calls from several threads, or ``mpiexec`` belongs to another
        library.
    CollectiveTimeoutError
        Some rank did not come.
    ArgumentError
        It is no intracommunicator that this process belongs to.
    """
    library = mpi()
    comm = library.COMM_WORLD if comm is None else comm
    if not isinstance(comm, library.Intracomm) or not comm:
        raise ArgumentError(
            "not an intracommunicator that this process belongs to",
            argument="comm",
            expected="one of mpi4py's Intracomm",
            got=repr(comm),
        )
    made = channels(comm, timeout_s)
    store = _store(library, made, timeout_s)
    rank, world_size = made.messages.Get_rank(), made.messages.Get_size()
    transport = MpiTransport(dist.PrefixStore("transport", store), rank, world_size, made)
    return MpiGroup(Communicator(transport, dist.PrefixStore("monitor", store), timeout_s), store)


def _store(library: Any, made: Channels, timeout_s: float) -> dist.Store:
    """A store that rank 0 holds, and the others are told the address of."""
    comm = made.messages
    rank, world_size = comm.Get_rank(), comm.Get_size()
    if world_size == 1:
        return dist.HashStore()
    waiting = "for rank 0 to say where its store is"
    if rank == 0:
        store: dist.TCPStore
        if made.ranks_here == world_size:
            store, host = local_store(), "127.0.0.1"
        else:
            host = socket.gethostname()
            store = dist.TCPStore(host, 0, None, True, wait_for_workers=False)
        # As long as the process: others may still look into it when this rank has finished.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(store))
        said = json.dumps([host, store.port, __version__]).encode()
        sends = [comm.Isend([said, library.BYTE], peer, 0) for peer in range(1, world_size)]
        wait_for(lambda: library.Request.Testall(sends), timeout_s, "for others to take it")
        return store
    heard, about = bytearray(_LONGEST), library.Status()
    request = comm.Irecv([heard, library.BYTE], 0, 0)
    wait_for(lambda: request.Test(about), timeout_s, waiting)
    host, port, version = json.loads(heard[: about.Get_count(library.BYTE)])
    if version != __version__:
        raise TransportError(
            f"rank {rank} came with ringcoll {__version__}, rank 0 with ringcoll {version}"
        )
    return dist.TCPStore(host, port, None, False, timeout=timedelta(seconds=timeout_s))
