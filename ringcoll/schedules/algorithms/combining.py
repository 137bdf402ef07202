"""Message combining: the blocks of an all-to-all travel together, by way of other ranks.

Problem: in an all-to-all, k - 1 messages of one block each cost k - 1 latencies. Let a block go by
way of other ranks, in at most one *hop* a phase: all blocks of a rank with the same hop are one
message. Messages are fewer, and traffic is more: a block for each hop. A *way* is the hops of a
block, the same from every rank. Blocks have equal lengths, as a rank passes on blocks that are
neither from nor for itself::

    Bruck                +1 | +2 | +4 | ...         the bits of the distance
    Bruck, radix 3       +1 +2 | +3 +6 | +9 ...     its digits to base 3
    ReTri                +1 -1 | +3 -3 | +9 ...     digits 1, 0 and -1
    torus, rows of 4     +1 +2 +3 | +4 +8 ...       along the row, then along the column

Source: J. Bruck, C.-T. Ho, S. Kipnis, E. Upfal and D. Weathersby, "Efficient algorithms for
all-to-all communications in multiport message-passing systems", IEEE TPDS 8 (1997).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from functools import partial

from ringcoll.schedules.algorithms.hierarchical import rows_of
from ringcoll.schedules.algorithms.registry import Cost, Parameter, powers_below, register
from ringcoll.schedules.ir import Program, Ref, Step, copy, inp, out, recv, send, tmp

Way = tuple[int, ...]
"""The hop of a block in each phase; 0 where it stays."""


def _num_hops(way: Way) -> int:
    return len(way) - way.count(0)


_register = partial(register, "all_to_all", chunks=lambda k, *parameter: k * k, equal_blocks=True)


def all_to_all_by(
    rank: int, ways: Sequence[Way], go: Callable[[int, Iterable[int]], int], at_once: bool = False
) -> Program:
    """All-to-all in which the blocks of each rank go these ways.

    ``go`` says where hops lead to from a rank; a hop with the opposite sign leads back. Each
    message is a step, or with ``at_once`` all messages of a phase are.
    """
    world_size = len(ways)
    slots = {way: slot for slot, way in enumerate(w for w in ways if _num_hops(w) > 1)}

    def place(phase: int, way: Way) -> Ref:
        """Where the block lies that is on this rank before a phase of its way."""
        done, ahead = way[:phase], way[phase:]
        source = go(rank, [-hop for hop in reversed(done)])
        chunk = source * world_size + go(rank, ahead)
        if not any(done):
            return inp(chunk)
        return tmp(slots[way], chunk) if any(ahead) else out(chunk)

    own = rank * world_size + rank
    first = [copy(out(own), inp(own))]
    for phase in range(len(ways[0])):
        moving: dict[int, list[Way]] = {}
        for way in ways:
            moving.setdefault(way[phase], []).append(way)
        hops = sorted(moving.keys() - {0})
        for step in [hops] if at_once else [[hop] for hop in hops]:
            old, new = partial(place, phase), partial(place, phase + 1)
            sends = (send(go(rank, [hop]), *map(old, moving[hop])) for hop in step)
            receives = (recv(go(rank, [-hop]), *map(new, moving[hop])) for hop in step)
            yield Step(*first, *sends, *receives)
            first = []


def digits_of(distances: range, radix: int, least: int = 0) -> list[Way]:
    """The distances as sums of digits times powers of the radix; ``least`` is the least digit.

    >>> digits_of(range(5), 3), digits_of(range(-2, 3), 3, least=-1)
    ([(0, 0), (1, 0), (2, 0), (0, 3), (1, 3)], [(1, -3), (-1, 0), (0, 0), (1, 0), (-1, 3)])
    """

    def way(far: int) -> Iterator[int]:
        for power in powers_below(radix, len(distances)):
            digit = (far - least) % radix + least
            yield digit * power
            far = (far - digit) // radix

    return [tuple(way(far)) for far in distances]


def _bruck_rounds(k: int, radix: int) -> int:
    """The digits 1 to r - 1 at each power of the radix, as far as there are ranks."""
    return sum(min(radix - 1, (k - 1) // power) for power in powers_below(radix, k))


def _bruck_traffic(k: int, radix: int) -> Fraction:
    """The distances but those with a 0 at the power: the first ones of each period of the digit."""
    zeros = (k // (radix * p) * p + min(k % (radix * p), p) for p in powers_below(radix, k))
    return Fraction(sum(k - number for number in zeros), k)


@_register(
    "bruck",
    slots=lambda k, radix: k - 1 - _bruck_rounds(k, radix),
    cost=Cost(_bruck_rounds, _bruck_traffic),
    parameter=Parameter("radix", default=lambda k: 2, least=2),
)
def bruck_all_to_all(rank: int, world_size: int, radix: int) -> Program:
    """Bruck all-to-all: a block that has to go d ranks far goes by the bits of d.

    ceil(lg k) steps; about half of the blocks travel in each, so lg k / 2 times the input is sent.
    With ``bruck=4`` blocks go by digits to base 4. A radix of r has up to (r - 1) ceil(log_r k)
    steps, and fewer blocks are passed on; r = k is a pairwise exchange. Blocks of equal length
    only.

    >>> from ringcoll.schedules.algorithms import schedule_of
    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(schedule_of("all_to_all", "bruck", 3)))
    step  rank 0        rank 1        rank 2
       0  =0 >1:1 <2:6  =4 >2:5 <0:1  =8 >0:6 <1:5
       1  >2:2 <1:3     >0:3 <2:7     >1:7 <0:2
    """
    ways = digits_of(range(world_size), radix)
    return all_to_all_by(rank, ways, lambda place, hops: (place + sum(hops)) % world_size)


def _balanced(k: int) -> list[Way]:
    return digits_of(range(-((k - 1) // 2), k // 2 + 1), 3, least=-1)


@_register(
    "retri",
    slots=lambda k: sum(_num_hops(way) > 1 for way in _balanced(k)),
    cost=Cost(
        rounds=lambda k: sum(1 for _ in powers_below(3, k)),
        traffic=lambda k: Fraction(sum(map(_num_hops, _balanced(k))), k),
    ),
    second_choice=True,
)
def retri_all_to_all(rank: int, world_size: int) -> Program:
    """ReTri all-to-all: 1, 3, 9, ... ranks to both sides at once; a block goes by digits 1, 0, -1.

    ceil(log_3 k) steps, with a message to each side, for any number of ranks; for k = 3^m, 2m/3
    times the input is sent. Bruck's of radix 3 sends as much, up to twice as far. Blocks of equal
    length only.

    Source: A. Juerss and S. Schmid, "Revisiting Bruck: phase-efficient all-to-all communication in
    reconfigurable networks", arXiv 2605.26930.

    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(retri_all_to_all, 3))
    step  rank 0                  rank 1                  rank 2
       0  =0 >2:2 >1:1 <1:3 <2:6  =4 >0:3 >2:5 <2:7 <0:1  =8 >1:7 >0:6 <0:2 <1:5
    """
    ways = _balanced(world_size)
    return all_to_all_by(rank, ways, lambda at, hops: (at + sum(hops)) % world_size, at_once=True)


@_register(
    "torus",
    slots=lambda k, columns: (columns - 1) * (k // columns - 1),
    cost=Cost(
        rounds=lambda k, columns: columns + k // columns - 2,
        traffic=lambda k, columns: 2 - Fraction(1, columns) - Fraction(columns, k),
    ),
    restriction=lambda k, columns: (
        f"{columns} has to divide the number of ranks" if k % columns else None
    ),
    second_choice=True,
    parameter=Parameter("ranks in a row", default=lambda k: rows_of(k).count(0), least=1),
)
def torus_all_to_all(rank: int, world_size: int, columns: int) -> Program:
    """Torus all-to-all: along the rows of a torus, then its columns, a pairwise exchange each.

    On a rows of b ranks a + b - 2 steps, and (a - 1)/a + (b - 1)/b times the input is sent. The
    torus is as square as can be; ``torus=8`` has rows of 8, and messages of 8 blocks between rows.
    Blocks of equal length only.

    Source: J. L. Träff, "Effective MPI: user-defined datatypes and Cartesian communicators for
    zero-copy all-to-all communication in multidimensional tori", arXiv 2605.29970.

    >>> from ringcoll.schedules.algorithms import schedule_of
    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(schedule_of("all_to_all", "torus", 4)))
    step  rank 0            rank 1            rank 2                rank 3
       0  =0 >1:1,3 <1:4,6  =5 >0:4,6 <0:1,3  =10 >3:11,9 <3:14,12  =15 >2:14,12 <2:11,9
       1  >2:2,6 <2:8,12    >3:7,3 <3:13,9    >0:8,12 <0:2,6        >1:13,9 <1:7,3
    """

    def go(place: int, hops: Iterable[int]) -> int:
        for hop in hops:
            place += (place + hop) % columns - place % columns if hop % columns else hop
        return place % world_size

    ways = [(far % columns, far - far % columns) for far in range(world_size)]
    return all_to_all_by(rank, ways, go)
