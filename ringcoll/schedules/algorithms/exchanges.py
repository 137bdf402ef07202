"""Rounds of exchanges: the peers of each round decide all else.

Problem: networks differ in which ranks are near. Halving, Swing, BCube and others differ only in
the peers of a rank in each round. Here a *pattern* is one function a round, from a rank to its
peers. If every rank reaches every other in exactly one way, the pattern is a reduce-scatter (each
peer gets the chunks of itself and of the ranks that it meets later), and backwards an all-gather::

    BCube on 12 ranks     0-1-2-3   4-5-6-7   8-9-10-11
                          0-4-8   1-5-9   2-6-10   3-7-11

In the same rounds whole vectors can be exchanged: fewer rounds, and more bytes.

In recursive halving a rank meets ranks 1, 2, 4, 8, ... away; on a ring of ranks a message takes
as many links. In Swing even ranks go to one side, odd ranks to the other, and the sides change; in
Trivance a rank meets both neighbours at once, by 1, 3, 9, ...::

    Swing on 8 ranks      0-1 2-3 4-5 6-7       distances 1, -1, 3
                          7-0 1-2 3-4 5-6
                          0-3 1-6 2-5 4-7
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fractions import Fraction
from functools import partial

from ringcoll.schedules.algorithms.registry import (
    Cost,
    Parameter,
    powers_below,
    register,
    share_of_others,
)
from ringcoll.schedules.ir import (
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
    """Reduce chunk r onto rank r; it ends in ``result``, partial sums are in ``place(chunk)``."""
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


Halves = tuple[int, range, range]
"""A peer of a round, and the chunks that a rank keeps and sends in it."""


def halve_and_double(rounds: Iterable[Halves], place: Callable[[int], Ref]) -> Program:
    """All-reduce with one peer a round; chunks are in ``place(chunk)`` at first."""
    met = [*rounds]
    for peer, kept, sent in met:
        yield Step(
            send(peer, *map(place, sent)),
            recv_reduce(peer, tuple(map(out, kept)), tuple(map(place, kept)), final=len(kept) == 1),
        )
        place = out
    for peer, had, missing in reversed(met):
        yield Step(send(peer, *map(out, had)), recv(peer, *map(out, missing)))


def exchange_vectors(rank: int, rounds: Rounds) -> Program:
    """All-reduce of whole vectors: in each round, a rank and its peers add up their vectors.

    All ranks get the same bits if, after each round, the ranks form groups whose members have heard
    of the same ranks: the group of the lowest rank is the left operand, and each rank finds that
    out.
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

    return Cost(lambda *world: len(pattern(*world)), vectors, vectors)


def cost_of(pattern: Callable[[int], Rounds]) -> Cost:
    """Both phases of a pattern: the least traffic, in twice as many rounds as it has."""
    return Cost(lambda k: 2 * len(pattern(k)), lambda k: 2 * share_of_others(k), share_of_others)


# ---- Patterns -----------------------------------------------------------------------------


def needs_power(base: int, k: int) -> str | None:
    """The reason why a pattern for powers of a number is not defined for a world size."""
    if all(k % (base * power) == 0 for power in powers_below(base, k)):
        return None
    return f"it needs a power of {base}"


def factors(k: int, most: int) -> list[int]:
    """Factors of ``k``: the largest up to ``most``, or else the smallest there is.

    >>> factors(64, 4), factors(12, 4), factors(14, 4), factors(13, 4)
    ([4, 4, 4], [4, 3], [2, 7], [13])
    """
    divisors: list[int] = []
    while k > 1:
        candidates = (*range(most, 1, -1), *range(most + 1, k + 1))
        divisors.append(next(factor for factor in candidates if k % factor == 0))
        k //= divisors[-1]
    return divisors


def digits(k: int, radix: int = 4) -> Rounds:
    """The ranks that differ in one digit, in a number system with a digit for each factor."""

    def exchange(stride: int, factor: int, rank: int) -> tuple[int, ...]:
        lowest = rank - rank // stride % factor * stride
        group = range(lowest, lowest + factor * stride, stride)
        return tuple(peer for peer in group if peer != rank)

    rounds, stride = [], 1
    for factor in factors(k, radix):
        rounds.append(partial(exchange, stride, factor))
        stride *= factor
    return tuple(rounds)


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


# ---- Algorithms ---------------------------------------------------------------------------


_register = partial(register, "all_reduce", second_choice=True)


@_register("bcube", chunks=lambda k: k, cost=cost_of(digits))
def bcube_all_reduce(rank: int, world_size: int) -> Program:
    """BCube all-reduce: reduce-scatter among all who differ in one digit, digit by digit, and back.

    2(k - 1)/k of the vector sent by each rank, the lower bound, in two steps for each factor of k
    (4 as often as it divides k, then 3 or 2, then primes), with as many messages as the factor has,
    less one; any number of ranks.

    Source: C. Guo et al., "BCube", SIGCOMM 2009, of which gloo has an all-reduce.

    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(bcube_all_reduce, 3))
    step  rank 0                rank 1                rank 2
       0  >1:1 >2:2 +1:0 +2:0!  >0:0 >2:2 +0:1 +2:1!  >0:0 >1:1 +0:2 +1:2!
       1  >1:0 >2:0 <1:1 <2:2   >0:1 >2:1 <0:0 <2:2   >0:2 >1:2 <0:0 <1:1
    """
    return all_reduce_by(rank, digits(world_size))


