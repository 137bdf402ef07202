"""How near a collective comes to what transport and memory allow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ringcoll.bench.contenders import Workload
from ringcoll.bench.limits import LIMITS
from ringcoll.bench.measure import Result
from ringcoll.bench.units import as_size, time_in_words

__all__ = ["Efficiency", "efficiencies", "lines"]


@dataclass(frozen=True)
class Efficiency:
    """The limits of one workload, and how near each contender comes to them.

    Parameters
    ----------
    workload, nbytes
        What ran, and the size that is shown.
    exchange_s, add_s, copy_s
        Medians of `ringcoll.bench.limits`; ``add_s`` is 0 where nothing is reduced.
    of
        For each contender (exchange_s + add_s) over its median.
    """

    workload: Workload
    nbytes: int
    exchange_s: float
    add_s: float
    copy_s: float
    of: dict[str, float]


def efficiencies(results: Sequence[Result]) -> list[Efficiency]:
    """Compare with the limits, where these were measured."""
    comparisons = []
    for workload in dict.fromkeys(result.workload for result in results):
        timed = {
            result.contender: result
            for result in results
            if result.workload == workload and result.timed is not None
        }
        medians = {
            name: result.timed.summary.p50_s
            for name, result in timed.items()
            if result.timed is not None
        }
        if "exchange" not in medians:
            continue
        limit_s = medians["exchange"] + medians.get("add", 0.0)
        comparisons.append(
            Efficiency(
                workload,
                timed["exchange"].nbytes,
                medians["exchange"],
                medians.get("add", 0.0),
                medians.get("copy", 0.0),
                {name: limit_s / time_s for name, time_s in medians.items() if name not in LIMITS},
            )
        )
    return comparisons


def lines(results: Sequence[Result]) -> Iterator[str]:
    """Lines to print below a table."""
    for row in efficiencies(results):
        shares = ", ".join(f"{name} {value:.2f}" for name, value in row.of.items())
        yield (
            f"# {as_size(row.nbytes)}: exchange {time_in_words(row.exchange_s)} + add "
            f"{time_in_words(row.add_s)}, copy {time_in_words(row.copy_s)}; efficiency: {shares}"
        )
