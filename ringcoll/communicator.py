"""The state that one rank keeps for one group: transport, plans, queue, memory.

Operations of a group run one at a time, in the order in which they were issued.
A blocking one runs in the caller's thread when nothing is queued before it; the
others run on one thread of the group's own.
"""

from __future__ import annotations

import atexit
import contextlib
import queue
import threading
import time
import weakref
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from ringcoll.errors import (
    CollectiveTimeoutError,
    GroupBrokenError,
    MismatchError,
    RingcollError,
    TransportError,
)
from ringcoll.execute import bind, execute
from ringcoll.monitor import Monitor, Running
from ringcoll.plan import Plan
from ringcoll.reduction import Reduction
from ringcoll.stage import Opened
from ringcoll.transport.base import Transport
from ringcoll.work import Work

__all__ = ["Call", "Communicator"]


@dataclass(slots=True)
class Call:
    """One call of a collective, ready to run.

    Parameters
    ----------
    plan
        What to run.
    dtype, device
        Of the flat tensors on which it runs.
    reduction
        What ``(+)`` means; ``None`` where nothing is reduced.
    description
        The call in words. It names all that ranks must agree on, so it is what is
        compared between them, and what tags are made of.
    open
        Makes the flat inputs and outputs, when the operation's turn has come, and
        what is to be done with them at the end.
    results
        What the operation's future will hold.
    timeout_s
        Time limit.
    lengths
        Elements of each block, where no rank knows all of them; tags then depend on them.
    """

    plan: Plan
    dtype: torch.dtype
    device: torch.device
    reduction: Reduction | None
    description: str
    open: Callable[[], Opened]
    timeout_s: float
    results: list[Tensor] = field(default_factory=list)
    lengths: dict[int, int] | None = None


_open_communicators: weakref.WeakSet[Communicator] = weakref.WeakSet()


@lru_cache(maxsize=4096)
def _hash(description: str) -> int:
    return zlib.crc32(description.encode())


