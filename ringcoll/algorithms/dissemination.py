"""Dissemination: in round s, send to rank + 2^s all that is known.

Problem: a barrier. No rank may leave before all ranks have come. The set of ranks that
have come has to be complete, so it does no harm to receive the news of a rank twice.

Source: D. Hensgen, R. Finkel and U. Manber, "Two algorithms for barrier
synchronization", Int. J. Parallel Programming 17 (1988).
"""

from __future__ import annotations

from fractions import Fraction

from ringcoll.algorithms.bruck import rounds_to_reach_all
from ringcoll.algorithms.entry import Cost
from ringcoll.algorithms.registry import register
from ringcoll.schedule import Program, Step, inp, out, recv_reduce, send


@register(
    "barrier",
    "dissemination",
    cost=Cost(
        rounds=rounds_to_reach_all,
        traffic=lambda k: Fraction(rounds_to_reach_all(k)),
        reduced=lambda k: Fraction(rounds_to_reach_all(k)),
    ),
)
def dissemination_barrier(rank: int, world_size: int) -> Program:
    """Dissemination barrier: ceil(lg k) rounds of one token, any number of ranks.

    >>> from ringcoll.schedule import grid
    >>> print(grid(dissemination_barrier, 4))
    step  rank 0      rank 1      rank 2      rank 3
       0  >1:0 +3:0   >2:0 +0:0   >3:0 +1:0   >0:0 +2:0
       1  >2:0 +2:0!  >3:0 +3:0!  >0:0 +0:0!  >1:0 +1:0!
    """
    distance, held = 1, inp(0)
    while distance < world_size:
        yield Step(
            send((rank + distance) % world_size, held),
            recv_reduce(
                (rank - distance) % world_size, out(0), held, final=2 * distance >= world_size
            ),
        )
        held, distance = out(0), 2 * distance
