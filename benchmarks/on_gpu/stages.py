"""The stages by name: what they find out, and how long they may take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from benchmarks.on_gpu.bandwidth import (
    EVERY_DTYPE,
    KERNELS,
    SHAPES,
    bandwidth,
    every_dtype,
    shapes,
)
from benchmarks.on_gpu.collectives import NCCL, SHARED, nccl, shared, shared_with_mps
from benchmarks.on_gpu.correctness import TABLE as CORRECTNESS
from benchmarks.on_gpu.correctness import correctness
from benchmarks.on_gpu.facts import TABLE as FACTS
from benchmarks.on_gpu.facts import facts
from benchmarks.on_gpu.host_time import TABLE as HOST_TIME
from benchmarks.on_gpu.host_time import host_time
from benchmarks.on_gpu.rounding import TABLE as ROUNDING
from benchmarks.on_gpu.rounding import rounding
from benchmarks.on_gpu.rows import Row, Settings

__all__ = ["MOST_S", "STAGES", "USUAL", "Stage"]

_Run = Callable[[Settings, Callable[[Row], object]], None]


class Stage(NamedTuple):
    """One of them.

    Parameters
    ----------
    table
        The title of its table.
    run
        Called with the settings, and with what takes each row as soon as it is there.
    limit_s
        Seconds that the stage may take in any case; more, if other stages leave time. A stage that
        takes longer is ended, and its rows so far are kept.
    """

    table: str
    run: _Run
    limit_s: float


def _each(rows: Callable[[Settings], Iterator[Row]]) -> _Run:
    def run(settings: Settings, emit: Callable[[Row], object]) -> None:
        for row in rows(settings):
            emit(row)

    return run


# In the order in which they run: what everything else rests on, and what has to be reached, first.
STAGES = {
    "facts": Stage(FACTS, _each(facts), 25.0),
    "bandwidth": Stage(KERNELS, _each(bandwidth), 60.0),
    "every_dtype": Stage(EVERY_DTYPE, _each(every_dtype), 60.0),
    "host_time": Stage(HOST_TIME, _each(host_time), 15.0),
    "rounding": Stage(ROUNDING, _each(rounding), 20.0),
    "correctness": Stage(CORRECTNESS, correctness, 110.0),
    "shared": Stage(SHARED, shared, 90.0),
    "shared_with_mps": Stage(SHARED, shared_with_mps, 45.0),
    "nccl": Stage(NCCL, nccl, 40.0),
    "shapes": Stage(SHAPES, _each(shapes), 180.0),
}
USUAL = tuple(name for name in STAGES if name != "shapes")
"""The stages that run if none are named; the shapes of launches have to be asked for."""
MOST_S = 480.0
"""Seconds that these may take together."""
