"""The recorder of one rank while its group is traced.

Nothing here runs unless there is a trace. A `Tracer` wraps the calls that an operation is bound to
(`Tracer.traced`), so that the clock is read before and after each; the executor runs them as
it runs any others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringcoll.runtime.group import Communicator, Work
from ringcoll.runtime.operation import (
    Binding,
    BoundInstruction,
    Combine,
    Move,
    Operation,
    Plan,
    Post,
    Posting,
    Program,
    Reading,
    Space,
    Turn,
    Wait,
)
from ringcoll.runtime.transport import Handle
from ringcoll.runtime.watch import Awaited, PhaseLog
from ringcoll.tools.tracing.clocks import ReadClock
from ringcoll.tools.tracing.records import MessageEnd, Records, Span, TracedOperation


class _Steps(NamedTuple):
    """Steps of a plan's instructions, and the waits for its messages by number."""

    instructions: tuple[int, ...]
    messages: dict[int, Wait]


def _steps(plan: Plan) -> _Steps:
    """Find the step to which each instruction belongs.

    A wait names its step. Work on a message that has arrived belongs to the step of the wait
    before it; packing for a send, and work before the first wait, to the step of the next send.
    """
    messages = {wait.message: wait for wait in plan.instructions if isinstance(wait, Wait)}
    steps: list[int] = []
    pending: list[int] = []  # instructions whose step is that of the next send
    current, number = -1, 0
    for index, instruction in enumerate(plan.instructions):
        if isinstance(instruction, Post):
            total = len(instruction.receives) + len(instruction.sends)
            own = [messages[message] for message in range(number, number + total)]
            number += total
            sends = [wait.step for wait in own if not wait.is_receive]
            current = min(sends or [wait.step for wait in own])
            for earlier in pending:
                steps[earlier] = current
            pending.clear()
        elif isinstance(instruction, Wait):
            if instruction.is_receive:
                current = instruction.step
        else:
            packs = isinstance(instruction, Move) and (
                plan.regions[instruction.into].space is Space.PACKING
            )
            if packs or current < 0:
                pending.append(index)
        steps.append(instruction.step if isinstance(instruction, Wait) else current)
    return _Steps(tuple(max(0, step) for step in steps), messages)


