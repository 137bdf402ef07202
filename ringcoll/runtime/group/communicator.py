"""One rank's end of a group: operations get their turn here, and are run.

To run an operation is: meet (once a group), resolve (once an operation), bind to memory, drive, and
copy the results out. On CUDA tensors an operation has a `Lane`: see
`ringcoll.runtime.transport.streams`. If the stream orders messages, and the host waits for nothing,
asynchronous operations need no thread; where the transport can wait for a moment, nor do those that
take no longer.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import weakref
from array import array
from collections.abc import Callable, Container, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from threading import get_ident
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from ringcoll.errors import (
    FORKED,
    NESTED,
    CaptureError,
    GroupBrokenError,
    NestedCallError,
    RingcollError,
    TransportError,
    described,
)
from ringcoll.runtime.group.agreement import agree
from ringcoll.runtime.group.queue import Queue, Work, Workspace
from ringcoll.runtime.machine import cores
from ringcoll.runtime.operation import (
    Binding,
    BoundInstruction,
    Operation,
    Turn,
    drive,
    interpreted,
)
from ringcoll.runtime.process import at_end, check_not_ending, hears_signals, observers
from ringcoll.runtime.rendezvous import ask_store, store_gone_error
from ringcoll.runtime.tensors import with_memory
from ringcoll.runtime.transport import (
    Handle,
    Lane,
    NotYetError,
    Quick,
    Streams,
    Transport,
    capturing,
)
from ringcoll.runtime.watch import (
    CallComparison,
    Issued,
    Lives,
    Monitor,
    announce,
    flight_recorder,
    monitored_barrier,
    patience_s,
)
from ringcoll.schedules.cost import Table

_EXIT_S = 10.0  # for operations that are pending when the process ends
_NO_MEMORY = "can't allocate memory"  # in torch's message; torch has no class for this error
# An asynchronous call runs where it is made for so long; longer if no other core could run it
# meanwhile.
_MOMENT_S, _LONG_MOMENT_S = 0.0002, 0.01
_JOIN_S = 5.0  # for threads that have nothing to wait for any more
_MOST_REMEMBERED = 8 << 20  # bytes of the operations that a group keeps for calls of the same kind
_profiler = torch.autograd.profiler
_draw = torch.autograd._record_function_with_args_enter
_SPREADS = 0x9E3779B1  # odd, so that histories that differ stay different
# Words of a group: whether calls may be made as a whole, calls so far, a number that is made of all
# of them, bytes that were sent, and whether a call has its turn, or takes it.
_READY, _ISSUED, _HISTORY, _SENT, _TAKEN = range(5)

# In the order of their making: to close a communicator of NCCL may take all its ranks.
_open_communicators: weakref.WeakKeyDictionary[Communicator, None] = weakref.WeakKeyDictionary()

Part = tuple[Operation | Turn, Sequence[Tensor]]
"""An operation and the tensors that it is run with."""


@dataclass(slots=True)
class Call:
    """A call that is checked and ready; it can be called any number of times.

    Parameters
    ----------
    member
        The rank's end of the group.
    operation, tensors
        First part of the call.
    timeout_s
        Time limit in seconds.
    async_op
        Whether a run returns a work at once.
    results
        The tensors that hold the result.
    following
        Further parts of the call. A generator may use the results of the earlier parts; it
        serves a single run.
    num_parts
        Number of parts, the same on all ranks.
    """

    member: Communicator
    operation: Operation | Turn
    tensors: Sequence[Tensor]
    timeout_s: float
    async_op: bool
    results: list[Tensor]
    following: Iterable[Part] = ()
    num_parts: int = 1
    # What makes the call, where nothing is unusual; functions that tell where the tensors are; the
    # lock that is taken meanwhile, which the queue looks for in frames; the binding that it is of.
    quick: Quick | None = None
    places: tuple[Callable[[], int], ...] = ()
    serving: Any = None
    binding: Any = None

    def __call__(self) -> Work | None:
        """Run the call once; return the work, if ``async_op``.

        Raises
        ------
        ArgumentError
            The storage of a tensor has been freed since the call was checked. Nothing was sent.
        """
        quick = self.quick
        if quick is not None:
            serving = self.serving  # noqa: F841  # see `Queue.is_within`
            try:
                number = quick(self.places)
                if number is None:
                    return None
                if number >= 0:
                    self.member.take_over(
                        number, self.operation, self.tensors, self.timeout_s, self.binding
                    )
                    return None
            except BaseException as error:
                self.member.left_off(error, self.timeout_s)
                raise
        if self.member.makes_whole_calls and not (self.async_op or self.following):
            self._find_quick()
        self._check(self.operation, self.tensors)
        if self.following and isinstance(self.following, Sequence):
            for operation, tensors in self.following:
                self._check(operation, tensors)
        return self.member.run(
            self.operation,
            self.tensors,
            self.timeout_s,
            self.async_op,
            self.results,
            self.following,
            self.num_parts,
        )

    def _find_quick(self) -> None:
        """Look for a binding that can make the call as a whole."""
        addresses = tuple(map(Tensor.data_ptr, self.tensors))
        bindings: Any = self.operation.bindings
        self.binding = bindings.get(addresses)
        self.quick = None if self.binding is None else self.binding.quick
        self.places = tuple(tensor.data_ptr for tensor in self.tensors)
        self.serving = self.member.serving

    @property
    def written(self) -> list[Tensor]:
        """The tensors that the first part changes."""
        return [self.tensors[number] for number in self.operation.written]

    def _check(self, operation: Operation | Turn, tensors: Sequence[Tensor]) -> None:
        # Memory that the operation is bound to has been checked.
        if tuple(map(Tensor.data_ptr, tensors)) not in operation.bindings:
            for tensor in tensors:
                with_memory(tensor, self.member.rank)


@dataclass(slots=True, eq=False)
class _Item:
    operation: Operation | Turn
    tensors: Sequence[Tensor]
    timeout_s: float
    following: Iterable[Part]
    lane: Lane | None
    work: Work
    number: int = -1


class _UnderWay(NamedTuple):
    """An operation of which a part has run: the rest of its program, and its messages' handles.

    Without handles, its transport interprets the program.
    """

    binding: Binding
    steps: Iterable[BoundInstruction]
    handles: list[Handle]
    tag: int
    deadline: float


class GroupState(IntEnum):
    """Whether a group can run operations; a group never goes back to a lower state."""

    OPEN = 0
    BROKEN = 1  # an operation has failed; `Communicator.broken` says why
    CLOSED = 2
    FOREIGN = 3  # this process was forked off, and its parent has the group


class Communicator:
    """One rank's end of a group.

    Parameters
    ----------
    transport, timeout_s
        Transport among the ranks, and default time limit of an operation, in seconds.
    store
        Store that all ranks see, and that nobody else uses.
    device
        Device of all tensors that may be sent; ``None`` for CPU tensors.
    lives
        The processes of the ranks; by default the ranks tell them in ``store``.
    fit
        A file of ``ringcoll fit``, which rank 0 reads when the ranks meet.
    token
        A text that no other group has; by default the ranks agree on one in ``store``.
    """

    def __init__(
        self,
        transport: Transport,
        store: dist.Store,
        timeout_s: float,
        device: torch.device | None = None,
        lives: Lives | None = None,
        fit: str | None = None,
        token: str = "",
    ) -> None:
        check_not_ending()
        self.transport, self.timeout_s, self.device = transport, timeout_s, device
        self.rank, self.world_size = transport.rank, transport.world_size
        self.operations: dict[Any, Operation] = {}
        self._remembering = threading.RLock()
        self.memory = Workspace(self._forget_memory)
        processes = lives or Lives(store, self.rank, self.world_size)
        self.monitor = Monitor(store, self.rank, self.world_size, self._give_up, processes)
        self.progress = self.monitor.progress
        self.store = store
        self._fit = fit
        self.table: Table | None = None  # costs and rules, once the ranks have met
        self._tracer: Any = None
        self.makes_whole_calls = False  # whether a binding has a function for them
        self._words = array("q", [0, 0, 0, 0, 0])  # of which the functions of `Quick` know
        self._queue: Queue[_Item] = Queue(f"ringcoll-{self.rank}", self._complete)
        self._comparison = CallComparison(store, self.monitor)
        self._has_met = self._is_crowded = False
        self._streams: dict[torch.device, Streams] = {}
        self._lane: Lane | None = None  # of the operation that runs
        self._running: Sequence[Tensor] | None = None  # tensors of the operation that runs
        self._following: Iterable[Part] = ()  # further parts of the call that runs
        self._moment_s = _MOMENT_S  # for which an asynchronous call runs where it is made
        self._is_brief = False  # such a call runs
        # Ranks that are threads hear no signals; a rank without peers does not wait.
        self._may_hear = self.world_size > 1 and not transport.shares_process
        self._gives_way = False  # whether a call may go on in another thread than its caller's
        self._under_way: _UnderWay | None = None  # a call that goes on in another thread
        self.state = GroupState.OPEN
        self.broken: BaseException | None = None  # the failure that has broken the group
        _open_communicators[self] = None
        self._asked_to_meet, self.token = False, token
        if not (processes.is_published and token):
            ask_store(store, timeout_s, partial(self._introduce, processes))
        if self.world_size > 1:
            flight_recorder.watch(self)

    def _introduce(self, processes: Lives) -> None:
        if not processes.is_published:
            processes.tell()
        if self.world_size > 1 and not self.token:
            self.token = flight_recorder.token(self.store)

    @property
    def num_issued(self) -> int:
        """Number of calls so far."""
        return self._words[_ISSUED]

    @property
    def nbytes_sent(self) -> int:
        """Bytes that the rank has sent in operations that are over."""
        return self._words[_SENT]

    @property
    def tracer(self) -> Any:
        """The `Tracer` of `ringcoll.tools.tracing`, while the group is traced."""
        return self._tracer

    @tracer.setter
    def tracer(self, tracer: Any) -> None:
        self._tracer = tracer
        self._set_ready()

    # --- calls ------------------------------------------------------------------------------

    def _set_ready(self) -> None:
        """Note whether calls may be made as a whole, by functions of `Quick`."""
        is_open = self.state is GroupState.OPEN and self._has_met
        self._words[_READY] = is_open and self._gives_way and self._tracer is None

    @property
    def serving(self) -> Any:
        """The lock of who runs operations."""
        return self._queue.serving

    def run_quickly(
        self,
        binding: Binding,
        operation: Operation | Turn,
        tensors: Sequence[Tensor],
        timeout_s: float,
    ) -> bool:
        """Run an operation, where it is bound to, as a whole; whether nothing was unusual."""
        serving = self._queue.serving  # noqa: F841  # see `Queue.is_within`
        assert binding.quick is not None
        try:
            number = binding.quick(None)
            if number is None:
                return True
            if number < 0:
                return False
            self.take_over(number, operation, tensors, timeout_s, binding)
        except BaseException as error:
            self.left_off(error, timeout_s)
            raise
        return True

    def left_off(self, error: BaseException, timeout_s: float) -> None:
        """Break the group after an interrupt of a whole call, unless the call is over."""
        if self._queue.serving._is_owned():
            self._check_left(error, self.num_issued - 1, None, timeout_s)

    def take_over(
        self,
        number: int,
        operation: Operation | Turn,
        tensors: Sequence[Tensor],
        timeout_s: float,
        binding: Binding,
    ) -> None:
        """Go on with a call that has begun as a whole, and takes longer."""
        item: _Item | None = None
        serving = self._queue.serving
        try:
            try:
                self._perform(number, operation, tensors, timeout_s, binding)
            except NotYetError:
                item = self._item(operation, tensors, timeout_s, (), None, [])
                item.number = number
                self._queue.items.appendleft(item)
            self._words[_TAKEN] = 0
            serving.release()
            if item is not None:
                self._call_thread(item, 1)
                item.work.wait()
        except BaseException as error:
            self._check_left(error, number, item, timeout_s)
            raise

    def _quick(self, operation: Any, binding: Binding, tensors: Sequence[Tensor]) -> None:
        """Give a binding its function for whole calls, if its transport can make them."""
        whole, queue, progress = binding.program.interpreted, self._queue, self.progress
        addresses = tuple(map(Tensor.data_ptr, tensors))
        is_kept = operation.bindings.get(addresses) is binding
        if whole is None or not is_kept or binding.loads or binding.stores or operation.inference:
            return
        about = operation.signature, operation.nbytes_sent, _SPREADS
        objects = (
            *(queue.serving.acquire, queue.serving.release, queue.items, observers),
            *(_profiler, "_is_profiler_enabled", progress, "last", progress.begin_run),
            *(operation, addresses, (False,), ()),
        )
        binding.quick = whole.quick(self._words, binding.valid, about, objects)
        self.makes_whole_calls = True

    def remember(self, key: Any, operation: Operation) -> None:
        """Keep an operation for calls of the same key."""
        with self._remembering:
            self.operations.pop(key, None)
            self.operations[key] = operation
            # An operation that has not run yet gets its plan later.
            nbytes = sum(known.nbytes for known in tuple(self.operations.values()))
            while nbytes > _MOST_REMEMBERED and len(self.operations) > 1:
                nbytes -= self.operations.pop(next(iter(self.operations))).nbytes

    def run(
        self,
        operation: Operation | Turn,
        tensors: Sequence[Tensor],
        timeout_s: float,
        async_op: bool,
        results: Sequence[Tensor],
        following: Iterable[Part] = (),
        num_parts: int = 1,
    ) -> Work | None:
        """Run an operation, or queue it and return its work; parameters as for `Call`."""
        queue, serving = self._queue, self._queue.serving
        if _profiler._is_profiler_enabled or observers:  # draws until this function is left
            drawn = _draw(f"ringcoll:{operation.name}", *tensors)  # noqa: F841
        if serving._is_owned():
            self._check_not_within(operation.name)
        lane = item = None
        number = -1
        try:
            with queue.turn:
                if self.state is not GroupState.OPEN:
                    self._refuse()
                words = self._words
                words[_TAKEN] = 1
                # To wake a thread takes longer than a short operation, and the thread takes the
                # processor, and Python's lock, from its caller.
                is_mine = (
                    (self._gives_way and not (following or operation.has_streams))
                    or not (async_op or (self._may_hear and hears_signals()))
                ) and (not queue.items and serving.acquire(False))
                if operation.has_streams:
                    lane = self._lane_of(operation, following, is_aside=not is_mine)
                if async_op or not is_mine:
                    item = self._item(operation, tensors, timeout_s, following, lane, results)
                # A function for a signal may make a call between two steps of Python that call
                # something. Here is none: calls are in the queue in the order of their numbers.
                number = words[_ISSUED]
                words[_ISSUED] = number + num_parts
                if item is not None:
                    item.number = number
                    if not is_mine:
                        queue.items.append(item)
                        words[_TAKEN] = 0  # what is in the queue keeps others out
            if not is_mine:
                assert item is not None
                self._call_thread(item, num_parts)
            else:
                try:
                    if item is not None:
                        self._begin(item)
                    elif lane is None and not following:
                        self._perform(number, operation, tensors, timeout_s)
                        words[_TAKEN] = 0
                        serving.release()
                        return None
                    else:
                        self._run(number, operation, tensors, timeout_s, following, lane)
                except NotYetError:
                    item = item or self._item(operation, tensors, timeout_s, (), None, results)
                    item.number = number
                    queue.items.appendleft(item)
                words[_TAKEN] = 0
                serving.release()
                if item is not None and not item.work.done:
                    self._call_thread(item, num_parts)
            if item is not None and not async_op:
                item.work.wait()
        except BaseException as error:
            self._check_left(error, number, item, timeout_s)
            raise
        if item is None:
            if lane is not None:
                lane.join()
        elif async_op:
            queue.serve_alone()
            return item.work
        return None

    def _check_not_within(self, name: str) -> None:
        """Refuse a call within another one; break the group if another one has left off."""
        if self._queue.is_within(sys._getframe(1)):
            raise NestedCallError(f"rank {self.rank}: the call of {name} {NESTED}")
        self._break(GroupBrokenError(f"rank {self.rank} was interrupted in an operation"))

    def _check_left(
        self, error: BaseException, number: int, item: _Item | None, timeout_s: float
    ) -> None:
        serving = self._queue.serving
        try:
            if number >= 0:
                self._break_off(error, timeout_s)
        finally:
            if serving._is_owned():
                self._words[_TAKEN] = 0
                serving.release()
            is_error = isinstance(error, RingcollError)
            if item is not None and not is_error and item in self._queue.items:
                self._queue.call_thread()
                item.work.ends_within(_JOIN_S)  # a thread may still be using the tensors

    def _break_off(self, error: BaseException, timeout_s: float) -> None:
        """Break the group after an interrupt: the messages that peers wait for will not come."""
        if self.state is GroupState.OPEN and not isinstance(error, RingcollError):
            try:
                self._failed(error, timeout_s)
            finally:
                self._break(error)
        if self._under_way is not None:
            self._end()

    def _item(
        self,
        operation: Operation | Turn,
        tensors: Sequence[Tensor],
        timeout_s: float,
        following: Iterable[Part],
        lane: Lane | None,
        results: Sequence[Tensor],
    ) -> _Item:
        make_work = Work if self._tracer is None else self._tracer.work
        work = make_work(operation.name, results, self._queue.help)
        return _Item(operation, tensors, timeout_s, following, lane, work)

    def _begin(self, item: _Item) -> None:
        try:
            self._is_brief, self.transport.until_s = True, time.monotonic() + self._moment_s
            self._complete(item)
        finally:
            self._is_brief, self.transport.until_s = False, None
        if item.work.has_callbacks:
            self._queue.call_thread(item.work)

    def _call_thread(self, item: _Item, num_parts: int) -> None:
        """Let a thread run a call; or this one, where the rank waits for nobody, or its stream."""
        if self.world_size > 1:
            self.progress.note_site(item.number, num_parts)
            if self.transport.waits_on_host:
                self._queue.call_thread()
                return
        self._queue.serve(item.work)
        if not item.work.done:  # another thread serves
            self._queue.call_thread()

    def _hears(self) -> bool:
        """Whether the wait of an operation goes to another thread, so that signals are heard.

        A function for a signal may call an operation of this group, and wait for it.
        """
        return self.progress.wait is not None and hears_signals()

    def in_turn(self, function: Callable[[], object], name: str) -> None:
        """Call a function when the operations before it are over, and none runs beside it."""
        self.run(Turn(name, function), (), self.timeout_s, False, [])

    def meet(self) -> tuple[int, ...]:
        """Host number of every rank; the first call, which all ranks make, meets the others."""
        if not self._asked_to_meet:
            self._asked_to_meet = True
            self.in_turn(lambda: None, "meeting")
        return self.transport.hosts

    def uses(self, storages: Container[int]) -> bool:
        """Whether an operation that runs, or waits for its turn, works on one of some storages."""
        items = self._queue.items.copy()
        serving, running = self._queue.serving, self._running
        is_serving = serving._is_owned() or not serving.acquire(False)
        if not is_serving:
            serving.release()
        elif running is None:
            return True  # which operation comes next is not known yet
        in_use = [running or (), *(item.tensors for item in items)]
        for following in (self._following, *(item.following for item in items)):
            if isinstance(following, Sequence):
                in_use += [tensors for _, tensors in following]
        return any(
            tensor.untyped_storage()._cdata in storages for tensors in in_use for tensor in tensors
        )

    # --- running ----------------------------------------------------------------------------

    def _complete(self, item: _Item) -> None:
        """Run a call of the queue: `Work.wait` raises its error, this function an interrupt."""
        error: BaseException | None = None
        complete = item.work.complete
        try:
            try:
                if self.broken is not None:
                    if self._under_way is not None:
                        self._end()
                    self._refuse()
                elif self._under_way is not None:
                    self._go_on(item.operation, item.tensors, item.timeout_s)
                else:
                    self._run(
                        item.number, item.operation, item.tensors, item.timeout_s, item.following,
                        item.lane,
                    )  # fmt: skip
            except NotYetError:
                raise
            except Exception as raised:  # noqa: BLE001  # see above
                error = raised
                self._break_off(raised, item.timeout_s)
            # A thread that waits may count on the tensors' memory being free.
            item.tensors, item.following = (), ()
            complete(error, None if item.lane is None else item.lane.end)
        except NotYetError:
            raise
        except BaseException as interrupt:
            # It may have come when the operation was over, which must not run again.
            if not item.work.done:
                self._break_off(interrupt, item.timeout_s)
                item.tensors, item.following = (), ()
                text = f"rank {self.rank} was interrupted: {described(interrupt)}"
                complete(GroupBrokenError(text), None if item.lane is None else item.lane.end)
            if threading.current_thread() not in self._queue.threads:
                raise

    def _run(
        self,
        number: int,
        operation: Operation | Turn,
        tensors: Sequence[Tensor],
        timeout_s: float,
        following: Iterable[Part],
        lane: Lane | None,
    ) -> None:
        """Run all parts of a call, in its lane if it has one."""
        if lane is not None:
            with lane:
                self._lane = lane
                try:
                    self._run(number, operation, tensors, timeout_s, following, None)
                finally:
                    self._lane = None
            return
        self._following = following
        try:
            self._perform(number, operation, tensors, timeout_s)
            for index, (operation, tensors) in enumerate(following, 1):  # noqa: PLR1704
                self._perform(number + index, operation, tensors, timeout_s)
        finally:
            self._following = ()

    def _perform(
        self,
        number: int,
        operation: Operation | Turn,
        tensors: Sequence[Tensor],
        timeout_s: float,
        begun: Binding | None = None,
    ) -> None:
        if operation.inference and not torch.is_inference_mode_enabled():
            with torch.inference_mode():  # the caller's mode, which holds for its thread only
                self._perform(number, operation, tensors, timeout_s)
            return
        progress, tracer = self.progress, self._tracer
        self._running = tensors
        progress.current = current = number, operation
        progress.thread = get_ident()
        if begun is None:
            before, progress.last = progress.last, current
            if operation is not before[1] or number != before[0] + 1:
                progress.begin_run(before)
        if not self.monitor.awake:
            self.monitor.wake()
        if tracer is not None:
            tracer.begin(number, operation)
        try:
            deadline = time.monotonic() + timeout_s
            if operation.plan is None or not self._has_met:
                self._resolve(operation, timeout_s)
            if self.transport.ordered or self._comparison.compares_each:
                assert operation.description is not None
                is_capturing = self._lane is not None and self._lane.capturing
                self._comparison.compare(operation.description, timeout_s, capturing=is_capturing)
            if self._lane is not None and isinstance(operation, Operation):
                self._lane.use(operation.memory_of(tensors))  # it may be dropped before it is read
                operation.move(self._lane.key)
            words = self._words
            if begun is None:
                binding = operation.binding(
                    tensors, self.transport, self._workspace, self._is_crowded
                )
                # The history is made of all operations until now: if ranks have disagreed on an
                # operation that took no waiting, the next message does not match.
                history = (words[_HISTORY] + operation.signature) * _SPREADS & 0x7FFFFFFF
                words[_HISTORY] = history
                tag = (history ^ number) & 0x7FFFFFFF
                if tracer is not None:
                    binding = tracer.traced(operation, binding, tag)
                for load, index in binding.loads:
                    load(tensors[index])
            else:
                binding, tag = begun, 0
            program, handles = binding.program, list[Handle]()
            steps: Iterable[BoundInstruction] = iter(program.items)
            try:
                if program.interpreted is not None:
                    if begun is None:
                        program.interpreted.begin(tag)
                    else:
                        tag = program.interpreted.adopt()
                    steps = interpreted(program, deadline, progress, handles)
                drive(steps, tag, binding.wait, deadline, progress, handles)
            except NotYetError:
                self._under_way = _UnderWay(binding, steps, handles, tag, deadline)
                raise
            for store, index in binding.stores:
                store(tensors[index])
            words[_SENT] += operation.nbytes_sent
            if program.interpreted is not None and binding.quick is None and words[_READY]:
                self._quick(operation, binding, tensors)
            if self._lane is not None and not self.transport.waits_on_host:
                self._watch_stream(number, operation, binding, handles, timeout_s)
        except NotYetError:
            raise
        except BaseException as error:  # noqa: BLE001  # it is raised
            self._fail(error, timeout_s)
        finally:
            if self._under_way is None:
                self._running = progress.current = progress.wait = None
                if tracer is not None:
                    tracer.end()

    def _end(self) -> None:
        """Note that the operation that has run is over, or will not go on."""
        self._under_way = self._running = None
        self.progress.end()
        if self._tracer is not None:
            self._tracer.end()

    def _go_on(
        self, operation: Operation | Turn, tensors: Sequence[Tensor], timeout_s: float
    ) -> None:
        assert self._under_way is not None
        binding, steps, handles, tag, deadline = self._under_way
        self._under_way, progress = None, self.progress
        progress.thread = get_ident()
        try:
            with torch.inference_mode() if operation.inference else contextlib.nullcontext():
                if handles:
                    assert progress.wait is not None
                    drive([progress.wait], tag, binding.wait, deadline, progress, handles)
                else:
                    steps = interpreted(binding.program, deadline, progress, handles)
                drive(steps, tag, binding.wait, deadline, progress, handles)
                for store, index in binding.stores:
                    store(tensors[index])
            self._words[_SENT] += operation.nbytes_sent
        except BaseException as error:  # noqa: BLE001  # it is raised
            self._fail(error, timeout_s)
        finally:
            self._end()

    def _resolve(self, operation: Operation | Turn, timeout_s: float) -> None:
        """Meet the others, once, and decide how the operation runs, at its first turn."""
        if not self._has_met:
            self._meet(timeout_s)
        if isinstance(operation, Operation) and operation.plan is None:
            assert self.table is not None
            operation.resolve(self.table, self.transport.hosts)

    def begin(self) -> None:
        """Meet the other ranks before the first operation; all ranks call it."""
        self.progress.current = 0, Turn("the making of the group", lambda: None)
        self.monitor.wake()
        try:
            self._meet(self.timeout_s)
        except BaseException as error:  # noqa: BLE001  # it is raised
            self._fail(error, self.timeout_s)
        finally:
            self.progress.end()

    def _fail(self, error: BaseException, timeout_s: float) -> NoReturn:
        """Break the group after the failure that is being handled, and raise its cause."""
        try:
            raised = self._failed(error, timeout_s)
        except BaseException:
            # A second interrupt has come: peers must not read on in this rank's memory.
            self._break(error)
            raise
        if self._tracer is not None:
            self._tracer.failed(raised)
        if raised is error:
            raise error
        raise raised from None  # the error that woke the wait is not the cause

    def _watch_stream(
        self,
        number: int,
        operation: Operation | Turn,
        binding: Binding,
        handles: Sequence[Handle],
        timeout_s: float,
    ) -> None:
        """Let the monitor look after an operation until its stream has come to its end."""
        lane, waits = self._lane, binding.waits(handles)
        assert lane is not None
        if waits and not lane.capturing:
            self.progress.issued.append(Issued(number, operation, timeout_s, waits, lane))
            error = self.monitor.error or self.broken
            if error is not None:  # the group may have broken before the operation was issued
                raise _without_frames(error)

    def _meet(self, timeout_s: float) -> None:
        with self.progress.meeting():
            # A store in this process always answers, and a thread has its own current GPU.
            if self.device is not None or self.transport.shares_process:
                self._meet_all(timeout_s)
            else:
                ask_store(self.store, timeout_s, partial(self._meet_all, timeout_s))

    def _meet_all(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        transport, lives = self.transport, self.monitor.lives
        lives.look()  # so that processes are known, also when the store is gone
        transport.connect(timeout_s)
        # A failure that broke the group meanwhile met no connections to break.
        if self.monitor.error is not None:
            raise _without_frames(self.monitor.error)
        if self.broken is not None:
            self._refuse()
        self._has_met = True
        lives.look()  # by now all are known
        ranks_here = transport.hosts.count(transport.hosts[self.rank])
        threads = torch.get_num_threads()
        self._is_crowded = threads > 1 and threads * ranks_here > cores()
        if 2 * ranks_here > cores():
            self._moment_s = _LONG_MOMENT_S
        store = dist.PrefixStore("choice", self.store)
        left_s = max(round(deadline - time.monotonic(), 3), 0.001)
        self.table = agree(transport, store, left_s, device=self.device, fit=self._fit)
        if transport.waits_briefly:
            self._gives_way = not self._comparison.compares_each
            transport.gives_way = self._hears
            self._set_ready()
        if transport.direct_from is not None:
            transport.direct_from = self.table.parameters.direct_from or transport.direct_from

    def _failed(self, error: BaseException, timeout_s: float) -> BaseException:
        """Break the group after a failure, report the failure, and explain it."""
        if isinstance(error, dist.DistError):
            error = store_gone_error(self.store, error)
        if isinstance(error, TransportError):
            error = _without_frames(self.monitor.explain(error, timeout_s))
            text = str(error)
        else:
            # Peers wait for messages that will not come, and messages in flight use the memory.
            text = self.monitor.report(error, timeout_s)
            is_lack = type(error) is RuntimeError and _NO_MEMORY in str(error)
            # To connect may need files and descriptors that the process cannot have.
            if is_lack or (isinstance(error, OSError) and not self._has_met):
                error = TransportError(text)
        is_own = threading.current_thread() in self._queue.threads
        is_raised = not is_own and not self._is_brief
        self._break_and_tell(error, text, is_raised=is_raised)
        return error

    def _give_up(self) -> None:
        """Break the wait of the running operation, which is in vain, as the monitor knows.

        The host gets the error where it waits. If a stream waits, nobody may ever ask.
        """
        error = self.monitor.error
        if self.progress.issued and error is not None:
            self._break_and_tell(error, str(error), is_raised=False)
        else:
            self.transport.abort()

    def _break_and_tell(self, error: BaseException, text: str, *, is_raised: bool) -> None:
        is_first = self.state is GroupState.OPEN
        if is_first:
            self.progress.failed = self.progress.running()
            if isinstance(error, Exception):
                announce(text, is_raised=is_raised)
        self._break(error)
        if is_first:
            flight_recorder.save()

    def _break(self, error: BaseException) -> None:
        if self.state is GroupState.FOREIGN:
            return
        try:
            if self.broken is None:
                self.broken = _without_frames(error)
                self.state = max(self.state, GroupState.BROKEN)
                self._set_ready()
            self.progress.abandon(self.broken)
        finally:
            self.transport.abort()

    def snapshot(self) -> dict[str, Any]:
        """The state of the rank, as plain data: see `ringcoll.runtime.watch.flight_report`."""
        running = self.progress.current
        queued = [
            (item.number, item.operation)
            for item in tuple(self._queue.items)
            if not item.work.done and (running is None or item.number != running[0])
        ]
        return {
            "group": self.token,
            "transport": self.transport.name,
            "rank": self.rank,
            "world_size": self.world_size,
            "ranks": self.monitor.notices.names.members,
            "failure": None if self.broken is None else str(self.broken),
            **flight_recorder.operations(self.monitor, queued),
        }

    def check_usable(self) -> None:
        """Raise `GroupBrokenError` if the group is closed, broken, or another process's."""
        if self.state is not GroupState.OPEN:
            self._refuse()

    def disown(self) -> None:
        """Let every call raise an error, in a forked process: its parent has the group."""
        self.state = GroupState.FOREIGN  # the parent's threads and connections stay as they are
        self._set_ready()
        # Threads that are not here any more may hold the others.
        self._queue.turn, self._queue.serving = threading.RLock(), threading.RLock()

    def _refuse(self) -> None:
        names = self.monitor.notices.names
        if self.state is GroupState.FOREIGN:
            raise GroupBrokenError(FORKED)
        if self.state is GroupState.CLOSED:
            raise GroupBrokenError(f"{names.of(self.rank)}: {names.group} was closed")
        assert self.broken is not None
        is_own = isinstance(self.broken, RingcollError)
        why = self.broken if is_own else described(self.broken)
        raise GroupBrokenError(
            f"{names.of(self.rank)}: {names.group} is broken by an earlier failure: {why}",
            peer=getattr(self.broken, "peer", None),
        ) from self.broken

    # --- memory and streams -----------------------------------------------------------------

    def _workspace(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        lane = self._lane
        if lane is not None and lane.capturing:  # the memory lives as long as the graph
            return torch.empty(numel, dtype=dtype, device=device)
        memory = self.memory.take(numel, dtype, device)
        if lane is not None:  # the memory may be replaced while the stream still uses it
            lane.use([memory])
        return memory

    def _forget_memory(self) -> None:
        for operation in tuple(self.operations.values()):  # other threads may add operations
            operation.forget()

    def _lane_of(
        self, operation: Operation | Turn, following: Iterable[Part], *, is_aside: bool
    ) -> Lane:
        """The way of a call through the streams of its device; nothing else is enqueued yet."""
        device = operation.device
        streams = self._streams.get(device)
        if streams is None:
            streams = self._streams[device] = Streams(device)
        is_capturing = capturing(device)
        if is_capturing:
            self._check_capture(operation, following)
        on_host = operation.name == "barrier"
        return Lane(streams, aside=is_aside, capturing=is_capturing, on_host=on_host)

    def _check_capture(self, operation: Operation | Turn, following: Iterable[Part]) -> None:
        """Refuse a call that cannot be captured in a CUDA graph.

        The first run of a call must not be captured: it connects, loads kernels, and compares
        calls through the store.
        """
        refused = f"rank {self.rank}: {operation.name} cannot be captured in a CUDA graph: "
        if self.transport.waits_on_host:
            raise CaptureError(
                f"{refused}over {self.transport.name} the host takes part in it. Let CUDA tensors "
                'travel over NCCL: cuda_transport="nccl", or RINGCOLL_CUDA_TRANSPORT'
            )
        if not isinstance(following, Sequence):
            raise CaptureError(f"{refused}what it sends depends on what it has received")
        for each in (operation, *(part for part, _ in following)):
            if each.description is None or each.description not in self._comparison.known:
                raise CaptureError(
                    f"{refused}no such call has run in this group yet. Run it once before the "
                    "capture, on all ranks, with tensors of the same shapes and dtypes"
                )

    # --- the end ----------------------------------------------------------------------------

    def monitored_barrier(self, timeout_s: float, wait_all_ranks: bool) -> None:
        """See `ringcoll.monitored_barrier`."""
        monitor = self.monitor
        with self._queue.turn:
            self.check_usable()
            number = self.progress.enter_barrier(self.num_issued)
        store = dist.PrefixStore("barrier", self.store)
        wait = partial(
            monitored_barrier, store, self.rank, self.world_size, number, timeout_s, wait_all_ranks,
            lambda: monitor.error is not None,
        )  # fmt: skip
        monitor.wake()  # which sees a rank that makes another call
        try:
            # Rank 0 may come as late as the time limit allows, and then waits as long for others.
            ask_store(self.store, 2 * timeout_s + patience_s(timeout_s), wait)
        except TransportError:
            if monitor.error is None:
                raise
            cause = _without_frames(monitor.error)
            self._break_and_tell(cause, str(cause), is_raised=True)
            raise cause from None
        finally:
            self.progress.barrier = None

    def close(self, drain_s: float = 0.0, running_s: float | None = None) -> None:
        """End threads and connections; queued operations fail after ``drain_s`` s, or at once.

        So do operations that other threads wait for, after ``running_s`` if that is given.
        """
        if self.state >= GroupState.CLOSED:
            return
        self.state = GroupState.CLOSED
        self._set_ready()
        # Nobody takes part in the queued operations of a broken group: to wait for them is in vain.
        if self.broken is not None or not self._queue.close(drain_s, running_s):
            self.broken = self.broken or GroupBrokenError(f"rank {self.rank}: the group was closed")
            self.transport.abort()
        else:
            self.monitor.leave(self.timeout_s)
        self._queue.close(_JOIN_S)
        self.monitor.close()
        flight_recorder.forget(self)
        self.progress.forget()
        self.memory.clear()
        self.operations.clear()
        self.transport.close()

    def abort(self) -> None:
        """Make all operations fail, here and at the peers that take part in them."""
        self._break(GroupBrokenError(f"rank {self.rank}: the group was aborted"))


def in_use(storages: Container[int]) -> bool:
    """Whether an operation of any group of this process works on one of some storages."""
    return any(
        member.uses(storages)
        for ref in _open_communicators.keyrefs()
        if (member := ref()) is not None
    )


def _without_frames(error: BaseException) -> BaseException:
    """A copy of an error, to be kept: a traceback refers to the user's frames, and so to the group.

    The group and the communicator would keep each other, with threads and connections, alive.
    """
    try:
        return copy(error)
    except Exception:  # noqa: BLE001  # a class of the user's that cannot be copied
        return TransportError(described(error))


def _leave_to_parent() -> None:
    """Refuse all groups in a forked process: its parent has their threads and connections."""
    for communicator in tuple(_open_communicators):
        communicator.disown()
    _open_communicators.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


def _close_all() -> None:
    # Nobody waits for the pending operations of a program that an exception has ended. Python keeps
    # the exception for debuggers; at a prompt it may be an old exception.
    is_lost = hasattr(sys, "last_type") and not hasattr(sys, "ps1")
    for communicator in tuple(_open_communicators):
        with contextlib.suppress(RingcollError, RuntimeError):
            # Threads that still wait are daemons, which Python would stop at once.
            communicator.close(0.0 if is_lost else _EXIT_S, 0.0)


at_end(_close_all)
