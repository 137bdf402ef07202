"""Binomial trees: the number of ranks that know, or have been heard, doubles in each step.

Ranks are counted from the root: v = (rank - root) mod k. The parent of v is v without its lowest
set bit; a broadcast goes by falling, a reduction by rising powers of two::

    0 ---------------> 4        step 0   0>4
    0 -----> 2   4 --> 6        step 1   0>2  4>6
    0 -> 1   2 -> 3    ...      step 2   0>1  2>3  4>5  6>7

Source: MPICH; R. Thakur et al., IJHPCA 19 (2005).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from ringcoll.schedules.algorithms import ring
from ringcoll.schedules.algorithms.registry import (
    Cost,
    powers_below,
    register,
    rounds_to_reach_all,
    share_of_others,
    vector_each_round,
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


class _Node:
    """A rank of a tree with ``radix`` - 1 children a level (in a binomial one: 1)."""

    def __init__(self, rank: int, world_size: int, root: int, radix: int) -> None:
        self.world_size, self.root, self.radix = world_size, root, radix
        self.v = (rank - root) % world_size  # counted from the root
        self.levels = [*powers_below(radix, world_size)]  # how far apart parents and children are

    def rank(self, v: int) -> int:
        return (v + self.root) % self.world_size

    def children(self, mask: int) -> range:
        """The children at a level."""
        if self.v % (self.radix * mask):
            return range(0)
        return range(self.v + mask, min(self.v + self.radix * mask, self.world_size), mask)

    def parents(self, mask: int) -> range:
        """The parent, if it is at this level."""
        offset = self.v % (self.radix * mask)
        above = self.v - offset
        return range(above, above + 1) if offset and offset % mask == 0 else range(0)

    def below(self, child: int, mask: int) -> range:
        """The ranks below a child at a level, itself included."""
        return range(child, min(child + mask, self.world_size))


def _down(node: _Node, refs: Callable[[range], Iterable[Ref]]) -> Program:
    """Each rank sends its children, the farthest first, the ``refs`` of the ranks below them."""
    for mask in reversed(node.levels):
        yield Step(
            *(
                send(node.rank(child), *refs(node.below(child, mask)))
                for child in node.children(mask)
            ),
            *(
                recv(node.rank(parent), *refs(node.below(node.v, mask)))
                for parent in node.parents(mask)
            ),
        )


def broadcast_phase(rank: int, world_size: int, root: int, held: Ref, radix: int = 2) -> Program:
    """Send chunk 0 from the root, which has it in ``held``, to every output."""
    source = held if rank == root else out(0)
    return _down(_Node(rank, world_size, root, radix), lambda below: [source])


def reduce_phase(
    rank: int,
    world_size: int,
    root: int,
    partial: Ref,
    radix: int = 2,
    received_left: bool | None = False,
) -> Program:
    """Reduce chunk 0 onto the root; partial results are kept in ``partial``.

    The data of a child are the right operand, unless ``received_left`` says otherwise; see
    `ringcoll.schedules.recv_reduce`.
    """
    node, held = _Node(rank, world_size, root, radix), inp(0)
    for mask in node.levels:
        step: list[Operation] = [send(node.rank(parent), held) for parent in node.parents(mask)]
        for child in node.children(mask):
            final = node.v == 0 and child + mask >= world_size
            peer = node.rank(child)
            step.append(recv_reduce(peer, partial, held, received_left=received_left, final=final))
            held = partial
        yield Step(*step)


def gather_phase(
    rank: int, world_size: int, root: int, own: Ref, kept: Callable[[int, int], Ref], radix: int = 2
) -> Program:
    """Gather block r of each rank r, kept in ``own``, to the root's output.

    ``kept`` says where the other ranks keep the blocks that they pass on, from
    (index, block); the indices start at 0.
    """
    node = _Node(rank, world_size, root, radix)

    def place(v: int) -> Ref:
        if v == node.v:
            return own
        block = node.rank(v)
        return kept(v - node.v - 1, block) if node.v else out(block)

    for mask in node.levels:
        yield Step(
            *(
                recv(node.rank(child), *map(place, node.below(child, mask)))
                for child in node.children(mask)
            ),
            *(
                send(node.rank(parent), *map(place, node.below(node.v, mask)))
                for parent in node.parents(mask)
            ),
        )


def scatter_phase(
    rank: int, world_size: int, root: int, kept: Callable[[int, int], Ref], radix: int = 2
) -> Program:
    """Scatter the blocks of the root's input: block r to the output of each rank r.

    ``kept`` says where a rank keeps the blocks that it passes on, from (index, block).
    """
    node = _Node(rank, world_size, root, radix)

    def place(v: int) -> Ref:
        block = node.rank(v)
        if node.v == 0:
            return inp(block)
        return out(block) if v == node.v else kept(v - node.v - 1, block)

    return _down(node, partial(map, place))


# ---- Costs ---------------------------------------------------------------------------------

BROADCAST = Cost(rounds_to_reach_all, vector_each_round)
REDUCE = Cost(rounds_to_reach_all, vector_each_round, vector_each_round)
ALL_REDUCE = Cost(
    lambda k: 2 * rounds_to_reach_all(k), lambda k: 2 * vector_each_round(k), vector_each_round
)
BLOCKS = Cost(rounds_to_reach_all, share_of_others)


@register("broadcast", "binomial_tree", cost=BROADCAST)
def binomial_tree_broadcast(rank: int, world_size: int, root: int) -> Program:
    """Binomial tree broadcast: in each step, every rank that has the vector sends it to another.

    ceil(lg k) steps, the lower bound; the root sends the vector in each of them.

    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(binomial_tree_broadcast, 4))
    step  rank 0   rank 1  rank 2  rank 3
       0  =0 >2:0  .       <0:0    .
       1  >1:0     <0:0    >3:0    <2:0
    """
    return with_copy(broadcast_phase(rank, world_size, root, inp(0)), 0, on=rank == root)


@register("reduce", "binomial_tree", slots=lambda k: 1, cost=REDUCE)
def binomial_tree_reduce(rank: int, world_size: int, root: int) -> Program:
    """Binomial tree reduce: the broadcast backwards, adding on the way.

    ceil(lg k) steps, the lower bound. Inputs survive on every rank: partial
    results are kept in one slot of scratch memory.

    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(binomial_tree_reduce, 4))
    step  rank 0  rank 1  rank 2  rank 3
       0  +1:0    >0:0    +3:0    >2:0
       1  +2:0!   .       >0:0    .
    """
    return reduce_phase(rank, world_size, root, out(0) if rank == root else tmp(0, 0))


@register("all_reduce", "binomial_tree", order=OperandOrder.RANK, cost=ALL_REDUCE)
def binomial_tree_all_reduce(rank: int, world_size: int) -> Program:
    """Tree all-reduce: a binomial tree reduce to rank 0, then a broadcast from it.

    2 ceil(lg k) steps, each with the whole vector. Operands stay in rank order.

    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(binomial_tree_all_reduce, 4))
    step  rank 0  rank 1  rank 2  rank 3
       0  +1:0    >0:0    +3:0    >2:0
       1  +2:0!   .       >0:0    .
       2  >2:0    .       <0:0    .
       3  >1:0    <0:0    >3:0    <2:0
    """
    yield from reduce_phase(rank, world_size, 0, out(0))
    yield from broadcast_phase(rank, world_size, 0, out(0))


@register("gather", "binomial_tree", chunks=lambda k: k, slots=lambda k: (k - 1) // 2, cost=BLOCKS)
def binomial_tree_gather(rank: int, world_size: int, root: int) -> Program:
    """Binomial tree gather: each rank collects its subtree, then passes it on.

    ceil(lg k) steps; the root receives (k - 1)/k of the output: both lower bounds.

    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(binomial_tree_gather, 4))
    step  rank 0   rank 1  rank 2  rank 3
       0  =0 <1:1  >0:1    <3:3    >2:3
       1  <2:2-3   .       >0:2-3  .
    """
    steps = gather_phase(rank, world_size, root, inp(rank), tmp)
    return with_copy(steps, root, on=rank == root)


@register("scatter", "binomial_tree", chunks=lambda k: k, slots=lambda k: (k - 1) // 2, cost=BLOCKS)
def binomial_tree_scatter(rank: int, world_size: int, root: int) -> Program:
    """Binomial tree scatter: the root hands out halves, their owners quarters, ...

    ceil(lg k) steps; the root sends (k - 1)/k of the input: both lower bounds.

    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(binomial_tree_scatter, 4))
    step  rank 0     rank 1  rank 2  rank 3
       0  =0 >2:2-3  .       <0:2-3  .
       1  >1:1       <0:1    >3:3    <2:3
    """
    return with_copy(scatter_phase(rank, world_size, root, tmp), root, on=rank == root)


@register(
    "broadcast",
    "scatter_all_gather",
    chunks=lambda k: k,
    cost=Cost(lambda k: rounds_to_reach_all(k) + k - 1, lambda k: 2 * share_of_others(k)),
)
def scatter_all_gather_broadcast(rank: int, world_size: int, root: int) -> Program:
    """Broadcast of a long vector: a binomial tree scatter, then a ring all-gather.

    ceil(lg k) + k - 1 steps, 2(k - 1)/k of the vector on the busiest path. The
    root, which has everything, takes no part in the receiving.

    Source: M. Barnett et al., "Interprocessor collective communication library
    (InterCom)", 1994; MPICH for long messages; R. Thakur et al., IJHPCA 19 (2005).

    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(scatter_all_gather_broadcast, 4))
    step  rank 0              rank 1     rank 2     rank 3
       0  =0 =1 =2 =3 >2:2-3  .          <0:2-3     .
       1  >1:1                <0:1       >3:3       <2:3
       2  >1:0                >2:1 <0:0  >3:2 <1:1  <2:2
       3  >1:3                >2:0 <0:3  >3:1 <1:0  <2:1
       4  >1:2                >2:3 <0:2  >3:0 <1:3  <2:0
    """
    scatter = scatter_phase(rank, world_size, root, lambda index, block: out(block))
    yield from with_copy(scatter, *range(world_size), on=rank == root)
    for sending, receiving in ring.all_gather_phase(rank, world_size, out(rank)):
        takes = (receiving,) if rank != root else ()
        gives = (sending,) if (rank + 1) % world_size != root else ()
        yield Step(*gives, *takes)


@register(
    "reduce",
    "reduce_scatter_gather",
    chunks=lambda k: k,
    slots=lambda k: 3 + (k - 1) // 2,
    cost=Cost(
        lambda k: rounds_to_reach_all(k) + k - 1, lambda k: 2 * share_of_others(k), share_of_others
    ),
)
def reduce_scatter_gather_reduce(rank: int, world_size: int, root: int) -> Program:
    """Reduce of a long vector: a ring reduce-scatter, then a binomial tree gather.

    ceil(lg k) + k - 1 steps, 2(k - 1)/k of the vector on the busiest path.

    Source: R. Rabenseifner, ICCS 2004, with the ring in place of halving so that
    any number of ranks will do; R. Thakur et al., IJHPCA 19 (2005).

    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(reduce_scatter_gather_reduce, 4))
    step  rank 0      rank 1      rank 2      rank 3
       0  >1:3 +3:2   >2:0 +0:3   >3:1 +1:0   >0:2 +2:1
       1  >1:2 +3:1   >2:3 +0:2   >3:0 +1:3   >0:1 +2:0
       2  >1:1 +3:0!  >2:2 +0:1!  >3:3 +1:2!  >0:0 +2:3!
       3  <1:1        >0:1        <3:3        >2:3
       4  <2:2-3      .           >0:2-3      .
    """
    result = out(rank) if rank == root else tmp(2, rank)
    yield from ring.reduce_scatter_phase(
        rank, world_size, lambda chunk, step: tmp(step % 2, chunk), result
    )
    yield from gather_phase(
        rank, world_size, root, result, lambda index, block: tmp(3 + index, block)
    )
