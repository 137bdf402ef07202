"""The orders of a pipeline, as data: GPipe and 1F1B.

Problem: a model is cut into stages, of which stage r lies on rank r of p, and a batch is cut into m
micro-batches. Each micro-batch passes forward through all stages, and its gradient passes back
through them. A schedule says in which order a rank does this work. An action is written as stage,
kind and micro-batch: ``0F3`` is the forward of micro-batch 3 through stage 0, ``0B3`` its backward.

A rank begins with a *warm-up* of forwards; then a backward follows each forward; then come the
other backwards. With backwards that take twice as long as forwards, and messages that cost nothing:

=============  ============  ==================  ===================================
schedule       warm-up       idle share          activations that rank r keeps
=============  ============  ==================  ===================================
`gpipe`        m             (p-1) / (m + p-1)   m
`one_f_one_b`  p - r - 1     (p-1) / (m + p-1)   min(m, p-r)
=============  ============  ==================  ===================================

No rank waits for ever: a rank takes micro-batches in the order of their numbers, forward and
backward, and before the backward of micro-batch i the last stage needs the forwards up to i alone.

Interleaved and zero-bubble pipelines are torch's: the schedules of ``torch.distributed.pipelining``
run on the backend ``"ringcoll"``.

Source: Huang et al., "GPipe", NeurIPS 2019; Narayanan et al., "PipeDream", SOSP 2019 (1F1B);
Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", SC 2021 (1F1B with a flush after each batch).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from functools import partial

from ringcoll.errors import ScheduleError


class Kind(StrEnum):
    """The kind of an action; the value is its letter."""

    FORWARD = "F"
    BACKWARD = "B"


_COST = {Kind.FORWARD: 1, Kind.BACKWARD: 2}  # as `timed_actions` counts, in times of a forward


@dataclass(frozen=True, slots=True)
class Action:
    """The work of a stage on a micro-batch.

    >>> str(Action(Kind.FORWARD, stage=0, microbatch=3))
    '0F3'
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    def neighbour(self, step: int) -> Action:
        """The action that takes what this action hands on (1), or gives what it needs (-1)."""
        direction = step if self.kind is Kind.FORWARD else -step
        return Action(self.kind, self.stage + direction, self.microbatch)


@dataclass(frozen=True, slots=True)
class PipelineSchedule:
    """An order, by its name in `SCHEDULES`.

    Another name, or a number below 1, raises `ScheduleError`.

    >>> print(*one_f_one_b(2, 3).program(0))
    0F0 0F1 0B0 0F2 0B1 0B2
    """

    name: str
    world_size: int
    num_microbatches: int

    def __post_init__(self) -> None:
        if self.name not in _WARM_UPS:
            raise ScheduleError(f"{self.name!r} is none of {', '.join(_WARM_UPS)}")
        for name in ("world_size", "num_microbatches"):
            if (value := getattr(self, name)) < 1:
                raise ScheduleError(f"{name} must be positive (expected at least 1, got {value})")

    def __str__(self) -> str:
        return f"{self.name} stages={self.world_size} microbatches={self.num_microbatches}"

    def warm_up(self, rank: int) -> int:
        """Number of forwards that a rank does before backwards and forwards take turns."""
        return _WARM_UPS[self.name](rank, self.world_size, self.num_microbatches)

    def program(self, rank: int) -> tuple[Action, ...]:
        """The actions of a rank, in order."""
        m = self.num_microbatches
        warm_up = self.warm_up(rank)
        forwards = [Action(Kind.FORWARD, rank, microbatch) for microbatch in range(m)]
        actions = forwards[:warm_up]
        for microbatch in range(m):
            actions += forwards[warm_up + microbatch : warm_up + microbatch + 1]
            actions.append(Action(Kind.BACKWARD, rank, microbatch))
        return tuple(actions)


# The warm-up of a schedule, of the rank, the number of ranks and the number of micro-batches.
_WARM_UPS: Mapping[str, Callable[[int, int, int], int]] = {
    "gpipe": lambda _rank, _world_size, num_microbatches: num_microbatches,
    "1f1b": lambda rank, world_size, num_microbatches: min(num_microbatches, world_size - rank - 1),
}

