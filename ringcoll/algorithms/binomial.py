"""Binomial trees: the number of ranks that know, or have been heard, doubles in each step.

Ranks are counted from the root: v = (rank - root) mod k. The parent of v is v
without its lowest set bit; a broadcast goes by falling, a reduction by rising
powers of two::

    0 ---------------> 4        step 0   0>4
    0 -----> 2   4 --> 6        step 1   0>2  4>6
    0 -> 1   2 -> 3    ...      step 2   0>1  2>3  4>5  6>7

Source: MPICH; R. Thakur et al., IJHPCA 19 (2005).
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from ringcoll.algorithms import ring
from ringcoll.algorithms.bruck import rounds_to_reach_all
from ringcoll.algorithms.registry import Cost, register
from ringcoll.schedule.contracts import OperandOrder
from ringcoll.schedule.ir import Program, Ref, Step, copy, inp, out, recv, recv_reduce, send, tmp


def _subtree(v: int, mask: int, world_size: int) -> range:
    """The ranks below v, itself included, when its parent is v - mask."""
    return range(v, min(v + mask, world_size))


def broadcast_phase(rank: int, world_size: int, root: int, held: Ref) -> Program:
    """Send chunk 0 from the root, which has it in ``held``, to every output."""
    v = (rank - root) % world_size
    mask = 1 << rounds_to_reach_all(world_size)
    while mask > 1:
        mask //= 2
        if v % (2 * mask) == 0 and v + mask < world_size:
            yield Step(send((rank + mask) % world_size, held if v == 0 else out(0)))
        elif v % (2 * mask) == mask:
            yield Step(recv((rank - mask) % world_size, out(0)))
        else:
            yield Step()


def reduce_phase(rank: int, world_size: int, root: int, partial: Ref) -> Program:
    """Reduce chunk 0 onto the root; partial results are kept in ``partial``."""
    v = (rank - root) % world_size
    held, mask = inp(0), 1
    while mask < world_size:
        if v % (2 * mask) == 0 and v + mask < world_size:
            final = v == 0 and 2 * mask >= world_size
            yield Step(
                recv_reduce(
                    (rank + mask) % world_size, partial, held, received_left=False, final=final
                )
            )
            held = partial
        elif v % (2 * mask) == mask:
            yield Step(send((rank - mask) % world_size, held))
        else:
            yield Step()
        mask *= 2


def gather_phase(
    rank: int, world_size: int, root: int, own: Ref, kept: Callable[[int, int], Ref]
) -> Program:
    """Gather block r of each rank r, kept in ``own``, to the root's output.

    ``kept`` says where the other ranks keep what they pass on, from (index,
    block); the indices start at 0.
    """
    v = (rank - root) % world_size

    def place(u: int) -> Ref:
        block = (u + root) % world_size
        if u == v:
            return own
        return out(block) if v == 0 else kept(u - v - 1, block)

    mask = 1
    while mask < world_size:
        if v % (2 * mask) == 0 and v + mask < world_size:
            below = _subtree(v + mask, mask, world_size)
            yield Step(recv((rank + mask) % world_size, *map(place, below)))
        elif v % (2 * mask) == mask:
            yield Step(send((rank - mask) % world_size, *map(place, _subtree(v, mask, world_size))))
        else:
            yield Step()
        mask *= 2


def scatter_phase(
    rank: int, world_size: int, root: int, kept: Callable[[int, int], Ref]
) -> Program:
    """Scatter the blocks of the root's input: block r to the output of each rank r.

    ``kept`` says where a rank keeps what it passes on, from (index, block).
    """
    v = (rank - root) % world_size

    def place(u: int) -> Ref:
        block = (u + root) % world_size
        if v == 0:
            return inp(block)
        return out(block) if u == v else kept(u - v - 1, block)

    mask = 1 << rounds_to_reach_all(world_size)
    while mask > 1:
        mask //= 2
        if v % (2 * mask) == 0 and v + mask < world_size:
            below = _subtree(v + mask, mask, world_size)
            yield Step(send((rank + mask) % world_size, *map(place, below)))
        elif v % (2 * mask) == mask:
            yield Step(recv((rank - mask) % world_size, *map(place, _subtree(v, mask, world_size))))
        else:
            yield Step()


def _with_copy(steps: Program, is_root: bool, *chunks: int) -> Program:
    """Let the root copy its own input to its output in the first step."""
    if is_root:
        yield Step(*(copy(out(chunk), inp(chunk)) for chunk in chunks), *next(steps))
    yield from steps


_BROADCAST = Cost(rounds=rounds_to_reach_all, traffic=lambda k: Fraction(rounds_to_reach_all(k)))
_REDUCE = Cost(
    rounds=rounds_to_reach_all,
    traffic=lambda k: Fraction(rounds_to_reach_all(k)),
    reduced=lambda k: Fraction(rounds_to_reach_all(k)),
)
_BLOCKS = Cost(rounds=rounds_to_reach_all, traffic=lambda k: Fraction(k - 1, k))


@register("broadcast", "binomial_tree", cost=_BROADCAST)
def binomial_tree_broadcast(rank: int, world_size: int, root: int) -> Program:
    """Binomial tree broadcast: in each step, every rank that has the vector sends it to another.

    ceil(lg k) steps, the lower bound; the root sends the vector in each of them.

    >>> from ringcoll.schedule.drawing import grid
    >>> print(grid(binomial_tree_broadcast, 4))
    step  rank 0   rank 1  rank 2  rank 3
       0  =0 >2:0  .       <0:0    .
       1  >1:0     <0:0    >3:0    <2:0
    """
    return _with_copy(broadcast_phase(rank, world_size, root, inp(0)), rank == root, 0)


@register("reduce", "binomial_tree", slots=lambda k: 1, cost=_REDUCE)
def binomial_tree_reduce(rank: int, world_size: int, root: int) -> Program:
    """Binomial tree reduce: the broadcast backwards, adding on the way.

    ceil(lg k) steps, the lower bound. Inputs survive on every rank: partial
    results are kept in one slot of scratch memory.

    >>> from ringcoll.schedule.drawing import grid
    >>> print(grid(binomial_tree_reduce, 4))
    step  rank 0  rank 1  rank 2  rank 3
       0  +1:0    >0:0    +3:0    >2:0
       1  +2:0!   .       >0:0    .
    """
    return reduce_phase(rank, world_size, root, out(0) if rank == root else tmp(0, 0))


@register(
    "all_reduce",
    "binomial_tree",
    order=OperandOrder.RANK,
    cost=Cost(
        rounds=lambda k: 2 * rounds_to_reach_all(k),
        traffic=lambda k: Fraction(2 * rounds_to_reach_all(k)),
        reduced=lambda k: Fraction(rounds_to_reach_all(k)),
    ),
)
def binomial_tree_all_reduce(rank: int, world_size: int) -> Program:
    """Tree all-reduce: a binomial tree reduce to rank 0, then a broadcast from it.

    2 ceil(lg k) steps, each with the whole vector. Operands stay in rank order.

    >>> from ringcoll.schedule.drawing import grid
    >>> print(grid(binomial_tree_all_reduce, 4))
    step  rank 0  rank 1  rank 2  rank 3
       0  +1:0    >0:0    +3:0    >2:0
       1  +2:0!   .       >0:0    .
       2  >2:0    .       <0:0    .
       3  >1:0    <0:0    >3:0    <2:0
    """
    yield from reduce_phase(rank, world_size, 0, out(0))
    yield from broadcast_phase(rank, world_size, 0, out(0))


@register("gather", "binomial_tree", chunks=lambda k: k, slots=lambda k: (k - 1) // 2, cost=_BLOCKS)
def binomial_tree_gather(rank: int, world_size: int, root: int) -> Program:
    """Binomial tree gather: each rank collects its subtree, then passes it on.

    ceil(lg k) steps; the root receives (k - 1)/k of the output: both lower bounds.

    >>> from ringcoll.schedule.drawing import grid
    >>> print(grid(binomial_tree_gather, 4))
    step  rank 0   rank 1  rank 2  rank 3
       0  =0 <1:1  >0:1    <3:3    >2:3
       1  <2:2-3   .       >0:2-3  .
    """
    steps = gather_phase(rank, world_size, root, inp(rank), tmp)
    return _with_copy(steps, rank == root, root)


@register(
    "scatter", "binomial_tree", chunks=lambda k: k, slots=lambda k: (k - 1) // 2, cost=_BLOCKS
)
def binomial_tree_scatter(rank: int, world_size: int, root: int) -> Program:
    """Binomial tree scatter: the root hands out halves, their owners quarters, ...

    ceil(lg k) steps; the root sends (k - 1)/k of the input: both lower bounds.

    >>> from ringcoll.schedule.drawing import grid
    >>> print(grid(binomial_tree_scatter, 4))
    step  rank 0     rank 1  rank 2  rank 3
       0  =0 >2:2-3  .       <0:2-3  .
       1  >1:1       <0:1    >3:3    <2:3
    """
    return _with_copy(scatter_phase(rank, world_size, root, tmp), rank == root, root)


@register(
    "broadcast",
    "scatter_all_gather",
    chunks=lambda k: k,
    cost=Cost(
        rounds=lambda k: rounds_to_reach_all(k) + k - 1,
        traffic=lambda k: Fraction(2 * (k - 1), k),
    ),
)
def scatter_all_gather_broadcast(rank: int, world_size: int, root: int) -> Program:
    """Broadcast of a long vector: a binomial tree scatter, then a ring all-gather.

    ceil(lg k) + k - 1 steps, 2(k - 1)/k of the vector on the busiest path. The
    root, which has everything, takes no part in the receiving.

    Source: M. Barnett et al., "Interprocessor collective communication library
    (InterCom)", 1994; MPICH for long messages.

    >>> from ringcoll.schedule.drawing import grid
    >>> print(grid(scatter_all_gather_broadcast, 4))
    step  rank 0              rank 1     rank 2     rank 3
       0  =0 =1 =2 =3 >2:2-3  .          <0:2-3     .
       1  >1:1                <0:1       >3:3       <2:3
       2  >1:0                >2:1 <0:0  >3:2 <1:1  <2:2
       3  >1:3                >2:0 <0:3  >3:1 <1:0  <2:1
       4  >1:2                >2:3 <0:2  >3:0 <1:3  <2:0
    """
    scatter = scatter_phase(rank, world_size, root, lambda index, block: out(block))
    yield from _with_copy(scatter, rank == root, *range(world_size))
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
        rounds=lambda k: rounds_to_reach_all(k) + k - 1,
        traffic=lambda k: Fraction(2 * (k - 1), k),
        reduced=lambda k: Fraction(k - 1, k),
    ),
)
def reduce_scatter_gather_reduce(rank: int, world_size: int, root: int) -> Program:
    """Reduce of a long vector: a ring reduce-scatter, then a binomial tree gather.

    ceil(lg k) + k - 1 steps, 2(k - 1)/k of the vector on the busiest path.

    Source: R. Rabenseifner, ICCS 2004, with the ring in place of halving so that
    any number of ranks will do.

    >>> from ringcoll.schedule.drawing import grid
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
