"""The stages by name: what they find out, and how long they may take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from benchmarks.on_gpu.bandwidth import KERNELS, SHAPES, bandwidth, shapes
from benchmarks.on_gpu.collectives import NCCL, SHARED, nccl, shared
from benchmarks.on_gpu.correctness import TABLE as CORRECTNESS
from benchmarks.on_gpu.correctness import correctness
from benchmarks.on_gpu.facts import TABLE as FACTS
from benchmarks.on_gpu.facts import facts
from benchmarks.on_gpu.host_time import TABLE as HOST_TIME
from benchmarks.on_gpu.host_time import host_time
from benchmarks.on_gpu.rounding import TABLE as ROUNDING
from benchmarks.on_gpu.rounding import rounding
from benchmarks.on_gpu.rows import Row, Settings

__all__ = ["STAGES", "Stage"]

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
        Seconds after which the stage is ended. Its rows so far are kept.
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
# Together they may take 8 minutes, but for the shapes, which have to be asked for.
STAGES = {
    "facts": Stage(FACTS, _each(facts), 40.0),
    "bandwidth": Stage(KERNELS, _each(bandwidth), 90.0),
    "host_time": Stage(HOST_TIME, _each(host_time), 30.0),
    "rounding": Stage(ROUNDING, _each(rounding), 40.0),
    "correctness": Stage(CORRECTNESS, correctness, 150.0),
    "shared": Stage(SHARED, shared, 180.0),
    "nccl": Stage(NCCL, nccl, 120.0),
    "shapes": Stage(SHAPES, _each(shapes), 180.0),
}
