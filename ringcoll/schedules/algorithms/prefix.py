"""Prefixes: each rank gets the reduction of the vectors of the ranks before it, in rank order.

Problem: a scan, where rank r ends with the vectors of ranks 0 to r, and an exscan, with those of
ranks 0 to r - 1. Doubling takes the fewest rounds. In an exscan a rank keeps W, the total of the w
ranks before it, and may send V, which is W with its own vector. W of rank r - w makes 2 w ranks of
w; V of rank r - w - 1 makes 2 w + 1, but has to be reduced first. So q rounds, of which the first i
send V, are enough if ``k - 1 <= (2**i - 1) * 2**(q - i)``.

Sources: W. D. Hillis and G. L. Steele, "Data parallel algorithms", Communications of the ACM 29
(1986); J. L. Träff, arXiv 2604.25667, the first algorithm, and arXiv 2507.04785, where i = 2.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from ringcoll.schedules.algorithms.registry import (
    Cost,
    Parameter,
    powers_below,
    register,
    rounds_to_reach_all,
)
from ringcoll.schedules.ir import (
    OperandOrder,
    Operation,
    Program,
    Step,
    copy,
    inp,
    out,
    recv,
    recv_reduce,
    reduce,
    send,
    tmp,
)


def _cost(rounds: Callable[..., int], more: Callable[..., int] = lambda k: 0) -> Cost:
    """Rounds that each send and reduce the whole vector, and ``more`` reductions on top."""
    return Cost(rounds, lambda *k: Fraction(rounds(*k)), lambda *k: Fraction(rounds(*k) + more(*k)))


@register("scan", "recursive_doubling", order=OperandOrder.RANK, cost=_cost(rounds_to_reach_all))
def recursive_doubling_scan(rank: int, world_size: int) -> Program:
    """Recursive doubling scan in rank order: ceil(lg k) rounds, over 1, 2, 4, ... ranks.

    Each round sends the whole vector.

    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(recursive_doubling_scan, 4))
    step  rank 0   rank 1     rank 2     rank 3
       0  >1:0 =0  >2:0 +0:0  >3:0 +1:0  +2:0
       1  >2:0     >3:0       +0:0       +1:0
    """
    held = inp(0)
    for far in powers_below(2, world_size):
        step: list[Operation] = [send(rank + far, held)] if rank + far < world_size else []
        if rank >= far:
            step.append(recv_reduce(rank - far, out(0), held))
            held = out(0)
        elif rank == 0 and far == 1:
            step.append(copy(out(0), inp(0)))
        yield Step(*step)


@register(
    "scan", "linear", pipelined=True, order=OperandOrder.LEFT_TO_RIGHT, cost=_cost(lambda k: k - 1)
)
def linear_scan(rank: int, world_size: int) -> Program:
    """Linear scan in rank order: rank r adds its vector, and sends the sum to rank r + 1.

    It is to be run in segments.

    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(linear_scan, 3))
    step  rank 0   rank 1  rank 2
       0  =0 >1:0  +0:0    .
       1  .        >2:0    +1:0
    """
    for step in range(world_size - 1):
        if step == rank:
            own = () if rank else (copy(out(0), inp(0)),)
            yield Step(*own, send(rank + 1, out(0) if rank else inp(0)))
        else:
            yield Step(recv_reduce(step, out(0), inp(0))) if step == rank - 1 else Step()


def _rounds(k: int, inclusive: int) -> int:
    inclusive = min(inclusive, rounds_to_reach_all(k))
    return inclusive + rounds_to_reach_all(-(-(k - 1) // ((1 << inclusive) - 1)))


def _fewest_rounds(k: int) -> int:
    """The least rounds with V that let ceil(lg k) rounds do: see arXiv 2604.25667."""
    rounds = rounds_to_reach_all(k)
    return rounds + 1 - ((1 << rounds) - k + 1).bit_length()


@register(
    "exscan",
    "recursive_doubling",
    order=OperandOrder.RANK,
    slots=lambda k, inclusive: 2,
    cost=_cost(_rounds, lambda k, inclusive: min(inclusive - 1, ((k - 1) // 3).bit_length()) - 1),
    parameter=Parameter("inclusive rounds", default=_fewest_rounds, tried=(1, 2), least=1),
)
def recursive_doubling_exscan(rank: int, world_size: int, inclusive: int) -> Program:
    """Recursive doubling exscan in rank order: i rounds send totals with the own vector first.

    The other rounds send totals without it. By default i is the least for which ceil(lg k) rounds
    are enough. ``recursive_doubling=1`` reduces least, in 1 + ceil(lg(k - 1)) rounds;
    ``recursive_doubling=2`` has ceil(lg(k - 1) + lg(4/3)), over 1, 2, 3, 6, 12, ... ranks.

    >>> from ringcoll.schedules.algorithms import schedule_of
    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(schedule_of("exscan", "recursive_doubling", 4)))
    step  rank 0  rank 1     rank 2     rank 3
       0  >1:0    >2:0 <0:0  >3:0 <1:0  <2:0
       1  .       S0         .          .
       2  >2:0    >3:0 =0    +0:0!      +1:0!
    """
    reached, before, is_new = 0, out(0), False  # w, the place of W, and whether W has just come
    for number in range(_rounds(world_size, inclusive)):
        first = 0 if number < inclusive else 1  # rank 0 has V only, its own vector
        far = reached + 1 - first
        sends = first <= rank < world_size - far
        total = before if first else tmp(1, 0) if number * rank else inp(0)
        if 0 < number < inclusive:
            yield Step(reduce(total, before, inp(0))) if sends and is_new else Step()
        reached += far
        # In place, the output may not be written before the last use of the input.
        into = tmp(0, 0) if number + 1 < inclusive and rank < world_size - reached - 1 else out(0)
        step: list[Operation] = [send(rank + far, total)] if sends else []
        is_new = rank - far >= first
        if is_new:
            step.append(recv_reduce(rank - far, into, before) if number else recv(rank - 1, into))
        elif rank and into != before:
            step.append(copy(into, before))
        before = into
        yield Step(*step)
