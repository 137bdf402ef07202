"""K-nomial trees: a rank serves up to r - 1 others in a step, for any radix r.

Problem: where a message costs latency more than the sender's time, a binomial tree is too deep. The
parent of v, counted from the root, is v without its lowest digit other than 0 in base r. With r = 4
there are half as many steps.

Source: the k-nomial trees of MPICH (a parameter of its broadcast, reduce, gather and scatter).
"""

from __future__ import annotations

from fractions import Fraction
from functools import partial

from ringcoll.schedules.algorithms.binomial import (
    broadcast_phase,
    gather_phase,
    reduce_phase,
    scatter_phase,
)
from ringcoll.schedules.algorithms.registry import (
    Cost,
    Parameter,
    powers_below,
    register,
    share_of_others,
)
from ringcoll.schedules.ir import Program, inp, out, tmp, with_copy


def _rounds(k: int, radix: int) -> int:
    return len([*powers_below(radix, k)])


def _messages(k: int, radix: int) -> Fraction:
    """The root's messages: r - 1 at each level, fewer where so many are not left."""
    return Fraction(sum(min(radix - 1, (k - 1) // mask) for mask in powers_below(radix, k)))


def _passed_on(k: int, radix: int) -> int:
    """Most blocks that a rank other than the root keeps for others."""
    return max((min(mask, k - mask) - 1 for mask in powers_below(radix, k)), default=0)


_BLOCKS = Cost(_rounds, lambda k, radix: share_of_others(k))
_register = partial(
    register,
    second_choice=True,
    # 4 halves the steps of a binomial tree.
    parameter=Parameter("radix", default=lambda k: 4, least=2),
)


@_register("broadcast", "knomial_tree", cost=Cost(_rounds, _messages))
def knomial_tree_broadcast(rank: int, world_size: int, root: int, radix: int) -> Program:
    """K-nomial tree broadcast: every rank that has the vector sends it to up to r - 1 others.

    ceil(log_r k) steps, up to r - 1 messages a step. With r = 4 these are half of the binomial
    tree's steps; a name such as ``knomial_tree=8`` has another radix. On 16 ranks::

        0 -------------------> 4, 8, 12     step 0
        0 -> 1, 2, 3    4 -> 5, 6, 7  ...   step 1

    >>> from ringcoll.schedules.algorithms import schedule_of
    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(schedule_of("broadcast", "knomial_tree", 5)))
    step  rank 0          rank 1  rank 2  rank 3  rank 4
       0  =0 >4:0         .       .       .       <0:0
       1  >1:0 >2:0 >3:0  <0:0    <0:0    <0:0    .
    """
    steps = broadcast_phase(rank, world_size, root, inp(0), radix)
    return with_copy(steps, 0, on=rank == root)


@_register(
    "reduce", "knomial_tree", slots=lambda k, radix: 1, cost=Cost(_rounds, _messages, _messages)
)
def knomial_tree_reduce(rank: int, world_size: int, root: int, radix: int) -> Program:
    """K-nomial tree reduce: the broadcast backwards, adding on the way.

    ceil(log_r k) steps, with up to r - 1 messages each; r is 4, or as in ``knomial_tree=8``.
    Partial results are kept in one slot of scratch memory.

    >>> from ringcoll.schedules.algorithms import schedule_of
    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(schedule_of("reduce", "knomial_tree", 5)))
    step  rank 0          rank 1  rank 2  rank 3  rank 4
       0  +1:0 +2:0 +3:0  >0:0    >0:0    >0:0    .
       1  +4:0!           .       .       .       >0:0
    """
    partial_sum = out(0) if rank == root else tmp(0, 0)
    return reduce_phase(rank, world_size, root, partial_sum, radix)


@_register("gather", "knomial_tree", chunks=lambda k, radix: k, slots=_passed_on, cost=_BLOCKS)
def knomial_tree_gather(rank: int, world_size: int, root: int, radix: int) -> Program:
    """K-nomial tree gather: each rank collects from up to r - 1 others, then passes it all on.

    ceil(log_r k) steps; the root receives (k - 1)/k of the output, the lower bound. r is 4, or as
    in ``knomial_tree=8``.

    >>> from ringcoll.schedules.algorithms import schedule_of
    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(schedule_of("gather", "knomial_tree", 5)))
    step  rank 0             rank 1  rank 2  rank 3  rank 4
       0  =0 <1:1 <2:2 <3:3  >0:1    >0:2    >0:3    .
       1  <4:4               .       .       .       >0:4
    """
    steps = gather_phase(rank, world_size, root, inp(rank), tmp, radix)
    return with_copy(steps, root, on=rank == root)


@_register("scatter", "knomial_tree", chunks=lambda k, radix: k, slots=_passed_on, cost=_BLOCKS)
def knomial_tree_scatter(rank: int, world_size: int, root: int, radix: int) -> Program:
    """K-nomial tree scatter: the root hands out parts to up to r - 1 others, and so do they.

    ceil(log_r k) steps; the root sends (k - 1)/k of the input, the lower bound. r is 4, or as in
    ``knomial_tree=8``.

    >>> from ringcoll.schedules.algorithms import schedule_of
    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(schedule_of("scatter", "knomial_tree", 5)))
    step  rank 0          rank 1  rank 2  rank 3  rank 4
       0  =0 >4:4         .       .       .       <0:4
       1  >1:1 >2:2 >3:3  <0:1    <0:2    <0:3    .
    """
    steps = scatter_phase(rank, world_size, root, tmp, radix)
    return with_copy(steps, root, on=rank == root)
