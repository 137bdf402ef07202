"""The state that one rank keeps for one group: transport, plans, queue, memory.

Operations of a group run one at a time, in the order in which they were issued.
A blocking one runs in the caller's thread when nothing is queued before it. The
others run on threads of the group's own, of which one at a time serves the queue:
when an operation has callbacks, the thread that ran it leaves the queue to another
and runs them. So a callback may wait for other operations of the group.

On CUDA tensors an operation has a `Lane`: see `ringcoll.streams`. Where messages are
ordered by the stream, and the host waits for nothing, no thread is needed either.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from ringcoll.choice.measured import agree
from ringcoll.choice.table import Table
from ringcoll.errors import (
    CaptureError,
    CollectiveTimeoutError,
    GroupBrokenError,
    MismatchError,
    PeerLostError,
    RingcollError,
    TransportError,
)
from ringcoll.execute import Bound, bind, execute
from ringcoll.machine import cores
from ringcoll.monitor import Monitor, Running, monitored_barrier
from ringcoll.plan import Plan
from ringcoll.reduction import TORCH, Engine, Reduction
from ringcoll.stage import Opened
from ringcoll.streams import Lane, Streams
from ringcoll.transport.base import Transport, appears
from ringcoll.transport.narrow import NarrowTransport
from ringcoll.work import Work

if TYPE_CHECKING:
    from ringcoll.tracing.recorder import Tracer

__all__ = ["Bindings", "Call", "Communicator", "Decision", "Keeper"]


@dataclass(frozen=True, slots=True)
class Decision:
    """How a call is run: the same on every rank.

    Parameters
    ----------
    plan
        What to run.
    dtype
        Of the flat tensors on which it runs.
    description
        The call in words. It names all that ranks must agree on, so it is what is
        compared between them, and what tags are made of.
    """

    plan: Plan
    dtype: torch.dtype
    description: str
    signature: int
    """A hash of the description, of 32 bits."""


@dataclass(slots=True)
class Bindings:
    """A decision that is bound to memory and to a transport."""

    decision: Decision
    transport: Transport
    instructions: Iterable[Bound]


@dataclass(slots=True)
class Keeper:
    """Where a call that is run again and again keeps what it is bound to.

    Parameters
    ----------
    forget
        Lets go of the flat tensors that the call keeps.
    """

    forget: Callable[[], None]
    bindings: Bindings | None = None
    key: object = None
    """Of the lane to which it all belongs."""

    def move(self, key: object) -> None:
        """Let go of what belongs to another lane than that of the call's next run."""
        if self.key != key:
            self.bindings, self.key = None, key
            self.forget()


@dataclass(slots=True)
class Call:
    """One call of a collective, ready to run.

    Parameters
    ----------
    name
        Its collective.
    decide
        How to run it; asked when the operation's turn has come and the ranks have met.
    device
        Of the flat tensors on which it runs.
    reduction
        What ``(+)`` means; ``None`` where nothing is reduced.
    open
        Makes the flat inputs and outputs, when the operation's turn has come, and
        what is to be done with them at the end.
    results
        What the operation's future will hold.
    timeout_s
        Time limit.
    lengths
        Elements of each block, where no rank knows all of them; tags then depend on them.
    keeper
        For a call that is run again and again: ``open`` always gives the same memory.
    tensors
        The user's, on a device with streams; none on one without.
    following
        Calls that belong to the same operation and run after this one. Where they are
        made by a generator, it may use the results of those before.
    num_calls
        This one and those that follow; the same on all ranks.
    engine
        What reduces.
    """

    name: str
    decide: Callable[[], Decision]
    device: torch.device
    reduction: Reduction | None
    open: Callable[[], Opened]
    timeout_s: float
    results: list[Tensor] = field(default_factory=list)
    lengths: dict[int, int] | None = None
    keeper: Keeper | None = None
    tensors: Sequence[Tensor] = ()
    following: Iterable[Call] = ()
    num_calls: int = 1
    engine: Engine = TORCH


_log = logging.getLogger("ringcoll")
_EXIT_S = 10.0  # for operations that are pending when the process ends
_JOIN_S = 10.0  # for threads to end that have nothing to wait for any more

