"""The steps of a rank as waves, produced lazily."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain, repeat
from typing import NamedTuple

from ringcoll.errors import ScheduleError
from ringcoll.schedule import Recv, RecvReduce, Reduce, Schedule, Send, Step


class RankWave(NamedTuple):
    """A rank's work in a wave; amounts of data are in chunks.

    ``sends`` holds peer, chunks and step of each message; ``receives`` holds peer, chunks, step,
    and whether the message is reduced. ``reduced`` is what the rank reduces in its own memory, and
    ``step`` the last step of the wave.
    """

    sends: list[tuple[int, int, int]]
    receives: list[tuple[int, int, int, bool]]
    reduced: int
    step: int


def wave_of(number: int, step: Step) -> RankWave:
    """A rank's work in one step; the peers are not checked."""
    sends: list[tuple[int, int, int]] = []
    receives: list[tuple[int, int, int, bool]] = []
    reduced = 0
    for operation in step:
        if type(operation) is Send:
            sends.append((operation.peer, len(operation.refs), number))
        elif type(operation) is RecvReduce:
            receives.append((operation.peer, len(operation.into), number, True))
        elif type(operation) is Recv:
            receives.append((operation.peer, len(operation.refs), number, False))
        elif type(operation) is Reduce:
            reduced += len(operation.sources) - 1
    return RankWave(sends, receives, reduced, number)


def waves_of(schedule: Schedule, rank: int, segments: int) -> Iterator[RankWave]:
    """Produce the waves in which a rank does anything that takes time.

    No more than ``segments`` steps are held in memory, and no more than the schedule has.
    """
    return in_segments(_checked(schedule, rank), segments)


def _checked(schedule: Schedule, rank: int) -> Iterator[RankWave]:
    world_size = schedule.world_size
    for number, step in enumerate(schedule.program(rank)):
        wave = wave_of(number, step)
        for peer, *_ in (*wave.sends, *wave.receives):
            if not 0 <= peer < world_size or peer == rank:
                raise ScheduleError(
                    f"rank {rank}, step {number}: {peer} is not another rank of {world_size}"
                )
        yield wave


def in_segments(steps: Iterable[RankWave], segments: int) -> Iterator[RankWave]:
    """Put together the steps of one time: segment j does step w - j in wave w."""
    if segments == 1:
        yield from filter(_does_anything, steps)
        return
    active: deque[tuple[int, RankWave]] = deque()  # the newest step first: it is of segment 0
    # A wave a step, and some at the end, in which the last steps' other segments follow.
    for wave, step in enumerate(chain(steps, repeat(None, segments - 1))):
        if step is not None and _does_anything(step):
            active.appendleft((wave, step))
        if active and active[-1][0] <= wave - segments:
            active.pop()
        if len(active) == 1:
            yield active[0][1]
        elif active:
            yield RankWave(
                [item for _, work in active for item in work.sends],
                [item for _, work in active for item in work.receives],
                sum(work.reduced for _, work in active),
                active[0][0],
            )


def _does_anything(wave: RankWave) -> bool:
    return bool(wave.sends or wave.receives or wave.reduced)
