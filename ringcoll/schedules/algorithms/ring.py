"""Rings and chains: every rank sends to the next one and receives from the one before.

Problem: move or reduce a long vector with every link busy all the time. A ring does so at the
lowest possible traffic, at the price of a number of rounds that grows with the number of ranks.

::

    0 --> 1 --> 2 --> 3
    ^                 |
    +-----------------+

A chain broadcasts a long vector at the speed of one link: in B segments the
whole chain is busy, for k + B - 2 steps of 1/B of the vector.

Source: P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for
clusters of workstations", J. Parallel Distrib. Comput. 69 (2009).
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from math import gcd

from ringcoll.schedules.algorithms.registry import Cost, register, share_of_others
from ringcoll.schedules.ir import (
    Program,
    Ref,
    Step,
    copy,
    inp,
    out,
    parallel,
    recv,
    recv_reduce,
    renumber,
    send,
    tmp,
    with_copy,
)


def reduce_scatter_phase(
    rank: int, world_size: int, partial: Callable[[int, int], Ref], result: Ref
) -> Program:
    """Reduce chunk r onto rank r, in world_size - 1 steps; it ends in ``result``.

    Chunk c starts at rank c + 1 and travels once round the ring; each rank that
    it passes adds its own share. On its way it is kept in ``partial(chunk, step)``.
    """
    next_rank, prev_rank = (rank + 1) % world_size, (rank - 1) % world_size
    held = inp(prev_rank)
    for step in range(world_size - 1):
        chunk = (rank - step - 2) % world_size
        last = step == world_size - 2
        into = result if last else partial(chunk, step)
        yield Step(
            send(next_rank, held),
            recv_reduce(prev_rank, into, inp(chunk), received_left=True, final=last),
        )
        held = into


def all_gather_phase(rank: int, world_size: int, own: Ref) -> Program:
    """Send chunk r of rank r, which is in ``own``, to all, in world_size - 1 steps."""
    next_rank, prev_rank = (rank + 1) % world_size, (rank - 1) % world_size
    held = own
    for step in range(world_size - 1):
        received = out((rank - step - 1) % world_size)
        yield Step(send(next_rank, held), recv(prev_rank, received))
        held = received


_BOTH = Cost(lambda k: 2 * (k - 1), lambda k: 2 * share_of_others(k), share_of_others)


@register(
    "reduce_scatter",
    "ring",
    chunks=lambda k: k,
    slots=lambda k: 2,
    cost=Cost(lambda k: k - 1, share_of_others, share_of_others),
)
def ring_reduce_scatter(rank: int, world_size: int) -> Program:
    """Ring reduce-scatter: each block travels once round the ring and is reduced on its way.

    k - 1 steps, (k - 1)/k of the input sent by each rank, any number of ranks.
    Partial results alternate between two slots of scratch memory.

    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(ring_reduce_scatter, 4))
    step  rank 0      rank 1      rank 2      rank 3
       0  >1:3 +3:2   >2:0 +0:3   >3:1 +1:0   >0:2 +2:1
       1  >1:2 +3:1   >2:3 +0:2   >3:0 +1:3   >0:1 +2:0
       2  >1:1 +3:0!  >2:2 +0:1!  >3:3 +1:2!  >0:0 +2:3!
    """
    return reduce_scatter_phase(
        rank, world_size, lambda chunk, step: tmp(step % 2, chunk), out(rank)
    )


@register("all_gather", "ring", chunks=lambda k: k, cost=Cost(lambda k: k - 1, share_of_others))
def ring_all_gather(rank: int, world_size: int) -> Program:
    """Ring all-gather: each rank passes on the block it received in the step before.

    k - 1 steps, (k - 1)/k of the output sent by each rank, any number of ranks.

    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(ring_all_gather, 4))
    step  rank 0        rank 1        rank 2        rank 3
       0  =0 >1:0 <3:3  =1 >2:1 <0:0  =2 >3:2 <1:1  =3 >0:3 <2:2
       1  >1:3 <3:2     >2:0 <0:3     >3:1 <1:0     >0:2 <2:1
       2  >1:2 <3:1     >2:3 <0:2     >3:0 <1:3     >0:1 <2:0
    """
    return with_copy(all_gather_phase(rank, world_size, inp(rank)), rank)


@register("all_reduce", "ring", chunks=lambda k: k, cost=_BOTH)
def ring_all_reduce(rank: int, world_size: int) -> Program:
    """Ring all-reduce: a ring reduce-scatter, then a ring all-gather.

    2(k - 1) steps and 2(k - 1)/k of the vector sent by each rank, which is the
    lower bound on traffic, for any number of ranks. Partial results are kept in
    the output, so no scratch memory is used.

    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(ring_all_reduce, 4))
    step  rank 0      rank 1      rank 2      rank 3
       0  >1:3 +3:2   >2:0 +0:3   >3:1 +1:0   >0:2 +2:1
       1  >1:2 +3:1   >2:3 +0:2   >3:0 +1:3   >0:1 +2:0
       2  >1:1 +3:0!  >2:2 +0:1!  >3:3 +1:2!  >0:0 +2:3!
       3  >1:0 <3:3   >2:1 <0:0   >3:2 <1:1   >0:3 <2:2
       4  >1:3 <3:2   >2:0 <0:3   >3:1 <1:0   >0:2 <2:1
       5  >1:2 <3:1   >2:3 <0:2   >3:0 <1:3   >0:1 <2:0
    """
    yield from reduce_scatter_phase(rank, world_size, lambda chunk, step: out(chunk), out(rank))
    yield from all_gather_phase(rank, world_size, out(rank))


@register("all_reduce", "bidirectional_ring", chunks=lambda k: 2 * k, cost=_BOTH)
def bidirectional_ring_all_reduce(rank: int, world_size: int) -> Program:
    """Two ring all-reduces at once, one in each direction, on half of the vector each.

    Steps and traffic as for the ring, but both directions of every link carry
    data, which pays where links are full duplex and slower than the memory.

    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(bidirectional_ring_all_reduce, 4))
    step  rank 0                 rank 1                 rank 2                 rank 3
       0  >1:3 +3:2 >3:7 +1:6    >2:0 +0:3 >0:6 +2:5    >3:1 +1:0 >1:5 +3:4    >0:2 +2:1 >2:4 +0:7
       1  >1:2 +3:1 >3:6 +1:5    >2:3 +0:2 >0:5 +2:4    >3:0 +1:3 >1:4 +3:7    >0:1 +2:0 >2:7 +0:6
       2  >1:1 +3:0! >3:5 +1:4!  >2:2 +0:1! >0:4 +2:7!  >3:3 +1:2! >1:7 +3:6!  >0:0 +2:3! >2:6 +0:5!
       3  >1:0 <3:3 >3:4 <1:7    >2:1 <0:0 >0:7 <2:6    >3:2 <1:1 >1:6 <3:5    >0:3 <2:2 >2:5 <0:4
       4  >1:3 <3:2 >3:7 <1:6    >2:0 <0:3 >0:6 <2:5    >3:1 <1:0 >1:5 <3:4    >0:2 <2:1 >2:4 <0:7
       5  >1:2 <3:1 >3:6 <1:5    >2:3 <0:2 >0:5 <2:4    >3:0 <1:3 >1:4 <3:7    >0:1 <2:0 >2:7 <0:6
    """
    return parallel(ring_all_reduce(rank, world_size), _strided(rank, world_size, -1, 1))


def strides(k: int) -> list[int]:
    """At most four strides with which a ring visits all of ``k`` ranks.

    >>> strides(2), strides(6), strides(8), strides(12)
    ([1], [1, 5], [1, 3, 5, 7], [1, 5, 7, 11])
    """
    return [stride for stride in range(1, max(k, 2)) if gcd(stride, k) == 1][:4]


@register(
    "all_reduce", "multi_ring", chunks=lambda k: k * len(strides(k)), cost=_BOTH, second_choice=True
)
def multi_ring_all_reduce(rank: int, world_size: int) -> Program:
    """Up to four ring all-reduces at once, with other strides, on a part of the vector each.

    Steps and traffic as for the ring; no two rings share a directed link, which pays where each
    rank has links of its own to several others, as the rings (channels) of NCCL do.

    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(multi_ring_all_reduce, 3))
    step  rank 0                 rank 1                 rank 2
       0  >1:2 +2:1 >2:5 +1:4    >2:0 +0:2 >0:4 +2:3    >0:1 +1:0 >1:3 +0:5
       1  >1:1 +2:0! >2:4 +1:3!  >2:2 +0:1! >0:3 +2:5!  >0:0 +1:2! >1:5 +0:4!
       2  >1:0 <2:2 >2:3 <1:5    >2:1 <0:0 >0:5 <2:4    >0:2 <1:1 >1:4 <0:3
       3  >1:2 <2:1 >2:5 <1:4    >2:0 <0:2 >0:4 <2:3    >0:1 <1:0 >1:3 <0:5
    """
    channels = enumerate(strides(world_size))
    return parallel(*(_strided(rank, world_size, stride, channel) for channel, stride in channels))


def _strided(rank: int, world_size: int, stride: int, channel: int) -> Program:
    place = rank * pow(stride, -1, world_size) % world_size
    return renumber(
        ring_all_reduce(place, world_size),
        peer=lambda place: place * stride % world_size,
        chunk=lambda chunk: channel * world_size + chunk,
    )


@register(
    "broadcast", "chain", pipelined=True, cost=Cost(lambda k: k - 1, lambda k: Fraction(k - 1))
)
def chain_broadcast(rank: int, world_size: int, root: int) -> Program:
    """Chain broadcast, to be run in segments: rank v hears from v - 1 and tells v + 1.

    k - 1 steps with the whole vector; with B segments k + B - 2 of one segment.

    Source: textbook; the chain broadcast of Open MPI.

    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(chain_broadcast, 4))
    step  rank 0   rank 1  rank 2  rank 3
       0  =0 >1:0  <0:0    .       .
       1  .        >2:0    <1:0    .
       2  .        .       >3:0    <2:0
    """
    v = (rank - root) % world_size
    for step in range(world_size - 1):
        if step == v:
            own = () if v else (copy(out(0), inp(0)),)
            yield Step(*own, send((rank + 1) % world_size, out(0) if v else inp(0)))
        elif step == v - 1:
            yield Step(recv((rank - 1) % world_size, out(0)))
        else:
            yield Step()


def _neighbor(rank: int, step: int, k: int) -> int:
    """Even ranks begin with the next one, then take turns; odd ranks the other way round."""
    return (rank + (1 if rank % 2 == step % 2 else -1)) % k


def _pair(rank: int, step: int, k: int) -> tuple[int, int]:
    """The two blocks that a rank has since a step; before, it had two others for as many steps."""
    if step == 0:
        return rank - rank % 2, rank - rank % 2 + 1
    return _pair(_neighbor(rank, step, k), step - 1, k)


@register(
    "all_gather",
    "neighbor_exchange",
    chunks=lambda k: k,
    restriction=lambda k: "it needs an even number of ranks" if k % 2 and k > 1 else None,
    cost=Cost(lambda k: k // 2, share_of_others),
    second_choice=True,
)
def neighbor_exchange_all_gather(rank: int, world_size: int) -> Program:
    """Neighbour exchange all-gather: two blocks at a time, with the next and previous rank in turn.

    k/2 steps, half of the ring's, and (k - 1)/k of the output sent by each rank; k even. Only
    neighbours exchange messages.

    Source: J. Chen, L. Zhang, Y. Zhang and W. Yuan, "Performance evaluation of allgather algorithms
    on terascale Linux cluster with fast Ethernet", HPC Asia 2005.

    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(neighbor_exchange_all_gather, 6))
    step  rank 0         rank 1         rank 2         rank 3         rank 4         rank 5
       0  =0 >1:0 <1:1   =1 >0:1 <0:0   =2 >3:2 <3:3   =3 >2:3 <2:2   =4 >5:4 <5:5   =5 >4:5 <4:4
       1  >5:0-1 <5:4-5  >2:0-1 <2:2-3  >1:2-3 <1:0-1  >4:2-3 <4:4-5  >3:4-5 <3:2-3  >0:4-5 <0:0-1
       2  >1:4-5 <1:2-3  >0:2-3 <0:4-5  >3:0-1 <3:4-5  >2:4-5 <2:0-1  >5:2-3 <5:0-1  >4:0-1 <4:2-3
    """
    peer = _neighbor(rank, 0, world_size)
    yield Step(copy(out(rank), inp(rank)), send(peer, inp(rank)), recv(peer, out(peer)))
    for step in range(1, world_size // 2):
        peer = _neighbor(rank, step, world_size)
        sent, received = _pair(rank, step - 1, world_size), _pair(rank, step, world_size)
        yield Step(send(peer, *map(out, sent)), recv(peer, *map(out, received)))
