"""One rank is slow, or late: all-reduces in which the others do not wait for it.

Problem: if one rank has half of the bandwidth, a ring takes twice its time; yet that rank has to
send no more than its n bytes, and to receive n. Where a rank comes late, a ring has all of its work
left. For large k, in n * beta::

    one rank has half of the bandwidth       ring 4   r2ccl 3       optcc 5/2   bound 2
    one rank comes late: from then on        ring 2   stragglar 1               bound 1

The parameter is the slow, or late, rank. A complete chunk goes on before the others are complete,
so that a hierarchy can have these algorithms only as its outermost one.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from functools import lru_cache, partial
from itertools import chain

from ringcoll.schedules.algorithms.circulant_blocks import broadcast_phase, exchanges
from ringcoll.schedules.algorithms.exchanges import needs_power
from ringcoll.schedules.algorithms.registry import Cost, Parameter, register, rounds_to_reach_all
from ringcoll.schedules.algorithms.ring import reduce_scatter_phase, ring_all_reduce
from ringcoll.schedules.ir import (
    Operation,
    Program,
    Ref,
    Step,
    inp,
    out,
    parallel,
    recv,
    recv_reduce,
    renumber,
    send,
    unfinished,
)

_register = partial(
    register,
    "all_reduce",
    second_choice=True,
    parameter=Parameter("the slow, or late, rank", default=lambda k: k - 1),
)


def _no_such_rank(k: int, rank: int) -> str | None:
    return None if rank < k else f"there is no rank {rank}"


def _others(rank: int, k: int) -> list[int]:
    return [other for other in range(k) if other != rank]


_PIECES = 4  # pieces for each other rank: filling the pipeline takes a quarter of the time


def _in_ring(place: int, step: int, others: int) -> tuple[int, int] | None:
    """The piece that a place sends in the ring, and its hop; ``None`` if its slot is empty."""
    if (slot := (place - step) % others) == others - 1:
        return None
    turn, hop = divmod(step - 2 - 2 * slot, 2 * (others - 1))
    piece = slot + turn * (others - 1)
    return (piece, hop) if turn >= 0 and piece < _PIECES * others else None


def _optcc_rounds(k: int, slow: int) -> int:
    return 2 * (_PIECES + 1) * (k - 1)


def _optcc_chunks(k: int, slow: int) -> int:
    return max(1, 2 * _PIECES * (k - 1))


def _optcc_traffic(k: int, slow: int) -> Fraction:
    of_two_chunks = _optcc_rounds(k, slow) - 4 if k > 2 else 0
    return Fraction(_optcc_rounds(k, slow) + of_two_chunks, _optcc_chunks(k, slow))


def _optcc_reduced(k: int, slow: int) -> Fraction:
    few = {1: 0, 2: 2 * _PIECES, 3: 6 * _PIECES + 1}
    return Fraction(few.get(k, 2 * (2 * _PIECES + 1) * (k - 1) - 4), _optcc_chunks(k, slow))


@_register(
    "optcc",
    chunks=_optcc_chunks,
    cost=Cost(_optcc_rounds, _optcc_traffic, _optcc_reduced),
    restriction=_no_such_rank,
)
def optcc_all_reduce(rank: int, world_size: int, slow: int) -> Program:
    """OptCC all-reduce: a rank with half of the bandwidth sends and receives half a piece a step.

    10(k - 1) steps, and about 5/2 n * beta where the slow rank has half of the bandwidth of the
    others; a ring takes 4(k - 1)/k. The bound is 2, as each element has to leave the slow rank, and
    to reach it. The slow rank is the last one; ``optcc=0`` has another. Any number of ranks;
    4(k - 1) pieces, each of two chunks.

    Four stages, all at once on pieces in a row: the slow rank sends a piece, by halves, to two
    ranks; the piece is reduced along the ring of the others; it goes round once more; two ranks
    send it back. The ring has k - 1 *slots*, which turn with the data, and one of them stays empty:
    the rank that has nothing to send in the ring sends to the slow one, and so for receiving. Once
    the pipeline is full, all ports are busy in each step.

    Source: P. Chen et al., "Don't let a few network failures slow the entire AllReduce", arXiv
    2606.01680, for the idea; the slots, and the order of the stages, are ours.

    >>> from ringcoll.schedules.algorithms import schedule_of
    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(schedule_of("all_reduce", "optcc", 3))[:270])
    step  rank 0          rank 1           rank 2
       0  +2:0            .                >0:0
       1  .               +2:1             >1:1
       2  +2:2 >1:0-1     +0:0-1!          >0:2
       3  <1:0-1          +2:3 >0:0-1      >1:3
       4  +2:4 >1:2-3     >2:0 +0:2-3!     >0:4 <1:0
    """
    others, place = _others(slow, world_size), rank - (rank > slow)
    h, num_chunks = len(others), _optcc_chunks(world_size, slow)

    def place_of(piece: int, *, begun: bool = True) -> tuple[Ref, ...]:
        """The two chunks of a piece: in the input if neither ring nor slow rank sent them."""
        both = range(2 * piece, 2 * piece + 2)
        return tuple((out if begun or chunk % h == place else inp)(chunk) for chunk in both)

    for step in range(_optcc_rounds(world_size, slow)):
        operations: list[Operation] = []
        back, to_rank, from_rank = step - 2 * h, others[step % h], others[(step - 1) % h]
        if step < num_chunks and rank == slow:
            operations.append(send(to_rank, inp(step)))
        if step < num_chunks and rank == to_rank:
            into, final = out(step), h == 1
            operations.append(recv_reduce(slow, into, inp(step), received_left=False, final=final))
        if back >= 0 and rank == slow:
            operations.append(recv(from_rank, out(back)))
        if back >= 0 and rank == from_rank:
            operations.append(send(slow, out(back)))
        if rank != slow and (sent := _in_ring(place, step, h)):
            refs = place_of(sent[0], begun=sent[1] > 0)
            operations.append(send(others[(place + 1) % h], *refs))
        if rank != slow and (received := _in_ring(place - 1, step, h)):
            (piece, hop), peer = received, others[place - 1]
            whole, own, final = place_of(piece), place_of(piece, begun=False), hop == h - 2
            reduces = recv_reduce(peer, whole, own, received_left=True, final=final)
            operations.append(reduces if hop < h - 1 else recv(peer, *whole))
        yield Step(*operations)


@lru_cache(maxsize=32)
def _powers(bits: int) -> tuple[int, ...]:
    """The numbers of so many bits but 0, as the powers of 2 in a finite field.

    >>> _powers(2), _powers(3)
    ((1, 2, 3), (1, 2, 4, 3, 6, 7, 5))
    """
    for polynomial in range((1 << bits) + 1, 2 << bits, 2):
        powers = [1]
        while (power := min(2 * powers[-1], 2 * powers[-1] ^ polynomial)) != 1:
            powers.append(power)
        if len(powers) == (1 << bits) - 1:
            return tuple(powers)
    return ()  # for one rank


def _stragglar_rounds(k: int, late: int) -> int:
    return max(0, 2 * k - 4 + rounds_to_reach_all(k))


@_register(
    "stragglar",
    chunks=lambda k, late: max(1, k - 1),
    cost=Cost(
        _stragglar_rounds,
        traffic=lambda k, late: Fraction(_stragglar_rounds(k, late), max(1, k - 1)),
        reduced=lambda k, late: Fraction(max(0, 2 * k - 3), max(1, k - 1)),
    ),
    restriction=lambda k, late: needs_power(2, k) or _no_such_rank(k, late),
)
def stragglar_all_reduce(rank: int, world_size: int, late: int) -> Program:
    """StragglAR all-reduce: while a rank is late, the others reduce; then each in turn meets it.

    2k - 4 + lg k steps with 1/(k - 1) of the vector each, k a power of 2. The late rank takes part
    in the last k - 2 + lg k, which is (k - 2 + lg k)/(k - 1) n * beta from the moment at which it
    comes, step by step; a ring takes 2(k - 1)/k, and the bound is 1. The late rank is the last one;
    ``stragglar=0`` has another.

    First, a ring reduce-scatter of the others. In step t of the second part the late rank, number
    0, and the t-th other one, number x^t of the field of k numbers, exchange what they have of
    chunk t, and both reduce it. The others meet as far apart, by an exclusive or with x^t, and send
    the chunk of the lowest power of x in their number. Any lg k powers in a row make up all
    numbers, so that all ranks have chunk t lg k steps later.

    Source: A. Devraj et al., "Efficient AllReduce with stragglers", arXiv 2505.23523: the steps,
    who meets the late rank, and the number of steps. The field, in place of a search for pairs, is
    ours.

    >>> from ringcoll.schedules.algorithms import schedule_of
    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(schedule_of("all_reduce", "stragglar", 4)))
    step  rank 0      rank 1      rank 2      rank 3
       0  >1:2 +2:1   >2:0 +0:2   >0:1 +1:0   .
       1  >1:1 +2:0   >2:2 +0:1   >0:0 +1:2   .
       2  >3:0 +3:0!  .           .           >0:0 +0:0!
       3  >2:0        >3:1 +3:1!  <0:0        >1:1 +1:1!
       4  >1:0 <1:1   >0:1 <0:0   >3:2 +3:2!  >2:2 +2:2!
       5  <3:2        >2:1 <2:2   >1:2 <1:1   >0:2
    """
    others, bits = _others(late, world_size), rounds_to_reach_all(world_size)
    h, place, powers = len(others), rank - (rank > late), _powers(bits)
    places = {power: place for place, power in enumerate(powers)}
    here = 0 if rank == late else powers[place]

    def chunk(number: int, step: int) -> int:
        """The chunk that a number sends; below 0 if it sends none."""
        turned = powers[(places[number] - step + bits) % h] if number else 1 << bits
        lowest = (turned & -turned).bit_length() - 1
        return min(step - bits + lowest, h - 1)

    if rank == late:
        yield from (Step() for _ in range(h - 1))
    else:
        scattered = reduce_scatter_phase(place, h, lambda chunk, step: out(chunk), out(place))
        yield from renumber(unfinished(scattered), peer=others.__getitem__)
    for step in range(h + bits - 1):
        there = here ^ powers[step % h]
        peer = others[places[there]] if there else late
        if step < h and not (here and there):
            own = inp(step) if rank == late or h == 1 else out(step)
            reduces = recv_reduce(peer, out(step), own, received_left=rank == late, final=True)
            yield Step(send(peer, own), reduces)
            continue
        sent, received = chunk(here, step), chunk(there, step)
        yield Step(
            *([send(peer, out(sent))] if there and sent >= 0 else []),
            *([recv(peer, out(received))] if here and received >= 0 else []),
        )


def _r2ccl_traffic(k: int, slow: int) -> Fraction:
    """Two chunks a step in both rings, and where the rank after the slow one passes on a result."""
    passed_on = enumerate(sends for _, sends, _ in exchanges(1, k, k - 1))
    twice = sum(number + 2 < k for number, sends in passed_on if sends is not None)
    return Fraction(max(0, 5 * k - 7 + rounds_to_reach_all(k) + twice), 2 * k - 1)


@_register(
    "r2ccl",
    chunks=lambda k, slow: 2 * k - 1,
    cost=Cost(
        rounds=lambda k, slow: 3 * (k - 1) + rounds_to_reach_all(k),
        traffic=_r2ccl_traffic,
        reduced=lambda k, slow: Fraction(max(0, 3 * k - 4), 2 * k - 1),
    ),
    restriction=_no_such_rank,
)
def r2ccl_all_reduce(rank: int, world_size: int, slow: int) -> Program:
    """R2CCL all-reduce: half of the data by a ring of all ranks, half by one without the slow rank.

    3(k - 1) + ceil(lg k) steps. Of 2k - 1 chunks k go round all ranks and k - 1 round the others,
    both at once: the slow rank sends one chunk in the time in which the others send two, as half of
    the bandwidth allows, so that both rings take 4(k - 1)/(2k - 1) n * beta. Then the next rank
    sends the sums of the k - 1 chunks to the slow one, which adds its own data and broadcasts the
    results, a chunk a step, in 2(k - 1 + ceil(lg k))/(2k - 1) n * beta. Together that is 3 for
    large k, where a ring takes 4, and less than a ring takes from 7 ranks on. Any number of ranks.
    The slow rank is the last one; ``r2ccl=0`` has another.

    Source: W. Wang et al., "Reliable and resilient collective communication library for LLM
    training and serving", arXiv 2512.25059: two all-reduces at once, then a broadcast. The equal
    chunks and the circulant broadcast are ours.

    >>> from ringcoll.schedules.algorithms import schedule_of
    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(schedule_of("all_reduce", "r2ccl", 3)))
    step  rank 0                rank 1                rank 2
       0  >1:2 +2:1 >1:4 +1:3   >2:0 +0:2 >0:3 +0:4   >0:1 +1:0
       1  >1:1 +2:0! >1:3 <1:4  >2:2 +0:1! >0:4 <0:3  >0:0 +1:2!
       2  >1:0 <2:2             >2:1 <0:0             >0:2 <1:1
       3  >1:2 <2:1             >2:0 <0:2             >0:1 <1:0
       4  >2:3                  .                     +0:3!
       5  >2:4                  <2:3                  >1:3 +0:4!
       6  <2:4                  .                     >0:4
       7  <1:3                  >0:3 <2:4             >1:4
    """
    others, far = _others(slow, world_size), (rank - slow) % world_size
    rest = range(world_size, 2 * world_size - 1)  # the chunks that the slow rank joins late
    ring = ring_all_reduce(rank - (rank > slow), len(rest)) if far else iter(())
    without = renumber(unfinished(ring), peer=others.__getitem__, chunk=rest.__getitem__)
    yield from parallel(ring_all_reduce(rank, world_size), without)
    results = broadcast_phase(rank, world_size, slow, len(rest), out)
    results = chain([Step()], renumber(results, chunk=rest.__getitem__))
    sums: Iterable[Step] = ()
    if far == 0:
        joins = partial(recv_reduce, (rank + 1) % world_size, received_left=True, final=True)
        sums = (Step(joins(out(chunk), inp(chunk))) for chunk in rest)
    elif far == 1:
        sums = (Step(send(slow, (inp if world_size == 2 else out)(chunk))) for chunk in rest)
    yield from parallel(results, sums)