SCHEDULES: Mapping[str, Callable[[int, int], PipelineSchedule]] = {
    name: partial(PipelineSchedule, name) for name in _WARM_UPS
}
"""The schedules by name; each is made of the number of ranks and the number of micro-batches."""


def gpipe(world_size: int, num_microbatches: int) -> PipelineSchedule:
    """All forwards, then all backwards; see `PipelineSchedule`.

    >>> print(grid(gpipe(3, 2)))
    rank 0  0F0 0F1 .   .   .   .   .   .   0B0 -   0B1 -
    rank 1  .   1F0 1F1 .   .   .   1B0 -   1B1 -   .   .
    rank 2  .   .   2F0 2F1 2B0 -   2B1 -   .   .   .   .
    """
    return SCHEDULES["gpipe"](world_size, num_microbatches)


def one_f_one_b(world_size: int, num_microbatches: int) -> PipelineSchedule:
    """1F1B: after a warm-up, a backward after each forward; as idle as `gpipe`, with less memory.

    >>> print(grid(one_f_one_b(3, 3)))
    rank 0  0F0 0F1 0F2 .   .   .   .   0B0 -   .   0B1 -   .   0B2 -
    rank 1  .   1F0 1F1 .   .   1B0 -   1F2 1B1 -   .   1B2 -   .   .
    rank 2  .   .   2F0 2B0 -   2F1 2B1 -   2F2 2B2 -   .   .   .   .
    """
    return SCHEDULES["1f1b"](world_size, num_microbatches)


def peak_activations(schedule: PipelineSchedule) -> tuple[int, ...]:
    """The largest number of activations that each rank keeps at a time.

    >>> peak_activations(gpipe(4, 8)), peak_activations(one_f_one_b(4, 8))
    ((8, 8, 8, 8), (4, 3, 2, 1))
    """
    # After the warm-up a backward follows each forward, if there is another one.
    ranks = range(schedule.world_size)
    return tuple(min(schedule.num_microbatches, schedule.warm_up(rank) + 1) for rank in ranks)


def bubble(schedule: PipelineSchedule) -> Fraction:
    """The share of all ranks' time in which they wait: ``(p - 1) / (m + p - 1)``."""
    others = schedule.world_size - 1
    return Fraction(others, schedule.num_microbatches + others)


def timed_actions(schedule: PipelineSchedule) -> Iterator[tuple[int, Action, int, int]]:
    """When each rank does what: rank, action, begin and end, in times of a forward.

    They come rank by rank, in order. A rank begins an action as soon as it can.

    >>> [(begin, end) for rank, _, begin, end in timed_actions(gpipe(2, 1)) if rank == 1]
    [(1, 2), (2, 4)]
    """
    programs = [schedule.program(rank) for rank in range(schedule.world_size)]
    waiting = [deque(program) for program in programs]
    free = [0] * schedule.world_size  # from when on a rank is idle
    ends: dict[Action, int] = {}
    while any(waiting):
        for rank, actions in enumerate(waiting):
            while actions:
                action = actions[0]
                source = action.neighbour(-1)
                if 0 <= source.stage < schedule.world_size and source not in ends:
                    break
                begin = max(free[rank], ends.get(source, 0))
                ends[actions.popleft()] = free[rank] = begin + _COST[action.kind]
    for rank, program in enumerate(programs):
        for action in program:
            yield rank, action, ends[action] - _COST[action.kind], ends[action]


def grid(schedule: PipelineSchedule) -> str:
    """Draw when each rank does what: a line for each rank, a column for the time of a forward.

    A rank begins an action as soon as it can. ``-`` goes on with the action before, ``.`` is idle.
    """
    timed = list(timed_actions(schedule))
    width = max(len(str(action)) for _, action, _, _ in timed)
    length = max(end for _, _, _, end in timed)
    lines = [["."] * length for _ in range(schedule.world_size)]
    for rank, action, begin, end in timed:
        lines[rank][begin:end] = [str(action), *["-"] * (end - begin - 1)]
    rows = [" ".join(cell.ljust(width) for cell in line) for line in lines]
    return "\n".join(f"rank {rank}  {row}".rstrip() for rank, row in enumerate(rows))
