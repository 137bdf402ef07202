"""An all-reduce that is wrong, for those who have to notice.

It passes for one of the library's own, which are not verified at each use: the
verifier would refuse it before anything is sent.
"""

from __future__ import annotations

from fractions import Fraction

from ringcoll.schedules import Operation, Program, RecvReduce, Step, recv
from ringcoll.schedules.algorithms import Cost, find, mark_built_in, register, unregister
from ringcoll.schedules.algorithms.ring import ring_all_reduce
from ringcoll.tools.bench import BenchRequest, Result, measure

__all__ = ["NAME", "measure_wrong"]

NAME = "forgetful_ring"


def forgetful_ring(rank: int, world_size: int) -> Program:
    """The ring; but rank 0 forgets its own share of the chunk that it completes."""
    for step in ring_all_reduce(rank, world_size):
        yield Step(*(_received_only(operation) if rank == 0 else operation for operation in step))


def _received_only(operation: Operation) -> Operation:
    if isinstance(operation, RecvReduce) and operation.final:
        return recv(operation.peer, *operation.into)
    return operation


def _register() -> None:
    free = Cost(rounds=lambda k: 0, traffic=lambda k: Fraction(0))
    register("all_reduce", NAME, cost=free, chunks=lambda k: k)(forgetful_ring)
    mark_built_in(find("all_reduce", NAME))


def measure_wrong(request: BenchRequest) -> list[Result]:
    """`measure`, on a rank, with the algorithm registered meanwhile."""
    _register()
    try:
        return measure(request)
    finally:
        unregister("all_reduce", NAME)
