"""The stages by name: what they find out, and how long they may take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from ringcoll.bench.gpu.bandwidth import KERNELS, SHAPES, bandwidth, shapes
from ringcoll.bench.gpu.collectives import NCCL, SHARED, nccl, shared
from ringcoll.bench.gpu.correctness import TABLE as CORRECTNESS
from ringcoll.bench.gpu.correctness import correctness
from ringcoll.bench.gpu.facts import TABLE as FACTS
from ringcoll.bench.gpu.facts import facts
from ringcoll.bench.gpu.host_time import TABLE as HOST_TIME
from ringcoll.bench.gpu.host_time import host_time
from ringcoll.bench.gpu.rounding import TABLE as ROUNDING
from ringcoll.bench.gpu.rounding import rounding
from ringcoll.bench.gpu.rows import Row, Settings

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
        After which it is ended. What it has found by then counts.
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
