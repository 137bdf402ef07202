"""Schedules of a pipeline, as data: for each rank its actions, in order; what follows from them.

Problem: a model is cut into stages, of which stage s lies on rank s mod p, and a batch is cut into
m micro-batches. Each micro-batch passes forward through all stages, and its gradient passes back
through them. A schedule says in which order a rank does this work. The messages follow from the
schedule: a forward needs the activation of the stage before, a backward needs the gradient of the
stage after.

An action is written as stage, kind and micro-batch::

    0F3    forward of micro-batch 3 through stage 0
    0B3    backward: the gradients of the stage's input and of its weights
    0I3    first half of a backward: the gradient of the stage's input
    0W3    second half of a backward: the gradients of the stage's weights

The orders are functions that return a `PipelineSchedule`. With the costs F = 1, B = 2, I = 1, W = 1
of `UNIT_COSTS`, and messages that cost nothing:

=============  ==================  ===================================  ====================
schedule       idle share          activations that rank r keeps        idle share holds for
=============  ==================  ===================================  ====================
`gpipe`        (p-1) / (m + p-1)   m                                    all m
`one_f_one_b`  (p-1) / (m + p-1)   min(m, p-r)                          all m
`interleaved`  (p-1) / (vm + p-1)  at most (v-1) p + 2 (p-r-1) + 1      multiples m of p
`zero_bubble`  (p-1) / (3m + p-1)  min(m, p)                            m >= p
=============  ==================  ===================================  ====================

Here v is the number of stages per rank; a stage of `interleaved` has 1/v of the layers of a rank.

Proof, idle time, memory and drawing follow from a simulation in which each rank begins each action
as soon as the rank is free and the action has what it needs.

Source: Huang et al., "GPipe", NeurIPS 2019; Narayanan et al., "PipeDream", SOSP 2019 (1F1B);
Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", SC 2021 (1F1B with a flush after each batch; section 2.2: interleaved 1F1B); Qi et
al., "Zero Bubble Pipeline Parallelism", ICLR 2024 (section 2: ZB-H1).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from itertools import product
from typing import Any, NamedTuple

from ringcoll.errors import ScheduleError, VerificationError


class Kind(StrEnum):
    """The kind of an action; the value is the letter of the text form."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUTS = "I"
    BACKWARD_WEIGHTS = "W"


UNIT_COSTS: Mapping[Kind, int] = {kind: 2 if kind is Kind.BACKWARD else 1 for kind in Kind}
"""Time of each kind of action, in units of one forward."""

# Numbers have few enough digits for `int`.
_ACTION = re.compile(r"(\d{1,18})([FBIW])(\d{1,18})")
_HEAD = re.compile(
    r"(\w+) stages=(\d{1,18}) microbatches=(\d{1,18}) "
    r"activations=(\d{1,18}(?:,\d{1,18})*)"
)


@dataclass(frozen=True, slots=True)
class Action:
    """The work of one stage on one micro-batch.

    >>> str(Action(Kind.FORWARD, stage=0, microbatch=3)), Action.parse("0F3").stage
    ('0F3', 0)
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read the text form; raise `ScheduleError` if the text is not an action."""
        match = _ACTION.fullmatch(text)
        if match is None:
            raise ScheduleError(f"{text!r} is not an action (expected the form 0F3)")
        stage, kind, microbatch = match.groups()
        return cls(Kind(kind), int(stage), int(microbatch))


