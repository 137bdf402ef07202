"""Notes what one rank does, while its group is traced.

Nothing here runs unless there is a trace. A `Tracer` puts itself around each operation of a
`Communicator` (`Tracer.around`), around its transport (`TracedTransport`), and in the place of
the executor (`Tracer.drive`): the same instructions in the same order, with the clock read
before and after each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from torch import Tensor

from ringcoll.communicator import Call, Communicator
from ringcoll.execute import _message
from ringcoll.monitor import Running
from ringcoll.plan import Combine, Finish, Move, Plan, Post, Space, Wait
from ringcoll.stage import Opened
from ringcoll.tracing.records import Message, Operation, Records, Span
from ringcoll.transport import base
from ringcoll.transport.base import Handle, Transport

__all__ = ["Clocks", "Meeting", "TracedTransport", "Tracer"]

Run = Callable[[int, Call], None]
Clocks = Callable[[], int]
"""A clock: it gives nanoseconds, and never goes back."""


class Meeting(Call):
    """A call in which the ranks compare their clocks: not a part of the trace."""

    __slots__ = ()


class _Steps(NamedTuple):
    """Steps of a plan's instructions, and of its messages by number."""

    instructions: tuple[int, ...]
    messages: dict[int, Wait]


def _steps(plan: Plan) -> _Steps:
    """Find the step to which each instruction belongs.

    A wait says it. Work on what has arrived belongs to the step of the wait before it; what
    is packed for a send, and work before the first wait, to that of the next send.
    """
    messages = {one.message: one for one in plan.instructions if isinstance(one, Wait)}
    found: list[int] = []
    pending: list[int] = []  # instructions whose step is that of the next send
    current, number = -1, 0
    for index, instruction in enumerate(plan.instructions):
        if isinstance(instruction, Post):
            total = len(instruction.receives) + len(instruction.sends)
            own = [messages[one] for one in range(number, number + total)]
            number += total
            sends = [one.step for one in own if not one.is_receive]
            current = min(sends or [one.step for one in own])
            for earlier in pending:
                found[earlier] = current
            pending.clear()
        elif isinstance(instruction, Wait):
            if instruction.is_receive:
                current = instruction.step
        elif current < 0 or _packs(plan, instruction):
            pending.append(index)
        found.append(instruction.step if isinstance(instruction, Wait) else current)
    return _Steps(tuple(max(0, step) for step in found), messages)


def _packs(plan: Plan, instruction: object) -> bool:
    return isinstance(instruction, Move) and (plan.regions[instruction.into].space is Space.PACKING)


class _Watched(NamedTuple):
    """A message on its way: its handle in the transport below, and its number."""

    handle: Handle
    number: int


class TracedTransport:
    """Another transport's messages, with times.

    Parameters
    ----------
    below
        What moves the bytes.
    tracer
        Who notes them.
    """

    def __init__(self, below: Transport, tracer: Tracer) -> None:
        self.below, self._tracer = below, tracer
        self.rank, self.world_size = below.rank, below.world_size
        self.name, self.ordered = below.name, below.ordered
        self.connect, self.abort, self.close = below.connect, below.abort, below.close

    def post(self, receives: Sequence[base.Message], sends: Sequence[base.Message]) -> list[Handle]:
        """Start messages; see `Transport.post`."""
        operation, clock = self._tracer.current, self._tracer.clock
        if operation is None:
            return self.below.post(receives, sends)
        begin = clock()
        handles = self.below.post(receives, sends)
        end = clock()
        first = len(operation.messages)
        steps = self._tracer.steps.messages
        for offset, (peer, tensor, tag) in enumerate((*receives, *sends)):
            is_send, step = offset >= len(receives), steps[first + offset].step
            operation.messages.append(Message(is_send, peer, step, tensor.nbytes, tag, begin, end))
        operation.spans.append(Span("post", begin, end, self._tracer.step))
        return [_Watched(handle, first + offset) for offset, handle in enumerate(handles)]

    def wait(self, handle: Handle, timeout_s: float) -> None:
        """Wait for one message; see `Transport.wait`."""
        if not isinstance(handle, _Watched):
            self.below.wait(handle, timeout_s)
            return
        operation, clock = self._tracer.current, self._tracer.clock
        begin = clock()
        self.below.wait(handle.handle, timeout_s)
        if operation is not None:
            step = operation.messages[handle.number].step
            operation.spans.append(Span("wait", begin, clock(), step, handle.number))


