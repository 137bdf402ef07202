"""Time functions side by side, in rounds.

Problem: two libraries are compared on a machine whose speed changes from second to second, and
whose caches and connections remember which ran last. So all contenders run in *rounds*: in each
round every contender runs once, in a new random order that is the same on all ranks. Before each
turn the ranks meet in a group of its own, which warms up no contender's connections, and start
together. The time of an operation is that of the slowest rank, unless the request says otherwise.

Ranks start at different moments, on an oversubscribed machine milliseconds apart, and with cold
caches. So that the start does not count, a turn consists of as many operations, in a row, as last a
few milliseconds, after a quarter as many, and at least one, that are not timed; a sample is the
mean of the others. If a turn is to have one operation only, the operation is timed with its start.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ringcoll.runtime.machine import cores, place
from ringcoll.schedules import without_collection

_TURN_S = 5e-3  # time that a turn should last, for each rank of a core: Linux's time slice is 3 ms
_MOST_A_TURN = 1000
_LEAD = 4  # before so many operations that are timed there is one that is not
_TRIES = 5  # rounds, to find the length of turns
_GROWTH = 10  # times as long as the last, at most
_TURNS = 4  # at least, of a fixed number of operations
_QUIET_S = 5e-3  # from meeting to starting
_AWAKE_S = 5e-4  # of these at the end, in which the processor is kept


class Meeting:
    """A meeting point of the ranks of the default group, on a group of its own.

    Collective: all ranks have to make, use and close it alike.
    """

    def __init__(self) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(backend="gloo")
        self._one_clock = len(set(self.gather(place()))) == 1

    def barrier(self) -> None:
        """Wait until all ranks have come."""
        dist.barrier(group=self._group)

    def start(self) -> None:
        """Wait until all ranks have come, and all is quiet: then all go on at one time.

        Ranks leave a barrier some 100 us apart, and gloo's threads may go on spinning until
        their time slice of 3 to 4 ms is over. On one host the ranks share a clock, so they
        agree on when to go on.
        """
        starts = torch.tensor([time.monotonic() + _QUIET_S], dtype=torch.float64, device="cpu")
        dist.all_reduce(starts, dist.ReduceOp.MAX, group=self._group)
        begin = float(starts) if self._one_clock else time.monotonic() + _QUIET_S
        time.sleep(max(0.0, begin - time.monotonic() - _AWAKE_S))
        while time.monotonic() < begin:
            pass

    def agree(self, number: int) -> int:
        """Give all ranks the number of rank 0."""
        token = torch.tensor([number], device="cpu")
        dist.broadcast(token, group=self._group, group_src=0)
        return int(token)

    def totals(self, *numbers: int) -> list[int]:
        """The sum of each number over all ranks."""
        token = torch.tensor(numbers, device="cpu")
        dist.all_reduce(token, group=self._group)
        return [int(number) for number in token]

    def gather(self, item: Any) -> list[Any]:  # whatever pickle can carry
        """Gather an item of every rank, on all ranks."""
        items: list[Any] = [None] * self.world_size
        dist.all_gather_object(items, item, group=self._group)
        return items

    def over_ranks(self, times_s: list[list[float]], how: str) -> list[tuple[float, ...]]:
        """Combine times that every rank has measured; ``how`` is one of `OVER_RANKS`."""
        table = torch.tensor(times_s, dtype=torch.float64, device="cpu")
        if how == "rank0":
            dist.broadcast(table, group=self._group, group_src=0)
        else:
            op = {"avg": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
            dist.all_reduce(table, op[how], group=self._group)
            table = table / self.world_size if how == "avg" else table
        return [tuple(row) for row in table.tolist()]

    def close(self) -> None:
        """Release the group."""
        dist.destroy_process_group(self._group)


@dataclass(frozen=True)
class Samples:
    """The times of each function in seconds, round by round: means of ``turns`` operations."""

    times_s: list[tuple[float, ...]]
    turns: list[int]


def alternate(
    meeting: Meeting,
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
    with without_collection():
        for _ in range(warmup if turn else max(1, warmup)):
            one_round(times, seed=0, turns=[1] * len(functions))
        turns = [turn or 1] * len(functions)
        if not turn:
            turns = _turns(meeting, one_round, times, most, seconds)
        times = [[] for _ in functions]
        done, start = 0, time.perf_counter()
        rounds = least if seconds is not None else max(1, most // max(turns))
        while rounds:
            for number in range(done, done + rounds):
                one_round(times, seed=number, turns=turns)
            if seconds is None:
                break
            done += rounds
            spent_s = time.perf_counter() - start
            rounds = meeting.agree(_more_rounds(done, most, spent_s, seconds))
    return Samples(meeting.over_ranks(times, over_ranks), turns)


def turn_seconds(world_size: int) -> float:
    """Seconds that a turn should last."""
    return _TURN_S * max(1.0, world_size / cores())


def _turns(
    meeting: Meeting,
    one_round: Callable[..., object],
    times: list[list[float]],
    most: int,
    seconds: float | None,
) -> list[int]:
    """How many operations of each function take some milliseconds; of a fixed number, alike."""

    def fitting(time_s: float, limit: int) -> int:
        possible = round(turn_seconds(meeting.world_size) / time_s)
        return meeting.agree(min(limit, max(1, possible)))

    if seconds is None:
        return [fitting(min(map(min, times)), max(1, most // _TURNS))] * len(times)
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
    meeting: Meeting,
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


def _more_rounds(done: int, most: int, spent_s: float, seconds: float) -> int:
    """Half of the rounds that the time seems to be good for: their speed may change."""
    possible = (seconds - spent_s) / (spent_s / done)
    return min(most - done, max(int(possible / 2), int(possible >= 1), 0))
