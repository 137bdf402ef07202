"""The recorder of one rank while its group is traced, and the common clock of all ranks.

Nothing here runs unless there is a trace. A `Tracer` wraps the calls that an operation is bound to
(`Tracer.traced`), so that the clock is read before and after each; the executor runs them as
it runs any others. `Records` are the notes of a rank: numbers only, as JSON between ranks.

Each rank notes times on a clock of its own, and a picture of all ranks needs a common one, which is
made from messages that were sent anyway.

Every message is a bound: a message is received after it was sent. If the offset ``o[r]`` has to
be added to the clock of rank r, a message from a to b says ::

    sent + o[a] <= received + o[b],   so   o[a] - o[b] <= received - sent

A ping and its answer bound the offset of a rank from both sides (Cristian, "Probabilistic
clock synchronization", 1989); all messages together are a system of difference constraints,
whose tightest form is a matrix of shortest paths. The middle between the two bounds of each
rank against rank 0 satisfies all of them at once: by the triangle inequality
``d[a][0] - d[b][0] <= d[a][b]`` and ``d[0][b] - d[0][a] <= d[a][b]``, and half the sum of
the left sides is ``o[a] - o[b]``. So no message arrives before it was sent, and the true
offset is no further away than half the distance of the bounds, which is the uncertainty.

Clocks of different hosts may also run at different rates. If the bounds from the beginning and
the bounds from the end exclude each other, a constant rate is assumed. If some bound is still
broken then, all bounds are loosened alike, and the uncertainty grows with them.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from ringcoll.errors import TraceError
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
    Reading,
    Space,
    Turn,
    Wait,
)
from ringcoll.runtime.transport import Handle
from ringcoll.runtime.watch import Awaited, PhaseLog, PhaseSpan, ThreadWait

Clocks = Callable[[], int]
"""A clock: it gives nanoseconds, and never goes back."""

# What packed data raise that are cut, that are no JSON, or that have other fields.
_MALFORMED = (zlib.error, ValueError, TypeError, LookupError, AttributeError, RecursionError)


class Span(NamedTuple):
    """Work of a rank from ``begin`` to ``end``, in ns on its own clock.

    ``kind`` is ``"wait"``, ``"post"``, ``"reduce"`` or ``"copy"``; ``message`` is the number of the
    message that the rank waited for, or -1; ``nbytes`` are the bytes that were reduced or copied.
    """

    kind: str
    begin: int
    end: int
    step: int
    message: int = -1
    nbytes: int = 0


class MessageEnd(NamedTuple):
    """An end of a message; the call that posted it took from ``begin`` to ``end``, in ns."""

    is_send: bool
    peer: int
    step: int
    nbytes: int
    tag: int
    begin: int
    end: int


@dataclass(slots=True)
class TracedOperation:
    """An operation of a group, as a rank has seen it.

    ``number`` is the same on all ranks; ``error`` is the text of the error, if it failed.
    ``group`` is the number of the traced group, and ``is_beside`` says whether another thread than
    the one that has entered the trace ran it. All ranks are ranks in the first group.
    """

    number: int
    description: str
    collective: str
    algorithm: str
    segments: int
    begin: int
    end: int = 0
    error: str = ""
    group: int = 0
    is_beside: bool = False
    messages: list[MessageEnd] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

    def arrivals(self) -> dict[int, Span]:
        """The waits that are over, by the number of the message."""
        return {span.message: span for span in self.spans if span.message >= 0}


@dataclass(slots=True)
class Records:
    """All notes of a rank.

    ``sightings`` are the messages between the rank and rank 0 that measured the clocks, before and
    after. ``left_out`` is the number of operations beyond the limit, ``phases_left_out`` that of
    phases and waits. ``groups`` are the ranks of each traced group.
    """

    rank: int
    world_size: int
    transport: str
    operations: list[TracedOperation] = field(default_factory=list)
    sightings: tuple[list[Sighting], list[Sighting]] = field(default_factory=lambda: ([], []))
    left_out: int = 0
    phases_left_out: int = 0
    groups: list[list[int]] = field(default_factory=list)
    phases: list[PhaseSpan] = field(default_factory=list)
    waits: list[ThreadWait] = field(default_factory=list)

    def packed(self) -> bytes:
        """As compressed JSON."""
        return zlib.compress(json.dumps(asdict(self)).encode(), 1)

    @classmethod
    def unpacked(cls, data: bytes) -> Self:
        """Read the data of `packed`.

        Raises
        ------
        TraceError
            The data are something else.
        """
        try:
            fields: dict[str, Any] = json.loads(zlib.decompress(data))
            operations = [_operation(item) for item in fields.pop("operations")]
            first, last = ([Sighting(*item) for item in row] for row in fields.pop("sightings"))
            phases = [PhaseSpan(**item) for item in fields.pop("phases")]
            waits = [ThreadWait(*item) for item in fields.pop("waits")]
            return cls(
                **fields, operations=operations, sightings=(first, last), phases=phases, waits=waits
            )
        except _MALFORMED as error:
            raise TraceError(f"not the notes of a rank: {error!r}") from error


def _operation(fields: dict[str, Any]) -> TracedOperation:
    messages = [MessageEnd(*item) for item in fields.pop("messages")]
    spans = [Span(*item) for item in fields.pop("spans")]
    return TracedOperation(**fields, messages=messages, spans=spans)


class _Steps(NamedTuple):
    """Steps of a plan's instructions, and of its messages by number."""

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
        elif current < 0 or _packs(plan, instruction):
            pending.append(index)
        steps.append(instruction.step if isinstance(instruction, Wait) else current)
    return _Steps(tuple(max(0, step) for step in steps), messages)