class Tracer:
    """Notes the operations of one rank of a group.

    Parameters
    ----------
    member
        The rank's end of the group.
    clock
        Gives nanoseconds.
    most
        Operations that are kept; more are counted.
    """

    def __init__(self, member: Communicator, clock: Clocks, most: int) -> None:
        self._member, self.clock, self._most = member, clock, most
        self.records = Records(member.rank, member.world_size, member.transport.name)
        self.current: Operation | None = None
        self.steps = _Steps((), {})
        self.step = 0  # of the instruction that runs
        self._known: dict[int, tuple[Plan, _Steps]] = {}

    def attach(self) -> None:
        """Begin: from now on operations are noted."""
        member = self._member
        member.transport = TracedTransport(member.transport, self)
        member.tracer = self

    def detach(self) -> None:
        """End: all is as it was before."""
        member = self._member
        if member.tracer is self:
            member.tracer = None
        if isinstance(member.transport, TracedTransport):
            member.transport = member.transport.below

    def around(self, run: Run) -> Run:
        """A function that runs a call, and notes that it does."""

        def watched(number: int, call: Call) -> None:
            if isinstance(call, Meeting):
                run(number, call)
                return
            if len(self.records.operations) >= self._most:
                self.records.left_out += 1
                run(number, call)
                return
            operation = self._started(number, call)
            try:
                run(number, replace(call, open=lambda: self._open(operation, call)))
            except BaseException as error:
                operation.error = f"{type(error).__name__}: {error}"
                raise
            finally:
                self.current, operation.end = None, self.clock()

        return watched

    def _started(self, number: int, call: Call) -> Operation:
        plan = call.plan
        known = self._known.get(id(plan))
        if known is None:
            known = self._known[id(plan)] = plan, _steps(plan)
        self.steps = known[1]
        operation = Operation(
            number,
            call.description,
            plan.schedule.collective,
            plan.schedule.algorithm,
            plan.segments,
            self.clock(),
        )
        self.records.operations.append(operation)
        self.current = operation
        return operation

    def _open(self, operation: Operation, call: Call) -> Opened:
        """Make the flat tensors; where they are copies, that is noted, there and back."""
        begin = self.clock()
        inputs, outputs, finish = call.open()
        if finish is None:
            return inputs, outputs, None
        nbytes = sum(tensor.nbytes for tensor in inputs)
        operation.spans.append(Span("copy", begin, self.clock(), 0, nbytes=nbytes))

        def finish_in_time() -> None:
            begin = self.clock()
            finish()
            last = max(self.steps.instructions, default=0)
            nbytes = sum(tensor.nbytes for tensor in outputs)
            operation.spans.append(Span("copy", begin, self.clock(), last, nbytes=nbytes))

        return inputs, outputs, finish_in_time

    def drive(
        self,
        call: Call,
        views: Sequence[Tensor],
        transport: Transport,
        tag: int,
        running: Running,
        deadline: float,
    ) -> None:
        """Run a plan, as `ringcoll.execute.execute` does, one instruction at a time."""
        handles: list[Handle] = []
        by_length = call.lengths is not None
        steps = self.steps.instructions if self.current is not None else ()
        post, wait = transport.post, transport.wait
        if not isinstance(transport, TracedTransport):
            post = partial(self._post_narrow, transport)
            wait = partial(self._wait_narrow, transport)
        for index, instruction in enumerate(call.plan.instructions):
            self.step = steps[index] if steps else 0
            if isinstance(instruction, Wait):
                running.wait = instruction
                wait(handles[instruction.message], max(deadline - time.monotonic(), 0.001))
            elif isinstance(instruction, Post):
                receives, sends = (
                    [_message(item, views, tag, by_length) for item in items]
                    for items in instruction
                )
                handles += post(receives, sends)
            elif isinstance(instruction, Move):
                begin = self.clock()
                views[instruction.into].copy_(views[instruction.source])
                self._note("copy", begin, views[instruction.into])
            else:
                begin = self.clock()
                self._reduce(call, views, instruction, transport.world_size)
                self._note("reduce", begin, views[instruction.into])

    def _reduce(
        self, call: Call, views: Sequence[Tensor], instruction: Combine | Finish, world_size: int
    ) -> None:
        reduction = call.reduction
        assert reduction is not None
        final = True
        if isinstance(instruction, Combine):
            into, left, right, final = instruction
            reduction.combine(views[left], views[right], out=views[into])
        if final and reduction.finish is not None:
            reduction.finish(views[instruction.into], world_size)

    def _post_narrow(
        self, transport: Transport, receives: list[base.Message], sends: list[base.Message]
    ) -> list[Handle]:
        """Post; what is done above the transport that moves the bytes is a copy."""
        begin, known = self.clock(), self._spans()
        handles = transport.post(receives, sends)
        end = self.clock()
        if self.current is not None:
            spans = self.current.spans
            inner = spans[known]
            nbytes = sum(message.tensor.nbytes for message in sends)
            spans.insert(known, Span("copy", begin, inner.begin, self.step, -1, nbytes))
            spans.append(Span("copy", inner.end, end, self.step))
        return handles

    def _wait_narrow(self, transport: Transport, handle: Handle, limit_s: float) -> None:
        """Wait; what has arrived is then widened."""
        known = self._spans()
        transport.wait(handle, limit_s)
        if self.current is not None:
            inner = self.current.spans[known]
            if not self.current.messages[inner.message].is_send:
                self._note("copy", inner.end)

    def _spans(self) -> int:
        return 0 if self.current is None else len(self.current.spans)

    def _note(self, kind: str, begin: int, tensor: Tensor | None = None) -> None:
        if self.current is not None:
            nbytes = 0 if tensor is None else tensor.nbytes
            self.current.spans.append(Span(kind, begin, self.clock(), self.step, -1, nbytes))
