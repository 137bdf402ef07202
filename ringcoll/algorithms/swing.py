"""Swing and Trivance: exchanges over short distances, for rings and tori.

Problem: in recursive halving a rank meets ranks 1, 2, 4, 8, ... away; on a ring of ranks a message takes
as many links. In Swing even ranks go to one side, odd ranks to the other, and the sides change; in
Trivance a rank meets both neighbours at once, by 1, 3, 9, ...::

    Swing on 8 ranks      0-1 2-3 4-5 6-7       distances 1, -1, 3
                          7-0 1-2 3-4 5-6
                          0-3 1-6 2-5 4-7

Sources: see the algorithms.
"""

from __future__ import annotations

from functools import partial

from ringcoll.algorithms.exchanges import (
    Rounds,
    all_reduce_by,
    cost_of,
    cost_of_vectors,
    exchange_vectors,
    needs_power,
    powers_below,
)
from ringcoll.algorithms.registry import register
from ringcoll.schedule import Program


def swing(k: int) -> Rounds:
    """Even ranks swing to one side, odd ranks to the other, by 1, -1, 3, -5, 11, ..."""

    def exchange(distance: int, rank: int) -> tuple[int, ...]:
        return ((rank + (-distance if rank % 2 else distance)) % k,)

    distances = ((1 - (-2) ** (step + 1)) // 3 for step, _ in enumerate(powers_below(2, k)))
    return tuple(partial(exchange, distance) for distance in distances)


def tripling(k: int) -> Rounds:
    """Both neighbours at the distances 1, 3, 9, ..."""

    def exchange(distance: int, rank: int) -> tuple[int, ...]:
        return (rank - distance) % k, (rank + distance) % k

    return tuple(partial(exchange, distance) for distance in powers_below(3, k))


@register(
    "all_reduce",
    "swing",
    chunks=lambda k: k,
    restriction=partial(needs_power, 2),
    cost=cost_of(swing),
    second_choice=True,
)
def swing_all_reduce(rank: int, world_size: int) -> Program:
    """Swing all-reduce: halving and doubling with peers on alternate sides, near on a ring.

    2 lg k steps and 2(k - 1)/k of the vector sent by each rank, the lower bound; k a power of two. Peers are
    1, 1, 3, 5, 11, ... ranks away, where recursive halving has 1, 2, 4, 8, 16, ...: on rings and tori
    messages cross fewer links.

    Source: D. De Sensi et al., "Swing: short-cutting rings for higher bandwidth allreduce", NSDI 2024.

    >>> from ringcoll.schedule import grid
    >>> print(grid(swing_all_reduce, 4))
    step  rank 0         rank 1         rank 2         rank 3
       0  >1:1-2 +1:0,3  >0:0,3 +0:1-2  >3:0,3 +3:1-2  >2:1-2 +2:0,3
       1  >3:3 +3:0!     >2:2 +2:1!     >1:1 +1:2!     >0:0 +0:3!
       2  >3:0 <3:3      >2:1 <2:2      >1:2 <1:1      >0:3 <0:0
       3  >1:0,3 <1:1-2  >0:1-2 <0:0,3  >3:1-2 <3:0,3  >2:0,3 <2:1-2
    """
    return all_reduce_by(rank, swing(world_size))


@register(
    "all_reduce",
    "trivance",
    chunks=lambda k: k,
    restriction=partial(needs_power, 3),
    cost=cost_of(tripling),
    second_choice=True,
)
def trivance_all_reduce(rank: int, world_size: int) -> Program:
    """Trivance all-reduce, for long vectors: both neighbours at distances 1, 3, 9, ... at once.

    2 log_3 k steps with two messages each and 2(k - 1)/k of the vector sent by each rank, the lower bound; k a
    power of three. It pays where a rank has two ports.

    Source: A. Jürß, V. Addanki and S. Schmid, "Trivance: latency-optimal allreduce by shortcutting multiport
    networks", arXiv 2602.17254.

    >>> from ringcoll.schedule import grid
    >>> print(grid(trivance_all_reduce, 3))
    step  rank 0                rank 1                rank 2
       0  >2:2 >1:1 +2:0 +1:0!  >0:0 >2:2 +0:1 +2:1!  >1:1 >0:0 +1:2 +0:2!
       1  >2:0 >1:0 <2:2 <1:1   >0:1 >2:1 <0:0 <2:2   >1:2 >0:2 <1:1 <0:0
    """
    return all_reduce_by(rank, tripling(world_size))


@register(
    "all_reduce",
    "swing_latency",
    restriction=partial(needs_power, 2),
    cost=cost_of_vectors(swing),
    second_choice=True,
)
def swing_latency_all_reduce(rank: int, world_size: int) -> Program:
    """Swing all-reduce for short vectors: whole vectors go to the peers of Swing, the farthest first.

    lg k steps, the lower bound, and lg k times the vector sent by each rank; k a power of two. The paper
    begins with the nearest peer. Then ranks add up in different orders, and have different sums of
    floats. From far to near the messages are the same, and so are the bits of all ranks. Bine trees
    (arXiv 2508.17311) have the same form for short vectors.

    Source: D. De Sensi et al., "Swing: short-cutting rings for higher bandwidth allreduce", NSDI 2024.

    >>> from ringcoll.schedule import grid
    >>> print(grid(swing_latency_all_reduce, 4))
    step  rank 0      rank 1      rank 2      rank 3
       0  >3:0 +3:0   >2:0 +2:0   >1:0 +1:0   >0:0 +0:0
       1  >1:0 +1:0!  >0:0 +0:0!  >3:0 +3:0!  >2:0 +2:0!
    """
    return exchange_vectors(rank, swing(world_size)[::-1])


@register(
    "all_reduce",
    "trivance_latency",
    slots=lambda k: 3,
    restriction=partial(needs_power, 3),
    cost=cost_of_vectors(tripling),
    second_choice=True,
)
def trivance_latency_all_reduce(rank: int, world_size: int) -> Program:
    """Trivance all-reduce for short vectors: whole vectors to both neighbours, the farthest first.

    log_3 k steps, the lower bound with two ports, and 2 log_3 k times the vector sent by each rank; k a power
    of three. The paper begins at distance 1. Then ranks add up in different orders, and have different
    sums of floats. From far to near the messages are the same, and so are the bits of all ranks.

    Source: A. Jürß, V. Addanki and S. Schmid, "Trivance: latency-optimal allreduce by shortcutting multiport
    networks", arXiv 2602.17254.

    >>> from ringcoll.schedule import grid
    >>> print(grid(trivance_latency_all_reduce, 3))
    step  rank 0               rank 1               rank 2
       0  >2:0 >1:0 <1:0 <2:0  >0:0 >2:0 <0:0 <2:0  >1:0 >0:0 <0:0 <1:0
       1  S0!                  S0!                  S0!
    """
    return exchange_vectors(rank, tripling(world_size)[::-1])
