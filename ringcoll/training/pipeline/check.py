"""Facts of a pipeline's schedule: a proof, its idle time, its memory, a drawing.

All of them follow from a simulation in which each rank begins each action as soon as the rank is
free and the action has what it needs. Messages cost nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction

from ringcoll.errors import VerificationError
from ringcoll.training.pipeline.pipeline_schedule import (
    UNIT_COSTS,
    Action,
    Kind,
    PipelineSchedule,
    Transfer,
    check_sizes,
    consumed,
    produced,
)

_SHOWN = 8  # stages of a rank that an error lists


def _wrong(rank: int, action: Action, message: str, **details: object) -> VerificationError:
    return VerificationError(
        f"action {action} on micro-batch {action.microbatch}: {message}",
        rank=rank,
        expected=details.get("expected"),
        got=details.get("got"),
    )


def _awaited(
    action: Action, num_stages: int, done: Mapping[Action | Transfer, int]
) -> Action | Transfer | None:
    """The result that an action waits for, if it is not there; ``None`` if all are there."""
    before = {
        Kind.FORWARD: None,
        Kind.BACKWARD: Kind.FORWARD,
        Kind.BACKWARD_INPUTS: Kind.FORWARD,
        Kind.BACKWARD_WEIGHTS: Kind.BACKWARD_INPUTS,
    }[action.kind]
    needed: list[Action | Transfer | None] = [
        None if before is None else Action(before, action.stage, action.microbatch),
        consumed(action, num_stages),
    ]
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
    if len(schedule.activations) != schedule.world_size:
        raise VerificationError(
            "activations are stated for other ranks",
            expected=f"{schedule.world_size} numbers",
            got=len(schedule.activations),
        )
    for rank, program in enumerate(schedule.programs):
        times = Counter(program)
        stages, microbatches = schedule.stages_of(rank), range(schedule.num_microbatches)
        for action in program:
            if action.stage not in stages or action.microbatch not in microbatches:
                few = ", ".join(map(str, stages[:_SHOWN])) + ", ..." * (len(stages) > _SHOWN)
                expected = f"stages [{few}] and micro-batches 0 to {microbatches[-1]}"
                raise _wrong(
                    rank, action, "is not work of this rank", expected=expected, got=action
                )
            if times[action] > 1:
                raise _wrong(rank, action, "occurs twice", expected=1, got=times[action])
        # One by one: the schedule may state more of them than there is memory.
        for stage, microbatch in ((s, m) for s in stages for m in microbatches):
            kinds = [kind for kind in Kind if Action(kind, stage, microbatch) in times]
            letters = "".join(kinds)
            if letters not in ("FB", "FIW"):
                forward = Action(Kind.FORWARD, stage, microbatch)
                got = letters or "nothing"
                raise _wrong(rank, forward, "is incomplete", expected="F B, or F I W", got=got)
    _ends(schedule, UNIT_COSTS)
    for rank, program in enumerate(schedule.programs):
        for action, kept in _kept(program):
            if kept > (bound := schedule.activations[rank]):
                raise _wrong(rank, action, "keeps too many", expected=f"at most {bound}", got=kept)


def peak_activations(schedule: PipelineSchedule) -> tuple[int, ...]:
    """The largest number of activations that each rank keeps at a time.

    >>> from ringcoll.training import gpipe, one_f_one_b
    >>> peak_activations(gpipe(4, 8)), peak_activations(one_f_one_b(4, 8))
    ((8, 8, 8, 8), (4, 3, 2, 1))
    """
    return tuple(
        max((kept for _, kept in _kept(program)), default=0) for program in schedule.programs
    )


def bubble(schedule: PipelineSchedule, costs: Mapping[Kind, int] = UNIT_COSTS) -> Fraction:
    """The share of all ranks' time in which they wait, by the simulation that `grid` draws.

    ``costs`` has the time of each kind of action, a positive integer; messages cost nothing.

    >>> from ringcoll.training import one_f_one_b, zero_bubble
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

    >>> from ringcoll.training import one_f_one_b
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
