"""What a picture of a schedule shows: the messages of each step, and what the ranks hold between steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

from ringcoll.errors import ArgumentError, VerificationError
from ringcoll.schedule import (
    Held,
    Recv,
    RecvReduce,
    Reduce,
    Ref,
    Schedule,
    Send,
    Step,
    Written,
    history,
)

MOST_RANKS = 64
"""Ranks that a picture can show."""
MOST_STEPS = 512
"""Steps that a picture can show."""


class DrawnMessage(NamedTuple):
    """A message of a step; ``is_reduced`` says that the target adds it to its own data."""

    source: int
    target: int
    chunks: tuple[int, ...]
    is_reduced: bool


@dataclass(frozen=True)
class Film:
    """A schedule, step by step.

    Parameters
    ----------
    schedule
        The schedule.
    messages
        The messages of each step.
    local
        Of each step the ranks that reduce chunks without a message, and how many.
    held
        What the ranks hold before the first step, and after each step that is right.
    failure
        What is wrong with the schedule; ``None`` if nothing is.
    """

    schedule: Schedule
    messages: tuple[tuple[DrawnMessage, ...], ...]
    local: tuple[tuple[tuple[int, int], ...], ...]
    held: tuple[Held, ...]
    failure: VerificationError | None

    @property
    def links(self) -> set[tuple[int, int]]:
        """The pairs of ranks that exchange messages, the lower rank first."""
        pairs = (sorted(message[:2]) for step in self.messages for message in step)
        return {(low, high) for low, high in pairs if low != high}


def film(schedule: Schedule) -> Film:
    """Run a schedule on symbols, for a picture; a wrong schedule runs as far as it goes.

    Raises
    ------
    ArgumentError
        It has more ranks or steps than a picture can show.
    TooLargeError
        The ranks move too many chunks.
    """
    if schedule.world_size > MOST_RANKS:
        raise too_many("ranks", MOST_RANKS, schedule.world_size)
    held: list[Held] = []
    failure = None
    try:
        for state in history(schedule):
            held.append(state)
            if len(held) > MOST_STEPS + 1:
                raise too_many("steps", MOST_STEPS, "more")
    except VerificationError as error:
        failure = error
    count = len(held) - 1 if failure is None else (failure.step or 0) + 1
    programs = [_steps(schedule, rank, count) for rank in range(schedule.world_size)]
    all_steps = list(zip_longest(*programs, fillvalue=Step()))
    messages = tuple(map(_messages, all_steps))
    return Film(schedule, messages, tuple(map(_local, all_steps)), tuple(held), failure)


def _local(steps: Iterable[Step]) -> tuple[tuple[int, int], ...]:
    """The ranks that reduce in a step without a message, and the chunks that they add."""
    added = (
        (rank, sum(len(op.sources) - 1 for op in step if isinstance(op, Reduce)))
        for rank, step in enumerate(steps)
    )
    return tuple((rank, chunks) for rank, chunks in added if chunks)


def too_many(what: str, most: int, got: object) -> ArgumentError:
    """The error about more than a picture can show."""
    return ArgumentError(
        f"so many {what} cannot be drawn", argument="schedule", expected=f"at most {most}", got=got
    )


def _steps(schedule: Schedule, rank: int, most: int) -> list[Step]:
    """The first steps of a rank, as they are written: reductions of a wrong schedule have no facts."""
    steps: list[Step] = []
    try:
        for step in Written.steps(schedule, rank):
            if len(steps) == most or not isinstance(step, Step):
                break
            steps.append(step)
    except Exception:  # noqa: BLE001  # the program of a user, at the fault that the proof names
        return steps
    return steps


def _messages(steps: Iterable[Step]) -> tuple[DrawnMessage, ...]:
    """Pair the sends of a step with what their targets do with them; what names no rank is left out."""
    all_steps = list(steps)
    ranks = range(len(all_steps))
    reduced: dict[tuple[int, int], list[bool]] = {}
    for rank, step in enumerate(all_steps):
        for operation in step:
            if isinstance(operation, Recv | RecvReduce) and operation.peer in ranks:
                is_reduced = isinstance(operation, RecvReduce)
                reduced.setdefault((operation.peer, rank), []).append(is_reduced)
    messages = []
    for rank, step in enumerate(all_steps):
        for operation in step:
            if isinstance(operation, Send) and operation.peer in ranks:
                queue = reduced.get((rank, operation.peer)) or [False]
                refs: tuple[object, ...] = operation.refs  # of a wrong schedule, anything
                chunks = tuple(ref.chunk for ref in refs if isinstance(ref, Ref))
                messages.append(DrawnMessage(rank, operation.peer, chunks, queue.pop(0)))
    return tuple(messages)
