"""Rounds of exchanges: which ranks meet in which round decides all else.

Problem: networks differ in what is near. Halving, Swing, BCube and others differ only in whom a rank
exchanges with in each round. Here a *pattern* is one function a round, from a rank to its peers; if
every rank reaches every other in exactly one way, the pattern is a reduce-scatter (each peer gets
what it and those that it meets later need), and backwards an all-gather::

    BCube on 12 ranks     0-1-2-3   4-5-6-7   8-9-10-11
                          0-4-8   1-5-9   2-6-10   3-7-11

In the same rounds whole vectors can be exchanged: fewer rounds, and more bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import partial

from ringcoll.algorithms.entry import Cost, Parameter
from ringcoll.algorithms.registry import register
from ringcoll.schedule import (
    OperandOrder,
    Program,
    Ref,
    Step,
    inp,
    out,
    recv,
    recv_reduce,
    reduce,
    send,
    tmp,
)

Round = Callable[[int], tuple[int, ...]]
"""The peers of a rank in a round; a rank is a peer of each of its peers."""

Rounds = tuple[Round, ...]


def spread(rank: int, rounds: Rounds) -> list[int]:
    """The ranks that a rank's data reach in some rounds; those that part late stand together."""
    if not rounds:
        return [rank]
    first, later = rounds[0], rounds[1:]
    return [other for peer in (rank, *first(rank)) for other in spread(peer, later)]


def reached(rank: int, rounds: Rounds) -> list[int]:
    """The ranks that a rank's data reach in some rounds, in order."""
    return sorted(spread(rank, rounds), key=_in_order)


def _in_order(rank: object) -> int:
    """The rank; a rank that stands for all ranks has no place among them."""
    return rank if isinstance(rank, int) else 0


def reduce_scatter_phase(
    rank: int, rounds: Rounds, place: Callable[[int], Ref], result: Ref
) -> Program:
    """Reduce chunk r onto rank r.

    Parameters
    ----------
    place
        Where a partial result is kept, from its chunk.
    result
        Where this rank's own chunk is kept at the end.
    """
    held: Callable[[int], Ref] = inp
    for number, peers in enumerate(rounds):
        later = rounds[number + 1 :]
        kept = reached(rank, later)
        into = (result,) if not later else tuple(map(place, kept))
        local = [tuple(map(held, kept))] + [into] * (len(peers(rank)) - 1)
        yield Step(
            *(send(peer, *map(held, reached(peer, later))) for peer in peers(rank)),
            *(
                recv_reduce(peer, into, own, final=not later and peer == peers(rank)[-1])
                for peer, own in zip(peers(rank), local, strict=True)
            ),
        )
        held = place


def all_gather_phase(rank: int, rounds: Rounds, own: Ref) -> Program:
    """Send chunk r of rank r to all; the first message reads it from ``own``."""
    for number in reversed(range(len(rounds))):
        later = rounds[number + 1 :]
        sent = tuple(map(out, reached(rank, later))) if later else (own,)
        yield Step(
            *(send(peer, *sent) for peer in rounds[number](rank)),
            *(recv(peer, *map(out, reached(peer, later))) for peer in rounds[number](rank)),
        )


def all_reduce_by(rank: int, rounds: Rounds) -> Program:
    """The reduce-scatter and the all-gather of a pattern."""
    yield from reduce_scatter_phase(rank, rounds, out, out(rank))
    yield from all_gather_phase(rank, rounds, out(rank))


def exchange_vectors(rank: int, rounds: Rounds) -> Program:
    """All-reduce of whole vectors: in each round, a rank and its peers add up what each of them has.

    All ranks get the same bits if, after each round, the ranks form groups whose members have heard
    of the same ranks: the group of the lowest rank is the left operand, and each rank finds that out.
    """
    held = inp(0)
    for number, peers in enumerate(rounds):
        earlier, last = rounds[:number][::-1], number == len(rounds) - 1
        operands = sorted((min(spread(peer, earlier)), peer) for peer in (rank, *peers(rank)))
        group = [peer for _, peer in operands]
        sends = [send(peer, held) for peer in peers(rank)]
        if len(group) == 2:
            peer, left = sends[0].peer, group[1] == rank
            yield Step(*sends, recv_reduce(peer, out(0), held, received_left=left, final=last))
        else:
            places = [held if peer == rank else tmp(at, 0) for at, peer in enumerate(group)]
            received = zip(group, places, strict=True)
            yield Step(*sends, *(recv(peer, place) for peer, place in received if peer != rank))
            yield Step(reduce(out(0), *places, final=last))
        held = out(0)


def cost_of_vectors(pattern: Callable[..., Rounds]) -> Cost:
    """Whole vectors in the rounds of a pattern, which may be in any order."""

    def vectors(*world: int) -> Fraction:
        return Fraction(sum(len(peers(0)) for peers in pattern(*world)))

    return Cost(rounds=lambda *world: len(pattern(*world)), traffic=vectors, reduced=vectors)


