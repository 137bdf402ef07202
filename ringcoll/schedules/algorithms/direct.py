"""Direct and pairwise exchange: each block goes straight to its destination.

Problem: the lowest latency for short messages, in one round, whatever the traffic; and a reduction
whose operands are added strictly in rank order, from left to right. That also makes these the
algorithms for operators that are not associative, and the most exact ones when the sum is
accumulated in a wider type.

In a pairwise exchange, step s sends to rank + s and receives from rank - s. Each step is a
permutation, so no rank is ever sent two messages at once::

    step 1   0>1  1>2  2>3  3>0
    step 2   0>2  1>3  2>0  3>1
    step 3   0>3  1>0  2>1  3>2

Source: the basic linear algorithms of Open MPI.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import partial

from ringcoll.schedules.algorithms.binomial import broadcast_phase, gather_phase, scatter_phase
from ringcoll.schedules.algorithms.registry import Cost, register, share_of_others
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
    reduce,
    send,
    tmp,
    with_copy,
)


def _fold(rank: int, world_size: int, chunk: int) -> Step:
    """Reduce the shares of all ranks, in rank order."""

    def share(source: int) -> Ref:
        return inp(chunk) if source == rank else tmp(source, chunk)

    return Step(reduce(out(chunk), *map(share, range(world_size)), final=True))


def _exchange(
    rank: int, world_size: int, sent: Callable[[int], Ref], received: Callable[[int], Ref]
) -> list[Operation]:
    """Messages to all others, the next one first, so that not all send to rank 0 first."""
    others = [(rank + step) % world_size for step in range(1, world_size)]
    sends = [send(peer, sent(peer)) for peer in others]
    return [*sends, *(recv(peer, received(peer)) for peer in reversed(others))]


_WHOLE_VECTORS = Cost(lambda k: 1, lambda k: Fraction(k - 1), lambda k: Fraction(k - 1))


_at_once = partial(register, order=OperandOrder.AT_ONCE, slots=lambda k: k)


@_at_once("all_reduce", "direct", cost=_WHOLE_VECTORS)
def direct_all_reduce(rank: int, world_size: int) -> Program:
    """Direct all-reduce: everyone sends everything to everyone, then all add in rank order.

    One step; k - 1 times the vector sent by each rank, and as much scratch memory.

    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(direct_all_reduce, 3))
    step  rank 0               rank 1               rank 2
       0  >1:0 >2:0 <2:0 <1:0  >2:0 >0:0 <0:0 <2:0  >0:0 >1:0 <1:0 <0:0
       1  S0!                  S0!                  S0!
    """
    yield Step(*_exchange(rank, world_size, lambda peer: inp(0), lambda peer: tmp(peer, 0)))
    yield _fold(rank, world_size, 0)


@_at_once(
    "reduce_scatter",
    "direct",
    chunks=lambda k: k,
    cost=Cost(lambda k: 1, share_of_others, share_of_others),
)
def direct_reduce_scatter(rank: int, world_size: int) -> Program:
    """Direct reduce-scatter: every block goes straight to its owner, who adds in rank order.

    One step, (k - 1)/k of the input sent by each rank.

    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(direct_reduce_scatter, 3))
    step  rank 0               rank 1               rank 2
       0  >1:1 >2:2 <2:0 <1:0  >2:2 >0:0 <0:1 <2:1  >0:0 >1:1 <1:2 <0:2
       1  S0!                  S1!                  S2!
    """
    yield Step(*_exchange(rank, world_size, inp, lambda peer: tmp(peer, rank)))
    yield _fold(rank, world_size, rank)


@_at_once(
    "all_reduce",
    "linear",
    cost=Cost(lambda k: 2, lambda k: Fraction(2 * (k - 1)), lambda k: Fraction(k - 1)),
    second_choice=True,
)
def linear_all_reduce(rank: int, world_size: int) -> Program:
    """Linear all-reduce: rank 0 adds up all vectors in rank order, and sends everyone the sum.

    Two steps; rank 0 receives and sends k - 1 times the vector. It is the reference for all others:
    one process that had all vectors would compute the same.

    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(linear_all_reduce, 3))
    step  rank 0     rank 1  rank 2
       0  <1:0 <2:0  >0:0    >0:0
       1  S0!        .       .
       2  >1:0 >2:0  <0:0    <0:0
    """
    yield from direct_reduce(rank, world_size, 0)
    if rank:
        yield Step()
        yield Step(recv(0, out(0)))
    else:
        yield Step(*(send(peer, out(0)) for peer in range(1, world_size)))


@_at_once(
    "all_reduce",
    "two_shot",
    chunks=lambda k: k,
    cost=Cost(lambda k: 2, lambda k: 2 * share_of_others(k), share_of_others),
)
def two_shot_all_reduce(rank: int, world_size: int) -> Program:
    """Two-shot all-reduce: a direct reduce-scatter, then a direct all-gather.

    Two steps with messages for any number of ranks, 2(k - 1)/k of the vector sent by each rank, and
    sums in rank order. Ranks that share memory read each other's vectors and totals in place, and
    wait for each other twice.

    Source: the two-shot kernel of DeepSpeed's and of TensorRT-LLM's all-reduce.

    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(two_shot_all_reduce, 3))
    step  rank 0               rank 1               rank 2
       0  >1:1 >2:2 <2:0 <1:0  >2:2 >0:0 <0:1 <2:1  >0:0 >1:1 <1:2 <0:2
       1  S0!                  S1!                  S2!
       2  >1:0 >2:0 <2:2 <1:1  >2:1 >0:1 <0:0 <2:2  >0:2 >1:2 <1:1 <0:0
    """
    yield from direct_reduce_scatter(rank, world_size)
    yield Step(*_exchange(rank, world_size, lambda peer: out(rank), out))


@register("all_gather", "direct", chunks=lambda k: k, cost=Cost(lambda k: 1, share_of_others))
def direct_all_gather(rank: int, world_size: int) -> Program:
    """Direct all-gather: everyone sends its block straight to everyone.

    One step, (k - 1)/k of the output sent by each rank.

    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(direct_all_gather, 3))
    step  rank 0                  rank 1                  rank 2
       0  =0 >1:0 >2:0 <2:2 <1:1  =1 >2:1 >0:1 <0:0 <2:2  =2 >0:2 >1:2 <1:1 <0:0
    """
    exchange = _exchange(rank, world_size, lambda peer: inp(rank), out)
    yield Step(copy(out(rank), inp(rank)), *exchange)


@register("broadcast", "linear", cost=Cost(lambda k: 1, lambda k: Fraction(k - 1)))
def linear_broadcast(rank: int, world_size: int, root: int) -> Program:
    """Linear broadcast: the root sends to everyone.

    One step; the root sends k - 1 times the vector. Ranks that share memory read it in place.

    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(linear_broadcast, 3))
    step  rank 0        rank 1  rank 2
       0  =0 >1:0 >2:0  <0:0    <0:0
    """
    steps = broadcast_phase(rank, world_size, root, inp(0), radix=world_size)
    return with_copy(steps, 0, on=rank == root)


@_at_once("reduce", "direct", cost=_WHOLE_VECTORS)
def direct_reduce(rank: int, world_size: int, root: int) -> Program:
    """Direct reduce: everyone sends everything to the root, which adds in rank order.

    One step; the root receives k - 1 times the vector.

    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(direct_reduce, 4))
    step  rank 0          rank 1  rank 2  rank 3
       0  <1:0 <2:0 <3:0  >0:0    >0:0    >0:0
       1  S0!             .       .       .
    """
    if rank != root:
        yield Step(send(root, inp(0)))
        return
    yield Step(*(recv(peer, tmp(peer, 0)) for peer in range(world_size) if peer != root))
    yield _fold(rank, world_size, 0)


@register("gather", "linear", chunks=lambda k: k, cost=Cost(lambda k: 1, share_of_others))
def linear_gather(rank: int, world_size: int, root: int) -> Program:
    """Linear gather: everyone sends its block to the root.

    One step; the root receives (k - 1)/k of the output.

    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(linear_gather, 4))
    step  rank 0             rank 1  rank 2  rank 3
       0  =0 <1:1 <2:2 <3:3  >0:1    >0:2    >0:3
    """
    steps = gather_phase(rank, world_size, root, inp(rank), tmp, radix=world_size)
    return with_copy(steps, root, on=rank == root)


@register("scatter", "linear", chunks=lambda k: k, cost=Cost(lambda k: 1, share_of_others))
def linear_scatter(rank: int, world_size: int, root: int) -> Program:
    """Linear scatter: the root sends each rank its block.

    One step; the root sends (k - 1)/k of the input.

    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(linear_scatter, 4))
    step  rank 0             rank 1  rank 2  rank 3
       0  =0 >1:1 >2:2 >3:3  <0:1    <0:2    <0:3
    """
    steps = scatter_phase(rank, world_size, root, tmp, radix=world_size)
    return with_copy(steps, root, on=rank == root)


@register(
    "reduce_scatter",
    "pairwise",
    chunks=lambda k: k,
    cost=Cost(lambda k: k - 1, share_of_others, share_of_others),
)
def pairwise_reduce_scatter(rank: int, world_size: int) -> Program:
    """Pairwise reduce-scatter: get each rank's share of the own block from it directly.

    k - 1 steps, (k - 1)/k of the input sent by each rank, no scratch memory.

    Source: MPICH; R. Thakur et al., IJHPCA 19 (2005), section 4.

    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(pairwise_reduce_scatter, 4))
    step  rank 0      rank 1      rank 2      rank 3
       0  >1:1 +3:0   >2:2 +0:1   >3:3 +1:2   >0:0 +2:3
       1  >2:2 +2:0   >3:3 +3:1   >0:0 +0:2   >1:1 +1:3
       2  >3:3 +1:0!  >0:0 +2:1!  >1:1 +3:2!  >2:2 +0:3!
    """
    local = inp(rank)
    for step in range(1, world_size):
        dst, src = (rank + step) % world_size, (rank - step) % world_size
        yield Step(
            send(dst, inp(dst)), recv_reduce(src, out(rank), local, final=step == world_size - 1)
        )
        local = out(rank)


@register(
    "all_to_all", "pairwise", chunks=lambda k: k * k, cost=Cost(lambda k: k - 1, share_of_others)
)
def pairwise_all_to_all(rank: int, world_size: int) -> Program:
    """Pairwise all-to-all: each block goes straight to its destination.

    k - 1 steps, (k - 1)/k of the input sent by each rank: the lower bound on
    traffic. Blocks may differ in length.

    Source: MPICH; R. Thakur et al., IJHPCA 19 (2005), section 4.

    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(pairwise_all_to_all, 3))
    step  rank 0        rank 1        rank 2
       0  =0 >1:1 <2:6  =4 >2:5 <0:1  =8 >0:6 <1:5
       1  >2:2 <1:3     >0:3 <2:7     >1:7 <0:2
    """
    peers = (((rank + far) % world_size, (rank - far) % world_size) for far in range(1, world_size))
    steps = (
        Step(send(dst, inp(rank * world_size + dst)), recv(src, out(src * world_size + rank)))
        for dst, src in peers
    )
    return with_copy(steps, rank * world_size + rank)
