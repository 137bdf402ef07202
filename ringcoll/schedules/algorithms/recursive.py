"""Recursive doubling and halving: exchange with the rank whose number differs in one bit.

Problem: few rounds. After round b a rank has exchanged, directly or not, with
every rank whose number agrees with its own in all but the lowest b bits::

    round 0   0-1  2-3  4-5  6-7     peer = rank ^ 1
    round 1   0-2  1-3  4-6  5-7     peer = rank ^ 2
    round 2   0-4  1-5  2-6  3-7     peer = rank ^ 4

The pattern needs a power of two. For other world sizes the first ranks are
*folded* in pairs, as MPICH does: an even rank gives its data to the odd one
after it, sits out, and gets the result at the end.

Sources: R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of collective
communication operations in MPICH", IJHPCA 19 (2005).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import repeat

from ringcoll.schedules.algorithms.exchanges import Halves, halve_and_double
from ringcoll.schedules.algorithms.registry import (
    Cost,
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
    inp,
    out,
    recv,
    recv_reduce,
    send,
    tmp,
    with_copy,
)


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


def _folded(
    rank: int,
    fold: Fold,
    exchanges: tuple[Program, int],
    first: Operation,
    handed: Iterable[Ref],
    result: Iterable[Ref],
) -> Program:
    """The steps of a rank: exchanges, and their number, between the steps of the pairs.

    A rank that sits out sends ``handed``, and gets ``result``. The rank that acts for it does
    ``first``, and sends ``result``.
    """
    steps, num_steps = exchanges
    if fold.sits_out(rank):
        yield Step(send(rank + 1, *handed))
        yield from repeat(Step(), num_steps)
        yield Step(recv(rank + 1, *result))
        return
    acts_for_two = fold.acts_for(rank)
    if fold.extra:
        yield Step(first) if acts_for_two else Step()
    yield from steps
    if fold.extra:
        yield Step(send(rank - 1, *result)) if acts_for_two else Step()


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
    fold = Fold(world_size)

    def exchanges() -> Program:
        held = out(0) if fold.acts_for(rank) else inp(0)
        for mask in powers_below(2, fold.size):
            peer, last = fold.rank(fold.index(rank) ^ mask), 2 * mask == fold.size
            yield Step(send(peer, held), recv_reduce(peer, out(0), held, final=last))
            held = out(0)

    first = recv_reduce(rank - 1, out(0), inp(0), final=False)
    return _folded(rank, fold, (exchanges(), fold.rounds), first, [inp(0)], [out(0)])


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
    fold = Fold(world_size)
    whole = range(fold.size)
    inputs, outputs = tuple(map(inp, whole)), tuple(map(out, whole))

    def halves() -> Iterator[Halves]:
        kept = whole
        for mask in powers_below(2, fold.size):
            peer = fold.rank(fold.index(rank) ^ mask)
            lower, upper = kept[: len(kept) // 2], kept[len(kept) // 2 :]
            kept, sent = (lower, upper) if rank < peer else (upper, lower)
            yield peer, kept, sent

    exchanges = halve_and_double(halves(), out if fold.acts_for(rank) else inp)
    first = recv_reduce(rank - 1, outputs, inputs, final=False)
    return _folded(rank, fold, (exchanges, 2 * fold.rounds), first, inputs, outputs)


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
    inputs = tuple(map(inp, blocks))

    def kept_in(block: int) -> Ref:
        return tmp(block, block)

    def exchanges() -> Program:
        place: Callable[[int], Ref] = kept_in if fold.acts_for(rank) else inp
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

    first = recv_reduce(rank - 1, tuple(map(kept_in, blocks)), inputs, final=False)
    result = out(rank) if fold.sits_out(rank) else kept_in(rank - 1)
    return _folded(rank, fold, (exchanges(), fold.rounds), first, inputs, [result])


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
    fold = Fold(world_size)
    sits_out = rank if fold.sits_out(rank) else rank - 1

    def exchanges() -> Program:
        place = out if fold.extra else inp
        for mask in powers_below(2, fold.size):
            index = fold.index(rank)
            low, far = index & ~(mask - 1), (index ^ mask) & ~(mask - 1)
            peer = fold.rank(index ^ mask)
            yield Step(
                send(peer, *map(place, fold.ranks(low, low + mask))),
                recv(peer, *map(out, fold.ranks(far, far + mask))),
            )
            place = out

    others = (out(block) for block in range(world_size) if block != sits_out)
    first = recv(rank - 1, out(rank - 1))
    steps = _folded(rank, fold, (exchanges(), fold.rounds), first, [inp(rank)], others)
    return with_copy(steps, rank)