@_register(
    "recursive_multiplying",
    order=OperandOrder.RANK,
    slots=lambda k, radix: max(factors(k, radix), default=0),
    cost=cost_of_vectors(digits),
    parameter=Parameter("radix", default=lambda k: 4, least=2),
)
def recursive_multiplying_all_reduce(rank: int, world_size: int, radix: int) -> Program:
    """Recursive multiplying all-reduce: whole vectors among all who differ in one digit.

    A step for each factor of k, in which each rank sends the vector to as many others as the factor
    has, less one: for k = 4^m half the steps of recursive doubling, and 1.5 times its traffic.
    Factors are up to the radix where that is possible: 4, or as in ``recursive_multiplying=8``. Any
    number of ranks. Operands stay in rank order.

    Source: A. Ruefenacht, M. Bull and S. Booth, "Generalisation of recursive doubling for
    AllReduce", Parallel Computing 69 (2017).

    >>> from ringcoll.schedules.algorithms import schedule_of
    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(schedule_of("all_reduce", "recursive_multiplying", 3)))
    step  rank 0               rank 1               rank 2
       0  >1:0 >2:0 <1:0 <2:0  >0:0 >2:0 <0:0 <2:0  >0:0 >1:0 <0:0 <1:0
       1  S0!                  S0!                  S0!
    """
    return exchange_vectors(rank, digits(world_size, radix))


@_register("swing", chunks=lambda k: k, restriction=partial(needs_power, 2), cost=cost_of(swing))
def swing_all_reduce(rank: int, world_size: int) -> Program:
    """Swing all-reduce: halving and doubling with peers on alternate sides, near on a ring.

    2 lg k steps and 2(k - 1)/k of the vector sent by each rank, the lower bound; k a power of two.
    Peers are 1, 1, 3, 5, 11, ... ranks away, where recursive halving has 1, 2, 4, 8, 16, ...: on
    rings and tori messages cross fewer links.

    Source: D. De Sensi et al., "Swing: short-cutting rings for higher bandwidth allreduce", NSDI
    2024.

    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(swing_all_reduce, 4))
    step  rank 0         rank 1         rank 2         rank 3
       0  >1:1-2 +1:0,3  >0:0,3 +0:1-2  >3:0,3 +3:1-2  >2:1-2 +2:0,3
       1  >3:3 +3:0!     >2:2 +2:1!     >1:1 +1:2!     >0:0 +0:3!
       2  >3:0 <3:3      >2:1 <2:2      >1:2 <1:1      >0:3 <0:0
       3  >1:0,3 <1:1-2  >0:1-2 <0:0,3  >3:1-2 <3:0,3  >2:0,3 <2:1-2
    """
    return all_reduce_by(rank, swing(world_size))


@_register(
    "trivance", chunks=lambda k: k, restriction=partial(needs_power, 3), cost=cost_of(tripling)
)
def trivance_all_reduce(rank: int, world_size: int) -> Program:
    """Trivance all-reduce, for long vectors: both neighbours at distances 1, 3, 9, ... at once.

    2 log_3 k steps with two messages each and 2(k - 1)/k of the vector sent by each rank, the lower
    bound; k a power of three. It pays where a rank has two ports.

    Source: A. Jürß, V. Addanki and S. Schmid, "Trivance: latency-optimal allreduce by shortcutting
    multiport networks", arXiv 2602.17254.

    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(trivance_all_reduce, 3))
    step  rank 0                rank 1                rank 2
       0  >2:2 >1:1 +2:0 +1:0!  >0:0 >2:2 +0:1 +2:1!  >1:1 >0:0 +1:2 +0:2!
       1  >2:0 >1:0 <2:2 <1:1   >0:1 >2:1 <0:0 <2:2   >1:2 >0:2 <1:1 <0:0
    """
    return all_reduce_by(rank, tripling(world_size))


@_register("swing_latency", restriction=partial(needs_power, 2), cost=cost_of_vectors(swing))
def swing_latency_all_reduce(rank: int, world_size: int) -> Program:
    """Swing all-reduce for short vectors: whole vectors go to Swing's peers, the farthest first.

    lg k steps, the lower bound, and lg k times the vector sent by each rank; k a power of two. The
    paper begins with the nearest peer. Then ranks add up in different orders, and have different
    sums of floats. From far to near the messages are the same, and so are the bits of all ranks.
    Bine trees (arXiv 2508.17311) have the same form for short vectors.

    Source: D. De Sensi et al., "Swing: short-cutting rings for higher bandwidth allreduce", NSDI
    2024.

    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(swing_latency_all_reduce, 4))
    step  rank 0      rank 1      rank 2      rank 3
       0  >3:0 +3:0   >2:0 +2:0   >1:0 +1:0   >0:0 +0:0
       1  >1:0 +1:0!  >0:0 +0:0!  >3:0 +3:0!  >2:0 +2:0!
    """
    return exchange_vectors(rank, swing(world_size)[::-1])


@_register(
    "trivance_latency",
    slots=lambda k: 3,
    restriction=partial(needs_power, 3),
    cost=cost_of_vectors(tripling),
)
def trivance_latency_all_reduce(rank: int, world_size: int) -> Program:
    """Trivance all-reduce for short vectors: whole vectors to both neighbours, the farthest first.

    log_3 k steps, the lower bound with two ports, and 2 log_3 k times the vector sent by each rank;
    k a power of three. The paper begins at distance 1. Then ranks add up in different orders, and
    have different sums of floats. From far to near the messages are the same, and so are the bits
    of all ranks.

    Source: A. Jürß, V. Addanki and S. Schmid, "Trivance: latency-optimal allreduce by shortcutting
    multiport networks", arXiv 2602.17254.

    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(trivance_latency_all_reduce, 3))
    step  rank 0               rank 1               rank 2
       0  >2:0 >1:0 <1:0 <2:0  >0:0 >2:0 <0:0 <2:0  >1:0 >0:0 <0:0 <1:0
       1  S0!                  S0!                  S0!
    """
    return exchange_vectors(rank, tripling(world_size)[::-1])