def cost_of(pattern: Callable[[int], Rounds]) -> Cost:
    """Both phases of a pattern: the least traffic, in twice as many rounds as it has."""
    return Cost(
        rounds=lambda k: 2 * len(pattern(k)),
        traffic=lambda k: Fraction(2 * (k - 1), k),
        reduced=lambda k: Fraction(k - 1, k),
    )


# ---- Patterns -----------------------------------------------------------------------------


def powers_below(base: int, k: int) -> Iterator[int]:
    """1, base, base^2, ... below ``k``."""
    power = 1
    while power < k:
        yield power
        power *= base


def needs_power(base: int, k: int) -> str | None:
    """The reason why a pattern for powers of a number is not defined for a world size."""
    if all(k % (base * power) == 0 for power in powers_below(base, k)):
        return None
    return f"it needs a power of {base}"


def factors(k: int, most: int) -> list[int]:
    """Factors of ``k``: the largest up to ``most``, or else the smallest there is.

    Examples
    --------
    >>> factors(64, 4), factors(12, 4), factors(14, 4), factors(13, 4)
    ([4, 4, 4], [4, 3], [2, 7], [13])
    """
    found = []
    while k > 1:
        small = [factor for factor in range(most, 1, -1) if k % factor == 0]
        found.append(small[0] if small else next(f for f in range(2, k + 1) if k % f == 0))
        k //= found[-1]
    return found


def digits(k: int, radix: int = 4) -> Rounds:
    """In a number system of as many digits as ``k`` has `factors`: all who differ in one digit."""

    def exchange(stride: int, factor: int, rank: int) -> tuple[int, ...]:
        lowest = rank - rank // stride % factor * stride
        return tuple(
            peer for peer in range(lowest, lowest + factor * stride, stride) if peer != rank
        )

    rounds, stride = [], 1
    for factor in factors(k, radix):
        rounds.append(partial(exchange, stride, factor))
        stride *= factor
    return tuple(rounds)


# ---- Algorithms ---------------------------------------------------------------------------


@register("all_reduce", "bcube", chunks=lambda k: k, cost=cost_of(digits), second_choice=True)
def bcube_all_reduce(rank: int, world_size: int) -> Program:
    """BCube all-reduce: reduce-scatter among all who differ in one digit, digit by digit, and back.

    2(k - 1)/k of the vector sent by each rank, the lower bound, in two steps for each factor of k (4 as often
    as it divides k, then 3 or 2, then primes), with as many messages as the factor has, less one; any
    number of ranks.

    Source: C. Guo et al., "BCube", SIGCOMM 2009, of which gloo has an all-reduce.

    >>> from ringcoll.schedule import grid
    >>> print(grid(bcube_all_reduce, 3))
    step  rank 0                rank 1                rank 2
       0  >1:1 >2:2 +1:0 +2:0!  >0:0 >2:2 +0:1 +2:1!  >0:0 >1:1 +0:2 +1:2!
       1  >1:0 >2:0 <1:1 <2:2   >0:1 >2:1 <0:0 <2:2   >0:2 >1:2 <0:0 <1:1
    """
    return all_reduce_by(rank, digits(world_size))


@register(
    "all_reduce",
    "recursive_multiplying",
    order=OperandOrder.RANK,
    slots=lambda k, radix: max(factors(k, radix), default=0),
    cost=cost_of_vectors(digits),
    second_choice=True,
    parameter=Parameter("radix", default=lambda k: 4, least=2),
)
def recursive_multiplying_all_reduce(rank: int, world_size: int, radix: int) -> Program:
    """Recursive multiplying all-reduce: whole vectors among all who differ in one digit.

    A step for each factor of k, in which each rank sends the vector to as many others as the factor has,
    less one: for k = 4^m half the steps of recursive doubling, and 1.5 times its traffic. Factors are up to
    the radix where that is possible: 4, or as in ``recursive_multiplying=8``. Any number of ranks. Operands
    stay in rank order.

    Source: A. Ruefenacht, M. Bull and S. Booth, "Generalisation of recursive doubling for AllReduce", Parallel
    Computing 69 (2017).

    >>> from ringcoll.algorithms import schedule_of
    >>> from ringcoll.schedule import grid
    >>> print(grid(schedule_of("all_reduce", "recursive_multiplying", 3)))
    step  rank 0               rank 1               rank 2
       0  >1:0 >2:0 <1:0 <2:0  >0:0 >2:0 <0:0 <2:0  >0:0 >1:0 <0:0 <1:0
       1  S0!                  S0!                  S0!
    """
    return exchange_vectors(rank, digits(world_size, radix))
