"""K-nomial trees of radix 4: a rank serves up to three others in a step, in half of the steps.

Problem: where a message costs latency more than the sender's time, a binomial tree is too deep. Here
ranks are counted from the root, v = (rank - root) mod k, and the parent of v is v without its lowest
digit other than 0 in base 4::

    0 -------------------> 4, 8, 12     step 0   on 16 ranks
    0 -> 1, 2, 3    4 -> 5, 6, 7  ...   step 1

Source: the k-nomial trees of MPICH (a parameter of its broadcast, reduce, gather and scatter).
"""

from __future__ import annotations

from fractions import Fraction

from ringcoll.algorithms import binomial
from ringcoll.algorithms.registry import Cost, register
from ringcoll.schedule.ir import Program, inp, out, tmp

RADIX = 4


def _rounds(k: int) -> int:
    return len(binomial.levels(k, RADIX))


def _messages(k: int) -> Fraction:
    """The root's messages: three at each level, fewer where so many are not left."""
    return Fraction(sum(min(RADIX - 1, (k - 1) // mask) for mask in binomial.levels(k, RADIX)))


def _passed_on(k: int) -> int:
    """Most blocks that a rank other than the root keeps for others."""
    return max((min(mask, k - mask) - 1 for mask in binomial.levels(k, RADIX)), default=0)


_BLOCKS = Cost(rounds=_rounds, traffic=lambda k: Fraction(k - 1, k))


@register(
    "broadcast",
    "knomial_tree",
    cost=Cost(rounds=_rounds, traffic=_messages),
    second_choice=True,
)
def knomial_tree_broadcast(rank: int, world_size: int, root: int) -> Program:
    """K-nomial tree broadcast: every rank that has the vector sends it to up to three others.

    ceil(log_4 k) steps, half of the binomial tree's; up to three messages a step.

    >>> from ringcoll.schedule.drawing import grid
    >>> print(grid(knomial_tree_broadcast, 5))
    step  rank 0          rank 1  rank 2  rank 3  rank 4
       0  =0 >4:0         .       .       .       <0:0
       1  >1:0 >2:0 >3:0  <0:0    <0:0    <0:0    .
    """
    steps = binomial.broadcast_phase(rank, world_size, root, inp(0), RADIX)
    return binomial.with_copy(steps, rank == root, 0)


@register(
    "reduce",
    "knomial_tree",
    slots=lambda k: 1,
    cost=Cost(rounds=_rounds, traffic=_messages, reduced=_messages),
    second_choice=True,
)
def knomial_tree_reduce(rank: int, world_size: int, root: int) -> Program:
    """K-nomial tree reduce: the broadcast backwards, adding on the way.

    ceil(log_4 k) steps, with up to three messages each. Partial results are kept in one slot of
    scratch memory.

    >>> from ringcoll.schedule.drawing import grid
    >>> print(grid(knomial_tree_reduce, 5))
    step  rank 0          rank 1  rank 2  rank 3  rank 4
       0  +1:0 +2:0 +3:0  >0:0    >0:0    >0:0    .
       1  +4:0!           .       .       .       >0:0
    """
    partial = out(0) if rank == root else tmp(0, 0)
    return binomial.reduce_phase(rank, world_size, root, partial, RADIX)


@register(
    "gather",
    "knomial_tree",
    chunks=lambda k: k,
    slots=_passed_on,
    cost=_BLOCKS,
    second_choice=True,
)
def knomial_tree_gather(rank: int, world_size: int, root: int) -> Program:
    """K-nomial tree gather: each rank collects from up to three others, then passes it all on.

    ceil(log_4 k) steps; the root receives (k - 1)/k of the output, the lower bound.

    >>> from ringcoll.schedule.drawing import grid
    >>> print(grid(knomial_tree_gather, 5))
    step  rank 0             rank 1  rank 2  rank 3  rank 4
       0  =0 <1:1 <2:2 <3:3  >0:1    >0:2    >0:3    .
       1  <4:4               .       .       .       >0:4
    """
    steps = binomial.gather_phase(rank, world_size, root, inp(rank), tmp, RADIX)
    return binomial.with_copy(steps, rank == root, root)


@register(
    "scatter",
    "knomial_tree",
    chunks=lambda k: k,
    slots=_passed_on,
    cost=_BLOCKS,
    second_choice=True,
)
def knomial_tree_scatter(rank: int, world_size: int, root: int) -> Program:
    """K-nomial tree scatter: the root hands out parts to up to three others, and so do they.

    ceil(log_4 k) steps; the root sends (k - 1)/k of the input, the lower bound.

    >>> from ringcoll.schedule.drawing import grid
    >>> print(grid(knomial_tree_scatter, 5))
    step  rank 0          rank 1  rank 2  rank 3  rank 4
       0  =0 >4:4         .       .       .       <0:4
       1  >1:1 >2:2 >3:3  <0:1    <0:2    <0:3    .
    """
    steps = binomial.scatter_phase(rank, world_size, root, tmp, RADIX)
    return binomial.with_copy(steps, rank == root, root)
