"""Messages to rank + 1, 2, 4, ...: the fewest rounds, for any number of ranks.

Problem: ceil(lg k) rounds, without needing a power of two. After round s a rank has heard, directly
or not, of 2^(s + 1) ranks in a row. Several blocks travel in one message.

Source: J. Bruck, C.-T. Ho, S. Kipnis, E. Upfal and D. Weathersby, "Efficient algorithms for
all-to-all communications in multiport message-passing systems", IEEE TPDS 8 (1997).
"""

from __future__ import annotations

from ringcoll.schedules.algorithms.circulant import all_gather_phase
from ringcoll.schedules.algorithms.registry import (
    Cost,
    powers_below,
    register,
    rounds_to_reach_all,
    share_of_others,
    vector_each_round,
)
from ringcoll.schedules.ir import Program, Step, inp, out, recv_reduce, send, with_copy


@register(
    "all_gather", "bruck", chunks=lambda k: k, cost=Cost(rounds_to_reach_all, share_of_others)
)
def bruck_all_gather(rank: int, world_size: int) -> Program:
    """Bruck all-gather: in step s get the next 2^s blocks from rank + 2^s.

    ceil(lg k) steps and (k - 1)/k of the output sent by each rank: both lower
    bounds, for any number of ranks.

    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(bruck_all_gather, 4))
    step  rank 0         rank 1         rank 2         rank 3
       0  =0 >3:0 <1:1   =1 >0:1 <2:2   =2 >1:2 <3:3   =3 >2:3 <0:0
       1  >2:0-1 <2:2-3  >3:1-2 <3:3,0  >0:2-3 <0:0-1  >1:3,0 <1:1-2
    """
    windows = ((min(2 * far, world_size), far) for far in powers_below(2, world_size))
    return with_copy(all_gather_phase(rank, world_size, inp(rank), windows), rank)


@register(
    "barrier", "dissemination", cost=Cost(rounds_to_reach_all, vector_each_round, vector_each_round)
)
def dissemination_barrier(rank: int, world_size: int) -> Program:
    """Dissemination barrier: ceil(lg k) rounds of one token, any number of ranks.

    In round s a rank sends all that it knows to rank + 2^s. No rank may leave before all ranks have
    come. The set of ranks that have come has to be complete, so it does no harm to receive the news
    of a rank twice.

    Source: D. Hensgen, R. Finkel and U. Manber, "Two algorithms for barrier
    synchronization", Int. J. Parallel Programming 17 (1988).

    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(dissemination_barrier, 4))
    step  rank 0      rank 1      rank 2      rank 3
       0  >1:0 +3:0   >2:0 +0:0   >3:0 +1:0   >0:0 +2:0
       1  >2:0 +2:0!  >3:0 +3:0!  >0:0 +0:0!  >1:0 +1:0!
    """
    held = inp(0)
    for distance in powers_below(2, world_size):
        dst, src = (rank + distance) % world_size, (rank - distance) % world_size
        last = 2 * distance >= world_size
        yield Step(send(dst, held), recv_reduce(src, out(0), held, final=last))
        held = out(0)
