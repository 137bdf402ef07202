"""Bruck's all-gather: messages to rank +- 1, 2, 4, ..., for any number of ranks.

Problem: the fewest rounds, ceil(lg k), without needing a power of two. Several
blocks travel in one message. His all-to-all is in `combining`.

Source: J. Bruck, C.-T. Ho, S. Kipnis, E. Upfal and D. Weathersby, "Efficient
algorithms for all-to-all communications in multiport message-passing systems",
IEEE TPDS 8 (1997).
"""

from __future__ import annotations

from fractions import Fraction

from ringcoll.algorithms.entry import Cost
from ringcoll.algorithms.registry import register
from ringcoll.schedule import Program, Step, copy, inp, out, recv, send


def rounds_to_reach_all(k: int) -> int:
    """ceil(lg k): the fewest rounds in which one rank's data can reach k ranks."""
    return (k - 1).bit_length()


@register(
    "all_gather",
    "bruck",
    chunks=lambda k: k,
    cost=Cost(rounds=rounds_to_reach_all, traffic=lambda k: Fraction(k - 1, k)),
)
def bruck_all_gather(rank: int, world_size: int) -> Program:
    """Bruck all-gather: in step s get the next 2^s blocks from rank + 2^s.

    ceil(lg k) steps and (k - 1)/k of the output sent by each rank: both lower
    bounds, for any number of ranks.

    >>> from ringcoll.schedule import grid
    >>> print(grid(bruck_all_gather, 4))
    step  rank 0         rank 1         rank 2         rank 3
       0  =0 >3:0 <1:1   =1 >0:1 <2:2   =2 >1:2 <3:3   =3 >2:3 <0:0
       1  >2:0-1 <2:2-3  >3:1-2 <3:3,0  >0:2-3 <0:0-1  >1:3,0 <1:1-2
    """
    distance, first = 1, (copy(out(rank), inp(rank)),)
    while distance < world_size:
        blocks = range(min(distance, world_size - distance))
        sent = [(rank + block) % world_size for block in blocks]
        received = [(rank + distance + block) % world_size for block in blocks]
        source = inp if distance == 1 else out
        yield Step(
            *(first if distance == 1 else ()),
            send((rank - distance) % world_size, *map(source, sent)),
            recv((rank + distance) % world_size, *map(out, received)),
        )
        distance *= 2
