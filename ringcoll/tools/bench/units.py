"""Statistics of times, bandwidths, sizes and times in words; without torch.

Times and their statistics are in seconds, ``algbw`` and ``busbw`` in GB/s of 1e9 bytes. The peak of
the hardware is compared with the bus bandwidth: see nccl-tests, doc/PERFORMANCE.md.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ringcoll.schedules import contract

_ENOUGH_SAMPLES = 5  # with 5 samples the quartiles are samples; with fewer they lie between samples
FEW_SAMPLES = f"of fewer than {_ENOUGH_SAMPLES} samples, and rough"
"""The meaning of the mark ``~`` of `spread_in_words`, for median and spread."""

_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_SIZE = re.compile(r"(\d{1,18})\s*([KMGT]?)(?:I?B)?", re.IGNORECASE | re.ASCII)


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
        return self.samples < _ENOUGH_SAMPLES

    @property
    def spread(self) -> float:
        """Interquartile range over median."""
        return (self.p75_s - self.p25_s) / self.p50_s if self.p50_s else 0.0


def summarize(samples_s: Sequence[float]) -> Summary:
    """Summarize measurements: at least one time, in seconds.

    >>> summary = summarize([4.0, 1.0, 2.0, 3.0, 5.0])
    >>> summary.p50_s, summary.p95_s, summary.avg_s, summary.spread
    (3.0, 5.0, 3.0, 0.6666666666666666)
    """
    import numpy as np  # here, as pages of help need no numpy

    measured = np.array(samples_s)
    quartiles = np.percentile(measured, (25, 50, 75))
    ranks = np.percentile(measured, (95, 99), method="inverted_cdf")
    whole = (measured.min(), measured.max(), measured.mean(), measured.std())
    return Summary(len(measured), *map(float, (*whole, *quartiles, *ranks)))


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