class TracedWork(Work):
    """A work whose waits are noted, if they are those of the thread that has entered the trace."""

    def __init__(
        self,
        description: str,
        results: Sequence[Tensor],
        help_: Callable[[Work], None] | None,
        note: tuple[PhaseLog, int],
    ) -> None:
        super().__init__(description, results, help_)
        self._note = note

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the operation; see `Work.wait`."""
        log, group = self._note
        if self.done or not log.is_recording:
            return super().wait(timeout)
        with log.waiting(Awaited(None), number=group):
            return super().wait(timeout)


class Tracer:
    """Notes the operations of one rank of a group: at most ``most``; it only counts the others.

    ``records`` are the notes of the rank, of all its traced groups; ``group`` is the number of the
    group in them. ``log`` has the phases of the thread that has entered the trace.
    """

    def __init__(
        self,
        member: Communicator,
        records: Records,
        log: PhaseLog,
        group: int,
        clock: ReadClock,
        most: int,
    ) -> None:
        self._member, self.clock, self._most = member, clock, most
        self.records, self._log, self._group = records, log, group
        self._ranks = records.groups[group]
        self.current: TracedOperation | None = None
        self._num_kept = 0
        self._known: dict[int, tuple[Plan, _Steps]] = {}

    def attach(self) -> None:
        """Begin to note operations."""
        self._member.tracer = self

    def detach(self) -> None:
        """Note no operations any more."""
        if self._member.tracer is self:
            self._member.tracer = None

    def work(
        self, name: str, results: Sequence[Tensor], help_: Callable[[Work], None] | None
    ) -> Work:
        """Make the work of an asynchronous operation."""
        return TracedWork(name, results, help_, (self._log, self._group))

    def begin(self, number: int, operation: Operation | Turn) -> None:
        """Note that an operation begins."""
        self.current = None
        if isinstance(operation, Turn):  # a turn does not belong to the trace
            return
        if self._num_kept >= self._most:  # the same on all ranks of the group
            self.records.left_out += 1
            return
        self._num_kept += 1
        name = operation.name
        self.current = TracedOperation(
            number, name, name, "", 1, self.clock(),
            group=self._group, is_beside=not self._log.is_recording,
        )  # fmt: skip
        self.records.operations.append(self.current)

    def failed(self, error: BaseException) -> None:
        """Note that the operation has failed."""
        if self.current is not None:
            self.current.error = f"{type(error).__name__}: {error}"

    def end(self) -> None:
        """Note that the operation is over."""
        if self.current is not None:
            self.current.end = self.clock()
        self.current = None

    def traced(self, operation: Operation | Turn, binding: Binding, tag: int) -> Binding:
        """Wrap all functions of a binding, so that each call of them is noted."""
        record = self.current
        if record is None or isinstance(operation, Turn):
            return binding
        plan, request = operation.plan, operation.request
        assert plan is not None
        record.description = operation.description or operation.name
        record.algorithm, record.segments = plan.schedule.algorithm, plan.segments
        if id(plan) not in self._known:
            self._known[id(plan)] = plan, _steps(plan)
        _, steps = self._known[id(plan)]
        program: list[BoundInstruction] = []
        first_message = 0
        both = zip(plan.instructions, binding.program.items, strict=True)
        for step, (instruction, bound) in zip(steps.instructions, both, strict=True):
            if isinstance(bound, Wait):
                program.append(bound)
            elif isinstance(bound, Posting):
                past_last = first_message + len(bound.receives) + len(bound.sends)
                waits = [steps.messages[number] for number in range(first_message, past_last)]
                post = self._posting(record, bound, step, tag, request.wire_dtype, waits)
                program.append(bound._replace(post=post))
                first_message = past_last
            else:
                assert isinstance(instruction, Combine | Move)
                kind = "copy" if isinstance(instruction, Move) else "reduce"
                nbytes = plan.regions[instruction.into].numel * request.work_dtype.itemsize
                run = bound.run if isinstance(bound, Reading) else bound
                noting = self._noting(record, run, kind, step, nbytes)
                program.append(bound._replace(run=noting) if isinstance(bound, Reading) else noting)
        last = max(steps.instructions, default=0)
        return Binding(
            [(self._noting(record, load, "copy", 0), number) for load, number in binding.loads],
            Program(program),
            [(self._noting(record, copy, "copy", last), number) for copy, number in binding.stores],
            self._waiting(record, binding.wait, steps),
            binding.is_over,
        )

    def _noting(
        self,
        record: TracedOperation,
        work: Callable[..., object],
        kind: str,
        step: int,
        nbytes: int | None = None,
    ) -> Callable[..., object]:
        """Note work of so many bytes; without them, of the tensor that is copied."""

        def work_and_note(*arguments: Any) -> None:
            begin = self.clock()
            work(*arguments)
            end = self.clock()
            size = arguments[0].nbytes if nbytes is None else nbytes
            record.spans.append(Span(kind, begin, end, step, nbytes=size))

        return work_and_note

    def _posting(
        self,
        record: TracedOperation,
        bound: Posting,
        step: int,
        tag: int,
        wire: torch.dtype,
        waits: Sequence[Wait],
    ) -> Callable[[int], list[Handle]]:
        def post_and_note(mixed: int) -> list[Handle]:
            begin = self.clock()
            handles = bound.post(mixed)
            end = self.clock()
            record.spans.append(Span("post", begin, end, step))
            for handle, wait in zip(handles, waits, strict=True):
                if handle is None:  # it is over, and nobody waits for it
                    record.spans.append(Span("wait", end, end, wait.step, wait.message))
            for message, wait in zip(bound.receives + bound.sends, waits, strict=True):
                nbytes, is_send = message.tensor.numel() * wire.itemsize, not wait.is_receive
                peer, mixed_tag = self._ranks[wait.peer], tag ^ message.tag
                record.messages.append(
                    MessageEnd(is_send, peer, wait.step, nbytes, mixed_tag, begin, end)
                )
            return handles

        return post_and_note

    def _waiting(
        self, record: TracedOperation, wait: Callable[[Handle, float], None], steps: _Steps
    ) -> Callable[[Handle, float], None]:
        progress = self._member.monitor.progress

        def wait_and_note(handle: Handle, timeout_s: float) -> None:
            begin = self.clock()
            wait(handle, timeout_s)
            waited = progress.wait
            assert waited is not None
            step = steps.messages[waited.message].step
            record.spans.append(Span("wait", begin, self.clock(), step, waited.message))

        return wait_and_note
