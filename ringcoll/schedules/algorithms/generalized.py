"""Between the fewest rounds and the least traffic: a reduce-scatter that ends early.

Problem: recursive doubling has the fewest rounds, with the whole vector in each; a reduce-scatter
and an all-gather have the least traffic, in twice as many rounds. The generalized all-reduce is
between them: a rank is left with 2^r shares of the vector where a reduce-scatter would leave it
with one. The last r rounds of the reduce-scatter keep both halves on both ranks, and the first r
rounds of the all-gather have nothing to do::

    8 ranks   r = 0   1/2 1/4 1/8 | 1/8 1/4 1/2    6 rounds, 7/4 of the vector
              r = 1   1/2 1/4 1/4 |     1/4 1/2    5 rounds, 7/4
              r = 2   1/2 1/2 1/2 |         1/2    4 rounds, 2
              r = 3   1   1   1   |                3 rounds, 3

Source: D. Kolmakov and X. Zhang, "A generalization of the allreduce operation", arXiv 2004.09362.
"""

from __future__ import annotations

from fractions import Fraction

from ringcoll.schedules.algorithms.hierarchical import run_on
from ringcoll.schedules.algorithms.registry import (
    Cost,
    Parameter,
    built_in_entry,
    on_hosts,
    register,
    rounds_to_reach_all,
)
from ringcoll.schedules.ir import Program


@register(
    "all_reduce",
    "generalized",
    chunks=lambda k, saved: k >> saved,
    cost=Cost(
        rounds=lambda k, saved: 2 * rounds_to_reach_all(k) - saved,
        traffic=lambda k, saved: Fraction(2 * ((k >> saved) - 1) + saved, k >> saved),
        reduced=lambda k, saved: Fraction((k >> saved) - 1 + saved, k >> saved),
    ),
    restriction=lambda k, saved: (
        f"{1 << saved} has to divide the number of ranks" if k % (1 << saved) else None
    ),
    second_choice=True,
    # One round fewer costs no traffic.
    parameter=Parameter("saved rounds", default=lambda k: 1 - k % 2, tried=(2, 3, 4)),
)
def generalized_all_reduce(rank: int, world_size: int, saved: int) -> Program:
    """Generalized all-reduce: r rounds fewer than the least traffic takes, for more traffic.

    2 ceil(lg k) - r steps. With m = k/2^r a rank sends (2(m - 1) + r)/m of the vector: 2(k - 1)/k,
    the lower bound, for r = 0 and r = 1, and lg k for r = lg k. Any number of ranks that 2^r
    divides; r is 1 for an even number, 0 for an odd one, and ``generalized=2`` has r = 2. Within
    groups of m ranks in a row it is the circulant all-reduce, and across the groups recursive
    doubling.

    Two ranks that keep both halves add the same two operands, so that the results are the same on
    all ranks. The paper also takes r > 0 where 2^r does not divide the number of ranks; there ranks
    would add in different orders, and have different sums of floats. These r are left out.

    >>> from ringcoll.schedules.algorithms import schedule_of
    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(schedule_of("all_reduce", "generalized=1", 4)))
    step  rank 0      rank 1      rank 2      rank 3
       0  >1:1 +1:0   >0:0 +0:1   >3:1 +3:0   >2:0 +2:1
       1  >2:0 +2:0!  >3:1 +3:1!  >0:0 +0:0!  >1:1 +1:1!
       2  >1:0 <1:1   >0:1 <0:0   >3:0 <3:1   >2:1 <2:0
    """
    inside, across = (
        built_in_entry("all_reduce", "circulant"),
        built_in_entry("all_reduce", "recursive_doubling"),
    )
    return run_on(rank, on_hosts(world_size, 1 << saved), inside, across)
