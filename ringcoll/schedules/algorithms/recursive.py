"""Recursive doubling and halving: exchange with the rank whose number differs in one bit.

Problem: few rounds. After round b a rank has exchanged, directly or not, with
every rank whose number agrees with its own in all but the lowest b bits::

    round 0   0-1  2-3  4-5  6-7     peer = rank ^ 1
    round 1   0-2  1-3  4-6  5-7     peer = rank ^ 2
    round 2   0-4  1-5  2-6  3-7     peer = rank ^ 4

The pattern needs a power of two. For other world sizes the first ranks are
*folded* in pairs, as MPICH does: an even rank gives its data to the odd one
after it, sits out, and gets the result at the end.

Recursive doubling has the fewest rounds, with the whole vector in each; a reduce-scatter and an
all-gather have the least traffic, in twice as many rounds. The generalized all-reduce is between
them: a rank is left with 2^r shares of the vector where a reduce-scatter would leave it with one.
The last r rounds of the reduce-scatter keep both halves on both ranks, and the first r rounds of
the all-gather have nothing to do::

    8 ranks   r = 0   1/2 1/4 1/8 | 1/8 1/4 1/2    6 rounds, 7/4 of the vector
              r = 1   1/2 1/4 1/4 |     1/4 1/2    5 rounds, 7/4
              r = 2   1/2 1/2 1/2 |         1/2    4 rounds, 2
              r = 3   1   1   1   |                3 rounds, 3

Sources: R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of collective
communication operations in MPICH", IJHPCA 19 (2005).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from itertools import repeat

from ringcoll.schedules.algorithms.hierarchical import run_on
from ringcoll.schedules.algorithms.registry import (
    Cost,
    Parameter,
    on_hosts,
    own,
    powers_below,
    register,
    rounds_to_reach_all,
    share_of_others,
)
from ringcoll.schedules.ir import (
    OperandOrder,
    Operation,
    Program,
    Ref,
    Step,
    copy,
    inp,
    out,
    recv,
    recv_reduce,
    send,
    tmp,
)


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

    Source: D. Kolmakov and X. Zhang, "A generalization of the allreduce operation", arXiv
    2004.09362.

    >>> from ringcoll.schedules.algorithms import schedule_of
    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(schedule_of("all_reduce", "generalized=1", 4)))
    step  rank 0      rank 1      rank 2      rank 3
       0  >1:1 +1:0   >0:0 +0:1   >3:1 +3:0   >2:0 +2:1
       1  >2:0 +2:0!  >3:1 +3:1!  >0:0 +0:0!  >1:1 +1:1!
       2  >1:0 <1:1   >0:1 <0:0   >3:0 <3:1   >2:1 <2:0
    """
    inside, across = own("all_reduce", "circulant"), own("all_reduce", "recursive_doubling")
    return run_on(rank, on_hosts(world_size, 1 << saved), inside, across)


def _power_of_two_below(world_size: int) -> int:
    """The largest power of two that is not above ``world_size``."""
    return 1 << (world_size.bit_length() - 1)


@dataclass(frozen=True)
class Fold:
    """A world folded to a power of two: the first 2 * ``extra`` ranks act in pairs."""

    world_size: int

    @property
    def size(self) -> int:
        """Ranks that act."""
        return _power_of_two_below(self.world_size)

    @property
    def extra(self) -> int:
        """Ranks that sit out."""
        return self.world_size - self.size

    def sits_out(self, rank: int) -> bool:
        """Whether a rank hands its data to the next one."""
        return rank < 2 * self.extra and rank % 2 == 0

    def acts_for(self, rank: int) -> bool:
        """Whether a rank acts for the one before it as well."""
        return rank < 2 * self.extra and rank % 2 == 1

    def index(self, rank: int) -> int:
        """Number of an acting rank among those that act."""
        return rank // 2 if rank < 2 * self.extra else rank - self.extra

    def rank(self, index: int) -> int:
        """The acting rank with that number."""
        return 2 * index + 1 if index < self.extra else index + self.extra

    def ranks(self, low: int, high: int) -> range:
        """All ranks for which the acting ranks number ``low`` to ``high - 1`` act."""
        return range(self._first(low), self._first(high))

    def _first(self, index: int) -> int:
        return 2 * index if index < self.extra else index + self.extra

    @property
    def rounds(self) -> int:
        """Exchanges until each acting rank has heard all others."""
        return rounds_to_reach_all(self.size)


def _rounds(k: int) -> int:
    return Fold(k).rounds + 2 * (Fold(k).extra > 0)


def _sitting_out(
    rank: int, rounds: int, gives: Iterable[Ref], gets: Iterable[Ref], *first: Operation
) -> Program:
    """The steps of a rank that sits out: the next rank acts for it."""
    yield Step(*first, send(rank + 1, *gives))
    yield from repeat(Step(), rounds)
    yield Step(recv(rank + 1, *gets))