def _packs(plan: Plan, instruction: object) -> bool:
    return isinstance(instruction, Move) and plan.regions[instruction.into].space is Space.PACKING


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
        clock: Clocks,
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
        steps = self._steps_of(plan)
        program: list[BoundInstruction] = []
        first_message = 0
        both = zip(plan.instructions, binding.program, strict=True)
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
                if isinstance(bound, Reading):
                    run = self._noting(record, bound.run, kind, step, nbytes)
                    program.append(bound._replace(run=run))
                else:
                    program.append(self._noting(record, bound, kind, step, nbytes))
        last_step = max(steps.instructions, default=0)
        return Binding(
            [(self._noting(record, load, "copy", 0), number) for load, number in binding.loads],
            program,
            [
                (self._noting(record, store, "copy", last_step), number)
                for store, number in binding.stores
            ],
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

    def _steps_of(self, plan: Plan) -> _Steps:
        known = self._known.get(id(plan))
        if known is None:
            known = self._known[id(plan)] = plan, _steps(plan)
        return known[1]


_Bounds = list[list[float]]
"""Upper bounds of o[a] - o[b] in ns: whole numbers, or infinity where nothing is known."""


class Sighting(NamedTuple):
    """A message from one rank to another: times in ns, each on the clock of its rank."""

    source: int
    target: int
    sent: int
    received: int


@dataclass(frozen=True)
class Clock:
    """From the clock of a rank to that of rank 0.

    ``offset_ns``, which is added to the rank's clock, is the offset at the time ``since_ns`` on
    that clock; it grows by ``rate`` in each unit of time. The true offset is at most
    ``uncertainty_ns`` away. A message may seem to arrive ``slack_ns`` before it was sent: 0 unless
    clocks drift in an irregular way.
    """

    offset_ns: int
    uncertainty_ns: int
    rate: float = 0.0
    since_ns: int = 0
    slack_ns: int = 0

    def corrected(self, time_ns: int) -> int:
        """The time on the clock of rank 0."""
        return time_ns + self.offset_ns + round(self.rate * (time_ns - self.since_ns))


def agree(
    world_size: int,
    begin: Sequence[Sighting],
    end: Sequence[Sighting],
    between: Iterable[Sighting] = (),
) -> list[Clock]:
    """Find the clocks of all ranks.

    ``begin`` and ``end`` are messages between rank 0 and each other rank, both ways, before and
    after the messages ``between``.
    """
    drifts = _drifts(world_size, begin, end)
    messages = [_steady(message, drifts) for message in (*begin, *between, *end)]
    bounds, slack = _feasible(world_size, messages)
    clocks = []
    for rank, (rate, since) in enumerate(drifts):
        above, below = bounds[rank][0], bounds[0][rank]
        if math.isinf(above) or math.isinf(below):
            raise TraceError(f"no messages both ways between rank 0 and rank {rank}")
        offset, uncertainty = int(above - below) // 2, -(-int(above + below) // 2)
        clocks.append(Clock(offset, uncertainty, rate, since, slack))
    return clocks


def _drifts(
    world_size: int, begin: Sequence[Sighting], end: Sequence[Sighting]
) -> list[tuple[float, int]]:
    """The rate of each rank's offset, and since when; 0 unless the rate is certain."""
    drifts = [(0.0, 0)] * world_size
    first, last = _direct(world_size, begin), _direct(world_size, end)
    for rank in range(1, world_size):
        low, high = -first[0][rank], first[rank][0]
        low_later, high_later = -last[0][rank], last[rank][0]
        if not math.isfinite(low + high + low_later + high_later):
            continue
        if low_later > high or high_later < low:
            since, until = _middle(begin, rank), _middle(end, rank)
            change = (low_later + high_later - low - high) / 2
            drifts[rank] = change / (until - since), since
    return drifts


def _middle(messages: Sequence[Sighting], rank: int) -> int:
    """Mean time of the messages of a rank, on its own clock."""
    times = [message.sent for message in messages if message.source == rank]
    return sum(times) // len(times)


def _steady(message: Sighting, drifts: Sequence[tuple[float, int]]) -> Sighting:
    """A message with the times of clocks that keep the rate of rank 0."""
    source, target, sent, received = message
    (rate, since), (other, other_since) = drifts[source], drifts[target]
    return Sighting(
        source,
        target,
        sent + round(rate * (sent - since)),
        received + round(other * (received - other_since)),
    )


def _direct(world_size: int, messages: Iterable[Sighting]) -> _Bounds:
    """The bounds from single messages."""
    bounds = [[math.inf] * world_size for _ in range(world_size)]
    for source, target, sent, received in messages:
        bounds[source][target] = min(bounds[source][target], received - sent)
    return bounds


def _feasible(world_size: int, messages: Sequence[Sighting]) -> tuple[_Bounds, int]:
    """The tightest bounds, and the slack without which they would exclude each other."""
    slack = 0
    while True:
        bounds = _closed(_direct(world_size, messages), slack)
        if all(bounds[rank][rank] >= 0 for rank in range(world_size)):
            return bounds, slack
        slack = 2 * slack or 1000


def _closed(bounds: _Bounds, slack: int) -> _Bounds:
    """Bounds by way of any other ranks: shortest paths, by Floyd and Warshall."""
    closed = [[bound + slack for bound in row] for row in bounds]
    for rank, row in enumerate(closed):
        row[rank] = 0
    for via, beyond in enumerate(closed):
        for row in closed:
            near = row[via]
            row[:] = [min(known, near + far) for known, far in zip(row, beyond, strict=True)]
    return closed