@dataclass(frozen=True, slots=True)
class PipelineSchedule:
    """The actions of all ranks, in order, and how many activations each rank keeps at most.

    The text form has a line with the name and the numbers, then a line for each rank.

    >>> print(one_f_one_b(2, 3))
    1f1b stages=2 microbatches=3 activations=2,1
    0F0 0F1 0B0 0F2 0B1 0B2
    1F0 1B0 1F1 1B1 1F2 1B2
    >>> PipelineSchedule.parse(str(one_f_one_b(2, 3))) == one_f_one_b(2, 3)
    True
    """

    name: str
    num_stages: int
    num_microbatches: int
    activations: tuple[int, ...]
    programs: tuple[tuple[Action, ...], ...]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.programs)

    def stages_of(self, rank: int) -> range:
        """Numbers of the stages on a rank."""
        return range(rank, self.num_stages, self.world_size)

    def __str__(self) -> str:
        head = (
            f"{self.name} stages={self.num_stages} microbatches={self.num_microbatches} "
            f"activations={','.join(map(str, self.activations))}"
        )
        return "\n".join([head, *(" ".join(map(str, program)) for program in self.programs)])

    @classmethod
    def parse(cls, text: str) -> PipelineSchedule:
        """Read the text form; raise `ScheduleError` if the text is not a schedule."""
        head, *lines = text.split("\n")
        match = _HEAD.fullmatch(head)
        if match is None:
            raise ScheduleError(
                f"{head!r} does not begin a schedule "
                "(expected the form: name stages=2 microbatches=3 activations=2,1)"
            )
        name, stages, microbatches, numbers = match.groups()
        activations = tuple(map(int, numbers.split(",")))
        programs = tuple(tuple(map(Action.parse, line.split())) for line in lines)
        return cls(name, int(stages), int(microbatches), activations, programs)


def check_sizes(**sizes: int) -> None:
    """Raise `ScheduleError` if a number is not positive."""
    for name, value in sizes.items():
        if value < 1:
            raise ScheduleError(f"{name} must be positive (expected at least 1, got {value})")


# --- messages ---------------------------------------------------------------------------------


class Transfer(NamedTuple):
    """A tensor that passes from a stage to a neighbour."""

    boundary: int  # the lower of the two stages
    microbatch: int
    is_gradient: bool  # an activation goes up, its gradient comes down

    def __str__(self) -> str:
        what = f"the {'gradient' if self.is_gradient else 'activation'} of micro-batch"
        return f"{what} {self.microbatch} from stage {self.boundary + self.is_gradient}"


def produced(action: Action, num_stages: int) -> Transfer | None:
    """The tensor that an action hands to a neighbouring stage; ``None`` if there is none."""
    if action.kind is Kind.FORWARD and action.stage < num_stages - 1:
        return Transfer(action.stage, action.microbatch, is_gradient=False)
    if action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUTS) and action.stage > 0:
        return Transfer(action.stage - 1, action.microbatch, is_gradient=True)
    return None


def consumed(action: Action, num_stages: int) -> Transfer | None:
    """The tensor that an action needs from a neighbouring stage; ``None`` if there is none."""
    if action.kind is Kind.FORWARD and action.stage > 0:
        return Transfer(action.stage - 1, action.microbatch, is_gradient=False)
    if action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUTS) and action.stage < num_stages - 1:
        return Transfer(action.stage, action.microbatch, is_gradient=True)
    return None


# --- orders -----------------------------------------------------------------------------------


def _alternate(
    forwards: Sequence[Action], backwards: Sequence[tuple[Action, ...]], warmup: int
) -> Iterator[Action]:
    """Some forwards, then a backward after each forward, then the other backwards."""
    yield from forwards[:warmup]
    for number, backward in enumerate(backwards, start=warmup):
        yield from forwards[number : number + 1]
        yield from backward


def _of_stage(kind: Kind, stage: int, num_microbatches: int) -> list[Action]:
    return [Action(kind, stage, microbatch) for microbatch in range(num_microbatches)]


def _with_warmups(name: str, p: int, m: int, warmups: Sequence[int]) -> PipelineSchedule:
    """A stage on each rank, which begins with its warm-up and then alternates."""
    check_sizes(world_size=p, num_microbatches=m)
    programs = []
    for rank, warmup in enumerate(warmups):
        backwards = [(action,) for action in _of_stage(Kind.BACKWARD, rank, m)]
        programs.append(tuple(_alternate(_of_stage(Kind.FORWARD, rank, m), backwards, warmup)))
    activations = tuple(min(m, warmup + 1) for warmup in warmups)
    return PipelineSchedule(name, p, m, activations, tuple(programs))


def gpipe(world_size: int, num_microbatches: int) -> PipelineSchedule:
    """All forwards, then all backwards; a size that is not positive raises `ScheduleError`.

    >>> print(grid(gpipe(4, 2)))
    rank 0  0F0 0F1 .   .   .   .   .   .   .   .   .   0B0 -   0B1 -
    rank 1  .   1F0 1F1 .   .   .   .   .   .   1B0 -   1B1 -   .   .
    rank 2  .   .   2F0 2F1 .   .   .   2B0 -   2B1 -   .   .   .   .
    rank 3  .   .   .   3F0 3F1 3B0 -   3B1 -   .   .   .   .   .   .
    """
    warmups = [num_microbatches] * world_size
    return _with_warmups("gpipe", world_size, num_microbatches, warmups)