@register(
    "all_reduce",
    "recursive_doubling",
    order=OperandOrder.RANK,
    cost=Cost(
        rounds=_rounds,
        traffic=lambda k: Fraction(_rounds(k)),
        reduced=lambda k: Fraction(_rounds(k) - (Fold(k).extra > 0)),
    ),
)
def recursive_doubling_all_reduce(rank: int, world_size: int) -> Program:
    """Recursive doubling all-reduce: exchange the whole vector with rank ^ 1, rank ^ 2, ...

    lg k steps and lg k times the vector sent by each rank (two of each more if k
    is not a power of two); any number of ranks. Operands stay in rank order.

    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(recursive_doubling_all_reduce, 4))
    step  rank 0      rank 1      rank 2      rank 3
       0  >1:0 +1:0   >0:0 +0:0   >3:0 +3:0   >2:0 +2:0
       1  >2:0 +2:0!  >3:0 +3:0!  >0:0 +0:0!  >1:0 +1:0!
    """
    fold, held = Fold(world_size), inp(0)
    if fold.sits_out(rank):
        yield from _sitting_out(rank, fold.rounds, [inp(0)], [out(0)])
        return
    if fold.acts_for(rank):
        yield Step(recv_reduce(rank - 1, out(0), held, final=False))
        held = out(0)
    elif fold.extra:
        yield Step()
    for mask in powers_below(2, fold.size):
        peer, last = fold.rank(fold.index(rank) ^ mask), 2 * mask == fold.size
        yield Step(send(peer, held), recv_reduce(peer, out(0), held, final=last))
        held = out(0)
    if fold.acts_for(rank):
        yield Step(send(rank - 1, out(0)))
    elif fold.extra:
        yield Step()


def _rabenseifner_reduced(k: int) -> Fraction:
    fold = Fold(k)
    return share_of_others(fold.size) + (fold.extra > 0)


