"""The steps of a rank as waves, produced lazily."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
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
        peers = [item[0] for item in wave.sends] + [item[0] for item in wave.receives]
        for peer in peers:
            if not 0 <= peer < world_size or peer == rank:
                raise ScheduleError(
                    f"rank {rank}, step {number}: {peer} is not another rank of {world_size}"
                )
        yield wave


def in_segments(steps: Iterable[RankWave], segments: int) -> Iterator[RankWave]:
    """Put the steps together that are done at the same time: segment j does step w - j in wave w."""
    if segments == 1:
        yield from filter(_does_anything, steps)
        return
    numbered = enumerate(steps)
    active: deque[tuple[int, RankWave]] = deque()  # the newest step first: it is of segment 0
    ended, wave = False, 0
    while active or not ended:
        if not ended:
            following = next(numbered, None)
            ended = following is None
            if following is not None and _does_anything(following[1]):
                active.appendleft(following)
        while active and active[-1][0] <= wave - segments:
            active.pop()
        if active:
            yield (
                active[0][1]
                if len(active) == 1
                else RankWave(
                    [item for _, work in active for item in work.sends],
                    [item for _, work in active for item in work.receives],
                    sum(work.reduced for _, work in active),
                    active[0][0],
                )
            )
        wave += 1


def _does_anything(wave: RankWave) -> bool:
    return bool(wave.sends or wave.receives or wave.reduced)
