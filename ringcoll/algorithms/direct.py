"""Direct exchange: everything in one round, whatever the traffic.

Problem: the lowest latency for short messages, and a reduction whose operands
are added strictly in rank order, from left to right. That also makes these the
algorithms for operators that are not associative, and the most exact ones when
the sum is accumulated in a wider type.

Source: the basic linear algorithms of Open MPI.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from ringcoll.algorithms.entry import Cost
from ringcoll.algorithms.registry import register
from ringcoll.schedule import (
    OperandOrder,
    Operation,
    Program,
    Ref,
    Step,
    copy,
    inp,
    out,
    recv,
    reduce,
    send,
    tmp,
)


def _fold(rank: int, world_size: int, chunk: int) -> Step:
    """Reduce what all ranks sent, and the own share, in rank order."""

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


def _share(k: int) -> Fraction:
    return Fraction(k - 1, k)


_WHOLE_VECTORS = Cost(
    rounds=lambda k: 1, traffic=lambda k: Fraction(k - 1), reduced=lambda k: Fraction(k - 1)
)


@register(
    "all_reduce", "direct", order=OperandOrder.AT_ONCE, slots=lambda k: k, cost=_WHOLE_VECTORS
)
def direct_all_reduce(rank: int, world_size: int) -> Program:
    """Direct all-reduce: everyone sends everything to everyone, then all add in rank order.

    One step; k - 1 times the vector sent by each rank, and as much scratch memory.

    >>> from ringcoll.schedule import grid
    >>> print(grid(direct_all_reduce, 3))
    step  rank 0               rank 1               rank 2
       0  >1:0 >2:0 <2:0 <1:0  >2:0 >0:0 <0:0 <2:0  >0:0 >1:0 <1:0 <0:0
       1  S0!                  S0!                  S0!
    """
    yield Step(*_exchange(rank, world_size, lambda peer: inp(0), lambda peer: tmp(peer, 0)))
    yield _fold(rank, world_size, 0)


@register(
    "reduce_scatter",
    "direct",
    order=OperandOrder.AT_ONCE,
    chunks=lambda k: k,
    slots=lambda k: k,
    cost=Cost(rounds=lambda k: 1, traffic=_share, reduced=_share),
)
def direct_reduce_scatter(rank: int, world_size: int) -> Program:
    """Direct reduce-scatter: every block goes straight to its owner, who adds in rank order.

    One step, (k - 1)/k of the input sent by each rank.

    >>> from ringcoll.schedule import grid
    >>> print(grid(direct_reduce_scatter, 3))
    step  rank 0               rank 1               rank 2
       0  >1:1 >2:2 <2:0 <1:0  >2:2 >0:0 <0:1 <2:1  >0:0 >1:1 <1:2 <0:2
       1  S0!                  S1!                  S2!
    """
    yield Step(*_exchange(rank, world_size, inp, lambda peer: tmp(peer, rank)))
    yield _fold(rank, world_size, rank)


@register(
    "all_reduce",
    "linear",
    order=OperandOrder.AT_ONCE,
    slots=lambda k: k,
    cost=Cost(
        rounds=lambda k: 2,
        traffic=lambda k: Fraction(2 * (k - 1)),
        reduced=lambda k: Fraction(k - 1),
    ),
    second_choice=True,
)
def linear_all_reduce(rank: int, world_size: int) -> Program:
    """Linear all-reduce: rank 0 adds up all vectors in rank order, and sends everyone the sum.

    Two steps; rank 0 receives and sends k - 1 times the vector. It is the reference for all others: what
    one process would compute that had all vectors.

    >>> from ringcoll.schedule import grid
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