@register(
    "all_reduce",
    "rabenseifner",
    order=OperandOrder.RANK,
    chunks=_power_of_two_below,
    cost=Cost(
        rounds=lambda k: _rounds(k) + Fold(k).rounds,
        traffic=lambda k: 2 * _rabenseifner_reduced(k),
        reduced=_rabenseifner_reduced,
    ),
)
def rabenseifner_all_reduce(rank: int, world_size: int) -> Program:
    """Rabenseifner's all-reduce: reduce-scatter by halving, then all-gather by doubling.

    2 lg k steps and, for a power of two, 2(k - 1)/k of the vector sent by each
    rank, the lower bound. For other k, with p the power of two below: two steps
    and twice the vector more, and p in place of k. Operands stay in rank order.

    Source: R. Rabenseifner, "Optimization of collective reduction operations", ICCS 2004. R.
    Thakur, R. Rabenseifner and W. Gropp, "Optimization of collective communication operations in
    MPICH", IJHPCA 19 (2005).

    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(rabenseifner_all_reduce, 4))
    step  rank 0         rank 1         rank 2         rank 3
       0  >1:2-3 +1:0-1  >0:0-1 +0:2-3  >3:2-3 +3:0-1  >2:0-1 +2:2-3
       1  >2:1 +2:0!     >3:3 +3:2!     >0:0 +0:1!     >1:2 +1:3!
       2  >2:0 <2:1      >3:2 <3:3      >0:1 <0:0      >1:3 <1:2
       3  >1:0-1 <1:2-3  >0:2-3 <0:0-1  >3:0-1 <3:2-3  >2:2-3 <2:0-1
    """
    fold, place = Fold(world_size), inp
    whole = range(fold.size)
    if fold.sits_out(rank):
        yield from _sitting_out(rank, 2 * fold.rounds, map(inp, whole), map(out, whole))
        return
    if fold.acts_for(rank):
        yield Step(
            recv_reduce(rank - 1, tuple(map(out, whole)), tuple(map(inp, whole)), final=False)
        )
        place = out
    elif fold.extra:
        yield Step()
    exchanges: list[tuple[int, range, range]] = []
    kept = whole
    for mask in powers_below(2, fold.size):
        peer = fold.rank(fold.index(rank) ^ mask)
        lower, upper = kept[: len(kept) // 2], kept[len(kept) // 2 :]
        kept, sent = (lower, upper) if rank < peer else (upper, lower)
        exchanges.append((peer, kept, sent))
        yield Step(
            send(peer, *map(place, sent)),
            recv_reduce(peer, tuple(map(out, kept)), tuple(map(place, kept)), final=len(kept) == 1),
        )
        place = out
    for peer, had, missing in reversed(exchanges):
        yield Step(send(peer, *map(out, had)), recv(peer, *map(out, missing)))
    if fold.acts_for(rank):
        yield Step(send(rank - 1, *map(out, whole)))
    elif fold.extra:
        yield Step()


def _blocks(k: int) -> Fraction:
    """In each round the most is sent by a rank whose peer's half holds the pairs."""
    fold = Fold(k)
    return Fraction(sum(len(fold.ranks(0, mask)) for mask in powers_below(2, fold.size)), k) + (
        fold.extra > 0
    )


@register(
    "reduce_scatter",
    "recursive_halving",
    chunks=lambda k: k,
    slots=lambda k: k,
    cost=Cost(
        rounds=_rounds,
        traffic=lambda k: _blocks(k) + Fraction(Fold(k).extra > 0, k),
        reduced=_blocks,
    ),
)
def recursive_halving_reduce_scatter(rank: int, world_size: int) -> Program:
    """Recursive halving reduce-scatter: hand half of the blocks over in each step.

    lg k steps and (k - 1)/k of the input sent by each rank for a power of two;
    for other k two steps and about one input more.

    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(recursive_halving_reduce_scatter, 4))
    step  rank 0         rank 1         rank 2         rank 3
       0  >2:2-3 +2:0-1  >3:2-3 +3:0-1  >0:0-1 +0:2-3  >1:0-1 +1:2-3
       1  >1:1 +1:0!     >0:0 +0:1!     >3:3 +3:2!     >2:2 +2:3!
    """
    fold, blocks = Fold(world_size), range(world_size)
    if fold.sits_out(rank):
        yield from _sitting_out(rank, fold.rounds, map(inp, blocks), [out(rank)])
        return

    def kept_in(block: int) -> Ref:
        return tmp(block, block)

    place: Callable[[int], Ref] = inp
    if fold.acts_for(rank):
        yield Step(
            recv_reduce(rank - 1, tuple(map(kept_in, blocks)), tuple(map(inp, blocks)), final=False)
        )
        place = kept_in
    elif fold.extra:
        yield Step()
    low, high = 0, fold.size
    while high - low > 1:
        half = (high - low) // 2
        peer = fold.rank(fold.index(rank) ^ half)
        lower, upper = fold.ranks(low, low + half), fold.ranks(low + half, high)
        if rank < peer:
            kept, sent, high = lower, upper, low + half
        else:
            kept, sent, low = upper, lower, low + half
        last = high - low == 1
        into = (out(block) if last and block == rank else kept_in(block) for block in kept)
        yield Step(
            send(peer, *map(place, sent)),
            recv_reduce(peer, tuple(into), tuple(map(place, kept)), final=last),
        )
        place = kept_in
    if fold.acts_for(rank):
        yield Step(send(rank - 1, kept_in(rank - 1)))
    elif fold.extra:
        yield Step()


@register("all_gather", "recursive_doubling", chunks=lambda k: k, cost=Cost(_rounds, _blocks))
def recursive_doubling_all_gather(rank: int, world_size: int) -> Program:
    """Recursive doubling all-gather: exchange all that is known with rank ^ 1, rank ^ 2, ...

    lg k steps and (k - 1)/k of the output sent by each rank for a power of two;
    for other k two steps and about one output more.

    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(recursive_doubling_all_gather, 4))
    step  rank 0         rank 1         rank 2         rank 3
       0  =0 >1:0 <1:1   =1 >0:1 <0:0   =2 >3:2 <3:3   =3 >2:3 <2:2
       1  >2:0-1 <2:2-3  >3:0-1 <3:2-3  >0:2-3 <0:0-1  >1:2-3 <1:0-1
    """
    fold, own = Fold(world_size), copy(out(rank), inp(rank))
    if fold.sits_out(rank):
        others = (out(block) for block in range(world_size) if block != rank)
        yield from _sitting_out(rank, fold.rounds, [inp(rank)], others, own)
        return
    if fold.acts_for(rank):
        yield Step(own, recv(rank - 1, out(rank - 1)))
    elif fold.extra:
        yield Step(own)
    place = out if fold.extra else inp
    for mask in powers_below(2, fold.size):
        index = fold.index(rank)
        low, far = index & ~(mask - 1), (index ^ mask) & ~(mask - 1)
        peer = fold.rank(index ^ mask)
        first = () if fold.extra or mask > 1 else (own,)
        yield Step(
            *first,
            send(peer, *map(place, fold.ranks(low, low + mask))),
            recv(peer, *map(out, fold.ranks(far, far + mask))),
        )
        place = out
    if fold.acts_for(rank):
        others = (out(block) for block in range(world_size) if block != rank - 1)
        yield Step(send(rank - 1, *others))
    elif fold.extra:
        yield Step()
