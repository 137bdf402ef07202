"""Schedules of a pipeline, as data: for each rank its actions, in order.

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
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from ringcoll.errors import ScheduleError


class Kind(StrEnum):
    """The kind of an action; the value is the letter of the text form."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUTS = "I"
    BACKWARD_WEIGHTS = "W"


UNIT_COSTS: Mapping[Kind, int] = {
    Kind.FORWARD: 1,
    Kind.BACKWARD: 2,
    Kind.BACKWARD_INPUTS: 1,
    Kind.BACKWARD_WEIGHTS: 1,
}
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

    >>> from ringcoll.training import one_f_one_b
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
        name, stages, microbatches, activations = match.groups()
        return cls(
            name,
            int(stages),
            int(microbatches),
            tuple(map(int, activations.split(","))),
            tuple(tuple(map(Action.parse, line.split())) for line in lines),
        )


# --- messages -------------------------------------------------------------------------


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


def check_sizes(**sizes: int) -> None:
    """Raise `ScheduleError` if a number is not positive."""
    for name, value in sizes.items():
        if value < 1:
            raise ScheduleError(f"{name} must be positive (expected at least 1, got {value})")