@register(
    "all_reduce",
    "two_shot",
    order=OperandOrder.AT_ONCE,
    chunks=lambda k: k,
    slots=lambda k: k,
    cost=Cost(rounds=lambda k: 2, traffic=lambda k: 2 * _share(k), reduced=_share),
)
def two_shot_all_reduce(rank: int, world_size: int) -> Program:
    """Two-shot all-reduce: a direct reduce-scatter, then a direct all-gather.

    Two steps with messages for any number of ranks, 2(k - 1)/k of the vector sent by each rank, and
    sums in rank order. Ranks that share memory read each other's vectors and totals in place, and
    wait for each other twice.

    Source: the two-shot kernel of DeepSpeed's and of TensorRT-LLM's all-reduce.

    >>> from ringcoll.schedule import grid
    >>> print(grid(two_shot_all_reduce, 3))
    step  rank 0               rank 1               rank 2
       0  >1:1 >2:2 <2:0 <1:0  >2:2 >0:0 <0:1 <2:1  >0:0 >1:1 <1:2 <0:2
       1  S0!                  S1!                  S2!
       2  >1:0 >2:0 <2:2 <1:1  >2:1 >0:1 <0:0 <2:2  >0:2 >1:2 <1:1 <0:0
    """
    yield from direct_reduce_scatter(rank, world_size)
    yield Step(*_exchange(rank, world_size, lambda peer: out(rank), out))


@register("all_gather", "direct", chunks=lambda k: k, cost=Cost(rounds=lambda k: 1, traffic=_share))
def direct_all_gather(rank: int, world_size: int) -> Program:
    """Direct all-gather: everyone sends its block straight to everyone.

    One step, (k - 1)/k of the output sent by each rank.

    >>> from ringcoll.schedule import grid
    >>> print(grid(direct_all_gather, 3))
    step  rank 0                  rank 1                  rank 2
       0  =0 >1:0 >2:0 <2:2 <1:1  =1 >2:1 >0:1 <0:0 <2:2  =2 >0:2 >1:2 <1:1 <0:0
    """
    exchange = _exchange(rank, world_size, lambda peer: inp(rank), out)
    yield Step(copy(out(rank), inp(rank)), *exchange)


@register("broadcast", "linear", cost=Cost(rounds=lambda k: 1, traffic=lambda k: Fraction(k - 1)))
def linear_broadcast(rank: int, world_size: int, root: int) -> Program:
    """Linear broadcast: the root sends to everyone.

    One step; the root sends k - 1 times the vector. Ranks that share memory read it in place.

    >>> from ringcoll.schedule import grid
    >>> print(grid(linear_broadcast, 3))
    step  rank 0        rank 1  rank 2
       0  =0 >1:0 >2:0  <0:0    <0:0
    """
    if rank != root:
        yield Step(recv(root, out(0)))
        return
    peers = ((rank + step) % world_size for step in range(1, world_size))
    yield Step(copy(out(0), inp(0)), *(send(peer, inp(0)) for peer in peers))


@register("reduce", "direct", order=OperandOrder.AT_ONCE, slots=lambda k: k, cost=_WHOLE_VECTORS)
def direct_reduce(rank: int, world_size: int, root: int) -> Program:
    """Direct reduce: everyone sends everything to the root, which adds in rank order.

    One step; the root receives k - 1 times the vector.

    >>> from ringcoll.schedule import grid
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


@register("gather", "linear", chunks=lambda k: k, cost=Cost(rounds=lambda k: 1, traffic=_share))
def linear_gather(rank: int, world_size: int, root: int) -> Program:
    """Linear gather: everyone sends its block to the root.

    One step; the root receives (k - 1)/k of the output.

    >>> from ringcoll.schedule import grid
    >>> print(grid(linear_gather, 4))
    step  rank 0             rank 1  rank 2  rank 3
       0  =0 <1:1 <2:2 <3:3  >0:1    >0:2    >0:3
    """
    if rank != root:
        yield Step(send(root, inp(rank)))
        return
    yield Step(
        copy(out(root), inp(root)),
        *(recv(peer, out(peer)) for peer in range(world_size) if peer != root),
    )


@register("scatter", "linear", chunks=lambda k: k, cost=Cost(rounds=lambda k: 1, traffic=_share))
def linear_scatter(rank: int, world_size: int, root: int) -> Program:
    """Linear scatter: the root sends each rank its block.

    One step; the root sends (k - 1)/k of the input.

    >>> from ringcoll.schedule import grid
    >>> print(grid(linear_scatter, 4))
    step  rank 0             rank 1  rank 2  rank 3
       0  =0 >1:1 >2:2 >3:3  <0:1    <0:2    <0:3
    """
    if rank != root:
        yield Step(recv(root, out(rank)))
        return
    yield Step(
        copy(out(root), inp(root)),
        *(send(peer, inp(peer)) for peer in range(world_size) if peer != root),
    )