# In the order in which they were made: closing those of NCCL may take all their ranks.
_open_communicators: weakref.WeakKeyDictionary[Communicator, None] = weakref.WeakKeyDictionary()


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
    device
        The only one whose tensors may be sent; none where any may.
    """

    def __init__(
        self,
        transport: Transport,
        store: dist.Store,
        timeout_s: float,
        device: torch.device | None = None,
    ) -> None:
        self.transport, self.timeout_s, self.device = transport, timeout_s, device
        self.rank, self.world_size = transport.rank, transport.world_size
        self.repeated: dict[object, tuple[Call, Tensor]] = {}  # for `ringcoll.prepared.repeat`
        self._monitor = Monitor(store, self.rank, self.world_size, transport.abort)
        self._store = store
        self._connected = False
        self.table: Table | None = None  # what choices go by, once the ranks have met
        self._compared: set[str] = set()
        self._comparisons = 0
        self._issued = self._barriers = 0
        self._turn = threading.Lock()
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._queued = 0
        self._serving = threading.Lock()  # held by the thread that serves the queue
        self._threads: list[threading.Thread] = []
        self._spare = 0  # threads that wait to serve
        self._counting = threading.Lock()
        self._workspace: dict[torch.device, Tensor] = {}
        self._workspace_as: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        self._streams: dict[torch.device, Streams] = {}
        self._lane: Lane | None = None  # of the operation that runs
        self._broken: BaseException | None = None
        self._closed = False
        self.tracer: Tracer | None = None  # whoever looks where the time goes
        _open_communicators[self] = None

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
        CaptureError
            It cannot be captured in a CUDA graph, as it is being.
        RingcollError
            The operation failed.
        """
        work: Work | None = None
        with self._turn:
            self._check()
            aside = async_op or self._queued > 0
            lane = self._lane_of(call, aside) if call.tensors else None
            number = self._issued
            self._issued += call.num_calls
            if not aside:
                self._execute(number, call, lane)
                if lane is not None:
                    lane.join()
                return None
            work = Work(call.name, call.results)
            # Where there is nobody to wait for, or who waits is the stream.
            if not self._queued and (self.world_size == 1 or not self.transport.waits_on_host):
                error = self._outcome(number, call, lane)
                work.complete(error, None if lane is None else lane.end)
                return work
            self._queued += 1
            if not self._threads:
                self._add_thread()
            self._queue.put((number, call, lane, work))
        if async_op:
            return work
        work.wait()
        return None

    def close(self, drain_s: float = 0.0) -> None:
        """End the threads and connections.

        Parameters
        ----------
        drain_s
            How long to wait, in seconds, for operations that are queued; then they fail.
        """
        if self._closed:
            return
        self._closed = True
        self._queue.put(None)
        self._join(drain_s)
        if self._queued:
            self._broken = self._broken or GroupBrokenError(
                f"rank {self.rank}: the group was closed"
            )
            self.transport.abort()
        self._join(_JOIN_S)
        self._monitor.close()
        self._workspace.clear()
        self._workspace_as.clear()
        self.repeated.clear()
        self.transport.close()

    def monitored_barrier(self, timeout_s: float, wait_all_ranks: bool) -> None:
        """Wait until all ranks have come; see `ringcoll.monitored_barrier`."""
        with self._turn:
            self._check()
            self._barriers += 1
            store = dist.PrefixStore("barrier", self._store)
            monitored_barrier(
                store, self.rank, self.world_size, self._barriers, timeout_s, wait_all_ranks
            )

    def abort(self) -> None:
        """Make all operations fail, here and at the peers that take part in them."""
        self._break(GroupBrokenError(f"rank {self.rank}: the group was aborted"))

    def _join(self, limit_s: float) -> None:
        deadline, me = time.monotonic() + limit_s, threading.current_thread()
        # One that goes to its callbacks may start another.
        while alive := [one for one in self._threads if one.is_alive() and one is not me]:
            alive[0].join(max(0.0, deadline - time.monotonic()))
            if time.monotonic() >= deadline:
                return

    def _check(self) -> None:
        if self._closed:
            raise GroupBrokenError(f"rank {self.rank}: the group was closed")
        if self._broken is not None:
            raise GroupBrokenError(
                f"rank {self.rank}: the group is broken by an earlier failure: {self._broken}"
            ) from self._broken

    def _add_thread(self) -> None:
        with self._counting:
            self._spare += 1
        name = f"ringcoll-{self.rank}"
        thread = threading.Thread(target=self._serve, name=name, daemon=True)
        thread.start()
        self._threads = [*(one for one in self._threads if one.is_alive()), thread]

    def _serve(self) -> None:
        while True:
            with self._serving:
                with self._counting:
                    self._spare -= 1
                work = self._serve_until_callbacks()
                if work is None:
                    return
                with self._counting:
                    alone = not self._spare
                if alone:
                    self._add_thread()
            work.settle()
            del work  # with the user's tensors: this may now wait for long
            with self._counting:
                if self._spare:
                    return
                self._spare += 1

    def _serve_until_callbacks(self) -> Work | None:
        """Run what is queued, up to an operation whose future is yet to be settled."""
        while (item := self._queue.get()) is not None:
            number, call, lane, work = item
            del item
            error = self._outcome(number, call, lane)
            del call
            with self._turn:
                self._queued -= 1
            if work.complete(error, None if lane is None else lane.end):
                return work
            del work, lane, error
        self._queue.put(None)  # for the next thread
        return None

    def _outcome(self, number: int, call: Call, lane: Lane | None) -> BaseException | None:
        """Run a call; the error, if it fails, is for whoever waits for it."""
        try:
            if self._broken is not None:
                self._check()
            self._execute(number, call, lane)
        except BaseException as error:  # noqa: BLE001  # `Work.wait` raises it
            return error
        return None

    def _lane_of(self, call: Call, aside: bool) -> Lane:
        """Where a call runs on its device, and after what; nothing but that is enqueued yet."""
        streams = self._streams.get(call.device)
        if streams is None:
            streams = self._streams[call.device] = Streams(call.device)
        capturing = streams.capturing()
        if capturing:
            self._check_capture(call)
        on_host = call.name == "barrier"
        return Lane(streams, aside=aside, capturing=capturing, on_host=on_host)

    def _check_capture(self, call: Call) -> None:
        """Refuse what cannot be captured in a CUDA graph.

        What a call does when it is run for the first time must not be captured: connecting,
        loading of kernels, and comparing calls through the store.
        """
        refused = f"rank {self.rank}: {call.name} cannot be captured in a CUDA graph: "
        if self.transport.waits_on_host:
            raise CaptureError(
                f"{refused}over {self.transport.name} the host takes part in it. Let CUDA tensors "
                'travel over NCCL: cuda_transport="nccl", or RINGCOLL_CUDA_TRANSPORT'
            )
        if not isinstance(call.following, Sequence):
            raise CaptureError(f"{refused}what it sends depends on what it has received")
        for one in (call, *call.following):
            if not self._connected or one.decide().description not in self._compared:
                raise CaptureError(
                    f"{refused}no such call has run in this group yet. Run it once before the "
                    "capture, on all ranks, with tensors of the same shapes and dtypes"
                )

    def _execute(self, number: int, call: Call, lane: Lane | None) -> None:
        """Run a call, and those that follow, in its lane if it has one."""
        if lane is None:
            self._run_all(number, call)
            return
        with lane:
            self._lane = lane
            try:
                self._run_all(number, call)
            finally:
                self._lane = None

    def _run_all(self, number: int, call: Call) -> None:
        tracer = self.tracer
        run = self._run_plan if tracer is None else tracer.around(self._run_plan)
        run(number, call)
        for index, following in enumerate(call.following, 1):
            run(number + index, following)

    def _run_plan(self, number: int, call: Call) -> None:
        if not torch.is_inference_mode_enabled() and any(
            one.is_inference() for one in call.results
        ):
            with torch.inference_mode():  # the caller's mode, which only holds for its thread
                self._run_plan(number, call)
            return
        running = Running(number, call.name, call.lengths)
        self._monitor.start(running)
        try:
            if self._lane is not None:
                self._lane.use(call.tensors)  # they may be dropped before it has run
                if call.keeper is not None:
                    call.keeper.move(self._lane.key)
            if not self._connected:
                self.transport.connect(call.timeout_s)
                self._connected = True
                choice = dist.PrefixStore("choice", self._store)
                self.table = agree(self.transport, choice, call.timeout_s)
            bindings = call.keeper.bindings if call.keeper is not None else None
            decision = call.decide() if bindings is None else bindings.decision
            running.description = decision.description
            if self.transport.ordered:
                self._compare(decision.description, call.timeout_s)
            inputs, outputs, finish = call.open()
            if bindings is None:
                bindings = self._bind(call, decision, inputs, outputs)
            tag = (decision.signature + number * 0x9E3779B1) & 0x7FFFFFFF
            wait, now = bindings.transport.wait, time.monotonic
            deadline = now() + call.timeout_s
            if self.tracer is not None and self.tracer.current is not None:
                self.tracer.drive(call, bindings, tag, running, deadline)
            else:
                for item in execute(bindings.instructions, tag):
                    running.wait = item.wait
                    wait(item.handle, max(deadline - now(), 0.001))
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

    def _bind(
        self, call: Call, decision: Decision, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> Bindings:
        reduction = call.reduction
        transport: Transport = self.transport
        ranks_here = transport.hosts.count(transport.hosts[self.rank])
        crowded = torch.get_num_threads() * ranks_here > cores()
        if reduction is not None and crowded and call.device.type == "cpu":
            reduction = reduction.in_pieces()
        if reduction is not None and reduction.wire_dtype is not decision.dtype:
            transport = NarrowTransport(transport, reduction.wire_dtype, call.engine)
        instructions = bind(
            decision.plan,
            inputs,
            outputs,
            self._memory(decision.plan.workspace_numel, decision.dtype, call.device),
            transport,
            reduction=reduction,
            engine=call.engine,
            tag_by_length=call.lengths is not None,
        )
        if call.keeper is None:
            return Bindings(decision, transport, instructions)
        with torch.inference_mode(False):  # it may be run again outside of that mode
            call.keeper.bindings = Bindings(decision, transport, [*instructions])
        return call.keeper.bindings

    def _break(self, error: BaseException) -> None:
        if self._broken is None:
            self._broken = error
            if threading.current_thread() in self._threads and not self._closed:
                # Perhaps nobody waits for it.
                _log.error("%s: %s", type(error).__name__, error)
        self.transport.abort()

    def _memory(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Working memory; it is kept, and grows when more is needed."""
        lane = self._lane
        if lane is not None and lane.capturing:  # it lives as long as the graph
            return torch.empty(numel, dtype=dtype, device=device)
        view = self._kept_memory(numel, dtype, device)
        if lane is not None:  # others use it after this one, or nobody: it may be replaced
            lane.use([view])
        return view

    def _kept_memory(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        view = self._workspace_as.get((device, dtype))
        if view is None or view.numel() < numel:
            with torch.inference_mode(False):  # it is used again outside of that mode
                view = self._more_memory(numel, dtype, device)
            self._workspace_as[device, dtype] = view
        return view

    def _more_memory(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        memory = self._workspace.get(device)
        if memory is None or memory.numel() < numel * dtype.itemsize:
            self._workspace.pop(device, None)
            self._workspace_as.clear()
            self.repeated.clear()  # what is bound to it
            # A multiple of every dtype's size, so that any of them can view it.
            nbytes = -(-numel * dtype.itemsize // 64) * 64
            memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
            self._workspace[device] = memory
        return memory.view(dtype)

    def _compare(self, description: str, timeout_s: float) -> None:
        """Compare calls through the store, where tags cannot do it: each kind once, or each."""
        capturing = self._lane is not None and self._lane.capturing
        each = dist.get_debug_level() == dist.DebugLevel.DETAIL and not capturing
        if description in self._compared and not each:
            return
        self._compared.add(description)
        before, self._comparisons = self._comparisons, self._comparisons + 1
        keys = [f"call/{self._comparisons}/{peer}" for peer in range(self.world_size)]
        self._store.set(keys[self.rank], description)
        deadline = time.monotonic() + timeout_s
        known = lambda: self._monitor.error is not None  # noqa: E731
        for peer, key in enumerate(keys):
            if not appears(self._store, [key], deadline, known):
                if self._monitor.error is not None:
                    raise PeerLostError(f"rank {self.rank} gave up rank {peer}", peer=peer)
                raise CollectiveTimeoutError(
                    f"rank {self.rank} waited {timeout_s:g} s for rank {peer}", peer=peer
                )
            theirs = self._store.get(key).decode()
            if theirs != description:
                raise MismatchError(
                    f"rank {self.rank} called {description}, rank {peer} called {theirs}",
                    peer=peer,
                    mine=description,
                    theirs=theirs,
                )
        self._store.delete_key(f"call/{before}/{self.rank}")  # all have come further


_Item = tuple[int, Call, Lane | None, Work]
"""An operation in the queue: its number, the call, its lane, and who is told of its end."""


@atexit.register
def _close_all() -> None:
    for communicator in tuple(_open_communicators):
        with contextlib.suppress(RingcollError, RuntimeError):
            communicator.close(_EXIT_S)
