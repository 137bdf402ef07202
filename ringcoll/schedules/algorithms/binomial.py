"""Binomial trees: the number of ranks that know, or have been heard, doubles in each step.

Ranks are counted from the root: v = (rank - root) mod k. The parent of v is v without its lowest
set bit; a broadcast goes by falling, a reduction by rising powers of two::

    0 ---------------> 4        step 0   0>4
    0 -----> 2   4 --> 6        step 1   0>2  4>6
    0 -> 1   2 -> 3    ...      step 2   0>1  2>3  4>5  6>7

Where a message costs latency more than the sender's time, a binomial tree is too deep. In a
k-nomial tree of any radix r a rank serves up to r - 1 others in a step, in fewer steps: the parent
of v is v without its lowest digit other than 0 in base r.

Source: MPICH; R. Thakur et al., IJHPCA 19 (2005).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

from ringcoll.schedules.algorithms import ring
from ringcoll.schedules.algorithms.registry import (
    Cost,
    Parameter,
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
    copy,
    inp,
    out,
    recv,
    recv_reduce,
    send,
    tmp,
)


@dataclass(frozen=True)
class _Node:
    """A rank of a tree with ``radix`` - 1 children a level (in a binomial one: 1)."""

    v: int  # counted from the root
    world_size: int
    root: int
    radix: int

    def levels(self) -> list[int]:
        """How far apart parents and children are."""
        return [*powers_below(self.radix, self.world_size)]

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


def _node(rank: int, world_size: int, root: int, radix: int) -> _Node:
    return _Node((rank - root) % world_size, world_size, root, radix)


def broadcast_phase(rank: int, world_size: int, root: int, held: Ref, radix: int = 2) -> Program:
    """Send chunk 0 from the root, which has it in ``held``, to every output."""
    node = _node(rank, world_size, root, radix)
    source = out(0) if node.v else held
    for mask in reversed(node.levels()):
        yield Step(
            *(send(node.rank(child), source) for child in node.children(mask)),
            *(recv(node.rank(parent), out(0)) for parent in node.parents(mask)),
        )


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
    node, held = _node(rank, world_size, root, radix), inp(0)
    for mask in node.levels():
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

    ``kept`` says where the other ranks keep what they pass on, from (index,
    block); the indices start at 0.
    """
    node = _node(rank, world_size, root, radix)

    def place(v: int) -> Ref:
        if v == node.v:
            return own
        block = node.rank(v)
        return kept(v - node.v - 1, block) if node.v else out(block)

    for mask in node.levels():
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

    ``kept`` says where a rank keeps what it passes on, from (index, block).
    """
    node = _node(rank, world_size, root, radix)

    def place(v: int) -> Ref:
        block = node.rank(v)
        if node.v == 0:
            return inp(block)
        return out(block) if v == node.v else kept(v - node.v - 1, block)

    for mask in reversed(node.levels()):
        yield Step(
            *(
                send(node.rank(child), *map(place, node.below(child, mask)))
                for child in node.children(mask)
            ),
            *(
                recv(node.rank(parent), *map(place, node.below(node.v, mask)))
                for parent in node.parents(mask)
            ),
        )


def with_copy(steps: Program, is_root: bool, *chunks: int) -> Program:
    """Let the root copy its own input to its output in the first step."""
    if is_root:
        yield Step(*(copy(out(chunk), inp(chunk)) for chunk in chunks), *next(steps))
    yield from steps


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
    return with_copy(broadcast_phase(rank, world_size, root, inp(0)), rank == root, 0)


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
    return with_copy(steps, rank == root, root)


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
    return with_copy(scatter_phase(rank, world_size, root, tmp), rank == root, root)


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
    yield from with_copy(scatter, rank == root, *range(world_size))
    for sending, receiving in ring.all_gather_phase(rank, world_size):
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


# ---- K-nomial trees ------------------------------------------------------------------------


def _rounds(k: int, radix: int) -> int:
    return len([*powers_below(radix, k)])


def _messages(k: int, radix: int) -> Fraction:
    """The root's messages: r - 1 at each level, fewer where so many are not left."""
    return Fraction(sum(min(radix - 1, (k - 1) // mask) for mask in powers_below(radix, k)))


def _passed_on(k: int, radix: int) -> int:
    """Most blocks that a rank other than the root keeps for others."""
    return max((min(mask, k - mask) - 1 for mask in powers_below(radix, k)), default=0)


_BLOCKS = Cost(_rounds, lambda k, radix: share_of_others(k))
_register = partial(
    register,
    second_choice=True,
    # 4 halves the steps of a binomial tree.
    parameter=Parameter("radix", default=lambda k: 4, least=2),
)


@_register("broadcast", "knomial_tree", cost=Cost(_rounds, _messages))
def knomial_tree_broadcast(rank: int, world_size: int, root: int, radix: int) -> Program:
    """K-nomial tree broadcast: every rank that has the vector sends it to up to r - 1 others.

    ceil(log_r k) steps, up to r - 1 messages a step. With r = 4 these are half of the binomial
    tree's steps; a name such as ``knomial_tree=8`` has another radix. On 16 ranks::

        0 -------------------> 4, 8, 12     step 0
        0 -> 1, 2, 3    4 -> 5, 6, 7  ...   step 1

    Source: the k-nomial trees of MPICH (a parameter of its broadcast, reduce, gather and scatter).

    >>> from ringcoll.schedules.algorithms import schedule_of
    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(schedule_of("broadcast", "knomial_tree", 5)))
    step  rank 0          rank 1  rank 2  rank 3  rank 4
       0  =0 >4:0         .       .       .       <0:0
       1  >1:0 >2:0 >3:0  <0:0    <0:0    <0:0    .
    """
    steps = broadcast_phase(rank, world_size, root, inp(0), radix)
    return with_copy(steps, rank == root, 0)


@_register(
    "reduce", "knomial_tree", slots=lambda k, radix: 1, cost=Cost(_rounds, _messages, _messages)
)
def knomial_tree_reduce(rank: int, world_size: int, root: int, radix: int) -> Program:
    """K-nomial tree reduce: the broadcast backwards, adding on the way.

    ceil(log_r k) steps, with up to r - 1 messages each; r is 4, or as in ``knomial_tree=8``.
    Partial results are kept in one slot of scratch memory.

    Source: the k-nomial trees of MPICH (a parameter of its broadcast, reduce, gather and scatter).

    >>> from ringcoll.schedules.algorithms import schedule_of
    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(schedule_of("reduce", "knomial_tree", 5)))
    step  rank 0          rank 1  rank 2  rank 3  rank 4
       0  +1:0 +2:0 +3:0  >0:0    >0:0    >0:0    .
       1  +4:0!           .       .       .       >0:0
    """
    partial_sum = out(0) if rank == root else tmp(0, 0)
    return reduce_phase(rank, world_size, root, partial_sum, radix)


@_register("gather", "knomial_tree", chunks=lambda k, radix: k, slots=_passed_on, cost=_BLOCKS)
def knomial_tree_gather(rank: int, world_size: int, root: int, radix: int) -> Program:
    """K-nomial tree gather: each rank collects from up to r - 1 others, then passes it all on.

    ceil(log_r k) steps; the root receives (k - 1)/k of the output, the lower bound. r is 4, or as
    in ``knomial_tree=8``.

    Source: the k-nomial trees of MPICH (a parameter of its broadcast, reduce, gather and scatter).

    >>> from ringcoll.schedules.algorithms import schedule_of
    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(schedule_of("gather", "knomial_tree", 5)))
    step  rank 0             rank 1  rank 2  rank 3  rank 4
       0  =0 <1:1 <2:2 <3:3  >0:1    >0:2    >0:3    .
       1  <4:4               .       .       .       >0:4
    """
    steps = gather_phase(rank, world_size, root, inp(rank), tmp, radix)
    return with_copy(steps, rank == root, root)


@_register("scatter", "knomial_tree", chunks=lambda k, radix: k, slots=_passed_on, cost=_BLOCKS)
def knomial_tree_scatter(rank: int, world_size: int, root: int, radix: int) -> Program:
    """K-nomial tree scatter: the root hands out parts to up to r - 1 others, and so do they.

    ceil(log_r k) steps; the root sends (k - 1)/k of the input, the lower bound. r is 4, or as in
    ``knomial_tree=8``.

    Source: the k-nomial trees of MPICH (a parameter of its broadcast, reduce, gather and scatter).

    >>> from ringcoll.schedules.algorithms import schedule_of
    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(schedule_of("scatter", "knomial_tree", 5)))
    step  rank 0          rank 1  rank 2  rank 3  rank 4
       0  =0 >4:4         .       .       .       <0:4
       1  >1:1 >2:2 >3:3  <0:1    <0:2    <0:3    .
    """
    steps = scatter_phase(rank, world_size, root, tmp, radix)
    return with_copy(steps, rank == root, root)
