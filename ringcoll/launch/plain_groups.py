"""Groups of threads of this process, and of the ranks of an MPI program, without torch's groups.

Threads are for notebooks, examples and tests. A program of MPI::

    # mpiexec -n 4 python program.py
    import ringcoll, torch

    group = ringcoll.mpi_group()
    tensor = torch.arange(4.0) + group.rank()
    ringcoll.all_reduce(tensor, group=group, algorithm="ring")

Data travel in MPI's point-to-point messages: see `ringcoll.transport.mpi`; CUDA tensors pass
through host memory. Rank 0 holds a store, on the loopback interface if all ranks are on one host;
through the store ranks report what they do when an operation takes too long.
"""

from __future__ import annotations

import ctypes
import json
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ringcoll._version import __version__
from ringcoll.collectives import OwnGroup
from ringcoll.errors import ArgumentError, PeerLostError, TransportError
from ringcoll.group import Communicator
from ringcoll.machine import check_goes_on, seconds_of, served, started
from ringcoll.transport import (
    Channels,
    Faults,
    Hub,
    MpiTransport,
    StagedTransport,
    as_asked,
    channels,
    current_device,
    mpi_library,
    wait_for,
)


class LocalGroup(OwnGroup):
    """A rank of a group whose ranks are threads of this process; see `run_threads`.

    Examples
    --------
    >>> run_threads(lambda group: (group.rank(), group.size()), 2)
    [(0, 2), (1, 2)]
    """


def run_threads(
    function: Callable[[LocalGroup], Any],
    world_size: int,
    *,
    timeout_s: float = 60.0,
    verify_messages: bool = False,
    faults: Faults | None = None,
) -> list[Any]:
    """Run a function on k ranks that are threads of this process.

    For notebooks, examples and tests: no processes, no network.

    Parameters
    ----------
    function
        Function that each rank calls with its `LocalGroup`, the value for ``group=`` of the
        public functions.
    world_size
        Number of ranks.
    timeout_s
        Time limit of each operation, in seconds.
    verify_messages
        Whether messages have checksums: see `ringcoll.use`.
    faults
        What is to go wrong with messages, and how often; by default nothing.

    Returns
    -------
    list
        Return value of the function on each rank.

    Raises
    ------
    BaseException
        The exception of the first rank that failed; the other ranks are woken up.

    Examples
    --------
    >>> import torch, ringcoll
    >>> def rank_main(group):
    ...     tensor = torch.tensor([group.rank() + 1])
    ...     ringcoll.all_reduce(tensor, group=group, algorithm="ring")
    ...     return tensor.item()
    >>> ringcoll.run_threads(rank_main, 4)
    [10, 10, 10, 10]
    """
    timeout_s = seconds_of(timeout_s, "timeout_s")
    hub, store = Hub(world_size), dist.HashStore()
    members = [
        Communicator(
            as_asked(transport, verify_messages=verify_messages, faults=faults),
            dist.PrefixStore("monitor", store),
            timeout_s,
        )
        for transport in hub.transports()
    ]
    results: list[Any] = [None] * world_size
    failures: list[BaseException] = []

    def main(rank: int) -> None:
        try:
            results[rank] = function(LocalGroup(members[rank]))
        except BaseException as error:  # noqa: BLE001  # raised again below
            failures.append(error)
            hub.abort(f"rank {rank} raised {error!r}")
        finally:
            members[rank].close()

    check_goes_on()
    threads = [started(main, f"rank-{rank}", rank) for rank in range(world_size)]
    for thread in threads:
        thread.join()
    # A rank that was woken up by another's failure did not fail first.
    first = [error for error in failures if not isinstance(error, PeerLostError)]
    if failures:
        raise (first or failures)[0]
    return results


_ADDRESS_NBYTES = 1024  # the longest address of a store


