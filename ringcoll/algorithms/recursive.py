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

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction

from ringcoll.algorithms.entry import Cost
from ringcoll.algorithms.registry import register
from ringcoll.schedule import (
    OperandOrder,
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


def power_of_two_below(world_size: int) -> int:
    """The largest power of two that is not above ``world_size``."""
    return 1 << (world_size.bit_length() - 1)


@dataclass(frozen=True)
class Fold:
    """A world folded to a power of two: the first 2 * ``extra`` ranks act in pairs."""

    world_size: int

    @property
    def size(self) -> int:
        """Ranks that act."""
        return power_of_two_below(self.world_size)

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

    def masks(self) -> Iterator[int]:
        """1, 2, 4, ... below ``size``."""
        return (1 << bit for bit in range(self.size.bit_length() - 1))

    @property
    def rounds(self) -> int:
        """Number of masks."""
        return self.size.bit_length() - 1


def _folded_rounds(k: int, factor: int) -> int:
    fold = Fold(k)
    return factor * fold.rounds + (2 if fold.extra else 0)


def _idle(steps: int) -> Program:
    for _ in range(steps):
        yield Step()


@register(
    "all_reduce",
    "recursive_doubling",
    order=OperandOrder.RANK,
    cost=Cost(
        rounds=lambda k: _folded_rounds(k, 1),
        traffic=lambda k: Fraction(_folded_rounds(k, 1)),
        reduced=lambda k: Fraction(_folded_rounds(k, 1) - (1 if Fold(k).extra else 0)),
    ),
)
def recursive_doubling_all_reduce(rank: int, world_size: int) -> Program:
    """Recursive doubling all-reduce: exchange the whole vector with rank ^ 1, rank ^ 2, ...

    lg k steps and lg k times the vector sent by each rank (two of each more if k
    is not a power of two); any number of ranks. Operands stay in rank order.

    >>> from ringcoll.schedule import grid
    >>> print(grid(recursive_doubling_all_reduce, 4))
    step  rank 0      rank 1      rank 2      rank 3
       0  >1:0 +1:0   >0:0 +0:0   >3:0 +3:0   >2:0 +2:0
       1  >2:0 +2:0!  >3:0 +3:0!  >0:0 +0:0!  >1:0 +1:0!
    """
    fold = Fold(world_size)
    if fold.sits_out(rank):
        yield Step(send(rank + 1, inp(0)))
        yield from _idle(fold.rounds)
        yield Step(recv(rank + 1, out(0)))
        return
    held = inp(0)
    if fold.acts_for(rank):
        yield Step(recv_reduce(rank - 1, out(0), held, final=False))
        held = out(0)
    elif fold.extra:
        yield Step()
    for mask in fold.masks():
        peer = fold.rank(fold.index(rank) ^ mask)
        last = 2 * mask == fold.size
        yield Step(send(peer, held), recv_reduce(peer, out(0), held, final=last))
        held = out(0)
    if fold.acts_for(rank):
        yield Step(send(rank - 1, out(0)))
    elif fold.extra:
        yield Step()


def _rabenseifner_traffic(k: int) -> Fraction:
    fold = Fold(k)
    return Fraction(2 * (fold.size - 1), fold.size) + (2 if fold.extra else 0)


def _rabenseifner_reduced(k: int) -> Fraction:
    fold = Fold(k)
    return Fraction(fold.size - 1, fold.size) + (1 if fold.extra else 0)


@register(
    "all_reduce",
    "rabenseifner",
    order=OperandOrder.RANK,
    chunks=power_of_two_below,
    cost=Cost(
        rounds=lambda k: _folded_rounds(k, 2),
        traffic=_rabenseifner_traffic,
        reduced=_rabenseifner_reduced,
    ),
)
def rabenseifner_all_reduce(rank: int, world_size: int) -> Program:
    """Rabenseifner's all-reduce: reduce-scatter by halving, then all-gather by doubling.

    2 lg k steps and, for a power of two, 2(k - 1)/k of the vector sent by each
    rank, the lower bound. For other k, with p the power of two below: two steps
    and twice the vector more, and p in place of k. Operands stay in rank order.

    Source: R. Rabenseifner, "Optimization of collective reduction operations",
    ICCS 2004.

    >>> from ringcoll.schedule import grid
    >>> print(grid(rabenseifner_all_reduce, 4))
    step  rank 0         rank 1         rank 2         rank 3
       0  >1:2-3 +1:0-1  >0:0-1 +0:2-3  >3:2-3 +3:0-1  >2:0-1 +2:2-3
       1  >2:1 +2:0!     >3:3 +3:2!     >0:0 +0:1!     >1:2 +1:3!
       2  >2:0 <2:1      >3:2 <3:3      >0:1 <0:0      >1:3 <1:2
       3  >1:0-1 <1:2-3  >0:2-3 <0:0-1  >3:0-1 <3:2-3  >2:2-3 <2:0-1
    """
    fold = Fold(world_size)
    whole = range(fold.size)
    if fold.sits_out(rank):
        yield Step(send(rank + 1, *map(inp, whole)))
        yield from _idle(2 * fold.rounds)
        yield Step(recv(rank + 1, *map(out, whole)))
        return
    place = inp
    if fold.acts_for(rank):
        yield Step(
            recv_reduce(rank - 1, tuple(map(out, whole)), tuple(map(inp, whole)), final=False)
        )
        place = out
    elif fold.extra:
        yield Step()
    exchanges: list[tuple[int, range, range]] = []
    kept = whole
    for mask in fold.masks():
        peer = fold.rank(fold.index(rank) ^ mask)
        middle = len(kept) // 2
        lower, upper = kept[:middle], kept[middle:]
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


def _halving_traffic(k: int) -> Fraction:
    # In each round the most is sent by a rank whose peer's half holds the pairs.
    fold = Fold(k)
    most = sum(len(fold.ranks(0, mask)) for mask in fold.masks())
    return Fraction(most, k) + (1 + Fraction(1, k) if fold.extra else 0)


def _halving_reduced(k: int) -> Fraction:
    return _halving_traffic(k) - (Fraction(1, k) if Fold(k).extra else 0)


@register(
    "reduce_scatter",
    "recursive_halving",
    chunks=lambda k: k,
    slots=lambda k: k,
    cost=Cost(
        rounds=lambda k: _folded_rounds(k, 1), traffic=_halving_traffic, reduced=_halving_reduced
    ),
)
def recursive_halving_reduce_scatter(rank: int, world_size: int) -> Program:
    """Recursive halving reduce-scatter: hand half of the blocks over in each step.

    lg k steps and (k - 1)/k of the input sent by each rank for a power of two;
    for other k two steps and about one input more.

    >>> from ringcoll.schedule import grid
    >>> print(grid(recursive_halving_reduce_scatter, 4))
    step  rank 0         rank 1         rank 2         rank 3
       0  >2:2-3 +2:0-1  >3:2-3 +3:0-1  >0:0-1 +0:2-3  >1:0-1 +1:2-3
       1  >1:1 +1:0!     >0:0 +0:1!     >3:3 +3:2!     >2:2 +2:3!
    """
    fold = Fold(world_size)
    blocks = range(world_size)
    if fold.sits_out(rank):
        yield Step(send(rank + 1, *map(inp, blocks)))
        yield from _idle(fold.rounds)
        yield Step(recv(rank + 1, out(rank)))
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


def _doubling_traffic(k: int) -> Fraction:
    fold = Fold(k)
    most = sum(len(fold.ranks(0, mask)) for mask in fold.masks())
    return Fraction(most + (k if fold.extra else 0), k)


@register(
    "all_gather",
    "recursive_doubling",
    chunks=lambda k: k,
    cost=Cost(rounds=lambda k: _folded_rounds(k, 1), traffic=_doubling_traffic),
)
def recursive_doubling_all_gather(rank: int, world_size: int) -> Program:
    """Recursive doubling all-gather: exchange all that is known with rank ^ 1, rank ^ 2, ...

    lg k steps and (k - 1)/k of the output sent by each rank for a power of two;
    for other k two steps and about one output more.

    >>> from ringcoll.schedule import grid
    >>> print(grid(recursive_doubling_all_gather, 4))
    step  rank 0         rank 1         rank 2         rank 3
       0  =0 >1:0 <1:1   =1 >0:1 <0:0   =2 >3:2 <3:3   =3 >2:3 <2:2
       1  >2:0-1 <2:2-3  >3:0-1 <3:2-3  >0:2-3 <0:0-1  >1:2-3 <1:0-1
    """
    fold = Fold(world_size)
    own = copy(out(rank), inp(rank))
    if fold.sits_out(rank):
        yield Step(own, send(rank + 1, inp(rank)))
        yield from _idle(fold.rounds)
        yield Step(recv(rank + 1, *(out(block) for block in range(world_size) if block != rank)))
        return
    if fold.acts_for(rank):
        yield Step(own, recv(rank - 1, out(rank - 1)))
    elif fold.extra:
        yield Step(own)
    place = out if fold.extra else inp
    for mask in fold.masks():
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
