"""Parallel trees: the blocks of all ranks go down binomial trees at once, the farthest edges first.

Problem: Bruck's all-gather sends the most data over the longest distance. Here a block goes far
while it is alone. The *shift* of a block says how far it has come from its own rank. Shifts form a
binomial tree: the parent of a shift is the shift without its lowest set bit, which is the distance
of the message::

    0 -------------> 4                      distance 4    shift 4
    0 -----> 2       4 -----> 6             distance 2    shifts 2, 6
    0 -> 1   2 -> 3  4 -> 5   6 -> 7        distance 1    shifts 1, 3, 5, 7

In *PAT* a number of subtrees, the parallel trees, share each message. With fewer trees there are
more messages, all short; and as each tree is walked in depth, a rank keeps little for others: a
block, or in the reduce-scatter (the same backwards) a sum, for each level of each tree::

    0 -------------> 4                      distance 4    shift 4
    0 -> 1           4 -> 5                 distance 1    shifts 1, 5
    0 -----> 2       4 -----> 6             distance 2    shifts 2, 6
             2 -> 3           6 -> 7        distance 1    shifts 3, 7      two trees of 4 shifts

The order of the messages inside a tree is that of NCCL's reduce-scatter, and its reverse.

Source: S. Jeaugey, "PAT: a new algorithm for all-gather and reduce-scatter operations at scale",
arXiv 2506.20252.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from ringcoll.schedules.algorithms.registry import (
    Cost,
    register,
    rounds_to_reach_all,
    share_of_others,
)
from ringcoll.schedules.ir import (
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
    with_copy,
)

_register = partial(register, chunks=lambda k: k, second_choice=True)

Trees = Callable[[int], int]
"""Number of parallel trees, a power of two, from the world size."""


def all_shifts(k: int) -> int:
    """The next power of two."""
    return 1 << rounds_to_reach_all(k)


def most_trees(k: int) -> int:
    """Trees of two shifts each: the fewest rounds."""
    return max(1, all_shifts(k) // 2)


def two_trees(k: int) -> int:
    """Two trees, of any size."""
    return min(2, all_shifts(k))


def rounds(k: int, trees: int) -> Iterator[tuple[int, range]]:
    """For each round of the all-gather, the distance, and the shifts of the blocks that arrive.

    >>> [(distance, [*shifts]) for distance, shifts in rounds(7, 2)]
    [(4, [4]), (1, [1, 5]), (2, [2, 6]), (1, [3])]
    >>> [(distance, [*shifts]) for distance, shifts in rounds(7, 4)]
    [(4, [4]), (2, [2, 6]), (1, [1, 3, 5])]
    """
    distance, size = all_shifts(k) // 2, all_shifts(k) // trees
    while distance >= size:  # from tree to tree
        yield distance, range(distance, k, 2 * distance)
        distance //= 2
    for shift in range(1, min(size, k)):  # inside the trees, in depth
        yield shift & -shift, range(shift, k, size)


def slot(shift: int, k: int, trees: int) -> int:
    """The slot of a sum, by its level and its tree; -1 for a rank's own block."""
    tree, inside = divmod(shift, all_shifts(k) // trees)
    return inside.bit_count() * trees + tree - 1


def slots_of(trees: Trees) -> Callable[[int], int]:
    """Slots that the reduce-scatter needs: at most one for each level of each tree."""

    def needed(k: int) -> int:
        walk = rounds(k, trees(k))
        parents = (shift - distance for distance, shifts in walk for shift in shifts)
        return 1 + max((slot(parent, k, trees(k)) for parent in parents), default=-1)

    return needed


def reduce_scatter_phase(rank: int, world_size: int, trees: int) -> Program:
    """Reduce chunk r onto rank r."""
    walk = [*rounds(world_size, trees)]
    sums: dict[int, Ref] = {}  # by shift

    def held(shift: int) -> Ref:
        return sums.get(shift, inp((rank + shift) % world_size))

    for number, (distance, shifts) in reversed([*enumerate(walk)]):
        parents = [shift - distance for shift in shifts]
        sent, local = tuple(map(held, shifts)), tuple(map(held, parents))
        for parent in parents:
            place = slot(parent, world_size, trees)
            sums[parent] = tmp(place, (rank + parent) % world_size) if parent else out(rank)
        dst, src = (rank + distance) % world_size, (rank - distance) % world_size
        into = tuple(map(held, parents))
        yield Step(send(dst, *sent), recv_reduce(src, into, local, final=number == 0))


def all_gather_phase(rank: int, world_size: int, trees: int) -> Program:
    """Send chunk r of rank r to all."""
    place = inp
    for distance, shifts in rounds(world_size, trees):
        sent = ((rank + shift - distance) % world_size for shift in shifts)
        received = ((rank + shift) % world_size for shift in shifts)
        yield Step(
            send((rank - distance) % world_size, *map(place, sent)),
            recv((rank + distance) % world_size, *map(out, received)),
        )
        place = out


def cost_of(trees: Trees, *, reduces: bool = False) -> Cost:
    """The least traffic, in one round for each level between trees and each shift inside them."""

    def num_rounds(k: int) -> int:
        return rounds_to_reach_all(trees(k)) + all_shifts(k) // trees(k) - 1

    share = share_of_others
    return Cost(num_rounds, share, share) if reduces else Cost(num_rounds, share)


@_register(
    "reduce_scatter", "pat", slots=slots_of(most_trees), cost=cost_of(most_trees, reduces=True)
)
def pat_reduce_scatter(rank: int, world_size: int) -> Program:
    """PAT reduce-scatter: sums come up binomial trees, near ones first, with the fewest messages.

    ceil(lg k) steps, (k - 1)/k of the input sent by each rank and as much reduced: all three lower
    bounds, for any number of ranks. Scratch memory for almost half of the input.

    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(pat_reduce_scatter, 4))
    step  rank 0         rank 1         rank 2         rank 3
       0  >1:1,3 +3:0,2  >2:2,0 +0:1,3  >3:3,1 +1:2,0  >0:0,2 +2:3,1
       1  >2:2 +2:0!     >3:3 +3:1!     >0:0 +0:2!     >1:1 +1:3!
    """
    return reduce_scatter_phase(rank, world_size, most_trees(world_size))


@_register(
    "reduce_scatter",
    "pat_2_trees",
    slots=slots_of(two_trees),
    cost=cost_of(two_trees, reduces=True),
)
def pat_2_trees_reduce_scatter(rank: int, world_size: int) -> Program:
    """PAT reduce-scatter with two parallel trees: at most two blocks a message, and little memory.

    p/2 steps, where p is k or the next power of two; (k - 1)/k of the input sent by each rank and
    as much reduced, the lower bounds; any number of ranks. Scratch memory for 2 ceil(lg k) - 3
    blocks, or fewer.

    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(pat_2_trees_reduce_scatter, 5))
    step  rank 0      rank 1      rank 2      rank 3      rank 4
       0  >1:3 +4:2   >2:4 +0:3   >3:0 +1:4   >4:1 +2:0   >0:2 +3:1
       1  >2:2 +3:0   >3:3 +4:1   >4:4 +0:2   >0:0 +1:3   >1:1 +2:4
       2  >1:1 +4:0   >2:2 +0:1   >3:3 +1:2   >4:4 +2:3   >0:0 +3:4
       3  >4:4 +1:0!  >0:0 +2:1!  >1:1 +3:2!  >2:2 +4:3!  >3:3 +0:4!
    """
    return reduce_scatter_phase(rank, world_size, two_trees(world_size))


@_register("all_gather", "pat", cost=cost_of(most_trees))
def pat_all_gather(rank: int, world_size: int) -> Program:
    """PAT all-gather: blocks go down binomial trees, far ones first, with the fewest messages.

    ceil(lg k) steps and (k - 1)/k of the output sent by each rank: both lower bounds, for any
    number of ranks.

    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(pat_all_gather, 4))
    step  rank 0         rank 1         rank 2         rank 3
       0  =0 >2:0 <2:2   =1 >3:1 <3:3   =2 >0:2 <0:0   =3 >1:3 <1:1
       1  >3:0,2 <1:1,3  >0:1,3 <2:2,0  >1:2,0 <3:3,1  >2:3,1 <0:0,2
    """
    return with_copy(all_gather_phase(rank, world_size, most_trees(world_size)), rank)


@_register("all_gather", "pat_2_trees", cost=cost_of(two_trees))
def pat_2_trees_all_gather(rank: int, world_size: int) -> Program:
    """PAT all-gather with two parallel trees: at most two blocks a message.

    p/2 steps, where p is k or the next power of two; (k - 1)/k of the output sent by each rank, the
    lower bound; any number of ranks. Blocks arrive in the output, so that no scratch memory is
    saved; where messages go through a transport's own buffers, short ones need less of them.

    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(pat_2_trees_all_gather, 5))
    step  rank 0        rank 1        rank 2        rank 3        rank 4
       0  =0 >1:0 <4:4  =1 >2:1 <0:0  =2 >3:2 <1:1  =3 >4:3 <2:2  =4 >0:4 <3:3
       1  >4:0 <1:1     >0:1 <2:2     >1:2 <3:3     >2:3 <4:4     >3:4 <0:0
       2  >3:0 <2:2     >4:1 <3:3     >0:2 <4:4     >1:3 <0:0     >2:4 <1:1
       3  >4:2 <1:3     >0:3 <2:4     >1:4 <3:0     >2:0 <4:1     >3:1 <0:2
    """
    return with_copy(all_gather_phase(rank, world_size, two_trees(world_size)), rank)


@_register("all_gather", "sparbit", cost=cost_of(all_shifts))
def sparbit_all_gather(rank: int, world_size: int) -> Program:
    """Sparbit all-gather: blocks go down binomial trees, far ones first, each as its own message.

    ceil(lg k) steps and (k - 1)/k of the output sent by each rank: both lower bounds, for any
    number of ranks. A step has as many messages as the rank has blocks to send, so that none has to
    be packed.

    Source: W. J. Loch and G. P. Koslovski, "Sparbit: a new logarithmic-cost and data locality-aware
    MPI allgather algorithm", arXiv 2109.08751.

    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(sparbit_all_gather, 4))
    step  rank 0               rank 1               rank 2               rank 3
       0  =0 >2:0 <2:2         =1 >3:1 <3:3         =2 >0:2 <0:0         =3 >1:3 <1:1
       1  >1:0 >1:2 <3:3 <3:1  >2:1 >2:3 <0:0 <0:2  >3:2 >3:0 <1:1 <1:3  >0:3 >0:1 <2:2 <2:0
    """
    place, own = inp, [copy(out(rank), inp(rank))]
    for distance, shifts in rounds(world_size, all_shifts(world_size)):
        dst, src = (rank + distance) % world_size, (rank - distance) % world_size
        yield Step(
            *own,
            *(send(dst, place((src - shift + 2 * distance) % world_size)) for shift in shifts),
            *(recv(src, out((rank - shift) % world_size)) for shift in shifts),
        )
        place, own = out, []
