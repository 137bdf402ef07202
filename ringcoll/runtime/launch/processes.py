"""Real processes on this machine: a pool of ranks that runs functions.

Problem: start k ranks once, run many functions on them, and never leave a rank behind. The parent
holds the store at which the ranks meet, so the store outlives all ranks; it listens on a free port
of the loopback interface, and nothing leaves the machine.

Ctrl-C reaches the parent only, which then ends the ranks.

Calls and values travel to ranks and back pickled with the tensors that they hold. Tensors of all
dtypes do so but torch's integers of 1 to 7 bits, which it does not pickle.
"""

from __future__ import annotations

import contextlib
import copyreg
import errno
import fcntl
import functools
import io
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

from ringcoll.errors import ArgumentError, RingcollError
from ringcoll.runtime.machine import cores, free_bytes, seconds_of, whole
from ringcoll.runtime.rendezvous import serve_store

PRELOADED = ["ringcoll.runtime.launch.processes", "ringcoll.training.backend.process_group"]
"""Modules that are imported once, in the process from which ranks are forked, and not by each rank.

A program may add those of its ranks before it makes its first `Ranks`: ``torch._dynamo``, which
optimizers of torch import at their first step, takes a second of each rank's time.
"""
_REAP_S = 30.0  # for the end of a process whose connection has ended, on a busy machine
_LOOK_S = 1.0  # between looks at interrupts that came just before a wait, which do not end it
_GRACE_S = 5.0  # between asking a rank to end and killing it, and for late causes of failure
_MOST_PROCESSES = 1 << 10
_PROCESS_NBYTES = 16 << 20  # of a rank's own memory: 6 MiB at its start, and that of its groups
_LACKING = {
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "file descriptors"),
    errno.ENOMEM: "memory",
    **dict.fromkeys((errno.EAGAIN, errno.EPIPE, errno.ECONNRESET), "processes"),
}


class _Pickler(pickle.Pickler):
    dispatch_table = copyreg.dispatch_table


def pickled(value: object, pickler: Any = _Pickler) -> bytes:
    """Write a value for ``pickle.loads``, which shares no memory with the value.

    torch 2.13 cannot read back its own pickles of tensors of newer dtypes (uint16, float8).

    Parameters
    ----------
    value
        Any value that can be pickled; it may hold tensors.
    pickler
        A class such as cloudpickle's ``Pickler``, for values that only that can pickle.
    """
    table = {**pickler.dispatch_table, torch.UntypedStorage: _reduced}
    written = io.BytesIO()
    # A pickler looks its table up in its class.
    type("Pickler", (pickler,), {"dispatch_table": table})(written).dump(value)
    return written.getvalue()


def _reduced(storage: torch.UntypedStorage) -> tuple[object, ...]:
    data = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return _storage, (data.cpu().numpy().tobytes(), storage.device)


def _storage(data: bytes, device: torch.device) -> Any:
    memory = torch.empty(len(data), dtype=torch.uint8, device=device).untyped_storage()
    if data:
        memory.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8).untyped_storage())
    typed: Any = torch.TypedStorage
    return typed(wrap_storage=memory, dtype=torch.uint8, _internal=True)  # for torch's functions


def by_value(function: Callable[..., Any], call: object) -> bytes | None:
    """Write ``call`` as bytes if the ranks cannot import its function; otherwise ``None``.

    Ranks import the file of ``__main__``. A notebook has no such file: the definitions of its cells
    have to travel with the call.
    """
    cause = None
    try:
        pickle.dumps(function)
        if Path(getattr(sys.modules["__main__"], "__file__", None) or "").is_file():
            return None
    except (AttributeError, TypeError, pickle.PicklingError) as error:  # a lambda, for example
        cause = error
    try:
        import cloudpickle
    except ImportError:
        named: Any = function if hasattr(function, "__qualname__") else type(function)
        if cause is None and named.__module__ != "__main__":
            return None
        message = (
            "the ranks cannot import the function; put it into a module, or install "
            "cloudpickle: pip install 'ringcoll[notebooks]'"
        )
        expected = "a function of a module"
        got = f"{named.__module__}.{named.__qualname__}"
        raise ArgumentError(message, "function", expected, got) from cause
    return pickled(call, cloudpickle.Pickler)