class Communicator:
    """One rank's end of a group.

    Parameters
    ----------
    transport
        Messages among the ranks of the group.
    store
        For the monitor; seen by all ranks and used by nobody else.
    timeout_s
        Time limit of an operation that gives none of its own.
    """

    def __init__(self, transport: Transport, store: dist.Store, timeout_s: float) -> None:
        self.transport, self.timeout_s = transport, timeout_s
        self.rank, self.world_size = transport.rank, transport.world_size
        self._monitor = Monitor(store, self.rank, self.world_size, transport.abort)
        self._store = store
        self._connected = False
        self._compared: set[str] = set()
        self._issued = 0
        self._turn = threading.Lock()
        self._queue: queue.SimpleQueue[tuple[int, Call, Work] | None] = queue.SimpleQueue()
        self._queued = 0
        self._worker: threading.Thread | None = None
        self._workspace: dict[torch.device, Tensor] = {}
        self._workspace_as: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        self._broken: BaseException | None = None
        self._closed = False
        _open_communicators.add(self)

    def run(self, call: Call, *, async_op: bool) -> Work | None:
        """Run a call, or queue it.

        Returns
        -------
        Work or None
            The work, if ``async_op``; otherwise the call is complete on return.

        Raises
        ------
        GroupBrokenError
            An earlier operation failed, or the group was closed.
        RingcollError
            The operation failed.
        """
        with self._turn:
            self._check()
            number = self._issued
            self._issued += 1
            if not async_op and not self._queued:
                self._execute(number, call)
                return None
            work = Work(call.description, call.results)
            self._queued += 1
            if self._worker is None:
                self._worker = threading.Thread(
                    target=self._serve, name=f"ringcoll-{self.rank}", daemon=True
                )
                self._worker.start()
            self._queue.put((number, call, work))
        if async_op:
            return work
        work.wait()
        return None

    def close(self) -> None:
        """End the threads and connections; operations that are queued fail."""
        if self._closed:
            return
        self._closed = True
        if self._queued:
            self._broken = self._broken or GroupBrokenError("the group was closed")
            self.transport.abort()
        self._queue.put(None)
        if self._worker is not None and self._worker is not threading.current_thread():
            self._worker.join(10)
        self._monitor.close()
        self._workspace.clear()
        self._workspace_as.clear()
        self.transport.close()

    def _check(self) -> None:
        if self._closed:
            raise GroupBrokenError(f"rank {self.rank}: the group was closed")
        if self._broken is not None:
            raise GroupBrokenError(
                f"rank {self.rank}: the group is broken by an earlier failure: {self._broken}"
            ) from self._broken

    def _serve(self) -> None:
        while (item := self._queue.get()) is not None:
            number, call, work = item
            error: BaseException | None = None
            try:
                self._check()
                self._execute(number, call)
            except BaseException as raised:  # noqa: BLE001  # `wait` raises it
                error = raised
            with self._turn:
                self._queued -= 1
            work.complete(error)

    def _execute(self, number: int, call: Call) -> None:
        running = Running(number, call.description, call.lengths)
        self._monitor.start(running)
        try:
            if not self._connected:
                self.transport.connect(call.timeout_s)
                self._connected = True
            if self.transport.ordered:
                self._compare(call)
            plan = call.plan
            inputs, outputs, finish = call.open()
            workspace = self._memory(plan.workspace_numel, call.dtype, call.device)
            views = bind(plan, inputs, outputs, workspace)
            tag = (_hash(call.description) + number * 0x9E3779B1) & 0x7FFFFFFF
            wait, limit_s = self.transport.wait, call.timeout_s
            deadline = time.monotonic() + limit_s
            for item in execute(
                plan,
                views,
                self.transport,
                tag,
                reduction=call.reduction,
                tag_by_length=call.lengths is not None,
            ):
                running.wait = item.wait
                wait(item.handle, max(deadline - time.monotonic(), 0.001))
            if finish is not None:
                finish()
        except TransportError as error:
            explained = self._monitor.explain(error, running, call.timeout_s)
            self._break(explained)
            raise explained from error
        except BaseException as error:
            # Peers wait for what will not come; and what is in flight uses our memory.
            self._monitor.report(error)
            self._break(error)
            raise
        finally:
            self._monitor.end()

    def _break(self, error: BaseException) -> None:
        self._broken = self._broken or error
        self.transport.abort()

    def _memory(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Working memory; it is kept, and grows when more is needed."""
        view = self._workspace_as.get((device, dtype))
        if view is None or view.numel() < numel:
            memory = self._workspace.get(device)
            if memory is None or memory.numel() < numel * dtype.itemsize:
                self._workspace.pop(device, None)
                self._workspace_as.clear()
                # A multiple of every dtype's size, so that any of them can view it.
                nbytes = -(-numel * dtype.itemsize // 64) * 64
                memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
                self._workspace[device] = memory
            view = memory.view(dtype)
            self._workspace_as[device, dtype] = view
        return view

    def _compare(self, call: Call) -> None:
        """Compare signatures through the store, once, where tags cannot do it."""
        if call.description in self._compared:
            return
        self._compared.add(call.description)
        key = f"call/{len(self._compared)}"
        self._store.set(f"{key}/{self.rank}", call.description)
        for peer in range(self.world_size):
            try:
                self._store.wait([f"{key}/{peer}"], timedelta(seconds=call.timeout_s))
            except RuntimeError as error:
                raise CollectiveTimeoutError(
                    f"rank {self.rank} waited {call.timeout_s:g} s for rank {peer}", peer=peer
                ) from error
            theirs = self._store.get(f"{key}/{peer}").decode()
            if theirs != call.description:
                raise MismatchError(
                    f"rank {self.rank} called {call.description}, rank {peer} called {theirs}",
                    peer=peer,
                    mine=call.description,
                    theirs=theirs,
                )


@atexit.register
def _close_all() -> None:
    for communicator in tuple(_open_communicators):
        with contextlib.suppress(RingcollError, RuntimeError):
            communicator.close()
