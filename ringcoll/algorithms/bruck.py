"""Bruck's algorithms: messages to rank +- 1, 2, 4, ..., for any number of ranks.

Problem: the fewest rounds, ceil(lg k), without needing a power of two. Several
blocks travel in one message.

Source: J. Bruck, C.-T. Ho, S. Kipnis, E. Upfal and D. Weathersby, "Efficient
algorithms for all-to-all communications in multiport message-passing systems",
IEEE TPDS 8 (1997).
"""

from __future__ import annotations

from fractions import Fraction

from ringcoll.algorithms.entry import Cost
from ringcoll.algorithms.registry import register
from ringcoll.schedule import Program, Step, copy, inp, out, recv, send, tmp


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


def _with_bit(k: int, bit: int) -> int:
    return sum(1 for shift in range(k) if shift & bit)


@register(
    "all_to_all",
    "bruck",
    chunks=lambda k: k * k,
    slots=lambda k: k,
    equal_blocks=True,
    cost=Cost(
        rounds=rounds_to_reach_all,
        traffic=lambda k: Fraction(
            sum(_with_bit(k, 1 << bit) for bit in range(rounds_to_reach_all(k))), k
        ),
    ),
)
def bruck_all_to_all(rank: int, world_size: int) -> Program:
    """Bruck all-to-all: a block that has to go d ranks far goes by the bits of d.

    ceil(lg k) steps; about half of the blocks travel in each, so lg k / 2 times
    the input is sent. Blocks of equal length only: a rank passes on blocks that
    are neither from nor for itself.

    >>> from ringcoll.schedule import grid
    >>> print(grid(bruck_all_to_all, 3))
    step  rank 0        rank 1        rank 2
       0  =0 >1:1 <2:6  =4 >2:5 <0:1  =8 >0:6 <1:5
       1  >2:2 <1:3     >0:3 <2:7     >1:7 <0:2
    """
    hop = 1
    while hop < world_size:
        far = [shift for shift in range(world_size) if shift & hop]

        def block(shift: int, travelled: int) -> int:
            source = (rank - travelled) % world_size
            return source * world_size + (source + shift) % world_size

        sent, received = [], []
        for shift in far:
            leaving = block(shift, shift & (hop - 1))
            sent.append(inp(leaving) if shift & (hop - 1) == 0 else tmp(shift, leaving))
            coming = block(shift, shift & (2 * hop - 1))
            received.append(out(coming) if shift < 2 * hop else tmp(shift, coming))
        own = rank * world_size + rank
        yield Step(
            *((copy(out(own), inp(own)),) if hop == 1 else ()),
            send((rank + hop) % world_size, *sent),
            recv((rank - hop) % world_size, *received),
        )
        hop *= 2
