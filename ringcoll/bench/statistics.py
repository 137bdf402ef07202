"""Statistics of repeated measurements, and bandwidths.

Times are in seconds; ``algbw`` and ``busbw`` in GB/s of 1e9 bytes. The bus bandwidth
is what the peak of the hardware is compared with: see nccl-tests, doc/PERFORMANCE.md.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ringcoll.schedule import contract

_FEW = 5  # with 5 samples the quartiles are samples; with fewer they lie between samples
FEW_SAMPLES = f"of fewer than {_FEW} samples, and rough"
"""The meaning of the mark ``~`` of `spread_in_words`, for median and spread."""


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
