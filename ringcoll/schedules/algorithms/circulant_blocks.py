"""Circulant graphs in blocks: the fewest rounds for a long vector, for any number of ranks.

Problem: a long vector is broadcast in B blocks, one block a message. The root has to send each
block, and the last one needs ceil(lg k) rounds to reach all ranks: no algorithm has fewer than
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

Sources: J. L. Träff, "Round-optimal n-block broadcast schedules in logarithmic time", arXiv
2312.11236; "Optimal broadcast schedules in logarithmic time with applications to broadcast,
all-broadcast, reduction and all-reduction", arXiv 2407.18004.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import partial

from ringcoll.schedules.algorithms.circulant import halvings
from ringcoll.schedules.algorithms.registry import Cost, Parameter, register, rounds_to_reach_all
from ringcoll.schedules.ir import (
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

_register = partial(register, second_choice=True)


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
    """The blocks that a rank sends in ceil(lg k) rounds, as its receivers receive them.

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


def broadcast_phase(
    rank: int, world_size: int, root: int, blocks: int, place: Callable[[int], Ref]
) -> Program:
    """Send all chunks from the root, which has them in ``place(chunk)``, to every output."""
    v = (rank - root) % world_size
    held = out if v else place
    for far, sends, receives in exchanges(v, world_size, blocks):
        yield Step(
            *(() if sends is None else (send((rank + far) % world_size, held(sends)),)),
            *(() if receives is None else (recv((rank - far) % world_size, out(receives)),)),
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

    >>> from ringcoll.schedules.algorithms import schedule_of
    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(schedule_of("broadcast", "circulant=3", 4)))
    step  rank 0         rank 1     rank 2     rank 3
       0  =0 =1 =2 >1:0  <0:0       .          .
       1  >2:1           >3:0       <0:1       <1:0
       2  >1:2           >2:0 <0:2  >3:1 <1:0  <2:1
       3  >2:2           >3:2 <3:1  <0:2       >1:1 <1:2
    """
    steps = broadcast_phase(rank, world_size, root, blocks, inp)
    return with_copy(steps, *range(blocks), on=rank == root)


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