def one_f_one_b(world_size: int, num_microbatches: int) -> PipelineSchedule:
    """1F1B: after a warm-up, a backward after each forward; as idle as `gpipe`, with less memory.

    Rank r begins with p - r - 1 forwards: so many stages lie between it and the first backward.

    >>> print(grid(one_f_one_b(4, 4)))
    rank 0  0F0 0F1 0F2 0F3 .   .   .   .   .   .   0B0 -   .   0B1 -   .   0B2 -   .   0B3 -
    rank 1  .   1F0 1F1 1F2 .   .   .   .   1B0 -   1F3 1B1 -   .   1B2 -   .   1B3 -   .   .
    rank 2  .   .   2F0 2F1 .   .   2B0 -   2F2 2B1 -   2F3 2B2 -   .   2B3 -   .   .   .   .
    rank 3  .   .   .   3F0 3B0 -   3F1 3B1 -   3F2 3B2 -   3F3 3B3 -   .   .   .   .   .   .
    """
    return _with_warmups("1f1b", world_size, num_microbatches, range(world_size)[::-1])


def interleaved(
    world_size: int, num_microbatches: int, *, stages_per_rank: int = 2
) -> PipelineSchedule:
    """1F1B with v stages per rank: idle for 1/v of the time, v times as many messages.

    A rank takes p micro-batches through its first stage, then the same micro-batches through its
    second stage, and so on. If p does not divide m, the schedule is that of the next multiple of
    p, without the actions of the micro-batches that do not exist: what is left keeps its order, so
    nothing new can block.

    >>> print(grid(interleaved(2, 2)))
    rank 0  0F0 0F1 2F0 2F1 .   .   2B0 -   .   2B1 -   0B0 -   0B1 -
    rank 1  .   1F0 1F1 3F0 3B0 -   3F1 3B1 -   1B0 -   1B1 -   .   .
    """
    check_sizes(
        world_size=world_size, num_microbatches=num_microbatches, stages_per_rank=stages_per_rank
    )
    num_stages = world_size * stages_per_rank
    rounds, places = range(0, num_microbatches, world_size), range(world_size)
    programs, activations = [], []
    for rank in range(world_size):
        stages = range(rank, num_stages, world_size)
        warmup = (stages_per_rank - 1) * world_size + 2 * (world_size - rank - 1)
        forwards = [
            Action(Kind.FORWARD, stage, first + place)
            for first, stage, place in product(rounds, stages, places)
        ]
        backwards = [
            (Action(Kind.BACKWARD, stage, first + place),)
            for first, stage, place in product(rounds, reversed(stages), places)
        ]
        padded = _alternate(forwards, backwards, warmup)
        programs.append(tuple(action for action in padded if action.microbatch < num_microbatches))
        activations.append(min(num_microbatches * stages_per_rank, warmup + 1))
    return PipelineSchedule(
        "interleaved", num_stages, num_microbatches, tuple(activations), tuple(programs)
    )


