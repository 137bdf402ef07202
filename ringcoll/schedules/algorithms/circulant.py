"""Circulant graphs: messages to rank +- ceil(k/2), ceil(k/4), ..., 1, for any number of ranks.

Problem: the fewest rounds *and* the least traffic, for every number of ranks, where halving and
doubling need a power of two. A rank keeps a window of blocks that begins with its own. In each
round the farther half of the window goes to the rank whose own block that half begins with::

    k = 5     window of rank 0     0 1 2 3 4
    round 0   3 4 go to rank 3     0 1 2           half of 5, rounded up, is 3
    round 1   2   goes to rank 2   0 1             half of 3 is 2
    round 2   1   goes to rank 1   0

Every rank does the same, so that what a rank keeps is added to as it shrinks. The all-gather is the
same backwards. Operands are added in another order than that of the ranks.

A long vector is broadcast in B blocks, one block a message. The root has to send each block, and
the last one needs ceil(lg k) rounds to reach all ranks: no algorithm has fewer than
B - 1 + ceil(lg k) rounds. Here every rank sends to rank + 1, 2, ..., ceil(k/4), ceil(k/2) in turn,
and the root sends another block in each round. Ranks are counted from the root; three blocks a, b,
c on 5 ranks::

    round 0   distance 2   0>2 a
    round 1   distance 3   0>3 b
    round 2   distance 1   0>1 c   2>3 a   3>4 b
    round 3   distance 2   0>2 c   2>4 a   4>1 b
    round 4   distance 3   0>3 c   1>4 c   3>1 a   4>2 b

In ceil(lg k) rounds a rank receives as many blocks. One of them is new, which is the *base block*
of the rank; the others are the base blocks of others, of ceil(lg k) rounds earlier. The reduction
is the same backwards, with a recv-reduce for each send.

Source: J. L. Träff, "Optimal, non-pipelined reduce-scatter and allreduce algorithms", arXiv
2410.14234.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import partial

from ringcoll.schedules.algorithms.registry import (
    Cost,
    Parameter,
    register,
    rounds_to_reach_all,
    share_of_others,
)
from ringcoll.schedules.ir import (
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

_register = partial(register, second_choice=True)


def halvings(k: int) -> Iterator[tuple[int, int]]:
    """The length of the window before and after each round.

    >>> [*halvings(5)], [*halvings(8)]
    ([(5, 3), (3, 2), (2, 1)], [(8, 4), (4, 2), (2, 1)])
    """
    while k > 1:
        yield k, (k + 1) // 2
        k = (k + 1) // 2


def reduce_scatter_phase(
    rank: int, world_size: int, partial: Callable[[int, int], Ref], result: Ref
) -> Program:
    """Reduce chunk r onto rank r; it ends in ``result``.

    A partial result is kept in ``partial(place in the window, chunk)``.
    """
    num_reduced = 0  # places of the window that hold partial results

    def reduced(place: int) -> Ref:
        return partial(place, (rank + place) % world_size)

    def held(place: int) -> Ref:
        return reduced(place) if place < num_reduced else inp((rank + place) % world_size)

    for length, half in halvings(world_size):
        kept, last = range(length - half), half == 1
        into, local = (result,) if last else tuple(map(reduced, kept)), tuple(map(held, kept))
        yield Step(
            send((rank + half) % world_size, *map(held, range(half, length))),
            recv_reduce((rank - half) % world_size, into, local, final=last),
        )
        num_reduced = max(num_reduced, len(kept))


def all_gather_phase(rank: int, world_size: int, own: Ref) -> Program:
    """Send chunk r of rank r to all; the first message reads it from ``own``."""
    for length, half in reversed([*halvings(world_size)]):
        sent = (own, *(out((rank + place) % world_size) for place in range(1, length - half)))
        received = (out((rank + place) % world_size) for place in range(half, length))
        yield Step(
            send((rank - half) % world_size, *sent), recv((rank + half) % world_size, *received)
        )


@_register(
    "reduce_scatter",
    "circulant",
    chunks=lambda k: k,
    slots=lambda k: k // 2,
    cost=Cost(rounds_to_reach_all, share_of_others, share_of_others),
)
def circulant_reduce_scatter(rank: int, world_size: int) -> Program:
    """Circulant reduce-scatter: the farther half of the blocks goes half way round in each step.

    ceil(lg k) steps, (k - 1)/k of the input sent by each rank and as much reduced: all three lower
    bounds, for any number of ranks.

    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(circulant_reduce_scatter, 5))
    step  rank 0         rank 1         rank 2         rank 3         rank 4
       0  >3:3-4 +2:0-1  >4:4,0 +3:1-2  >0:0-1 +4:2-3  >1:1-2 +0:3-4  >2:2-3 +1:4,0
       1  >2:2 +3:0      >3:3 +4:1      >4:4 +0:2      >0:0 +1:3      >1:1 +2:4
       2  >1:1 +4:0!     >2:2 +0:1!     >3:3 +1:2!     >4:4 +2:3!     >0:0 +3:4!
    """
    return reduce_scatter_phase(rank, world_size, tmp, out(rank))


@_register(
    "all_gather", "circulant", chunks=lambda k: k, cost=Cost(rounds_to_reach_all, share_of_others)
)
def circulant_all_gather(rank: int, world_size: int) -> Program:
    """Circulant all-gather: the circulant reduce-scatter backwards, without reducing.

    ceil(lg k) steps and (k - 1)/k of the output sent by each rank, for any number of ranks.

    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(circulant_all_gather, 5))
    step  rank 0         rank 1         rank 2         rank 3         rank 4
       0  =0 >4:0 <1:1   =1 >0:1 <2:2   =2 >1:2 <3:3   =3 >2:3 <4:4   =4 >3:4 <0:0
       1  >3:0 <2:2      >4:1 <3:3      >0:2 <4:4      >1:3 <0:0      >2:4 <1:1
       2  >2:0-1 <3:3-4  >3:1-2 <4:4,0  >4:2-3 <0:0-1  >0:3-4 <1:1-2  >1:4,0 <2:2-3
    """
    steps = all_gather_phase(rank, world_size, inp(rank))
    yield Step(copy(out(rank), inp(rank)), *next(steps))
    yield from steps


@_register(
    "all_reduce",
    "circulant",
    chunks=lambda k: k,
    cost=Cost(
        lambda k: 2 * rounds_to_reach_all(k), lambda k: 2 * share_of_others(k), share_of_others
    ),
)
def circulant_all_reduce(rank: int, world_size: int) -> Program:
    """Circulant all-reduce: a circulant reduce-scatter, then a circulant all-gather.

    2 ceil(lg k) steps and 2(k - 1)/k of the vector sent by each rank, the lower bound on traffic,
    for any number of ranks; Rabenseifner's needs more for all but powers of two.

    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(circulant_all_reduce, 3))
    step  rank 0      rank 1      rank 2
       0  >2:2 +1:0   >0:0 +2:1   >1:1 +0:2
       1  >1:1 +2:0!  >2:2 +0:1!  >0:0 +1:2!
       2  >2:0 <1:1   >0:1 <2:2   >1:2 <0:0
       3  >1:0 <2:2   >2:1 <0:0   >0:2 <1:1
    """
    yield from reduce_scatter_phase(rank, world_size, lambda place, chunk: out(chunk), out(rank))
    yield from all_gather_phase(rank, world_size, out(rank))


# ---- In blocks -----------------------------------------------------------------------------


def distances(k: int) -> list[int]:
    """How far messages go in the rounds; and ``k``, for one more.

    >>> distances(5), distances(8)
    ([1, 2, 3, 5], [1, 2, 4, 8])
    """
    return [*reversed([half for _, half in halvings(k)]), k]


def base_block(v: int, k: int) -> int:
    """The round in which a rank's own path from the root ends; ceil(lg k) for the root.

    >>> [base_block(v, 5) for v in range(5)]
    [3, 0, 1, 2, 0]
    """
    far = distances(k)
    place, last = 0, len(far) - 1
    for number in reversed(range(last)):
        if place + far[number] <= v:
            place, last = place + far[number], number
    return last


def received(v: int, k: int) -> list[int]:
    """The blocks that a rank receives in ceil(lg k) rounds: its base block, others minus that many.

    In each round the rank needs a block that it has not received. It takes the base block of the
    nearest rank before its sender that has another one; paths of distances from rank 0 lead there.
    It takes O(lg k) time, as the paper shows.

    >>> [received(v, 5) for v in range(5)]
    [[-3, -1, -2], [0, -1, -2], [-3, 1, -1], [-2, -3, 2], [-1, -2, 0]]
    """
    far, rounds, own = distances(k), rounds_to_reach_all(k), base_block(v, k)
    blocks: list[int] = []
    nearest = 2 * k  # ranks are counted on for one more turn, so that all senders are before v + k

    def search(place: int, highest: int) -> None:
        nonlocal nearest
        for number in range(highest, -1, -1):
            there = place + far[number]
            if len(blocks) == rounds:
                return
            if number == own or number in blocks:
                continue
            if there >= nearest or there > v + k - far[len(blocks)]:
                continue
            if there <= v + k - far[len(blocks) + 1]:
                search(there, number)
            if len(blocks) == rounds or place > v + k - far[len(blocks) + 1]:
                return
            nearest = there
            blocks.append(number)

    search(0, rounds)
    return [own if number == rounds else number - rounds for number in blocks]


def sent(v: int, k: int) -> list[int]:
    """The blocks that a rank sends in ceil(lg k) rounds: what the ranks receive that it sends to.

    >>> sent(0, 5), sent(3, 5)
    ([0, 1, 2], [-1, -1, -2])
    """
    return [received((v + far) % k, k)[number] for number, far in enumerate(distances(k)[:-1])]


def exchanges(v: int, k: int, blocks: int) -> Iterator[tuple[int, int | None, int | None]]:
    """The distance of each round of a broadcast, and the blocks that are sent and received.

    Blocks before the first do not exist, and the last stands for all that would follow it.
    """
    rounds, far, sends, receives = rounds_to_reach_all(k), distances(k), sent(v, k), received(v, k)
    for number in range(1 - blocks, rounds):
        turn, index = divmod(number, rounds)

        def block(wanted: int, first: int = blocks - 1 + turn * rounds) -> int | None:
            return min(first + wanted, blocks - 1) if first + wanted >= 0 else None

        reaches_root = (v + far[index]) % k == 0
        yield (
            far[index],
            None if reaches_root else block(sends[index]),
            block(receives[index]) if v else None,
        )


def _rounds_in_blocks(k: int, blocks: int) -> int:
    return blocks - 1 + rounds_to_reach_all(k)


def _traffic_in_blocks(k: int, blocks: int) -> Fraction:
    return Fraction(_rounds_in_blocks(k, blocks), blocks)


# With 16 blocks the rounds that fill the pipeline add up to a quarter of the vector, on up to 32
# ranks.
_BLOCKS = Parameter("blocks", default=lambda k: 16, tried=(4, 64), least=1)


@_register(
    "broadcast",
    "circulant",
    chunks=lambda k, blocks: blocks,
    cost=Cost(_rounds_in_blocks, _traffic_in_blocks),
    parameter=_BLOCKS,
)
def circulant_broadcast(rank: int, world_size: int, root: int, blocks: int) -> Program:
    """Circulant broadcast in B blocks: the root sends another block in each round.

    B - 1 + ceil(lg k) steps with one block each, the fewest possible, for any number of ranks. B is
    16, and ``circulant=64`` has 64 blocks. A rank sends and receives no more than
    1 + (ceil(lg k) - 1)/B of the vector.

    Sources: J. L. Träff, "Round-optimal n-block broadcast schedules in logarithmic time", arXiv
    2312.11236; "Optimal broadcast schedules in logarithmic time with applications to broadcast,
    all-broadcast, reduction and all-reduction", arXiv 2407.18004.

    >>> from ringcoll.schedules.algorithms import schedule_of
    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(schedule_of("broadcast", "circulant=3", 4)))
    step  rank 0         rank 1     rank 2     rank 3
       0  =0 =1 =2 >1:0  <0:0       .          .
       1  >2:1           >3:0       <0:1       <1:0
       2  >1:2           >2:0 <0:2  >3:1 <1:0  <2:1
       3  >2:2           >3:2 <3:1  <0:2       >1:1 <1:2
    """
    v = (rank - root) % world_size
    first = tuple(copy(out(block), inp(block)) for block in range(blocks)) if v == 0 else ()
    for far, sends, receives in exchanges(v, world_size, blocks):
        held = inp if v == 0 else out
        yield Step(
            *first,
            *(() if sends is None else (send((rank + far) % world_size, held(sends)),)),
            *(() if receives is None else (recv((rank - far) % world_size, out(receives)),)),
        )
        first = ()


@_register(
    "reduce",
    "circulant",
    chunks=lambda k, blocks: blocks,
    slots=lambda k, blocks: blocks if k > 2 else 0,
    cost=Cost(_rounds_in_blocks, _traffic_in_blocks, _traffic_in_blocks),
    parameter=_BLOCKS,
)
def circulant_reduce(rank: int, world_size: int, root: int, blocks: int) -> Program:
    """Circulant reduce in B blocks: the circulant broadcast backwards, adding on the way.

    B - 1 + ceil(lg k) steps with one block each, the fewest possible, for any number of ranks. B is
    16, and ``circulant=64`` has 64 blocks. Partial results are kept in scratch memory, a slot for
    each block.

    Sources: J. L. Träff, "Round-optimal n-block broadcast schedules in logarithmic time", arXiv
    2312.11236; "Optimal broadcast schedules in logarithmic time with applications to broadcast,
    all-broadcast, reduction and all-reduction", arXiv 2407.18004.

    >>> from ringcoll.schedules.algorithms import schedule_of
    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(schedule_of("reduce", "circulant=3", 4)))
    step  rank 0  rank 1     rank 2     rank 3
       0  +2:2    >3:1 +3:2  >0:2       >1:2 +1:1
       1  +1:2!   >0:2 +2:0  >1:0 +3:1  >2:1
       2  +2:1!   +3:0       >0:1       >1:0
       3  +1:0!   >0:0       .          .
    """
    v = (rank - root) % world_size
    held = [inp(block) for block in range(blocks)]
    for number, (far, sends, receives) in reversed([*enumerate(exchanges(v, world_size, blocks))]):
        step: list[Operation] = []
        if receives is not None:
            step.append(send((rank - far) % world_size, held[receives]))
        if sends is not None:
            peer, into = (rank + far) % world_size, out(sends) if v == 0 else tmp(sends, sends)
            # In the broadcast the root sends each block for the first time in the first B rounds.
            final = v == 0 and number < blocks
            step.append(recv_reduce(peer, into, held[sends], final=final))
            held[sends] = into
        yield Step(*step)
