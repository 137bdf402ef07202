"""Circulant graphs: messages to rank +- ceil(k/2), ceil(k/4), ..., 1, for any number of ranks.

Problem: the fewest rounds *and* the least traffic, for every number of ranks, where halving and
doubling need a power of two. A rank keeps a window of blocks that begins with its own. In each round the
farther half of the window goes to the rank whose own block that half begins with::

    k = 5     window of rank 0     0 1 2 3 4
    round 0   3 4 go to rank 3     0 1 2           half of 5, rounded up, is 3
    round 1   2   goes to rank 2   0 1             half of 3 is 2
    round 2   1   goes to rank 1   0

Every rank does the same, so that what a rank keeps is added to as it shrinks. The all-gather is the
same backwards. Operands are added in another order than that of the ranks.

Source: J. L. Träff, "Optimal, non-pipelined reduce-scatter and allreduce algorithms", arXiv 2410.14234.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction

from ringcoll.algorithms.bruck import rounds_to_reach_all
from ringcoll.algorithms.entry import Cost
from ringcoll.algorithms.registry import register
from ringcoll.schedule import Program, Ref, Step, copy, inp, out, recv, recv_reduce, send, tmp


def halvings(k: int) -> Iterator[tuple[int, int]]:
    """The length of the window before and after each round.

    Examples
    --------
    >>> [*halvings(5)], [*halvings(8)]
    ([(5, 3), (3, 2), (2, 1)], [(8, 4), (4, 2), (2, 1)])
    """
    while k > 1:
        yield k, (k + 1) // 2
        k = (k + 1) // 2


def reduce_scatter_phase(
    rank: int, world_size: int, partial: Callable[[int, int], Ref], result: Ref
) -> Program:
    """Reduce chunk r onto rank r.

    Parameters
    ----------
    partial
        Where a partial result is kept, from its place in the window and its chunk.
    result
        Where this rank's own chunk is kept at the end.
    """
    num_reduced = 0  # places of the window that hold partial results

    def held(place: int) -> Ref:
        chunk = (rank + place) % world_size
        return partial(place, chunk) if place < num_reduced else inp(chunk)

    for length, half in halvings(world_size):
        kept, last = range(length - half), half == 1
        into = (partial(place, (rank + place) % world_size) for place in kept)
        yield Step(
            send((rank + half) % world_size, *map(held, range(half, length))),
            recv_reduce(
                (rank - half) % world_size,
                (result,) if last else tuple(into),
                tuple(map(held, kept)),
                final=last,
            ),
        )
        num_reduced = max(num_reduced, len(kept))


def all_gather_phase(rank: int, world_size: int, own: Ref) -> Program:
    """Send chunk r of rank r to all; the first message reads it from ``own``."""
    for length, half in reversed([*halvings(world_size)]):
        sent = (own, *(out((rank + place) % world_size) for place in range(1, length - half)))
        received = (out((rank + place) % world_size) for place in range(half, length))
        yield Step(
            send((rank - half) % world_size, *sent), recv((rank + half) % world_size, *received)
        )


def _share(k: int) -> Fraction:
    return Fraction(k - 1, k)


@register(
    "reduce_scatter",
    "circulant",
    chunks=lambda k: k,
    slots=lambda k: k // 2,
    cost=Cost(rounds=rounds_to_reach_all, traffic=_share, reduced=_share),
    second_choice=True,
)
def circulant_reduce_scatter(rank: int, world_size: int) -> Program:
    """Circulant reduce-scatter: the farther half of the blocks goes half way round in each step.

    ceil(lg k) steps, (k - 1)/k of the input sent by each rank and as much reduced: all three lower
    bounds, for any number of ranks.

    >>> from ringcoll.schedule import grid
    >>> print(grid(circulant_reduce_scatter, 5))
    step  rank 0         rank 1         rank 2         rank 3         rank 4
       0  >3:3-4 +2:0-1  >4:4,0 +3:1-2  >0:0-1 +4:2-3  >1:1-2 +0:3-4  >2:2-3 +1:4,0
       1  >2:2 +3:0      >3:3 +4:1      >4:4 +0:2      >0:0 +1:3      >1:1 +2:4
       2  >1:1 +4:0!     >2:2 +0:1!     >3:3 +1:2!     >4:4 +2:3!     >0:0 +3:4!
    """
    return reduce_scatter_phase(rank, world_size, tmp, out(rank))


@register(
    "all_gather",
    "circulant",
    chunks=lambda k: k,
    cost=Cost(rounds=rounds_to_reach_all, traffic=_share),
    second_choice=True,
)
def circulant_all_gather(rank: int, world_size: int) -> Program:
    """Circulant all-gather: the circulant reduce-scatter backwards, without reducing.

    ceil(lg k) steps and (k - 1)/k of the output sent by each rank, for any number of ranks.

    >>> from ringcoll.schedule import grid
    >>> print(grid(circulant_all_gather, 5))
    step  rank 0         rank 1         rank 2         rank 3         rank 4
       0  =0 >4:0 <1:1   =1 >0:1 <2:2   =2 >1:2 <3:3   =3 >2:3 <4:4   =4 >3:4 <0:0
       1  >3:0 <2:2      >4:1 <3:3      >0:2 <4:4      >1:3 <0:0      >2:4 <1:1
       2  >2:0-1 <3:3-4  >3:1-2 <4:4,0  >4:2-3 <0:0-1  >0:3-4 <1:1-2  >1:4,0 <2:2-3
    """
    steps = all_gather_phase(rank, world_size, inp(rank))
    yield Step(copy(out(rank), inp(rank)), *next(steps))
    yield from steps


@register(
    "all_reduce",
    "circulant",
    chunks=lambda k: k,
    cost=Cost(
        rounds=lambda k: 2 * rounds_to_reach_all(k), traffic=lambda k: 2 * _share(k), reduced=_share
    ),
    second_choice=True,
)
def circulant_all_reduce(rank: int, world_size: int) -> Program:
    """Circulant all-reduce: a circulant reduce-scatter, then a circulant all-gather.

    2 ceil(lg k) steps and 2(k - 1)/k of the vector sent by each rank, the lower bound on traffic, for any
    number of ranks; Rabenseifner's needs more for all but powers of two.

    >>> from ringcoll.schedule import grid
    >>> print(grid(circulant_all_reduce, 3))
    step  rank 0      rank 1      rank 2
       0  >2:2 +1:0   >0:0 +2:1   >1:1 +0:2
       1  >1:1 +2:0!  >2:2 +0:1!  >0:0 +1:2!
       2  >2:0 <1:1   >0:1 <2:2   >1:2 <0:0
       3  >1:0 <2:2   >2:1 <0:0   >0:2 <1:1
    """
    yield from reduce_scatter_phase(rank, world_size, lambda place, chunk: out(chunk), out(rank))
    yield from all_gather_phase(rank, world_size, out(rank))