class RankError(RingcollError, RuntimeError):
    """A rank failed.

    ``rank`` is the first rank that did, ``kind`` the name of its error's class, and
    ``failures`` maps every rank that failed to (kind, text).
    """

    def __init__(self, rank: int, failures: dict[int, tuple[str, str]], details: str) -> None:
        self.rank, self.failures, self.details = rank, failures, details
        self.kind, text = failures[rank]
        super().__init__(f"rank {rank} raised {self.kind}: {text}")

    def __reduce__(self) -> tuple[object, ...]:
        return RankError, (self.rank, self.failures, self.details)


_receivers: list[Callable[[Any], object]] = []  # of reports; in a rank of a pool, the parent


def report(item: object) -> None:
    """Send an item, from a function that runs on a rank, to the parent's ``on_report``."""
    for receive in _receivers:
        receive(item)


@contextlib.contextmanager
def reports_to(receive: Callable[[Any], object]) -> Iterator[None]:
    """Take the reports of this process, which is no rank of a pool."""
    _receivers.append(receive)
    try:
        yield
    finally:
        _receivers.remove(receive)


_meeting: list[tuple[dist.Store, int, int]] = []  # in a rank's process: store, rank, world size


def rendezvous() -> tuple[dist.Store, int, int]:
    """The store at which the ranks meet, this rank, and their number, for ``init_process_group``.

    It is for a function that runs on a rank. A default group uses the same store, so another group
    needs a ``torch.distributed.PrefixStore`` of the store.

    Raises
    ------
    RingcollError
        This process is no rank of a pool.
    """
    if not _meeting:
        raise RingcollError("this process is no rank of a pool of `Ranks`")
    return _meeting[0]