class MpiGroup(OwnGroup):
    """A rank of a group of an MPI program; see `mpi_group`."""

    def __init__(self, communicator: Communicator, store: dist.Store) -> None:
        super().__init__(communicator)
        self._store, self._making = store, threading.Lock()
        _open.add(self)

    def on(self, device: torch.device) -> Communicator:
        """The communicator for tensors on a device; the first CUDA tensor makes its own."""
        if device.type not in ("cpu", "cuda"):
            message = "tensors on this device cannot be sent"
            raise ArgumentError(message, "tensor", "cpu or cuda", device, self.rank())
        if device.type == "cpu" or self not in _open:  # a closed communicator says so
            return self.communicator
        with self._making:
            if len(self.members) == 1:
                self.members.append(self._for_cuda(device))
        return self.members[1]

    def _for_cuda(self, device: torch.device) -> Communicator:
        if device == torch.device("cuda"):  # the current device
            device = torch.device("cuda", current_device())
        store = dist.PrefixStore("cuda", self._store)
        below = MpiTransport(dist.PrefixStore("transport", store), self.rank(), self.size())
        return Communicator(
            as_asked(StagedTransport(below, device)),
            dist.PrefixStore("monitor", store),
            self.communicator.timeout_s,
            device,
        )

    def close(self, drain_s: float = 0.0) -> None:
        """Release the group's resources, on all its ranks; the group cannot be used any more."""
        _open.discard(self)
        super().close(drain_s)


_open: set[MpiGroup] = set()  # keeps groups alive that the program has dropped: peers may wait


def mpi_group(comm: Any = None, *, timeout_s: float = 1800.0) -> MpiGroup:
    """Make a group of the ranks of an MPI communicator, in their order.

    All ranks of the communicator have to call this, as often and in the same order. The group
    has communicators of its own: its messages never meet the program's messages. The group lives
    until `MpiGroup.close`, or the end of the process.

    Parameters
    ----------
    comm
        An intracommunicator of mpi4py; by default ``MPI.COMM_WORLD``.
    timeout_s
        Time limit in seconds, of the wait for the other ranks, and of every operation that has
        no time limit of its own.

    Returns
    -------
    MpiGroup
        The value for ``group=`` of the public functions; roots and peers are ranks of the group.

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
        ``comm`` is not an intracommunicator that this process belongs to.
    """
    library = mpi_library()
    comm = library.COMM_WORLD if comm is None else comm
    if not isinstance(comm, library.Intracomm) or not comm:
        message = "not an intracommunicator that this process belongs to"
        raise ArgumentError(message, "comm", "one of mpi4py's Intracomm", repr(comm))
    timeout_s = seconds_of(timeout_s, "timeout_s")
    lines = channels(comm, timeout_s)
    store = _store(library, lines, timeout_s)
    rank, world_size = lines.messages.Get_rank(), lines.messages.Get_size()
    transport = as_asked(
        MpiTransport(dist.PrefixStore("transport", store), rank, world_size, lines)
    )
    return MpiGroup(Communicator(transport, dist.PrefixStore("monitor", store), timeout_s), store)


def _store(library: Any, lines: Channels, timeout_s: float) -> dist.Store:
    """Make the store that rank 0 holds, and send its address to the other ranks."""
    comm = lines.messages
    rank, world_size = comm.Get_rank(), comm.Get_size()
    if world_size == 1:
        return dist.HashStore()
    if rank == 0:
        store: dist.TCPStore
        if lines.ranks_here == world_size:
            store, host = served(), "127.0.0.1"
        else:
            host = socket.gethostname()
            store = dist.TCPStore(host, 0, None, True, wait_for_workers=False)
        # The store lives as long as the process: other ranks may read it after this rank's end.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(store))
        address = json.dumps([host, store.port, __version__]).encode()
        sends = [comm.Isend([address, library.BYTE], peer, 0) for peer in range(1, world_size)]
        wait_for(lambda: library.Request.Testall(sends), timeout_s, "for others to take it")
        return store
    buffer, status = bytearray(_ADDRESS_NBYTES), library.Status()
    request = comm.Irecv([buffer, library.BYTE], 0, 0)
    wait_for(lambda: request.Test(status), timeout_s, "for rank 0 to say where its store is")
    host, port, version = json.loads(buffer[: status.Get_count(library.BYTE)])
    if version != __version__:
        raise TransportError(
            f"rank {rank} came with ringcoll {__version__}, rank 0 with ringcoll {version}"
        )
    return dist.TCPStore(host, port, None, False, timeout=timedelta(seconds=timeout_s))
