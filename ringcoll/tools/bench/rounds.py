"""Time functions side by side, in rounds; without torch.

Problem: two libraries are compared on a machine whose speed changes from second to second, and
whose caches and connections remember which ran last. So all contenders run in *rounds*: in each
round every contender runs once, in a new random order that is the same on all ranks. Before each
turn the ranks meet in a group of its own, which warms up no contender's connections, and start
together. The time of an operation is that of the slowest rank, unless the request says otherwise.

Ranks start at different moments, on an oversubscribed machine milliseconds apart, and with cold
caches. So that the start does not count, a turn consists of as many operations, in a row, as last a
few milliseconds, after a quarter as many, and at least one, that are not timed; a sample is the
mean of the others. Where a turn is to have one operation only, that is timed with its start.

Times and their statistics are in seconds, ``algbw`` and ``busbw`` in GB/s of 1e9 bytes. The peak of
the hardware is compared with the bus bandwidth: see nccl-tests, doc/PERFORMANCE.md.
"""

from __future__ import annotations

import math
import random
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from ringcoll.runtime.machine import cores
from ringcoll.schedules import contract

OVER_RANKS = ("rank0", "avg", "min", "max")
"""Whose time counts: the first rank's, the mean, the fastest, the slowest; nccl-tests' -a."""

_TURN_S = 5e-3  # time that a turn should last, for each rank of a core: Linux's time slice is 3 ms
_MOST_A_TURN = 1000
_LEAD = 4  # before so many operations that are timed there is one that is not
_TRIES = 5  # rounds, to find the length of turns
_GROWTH = 10  # times as long as the last, at most
_TURNS = 4  # at least, of a fixed number of operations

_FEW = 5  # with 5 samples the quartiles are samples; with fewer they lie between samples
FEW_SAMPLES = f"of fewer than {_FEW} samples, and rough"
"""The meaning of the mark ``~`` of `spread_in_words`, for median and spread."""

_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_SIZE = re.compile(r"(\d{1,18})\s*([KMGT]?)(?:I?B)?", re.IGNORECASE | re.ASCII)


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


@dataclass(frozen=True)
class Samples:
    """The times of each function in seconds, round by round: means of ``turns`` operations."""

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
    from ringcoll.schedules import without_collection  # it imports the verifier

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
    meeting: MeetingPlace,
    one_round: Callable[..., object],
    times: list[list[float]],
    most: int,
    seconds: float | None,
) -> list[int]:
    """How many operations of each function take some milliseconds; of a fixed number, alike."""
    turn_s = turn_seconds(meeting.world_size)

    def fitting(time_s: float, limit: int) -> int:
        return meeting.agree(min(limit, max(1, round(turn_s / time_s))))

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


def _more_rounds(done: int, most: int, spent_s: float, seconds: float) -> int:
    """Half of the rounds that the time seems to be good for: their speed may change."""
    possible = (seconds - spent_s) / (spent_s / done)
    return min(most - done, max(int(possible / 2), int(possible >= 1), 0))


@dataclass(frozen=True)
class Summary:
    """Statistics of repeated measurements.

    Parameters
    ----------
    samples
        Number of samples.
    min_s, max_s, avg_s, stdev_s
        Minimum, maximum, mean, and standard deviation of the population.
    p25_s, p50_s, p75_s
        Quartiles, with linear interpolation; ``p50_s`` is the median.
    p95_s, p99_s
        Percentiles by nearest rank, as in nccl-tests: values that were measured.
    """

    samples: int
    min_s: float
    max_s: float
    avg_s: float
    stdev_s: float
    p25_s: float
    p50_s: float
    p75_s: float
    p95_s: float
    p99_s: float

    @property
    def few(self) -> bool:
        """Whether there are too few samples for quartiles: each is made of two samples."""
        return self.samples < _FEW

    @property
    def spread(self) -> float:
        """Interquartile range over median."""
        return (self.p75_s - self.p25_s) / self.p50_s if self.p50_s else 0.0


def _nearest_rank(ordered: Sequence[float], percent: int) -> float:
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def summarize(samples_s: Sequence[float]) -> Summary:
    """Summarize measurements: at least one time, in seconds.

    >>> summary = summarize([4.0, 1.0, 2.0, 3.0, 5.0])
    >>> summary.p50_s, summary.p95_s, summary.avg_s, summary.spread
    (3.0, 5.0, 3.0, 0.6666666666666666)
    """
    ordered = sorted(samples_s)
    quartiles = [ordered[0]] * 3
    if len(ordered) > 1:
        quartiles = statistics.quantiles(ordered, n=4, method="inclusive")
    return Summary(
        samples=len(ordered),
        min_s=ordered[0],
        max_s=ordered[-1],
        avg_s=statistics.fmean(ordered),
        stdev_s=statistics.pstdev(ordered),
        p25_s=quartiles[0],
        p50_s=quartiles[1],
        p75_s=quartiles[2],
        p95_s=_nearest_rank(ordered, 95),
        p99_s=_nearest_rank(ordered, 99),
    )


def spread_in_words(summary: Summary) -> str:
    """Write the spread for a table; ``~`` marks few samples.

    >>> spread_in_words(summarize([1.0] * 5)), spread_in_words(summarize([1.0]))
    ('0%', '~0%')
    """
    return f"{'~' * summary.few}{100 * summary.spread:.0f}%"


def algbw(nbytes: int, seconds: float) -> float:
    """Algorithm bandwidth: the size of the data over the time, in GB/s.

    >>> round(algbw(33554432, 2943.25e-6), 2)
    11.4
    """
    return nbytes / seconds / 1e9 if seconds > 0 else 0.0


def busbw(collective: str, world_size: int, nbytes: int, seconds: float) -> float:
    """Bus bandwidth, in GB/s: the algorithm bandwidth times the collective's factor.

    ``nbytes`` is the size of the whole data: the vector, or all blocks of a rank.

    >>> busbw("all_reduce", 4, 1_000_000_000, 1.0)
    1.5
    """
    factor = contract(collective).busbw_factor(world_size)
    return algbw(nbytes, seconds) * float(factor)


def parse_size(text: str) -> int:
    """Read a number of bytes, as nccl-tests does: K, M and G are powers of 1024.

    >>> parse_size("4"), parse_size("64K"), parse_size("16 MiB")
    (4, 65536, 16777216)
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size such as 4, 64K or 16M")
    return int(match[1]) << 10 * _POWERS[match[2].upper()]


def as_size(nbytes: int) -> str:
    """Write a number of bytes.

    >>> as_size(4), as_size(65536), as_size(16 << 20), as_size(1536), as_size(1000)
    ('4 B', '64 KiB', '16 MiB', '1.5 KiB', '1000 B')
    """
    for whole, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= whole:
            return f"{nbytes / whole:.4g} {unit}"
    return f"{nbytes} B"


def time_in_words(seconds: float) -> str:
    """Write a time with three digits.

    >>> time_in_words(12.34e-6), time_in_words(0.0123), time_in_words(1.5)
    ('12.3 us', '12.3 ms', '1.5 s')
    """
    for factor, unit in ((1e6, "us"), (1e3, "ms")):
        if seconds * factor < 999.5:  # what three digits can show
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"