@contextlib.contextmanager
def _interrupts_noted() -> Iterator[None]:
    """Deliver Ctrl-C at the end of a block that must not be left half done."""
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # no Ctrl-C comes
        yield
        return
    noted: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, frame: noted.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler or signal.SIG_DFL)  # ``None`` if it was not Python's
    if noted:
        raise KeyboardInterrupt


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Deliver Ctrl-C at the end; processes that start in the block never get it.

    A terminal sends Ctrl-C to them as well, and each would print a traceback.
    """
    with _interrupts_noted():
        resource_tracker.ensure_running()  # its later start would unblock the signal
        # The processes inherit the blocked signal; other threads of this process may still get it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Ranks:
    """k processes, each with an initialised default group.

    On Ctrl-C the ranks are ended, and the caller gets `KeyboardInterrupt`.

    Parameters
    ----------
    world_size
        Number of ranks.
    backend
        Backend of the default group: ``"gloo"``, ``"ringcoll"``, or any other that torch knows;
        ``None`` for no default group at all: see `rendezvous`.
    timeout_s
        Time limit in seconds of a run, and of the group's operations.
    threads
        Threads of torch in each rank; by default the cores, shared evenly.
    outlives_errors
        Whether the pool goes on after an error if every rank has answered and none has died. The
        ranks' groups are then as the error left them.

    Examples
    --------
    >>> import operator
    >>> from ringcoll.runtime.launch import Ranks
    >>> with Ranks(2) as ranks:
    ...     ranks.run(operator.add, 1, 2)
    [3, 3]
    """

    _outlives_errors = False

    def __init__(
        self,
        world_size: int,
        *,
        backend: str | None = "gloo",
        timeout_s: float = 120.0,
        threads: int | None = None,
        outlives_errors: bool = False,
    ) -> None:
        timeout_s = seconds_of(timeout_s, "timeout_s")
        ranks = whole(world_size)
        if isinstance(world_size, bool) or type(ranks) is not int or ranks < 1:
            raise ArgumentError(
                "must be a positive whole number", "world_size", "1 or more", repr(world_size)
            )
        most = int(min(_MOST_PROCESSES, free_bytes() / _PROCESS_NBYTES))
        if ranks > max(1, most):
            few = "so many processes are not started on one host"
            scarce = "there is no memory for so many processes"
            raise ArgumentError(
                scarce if most < _MOST_PROCESSES else few, "world_size", f"at most {most}", ranks
            )
        self.world_size, self.timeout_s = ranks, timeout_s
        self._outlives_errors = outlives_errors
        threads = threads or max(1, cores() // ranks)
        self._store = serve_store()

        def arguments(rank: int, connection: Connection) -> tuple[object, ...]:
            meeting = (self._store.port, rank, ranks, timeout_s)
            return meeting, backend, threads, connection, dict(os.environ)

        try:
            self._start(_main, arguments)
        except (EOFError, OSError) as error:  # the server that forks ends where it cannot fork
            lacking = _LACKING.get(getattr(error, "errno", errno.EAGAIN))
            if lacking is None:
                raise
            raise ArgumentError(
                f"there are not enough {lacking} for {ranks} ranks", "world_size"
            ) from error

    @property
    def alive(self) -> bool:
        """Whether all ranks live."""
        return all(process.is_alive() for process in self.processes)

    def _start(
        self, main: Callable[..., None], arguments: Callable[[int, Connection], tuple[object, ...]]
    ) -> None:
        """Start a process for each rank; ``arguments(rank, connection)`` are its ``main``'s."""
        context = _context()
        self._connections: list[Connection] = []
        self.processes: list[multiprocessing.process.BaseProcess] = []
        try:
            with _interrupts_held():
                for rank in range(self.world_size):
                    connection, remote = context.Pipe()
                    args = arguments(rank, remote)
                    process = context.Process(
                        target=main, args=args, name=f"rank-{rank}", daemon=True
                    )
                    process.start()
                    remote.close()
                    self._connections.append(connection)
                    self.processes.append(process)
        except BaseException:
            self.kill()
            raise

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        on_report: Callable[[Any], object] | None = None,
        timeout_s: float | None = None,
    ) -> list[Any]:
        """Call a function on all ranks; return the value of each rank.

        Parameters
        ----------
        function
            Called with ``args`` on every rank. A function of a module is imported there; a
            function of a notebook cell, or of another function, is sent by cloudpickle.
        on_report
            Called with each item of `report`.
        timeout_s
            Time limit in seconds; by default the pool's.

        Raises
        ------
        ArgumentError
            The function cannot be sent to the ranks.
        RankError
            The function raised on some rank, or a rank died. The other ranks are ended, and
            the pool cannot be used any more, unless it ``outlives_errors``.
        TimeoutError
            The limit was exceeded; all ranks are killed.
        """
        call = by_value(function, (function, args))
        self._all_wait = False  # for the next call, after a failure
        try:
            for connection in self._connections:
                with contextlib.suppress(BrokenPipeError):
                    if call is None:
                        connection.send((function, args))
                    else:
                        connection.send_bytes(call)
            limit_s = seconds_of(timeout_s or self.timeout_s, "timeout_s")
            return self._results(on_report, limit_s)
        except BaseException:
            if not (self._outlives_errors and self._all_wait):
                self.kill()
            raise

    def _results(self, on_report: Callable[[Any], object] | None, timeout_s: float) -> list[Any]:
        deadline = time.monotonic() + timeout_s
        results: dict[int, Any] = {}
        failures: dict[int, tuple[str, str]] = {}
        details: dict[int, str] = {}
        while len(results) + len(failures) < self.world_size:
            waiting = {
                connection: rank
                for rank, connection in enumerate(self._connections)
                if rank not in results and rank not in failures
            }
            left_s = deadline - time.monotonic()
            ready = wait(list(waiting), min(max(0.0, left_s), _LOOK_S))
            if not ready and left_s <= _LOOK_S:
                if failures:
                    break
                raise TimeoutError(
                    f"ranks {sorted(waiting.values())} were not done after {timeout_s:g} s"
                )
            for connection in (item for item in ready if isinstance(item, Connection)):
                rank = waiting[connection]
                try:
                    kind, value = connection.recv()
                except (EOFError, ConnectionResetError):
                    self.processes[rank].join(_REAP_S)
                    code = self.processes[rank].exitcode
                    failures[rank] = ("ProcessDied", f"the process ended with exit code {code}")
                    continue
                if kind == "report":
                    if on_report is not None:
                        # A progress bar that is left with its lock held never stops.
                        with _interrupts_noted():
                            on_report(value)
                elif kind == "result":
                    results[rank] = value
                else:
                    failures[rank], details[rank] = value
            if failures:
                # Errors of other ranks follow soon, and may hold the cause.
                deadline = min(deadline, time.monotonic() + _GRACE_S)
        if failures:
            causes = [rank for rank, (kind, _) in failures.items() if kind != "PeerLostError"]
            first = (causes or list(failures))[0]
            self._all_wait = len(results) + len(details) == self.world_size
            raise RankError(first, failures, details.get(first, ""))
        return [results[rank] for rank in range(self.world_size)]

    def close(self) -> None:
        """End the ranks."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send(None)
        for process in self.processes:
            process.join(_GRACE_S)
        self.kill()

    def kill(self) -> None:
        """End the ranks at once."""
        for process in self.processes:
            if process.is_alive():
                process.kill()
        for process in self.processes:
            process.join()
        for connection in self._connections:
            connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self.close()
        else:
            self.kill()


@functools.cache
def _context() -> Any:
    """The way to start processes: forked from a process that has only imported torch.

    The import costs seconds. On macOS, where forking is not safe, each process pays them.
    """
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _end_with_program() -> None:
    """End with the program that has made the pool; the forkserver lives as long as its ranks."""
    program: Any = multiprocessing.parent_process()
    if sys.platform == "linux":
        # A rank that is stopped, or holds Python's lock, is killed by the system when the last
        # process that holds the program's end of this pipe has ended.
        fcntl.fcntl(program.sentinel, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(program.sentinel, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(program.sentinel, fcntl.F_SETFL, os.O_ASYNC)
    try:
        # Processes that the program has forked off hold that end, too.
        wait([os.pidfd_open(program.pid)])  # type: ignore[attr-defined,unused-ignore]  # of Linux
    except (AttributeError, OSError):
        program.join()
    os._exit(1)


def _main(
    meeting: tuple[int, int, int, float],
    backend: str | None,
    threads: int,
    connection: Connection,
    environment: dict[str, str],
) -> None:
    os.environ.clear()  # the variables of the process that it was forked from may be old
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the rank
    threading.Thread(target=_end_with_program, daemon=True).start()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    _join_and_obey("127.0.0.1", meeting, backend, threads, connection)


def _join_and_obey(
    address: str,
    meeting: tuple[int, int, int, float],
    backend: str | None,
    threads: int,
    connection: Connection,
) -> None:
    """Be a rank: meet the others at a store, then run the functions that the parent sends."""
    torch.set_num_threads(threads)
    port, rank, world_size, timeout_s = meeting
    limit = timedelta(seconds=timeout_s)
    store = dist.TCPStore(address, port, None, False, timeout=limit)
    _meeting.append((store, rank, world_size))
    if backend is not None:
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=limit
        )
    _receivers.append(lambda item: connection.send(("report", item)))
    while True:
        try:
            data = connection.recv_bytes()
        except EOFError:
            break
        try:
            if (call := ForkingPickler.loads(data)) is None:
                break
            function, args = call
            # Pickled here, so that a result that cannot be pickled is an error like any other.
            answer = ForkingPickler.dumps(("result", function(*args)))
        except BaseException as error:  # noqa: BLE001  # the parent raises it
            kind = type(error).__name__
            failure = (kind, str(error)), traceback.format_exc()
            answer = ForkingPickler.dumps(("error", failure))
        connection.send_bytes(answer)
    if dist.is_initialized():
        dist.destroy_process_group()
