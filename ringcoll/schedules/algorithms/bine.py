"""Bine trees: binomial trees with shorter edges, by distances in base -2.

Problem: ranks with near numbers are near in the network, but the edges of a binomial tree are 1, 2,
4, 8, ... ranks long. If edges point to both sides in turn, a subtree lies on both sides of its
root, and edges of 1, 1, 3, 5, 11, ..., |1 - (-2)^(s+1)|/3, reach all ranks: 2/3 of the length in
the limit::

    binomial    0 -------> 4        Bine    0 -----> 3       even ranks send up, odd ones down
                0 ---> 2                7 <- 0   3 -> 4      even down, odd up
                0 -> 1                  0 -> 1   2 <- 3      even up, odd down

The tree is a binomial tree whose ranks have other numbers. The edges of all ranks' trees are the
exchanges of Swing; they make up the collectives without a root. k is a power of two.

Source: D. De Sensi et al., "Bine trees: enhancing collective operations by optimizing communication
locality", SC 2025, arXiv 2508.17311.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial

from ringcoll.schedules.algorithms import binomial, exchanges
from ringcoll.schedules.algorithms.combining import all_to_all_by
from ringcoll.schedules.algorithms.exchanges import (
    Halves,
    halve_and_double,
    needs_power,
    reached,
    spread,
    swing,
)
from ringcoll.schedules.algorithms.registry import (
    Cost,
    register,
    rounds_to_reach_all,
    share_of_others,
    vector_each_round,
)
from ringcoll.schedules.ir import (
    OperandOrder,
    Program,
    inp,
    out,
    renumber,
    tmp,
    with_copy,
)

_register = partial(register, restriction=partial(needs_power, 2), second_choice=True)


@lru_cache(maxsize=16)  # for all ranks of a simulation
def tree(k: int, root: int) -> tuple[int, ...]:
    """The ranks, in the order of their numbers in a binomial tree.

    >>> tree(8, 0)
    (0, 1, 7, 6, 3, 2, 4, 5)
    """
    return tuple((root + place) % k for place in spread(0, swing(k)[::-1]))


@lru_cache(maxsize=16)
def numbers(k: int, root: int) -> dict[int, int]:
    """The number of each rank in a binomial tree."""
    return {rank: number for number, rank in enumerate(tree(k, root))}


def _on_tree(
    program: Callable[..., Program], rank: int, k: int, root: int, *, in_blocks: bool = False
) -> Program:
    """A program of binomial trees, on a Bine tree."""
    ranks, number = tree(k, root), numbers(k, root)[rank]
    return renumber(
        program(number, k, 0),
        peer=ranks.__getitem__,
        chunk=lambda chunk: ranks[chunk] if in_blocks else chunk,
    )


def middle(k: int) -> int:
    """The root whose tree does not go round the end: every subtree is a range of ranks.

    >>> middle(8), tree(8, 2)
    (2, (2, 3, 1, 0, 5, 4, 6, 7))
    """
    return sum(1 << bit for bit in range(1, rounds_to_reach_all(k), 2))


@_register("broadcast", "bine_tree", cost=binomial.BROADCAST)
def bine_tree_broadcast(rank: int, world_size: int, root: int) -> Program:
    """Bine tree broadcast: the binomial tree's, over shorter distances, the farthest first.

    lg k steps, the lower bound; k a power of two. The root sends the vector in each of them.

    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(bine_tree_broadcast, 4))
    step  rank 0   rank 1  rank 2  rank 3
       0  =0 >3:0  .       .       <0:0
       1  >1:0     <0:0    <3:0    >2:0
    """
    return _on_tree(binomial.binomial_tree_broadcast, rank, world_size, root)


@_register("reduce", "bine_tree", slots=lambda k: 1, cost=binomial.REDUCE)
def bine_tree_reduce(rank: int, world_size: int, root: int) -> Program:
    """Bine tree reduce: the broadcast backwards, adding on the way.

    lg k steps, the lower bound; k a power of two. Partial results are kept in one slot of scratch
    memory.

    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(bine_tree_reduce, 4))
    step  rank 0  rank 1  rank 2  rank 3
       0  +1:0    >0:0    >3:0    +2:0
       1  +3:0!   .       .       >0:0
    """
    return _on_tree(binomial.binomial_tree_reduce, rank, world_size, root)


@_register("all_reduce", "bine_tree", order=OperandOrder.RANK, cost=binomial.ALL_REDUCE)
def bine_tree_all_reduce(rank: int, world_size: int) -> Program:
    """Bine tree all-reduce: a Bine tree reduce to a rank in the middle, then a broadcast from it.

    2 lg k steps, each with the whole vector; k a power of two. The tree does not go round the end
    of the ranks, so that operands stay in rank order.

    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(bine_tree_all_reduce, 4))
    step  rank 0  rank 1  rank 2  rank 3
       0  >1:0    +0:0    +3:0    >2:0
       1  .       >2:0    +1:0!   .
       2  .       <2:0    >1:0    .
       3  <1:0    >0:0    >3:0    <2:0
    """
    root = middle(world_size)
    ranks, number = tree(world_size, root), numbers(world_size, root)[rank]
    up = binomial.reduce_phase(number, world_size, 0, out(0), received_left=None)
    yield from renumber(up, peer=ranks.__getitem__)
    down = binomial.broadcast_phase(number, world_size, 0, out(0))
    yield from renumber(down, peer=ranks.__getitem__)


@_register(
    "gather", "bine_tree", chunks=lambda k: k, slots=lambda k: (k - 1) // 2, cost=binomial.BLOCKS
)
def bine_tree_gather(rank: int, world_size: int, root: int) -> Program:
    """Bine tree gather: each rank collects its subtree, then passes it on.

    lg k steps; the root receives (k - 1)/k of the output: both lower bounds. k a power of two.

    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(bine_tree_gather, 4))
    step  rank 0   rank 1  rank 2  rank 3
       0  =0 <1:1  >0:1    >3:2    <2:2
       1  <3:3,2   .       .       >0:3,2
    """
    return _on_tree(binomial.binomial_tree_gather, rank, world_size, root, in_blocks=True)


@_register(
    "scatter", "bine_tree", chunks=lambda k: k, slots=lambda k: (k - 1) // 2, cost=binomial.BLOCKS
)
def bine_tree_scatter(rank: int, world_size: int, root: int) -> Program:
    """Bine tree scatter: the root hands out halves, their owners quarters, ...

    lg k steps; the root sends (k - 1)/k of the input: both lower bounds. k a power of two.

    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(bine_tree_scatter, 4))
    step  rank 0     rank 1  rank 2  rank 3
       0  =0 >3:3,2  .       .       <0:3,2
       1  >1:1       <0:1    <3:2    >2:2
    """
    return _on_tree(binomial.binomial_tree_scatter, rank, world_size, root, in_blocks=True)


@_register(
    "reduce_scatter",
    "bine",
    chunks=lambda k: k,
    slots=lambda k: k // 2,
    cost=Cost(rounds_to_reach_all, share_of_others, share_of_others),
)
def bine_reduce_scatter(rank: int, world_size: int) -> Program:
    """Bine reduce-scatter: half of the blocks go to the nearest peer, a quarter to the next, ...

    lg k steps, (k - 1)/k of the input sent by each rank and as much reduced: all three lower
    bounds. k a power of two.

    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(bine_reduce_scatter, 4))
    step  rank 0         rank 1         rank 2         rank 3
       0  >1:1-2 +1:0,3  >0:0,3 +0:1-2  >3:0,3 +3:1-2  >2:1-2 +2:0,3
       1  >3:3 +3:0!     >2:2 +2:1!     >1:1 +1:2!     >0:0 +0:3!
    """
    pattern = swing(world_size)
    slot = reached(rank, pattern[1:]).index
    return exchanges.reduce_scatter_phase(
        rank, pattern, lambda chunk: tmp(slot(chunk), chunk), out(rank)
    )


@_register("all_gather", "bine", chunks=lambda k: k, cost=binomial.BLOCKS)
def bine_all_gather(rank: int, world_size: int) -> Program:
    """Bine all-gather: one block to the farthest peer, two to the next, ..., half to the nearest.

    lg k steps and (k - 1)/k of the output sent by each rank: both lower bounds. k a power of two.

    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(bine_all_gather, 4))
    step  rank 0         rank 1         rank 2         rank 3
       0  =0 >3:0 <3:3   =1 >2:1 <2:2   =2 >1:2 <1:1   =3 >0:3 <0:0
       1  >1:0,3 <1:1-2  >0:1-2 <0:0,3  >3:1-2 <3:0,3  >2:0,3 <2:1-2
    """
    steps = exchanges.all_gather_phase(rank, swing(world_size), inp(rank))
    return with_copy(steps, rank)


@_register("all_reduce", "bine", chunks=lambda k: k, cost=exchanges.cost_of(swing))
def bine_all_reduce(rank: int, world_size: int) -> Program:
    """Bine all-reduce: Swing, with chunks numbered so that each message is one range of them.

    2 lg k steps and 2(k - 1)/k of the vector sent by each rank, the lower bound; k a power of two.
    The form of the paper for short vectors is `swing_latency`.

    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(bine_all_reduce, 4))
    step  rank 0         rank 1         rank 2         rank 3
       0  >1:2-3 +1:0-1  >0:0-1 +0:2-3  >3:0-1 +3:2-3  >2:2-3 +2:0-1
       1  >3:1 +3:0!     >2:3 +2:2!     >1:2 +1:3!     >0:0 +0:1!
       2  >3:0 <3:1      >2:2 <2:3      >1:3 <1:2      >0:1 <0:0
       3  >1:0-1 <1:2-3  >0:2-3 <0:0-1  >3:2-3 <3:0-1  >2:0-1 <2:2-3
    """
    pattern = swing(world_size)
    number = spread(0, pattern).index

    def halves() -> Iterator[Halves]:
        half = world_size
        for peers in pattern:
            (peer,), half = peers(rank), half // 2
            first, other = (place - place % half for place in (number(rank), number(peer)))
            yield peer, range(first, first + half), range(other, other + half)

    return halve_and_double(halves(), inp)


@_register(
    "all_to_all",
    "bine",
    chunks=lambda k: k * k,
    slots=lambda k: k - 1 - rounds_to_reach_all(k),
    equal_blocks=True,
    cost=Cost(rounds=rounds_to_reach_all, traffic=lambda k: vector_each_round(k) / 2),
)
def bine_all_to_all(rank: int, world_size: int) -> Program:
    """Bine all-to-all: in each step, half of the blocks go to the peer that is on their way.

    lg k steps; lg k / 2 times the input is sent. k a power of two. Blocks of equal length only: a
    rank passes on blocks that are neither from nor for itself.

    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(bine_all_to_all, 4))
    step  rank 0            rank 1            rank 2                rank 3
       0  =0 >1:1-2 <1:4,7  =5 >0:4,7 <0:1-2  =10 >3:11,8 <3:14,13  =15 >2:14,13 <2:11,8
       1  >3:3,7 <3:12,8    >2:6,2 <2:9,13    >1:9,13 <1:6,2        >0:12,8 <0:3,7
    """
    pattern = swing(world_size)

    def go(place: int, hops: Iterable[int]) -> int:
        for hop in filter(None, hops):
            (place,) = pattern[abs(hop) - 1](place)
        return place

    rounds = range(len(pattern))
    ways = [tuple((way >> n & 1) * (n + 1) for n in rounds) for way in range(world_size)]
    return all_to_all_by(rank, ways, go)
