"""Pairwise exchange: in step s send to rank + s, receive from rank - s.

Problem: everybody has something different for everybody. Each step is a
permutation, so no rank is ever sent two messages at once::

    step 1   0>1  1>2  2>3  3>0
    step 2   0>2  1>3  2>0  3>1
    step 3   0>3  1>0  2>1  3>2

Source: MPICH; R. Thakur et al., IJHPCA 19 (2005), section 4.
"""

from __future__ import annotations

from fractions import Fraction

from ringcoll.algorithms.entry import Cost
from ringcoll.algorithms.registry import register
from ringcoll.schedule import Program, Step, copy, inp, out, recv, recv_reduce, send


def _others(k: int) -> Fraction:
    return Fraction(k - 1, k)


@register(
    "reduce_scatter",
    "pairwise",
    chunks=lambda k: k,
    cost=Cost(rounds=lambda k: k - 1, traffic=_others, reduced=_others),
)
def pairwise_reduce_scatter(rank: int, world_size: int) -> Program:
    """Pairwise reduce-scatter: get each rank's share of the own block from it directly.

    k - 1 steps, (k - 1)/k of the input sent by each rank, no scratch memory.

    >>> from ringcoll.schedule import grid
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
    "all_to_all",
    "pairwise",
    chunks=lambda k: k * k,
    cost=Cost(rounds=lambda k: k - 1, traffic=_others),
)
def pairwise_all_to_all(rank: int, world_size: int) -> Program:
    """Pairwise all-to-all: each block goes straight to its destination.

    k - 1 steps, (k - 1)/k of the input sent by each rank: the lower bound on
    traffic. Blocks may differ in length.

    >>> from ringcoll.schedule import grid
    >>> print(grid(pairwise_all_to_all, 3))
    step  rank 0        rank 1        rank 2
       0  =0 >1:1 <2:6  =4 >2:5 <0:1  =8 >0:6 <1:5
       1  >2:2 <1:3     >0:3 <2:7     >1:7 <0:2
    """
    own = rank * world_size + rank
    for step in range(1, world_size):
        dst, src = (rank + step) % world_size, (rank - step) % world_size
        yield Step(
            *((copy(out(own), inp(own)),) if step == 1 else ()),
            send(dst, inp(rank * world_size + dst)),
            recv(src, out(src * world_size + rank)),
        )


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
    cost=Cost(rounds=lambda k: k // 2, traffic=_others),
    second_choice=True,
)
def neighbor_exchange_all_gather(rank: int, world_size: int) -> Program:
    """Neighbour exchange all-gather: two blocks at a time, with the next and the previous rank in turn.

    k/2 steps, half of the ring's, and (k - 1)/k of the output sent by each rank; k even. Only neighbours
    exchange messages.

    Source: J. Chen, L. Zhang, Y. Zhang and W. Yuan, "Performance evaluation of allgather algorithms on
    terascale Linux cluster with fast Ethernet", HPC Asia 2005.

    >>> from ringcoll.schedule import grid
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
