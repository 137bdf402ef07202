"""Time functions side by side, in rounds; without torch, so that ranks of MPI libraries can, too.

Problem: two libraries are compared on a machine whose speed changes from second to
second, and whose caches and connections remember who ran last. So all contenders run
in *rounds*: in each round every contender runs once, in a new random order that is the same
on all ranks. Before each turn the ranks meet in a group of its own, which warms up no
contender's connections, and start together. The time of an operation is that of the slowest
rank, unless the request says otherwise.

Ranks start at different moments, on an oversubscribed machine milliseconds apart, and with cold
caches. So that the start does not count, a turn consists of as many operations, in a row, as last a
few milliseconds, after a quarter as many, and at least one, that are not timed; a sample is the
mean of the others. Where a turn is to have one operation only, that is timed with its start.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from ringcoll.machine import cores

OVER_RANKS = ("rank0", "avg", "min", "max")
"""Whose time counts: the first rank's, the mean, the fastest, the slowest; nccl-tests' -a."""

_TURN_S = 5e-3  # time that a turn should last, for each rank of a core: Linux's time slice is 3 ms
_MOST_A_TURN = 1000
_LEAD = 4  # before so many operations that are timed there is one that is not
_TRIES = 5  # rounds, to find the length of turns
_GROWTH = 10  # times as long as the last, at most
_TURNS = 4  # at least, of a fixed number of operations


class MeetingPlace(Protocol):
    """The meeting point of the ranks that `alternate` needs."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    def start(self) -> None:
        """Wait until all ranks have come."""

    def agree(self, number: int) -> int:
        """Give all ranks the number of rank 0."""

    def over_ranks(self, times_s: list[list[float]], how: str) -> list[tuple[float, ...]]:
        """Combine times that every rank has measured; ``how`` is one of `OVER_RANKS`."""


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep Python's garbage collector out of the measurement."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(frozen=True)
class Samples:
    """The answer of `alternate`: for each function its times in seconds, round by round.

    Each time is the mean of as many operations as ``turns`` says for the function.
    """

    times_s: list[tuple[float, ...]]
    turns: list[int]


def alternate(
    meeting: MeetingPlace,
    functions: Sequence[Callable[[int], object]],
    *,
    warmup: int = 1,
    least: int = 5,
    most: int = 20,
    seconds: float | None = None,
    over_ranks: str = "max",
    turn: int | None = None,
    before: Callable[[int], object] | None = None,
) -> Samples:
    """Time functions side by side; called by all ranks alike.

    Parameters
    ----------
    meeting
        Where the ranks meet before each turn.
    functions
        The functions to time; called with the number of operations that they have to do.
    warmup, least, most, seconds
        As for `BenchRequest`; the clock is rank 0's.
    over_ranks
        One of `OVER_RANKS`.
    turn
        Operations in a turn, all timed; by default as many as take some milliseconds.
    before
        Called before each turn, untimed, with the number of the function whose turn it is.
    """
    times: list[list[float]] = [[] for _ in functions]
    one_round = partial(_one_round, meeting, functions, before, turn is None)
    with _no_collection():
        for _ in range(warmup if turn else max(1, warmup)):
            one_round(times, seed=0, turns=[1] * len(functions))
        turns = (
            [turn] * len(functions) if turn else _turns(meeting, one_round, times, most, seconds)
        )
        times = [[] for _ in functions]
        done, start = 0, time.perf_counter()
        rounds = least if seconds is not None else max(1, most // max(turns))
        while rounds:
            for number in range(done, done + rounds):
                one_round(times, seed=number, turns=turns)
            done += rounds
            rounds = _more_rounds(done, most, time.perf_counter() - start, seconds)
            rounds = meeting.agree(rounds) if seconds is not None else 0
    return Samples(meeting.over_ranks(times, over_ranks), turns)


def turn_seconds(world_size: int) -> float:
    """Seconds that a turn should last."""
    return _TURN_S * max(1.0, world_size / cores())


def _turns(
    meeting: MeetingPlace,
    one_round: Callable[..., object],
    times: list[list[float]],
    most: int,
    seconds: float | None,
) -> list[int]:
    """How many operations of each function take some milliseconds.

    With a fixed number of operations it is the same for all, so that all do that number.
    """
    turn_s = turn_seconds(meeting.world_size)

    def fitting(time_s: float, limit: int) -> int:
        return meeting.agree(min(limit, max(1, round(turn_s / time_s))))

    shortest = min(map(min, times))
    if seconds is None:
        return [fitting(shortest, max(1, most // _TURNS))] * len(times)
    # The first operation of a turn waits for the last rank: its time alone says too little.
    turns = [1] * len(times)
    for _ in range(_TRIES):
        longer = [
            fitting(min(own), min(_GROWTH * last, _MOST_A_TURN))
            for own, last in zip(times, turns, strict=True)
        ]
        if all(new <= last for new, last in zip(longer, turns, strict=True)):
            break
        turns = longer
        one_round(times, seed=0, turns=turns)
    return turns


def _one_round(
    meeting: MeetingPlace,
    functions: Sequence[Callable[[int], object]],
    before: Callable[[int], object] | None,
    has_lead: bool,
    times: list[list[float]],
    *,
    seed: int,
    turns: Sequence[int],
) -> None:
    order = list(range(len(functions)))
    random.Random(seed).shuffle(order)  # noqa: S311  # the same order on all ranks
    for index in order:
        if before is not None:
            before(index)
        meeting.start()
        if has_lead:
            functions[index](max(1, turns[index] // _LEAD))
        start = time.perf_counter()
        functions[index](turns[index])
        times[index].append((time.perf_counter() - start) / turns[index])


def _more_rounds(done: int, most: int, spent_s: float, seconds: float | None) -> int:
    """How many rounds to run before looking at the clock again.

    Half of those that the time seems to be good for: their speed may change.
    """
    if seconds is None:
        return 0
    possible = (seconds - spent_s) / (spent_s / done)
    return min(most - done, max(int(possible / 2), int(possible >= 1), 0))