def zero_bubble(world_size: int, num_microbatches: int) -> PipelineSchedule:
    """ZB-H1: 1F1B whose gradients of weights are put off, to fill the time of waiting.

    Only the gradient of a stage's input is awaited by another rank. Rank r puts the gradients of
    its weights off by r micro-batches. So each rank keeps at most p activations, as many as rank 0
    of `one_f_one_b`, and is idle for a third of the time.

    >>> print(grid(zero_bubble(4, 4)))
    rank 0  0F0 0F1 0F2 0F3 .   .   .   0I0 0W0 0I1 0W1 0I2 0W2 0I3 0W3
    rank 1  .   1F0 1F1 1F2 .   .   1I0 1F3 1I1 1W0 1I2 1W1 1I3 1W2 1W3
    rank 2  .   .   2F0 2F1 .   2I0 2F2 2I1 2F3 2I2 2W0 2I3 2W1 2W2 2W3
    rank 3  .   .   .   3F0 3I0 3F1 3I1 3F2 3I2 3F3 3I3 3W0 3W1 3W2 3W3
    """
    check_sizes(world_size=world_size, num_microbatches=num_microbatches)
    programs = []
    for rank in range(world_size):
        of_weights = _of_stage(Kind.BACKWARD_WEIGHTS, rank, num_microbatches)
        backwards = [
            (action, *of_weights[max(0, number - rank) : max(0, number - rank + 1)])
            for number, action in enumerate(_of_stage(Kind.BACKWARD_INPUTS, rank, num_microbatches))
        ]
        backwards.append(tuple(of_weights[max(0, num_microbatches - rank) :]))
        forwards = _of_stage(Kind.FORWARD, rank, num_microbatches)
        programs.append(tuple(_alternate(forwards, backwards, world_size - rank - 1)))
    activations = (min(num_microbatches, world_size),) * world_size
    return PipelineSchedule(
        "zero_bubble", world_size, num_microbatches, activations, tuple(programs)
    )


