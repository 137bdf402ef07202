"""Notes what one rank does, while its group is traced.

Nothing here runs unless there is a trace. A `Tracer` puts itself around each operation of a
`Communicator` (`Tracer.around`), and in the place of the executor (`Tracer.drive`): the same
bound instructions in the same order, with the clock read before and after each.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from ringcoll.communicator import Bindings, Call, Communicator
from ringcoll.execute import Posting
from ringcoll.monitor import Running
from ringcoll.plan import Combine, Move, Plan, Post, Wait
from ringcoll.regions import Space
from ringcoll.stage import Opened
from ringcoll.tracing.records import Message, Operation, Records, Span
from ringcoll.transport.base import Handle

__all__ = ["Clocks", "Meeting", "Tracer"]

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
        self._known: dict[int, tuple[Plan, _Steps]] = {}
        self._last_step = 0

    def attach(self) -> None:
        """Begin: from now on operations are noted."""
        self._member.tracer = self

    def detach(self) -> None:
        """End: all is as it was before."""
        if self._member.tracer is self:
            self._member.tracer = None

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
        operation = Operation(number, call.name, call.name, "", 1, self.clock())
        self.records.operations.append(operation)
        self.current = operation
        return operation

    def _steps_of(self, plan: Plan) -> _Steps:
        known = self._known.get(id(plan))
        if known is None:
            known = self._known[id(plan)] = plan, _steps(plan)
        return known[1]

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
            nbytes = sum(tensor.nbytes for tensor in outputs)
            span = Span("copy", begin, self.clock(), self._last_step, nbytes=nbytes)
            operation.spans.append(span)

        return inputs, outputs, finish_in_time

    def drive(
        self, call: Call, bindings: Bindings, tag: int, running: Running, deadline: float
    ) -> None:
        """Run bound instructions, as `ringcoll.execute.execute` does, and note each."""
        operation, clock, wait = self.current, self.clock, bindings.transport.wait
        assert operation is not None
        decision, plan = bindings.decision, bindings.decision.plan
        operation.description = decision.description
        operation.algorithm, operation.segments = plan.schedule.algorithm, plan.segments
        steps = self._steps_of(plan)
        self._last_step = max(steps.instructions, default=0)
        wire = decision.dtype if call.reduction is None else call.reduction.wire_dtype
        handles: list[Handle] = []
        both = zip(plan.instructions, bindings.instructions, strict=True)
        for step, (instruction, bound) in zip(steps.instructions, both, strict=True):
            begin = clock()
            if isinstance(bound, Wait):
                running.wait = bound
                wait(handles[bound.message], max(deadline - time.monotonic(), 0.001))
                step_of_it = steps.messages[bound.message].step
                operation.spans.append(Span("wait", begin, clock(), step_of_it, bound.message))
            elif isinstance(bound, Posting):
                handles += bound.post(tag)
                end = clock()
                operation.spans.append(Span("post", begin, end, step))
                for is_send, messages in ((False, bound.receives), (True, bound.sends)):
                    for peer, tensor, salt in messages:
                        nbytes = tensor.numel() * wire.itemsize
                        own_step = steps.messages[len(operation.messages)].step
                        operation.messages.append(
                            Message(is_send, peer, own_step, nbytes, tag ^ salt, begin, end)
                        )
            else:
                bound()
                assert isinstance(instruction, Combine | Move)
                kind = "copy" if isinstance(instruction, Move) else "reduce"
                nbytes = plan.regions[instruction.into].numel * decision.dtype.itemsize
                operation.spans.append(Span(kind, begin, clock(), step, nbytes=nbytes))
