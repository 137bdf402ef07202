"""Chains: each rank passes the vector on to the next one.

Problem: broadcast a long vector at the speed of one link. In B segments the
whole chain is busy: k + B - 2 steps of 1/B of the vector.

Source: textbook; the chain broadcast of Open MPI.
"""

from __future__ import annotations

from fractions import Fraction

from ringcoll.algorithms.entry import Cost
from ringcoll.algorithms.registry import register
from ringcoll.schedule import Program, Step, copy, inp, out, recv, send


@register(
    "broadcast",
    "chain",
    pipelined=True,
    cost=Cost(rounds=lambda k: k - 1, traffic=lambda k: Fraction(k - 1)),
)
def chain_broadcast(rank: int, world_size: int, root: int) -> Program:
    """Chain broadcast, to be run in segments: rank v hears from v - 1 and tells v + 1.

    k - 1 steps with the whole vector; with B segments k + B - 2 of one segment.

    >>> from ringcoll.schedule import grid
    >>> print(grid(chain_broadcast, 4))
    step  rank 0   rank 1  rank 2  rank 3
       0  =0 >1:0  <0:0    .       .
       1  .        >2:0    <1:0    .
       2  .        .       >3:0    <2:0
    """
    v = (rank - root) % world_size
    for step in range(world_size - 1):
        if step == v:
            own = (copy(out(0), inp(0)),) if v == 0 else ()
            yield Step(*own, send((rank + 1) % world_size, inp(0) if v == 0 else out(0)))
        elif step == v - 1:
            yield Step(recv((rank - 1) % world_size, out(0)))
        else:
            yield Step()