SCHEDULES: Mapping[str, Callable[..., PipelineSchedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zero_bubble": zero_bubble,
}
"""The generators by name; each takes the number of ranks and the number of micro-batches."""


# --- proof, idle time, memory, drawing --------------------------------------------------------


_SHOWN = 8  # stages of a rank that an error lists
# The action of the same stage on the same micro-batch that an action follows.
_BEFORE = {
    Kind.BACKWARD: Kind.FORWARD,
    Kind.BACKWARD_INPUTS: Kind.FORWARD,
    Kind.BACKWARD_WEIGHTS: Kind.BACKWARD_INPUTS,
}


def _wrong(rank: int, action: Action, message: str, **details: Any) -> VerificationError:
    text = f"action {action} on micro-batch {action.microbatch}: {message}"
    return VerificationError(text, rank=rank, **details)


def _awaited(
    action: Action, num_stages: int, done: Mapping[Action | Transfer, int]
) -> Action | Transfer | None:
    """The result that an action waits for, if it is not there; ``None`` if all are there."""
    needed: list[Action | Transfer | None] = [consumed(action, num_stages)]
    if (before := _BEFORE.get(action.kind)) is not None:
        needed.insert(0, Action(before, action.stage, action.microbatch))
    return next((item for item in needed if item is not None and item not in done), None)


def _ends(schedule: PipelineSchedule, costs: Mapping[Kind, int]) -> dict[Action, int]:
    """The time at which each action ends, if each rank begins each action as soon as it can."""
    done: dict[Action | Transfer, int] = {}
    ends: dict[Action, int] = {}
    places, clocks = [0] * schedule.world_size, [0] * schedule.world_size
    moving = True
    while moving:
        moving = False
        for rank, program in enumerate(schedule.programs):
            for action in program[places[rank] :]:
                if _awaited(action, schedule.num_stages, done) is not None:
                    break
                arrival = consumed(action, schedule.num_stages)
                begin = clocks[rank] if arrival is None else max(clocks[rank], done[arrival])
                ends[action] = done[action] = clocks[rank] = begin + costs[action.kind]
                leaving = produced(action, schedule.num_stages)
                if leaving is not None:
                    done[leaving] = clocks[rank]
                places[rank] += 1
                moving = True
    stuck = [
        (_awaited(program[place], schedule.num_stages, done), rank, program[place])
        for rank, (program, place) in enumerate(zip(schedule.programs, places, strict=True))
        if place < len(program)
    ]
    if stuck:  # a rank that waits for itself, if there is such a rank, is the cause
        awaited, rank, action = min(stuck, key=lambda item: isinstance(item[0], Transfer))
        raise _wrong(rank, action, f"waits for {awaited}, which never comes")
    return ends


def _kept(program: Sequence[Action]) -> Iterator[tuple[Action, int]]:
    """Each action, and the number of activations that its rank keeps after it."""
    kept = 0
    for action in program:
        kept += {Kind.FORWARD: 1, Kind.BACKWARD_INPUTS: 0}.get(action.kind, -1)
        yield action, kept


def check(schedule: PipelineSchedule) -> None:
    """Prove that a schedule computes all gradients, once, without a deadlock.

    - Each stage has one forward and one whole backward (B, or I and W) of each micro-batch, on its
      rank.
    - Each rank can do its actions in order: each forward comes after the forward of the stage
      before; each backward comes after its own forward and the backward of the stage after; W
      comes after I. Sends are asynchronous, so a rank waits for nothing else.
    - No rank keeps more activations than the schedule states. An activation is kept from the
      forward to the end of the backward: to B, or to W.

    The `VerificationError` of a wrong schedule names rank, action and micro-batch.
    """
    check_sizes(num_stages=schedule.num_stages, num_microbatches=schedule.num_microbatches)
    wanted, got = f"{schedule.world_size} numbers", len(schedule.activations)
    if got != schedule.world_size:
        raise VerificationError("activations are stated for other ranks", expected=wanted, got=got)
    for rank, program in enumerate(schedule.programs):
        times = Counter(program)
        stages, microbatches = schedule.stages_of(rank), range(schedule.num_microbatches)
        for action in program:
            if action.stage not in stages or action.microbatch not in microbatches:
                few = ", ".join(map(str, stages[:_SHOWN])) + ", ..." * (len(stages) > _SHOWN)
                wanted = f"stages [{few}] and micro-batches 0 to {microbatches[-1]}"
                raise _wrong(rank, action, "is not work of this rank", expected=wanted, got=action)
            if times[action] > 1:
                raise _wrong(rank, action, "occurs twice", expected=1, got=times[action])
        # One by one: the schedule may state more of them than there is memory.
        for stage, microbatch in ((s, m) for s in stages for m in microbatches):
            letters = "".join(kind for kind in Kind if Action(kind, stage, microbatch) in times)
            if letters not in ("FB", "FIW"):
                forward, kinds = Action(Kind.FORWARD, stage, microbatch), letters or "nothing"
                raise _wrong(rank, forward, "is incomplete", expected="F B, or F I W", got=kinds)
    _ends(schedule, UNIT_COSTS)
    for rank, program in enumerate(schedule.programs):
        for action, kept in _kept(program):
            if kept > (bound := schedule.activations[rank]):
                raise _wrong(rank, action, "keeps too many", expected=f"at most {bound}", got=kept)


def peak_activations(schedule: PipelineSchedule) -> tuple[int, ...]:
    """The largest number of activations that each rank keeps at a time.

    >>> peak_activations(gpipe(4, 8)), peak_activations(one_f_one_b(4, 8))
    ((8, 8, 8, 8), (4, 3, 2, 1))
    """
    return tuple(
        max((kept for _, kept in _kept(program)), default=0) for program in schedule.programs
    )


def bubble(schedule: PipelineSchedule, costs: Mapping[Kind, int] = UNIT_COSTS) -> Fraction:
    """The share of all ranks' time in which they wait, by the simulation that `grid` draws.

    ``costs`` has the time of each kind of action, a positive integer; messages cost nothing.

    >>> bubble(one_f_one_b(4, 8)), bubble(zero_bubble(4, 8))
    (Fraction(3, 11), Fraction(1, 9))
    """
    ends = _ends(schedule, costs)
    whole = schedule.world_size * max(ends.values())
    return 1 - Fraction(sum(costs[action.kind] for action in ends), whole)


def grid(schedule: PipelineSchedule, costs: Mapping[Kind, int] = UNIT_COSTS) -> str:
    """Draw when each rank does what: a line for each rank, a column for each unit of time.

    ``-`` goes on with the action before, ``.`` is idle. A schedule that cannot be run raises
    `VerificationError`.

    >>> print(grid(one_f_one_b(2, 2)))
    rank 0  0F0 0F1 .   .   0B0 -   .   0B1 -
    rank 1  .   1F0 1B0 -   1F1 1B1 -   .   .
    """
    ends = _ends(schedule, costs)
    width, length = max(len(str(action)) for action in ends), max(ends.values())
    lines = []
    for rank, program in enumerate(schedule.programs):
        cells = ["."] * length
        for action in program:
            cost = costs[action.kind]
            cells[ends[action] - cost : ends[action]] = [str(action), *["-"] * (cost - 1)]
        lines.append(" ".join([f"rank {rank} ", *(cell.ljust(width) for cell in cells)]).rstrip())
    return "\n".join(lines)
