"""The promise of each collective: where data are before it, and must be after it.

Data are counted in *blocks*. The collectives on a vector (all-reduce, broadcast, reduce, barrier)
have one block, the collectives on lists have a block for each rank, and all-to-all has a block for
each ordered pair, ``src * world_size + dst``. A schedule may cut each block into several chunks.

Sources: the MPI standard 4.1, chapter 6, for the meaning; nccl-tests,
doc/PERFORMANCE.md, for the factors of bus bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from fractions import Fraction

from ringcoll.errors import ScheduleError

LARGEST_WORLD = 1 << 16
"""Most ranks of a schedule, and of a topology: a typing error should not use all memory."""

_Blocks = Callable[[int, int, int], Sequence[int]]  # (rank, world_size, root) -> blocks
_Amounts = Callable[[int], tuple[Fraction, Fraction, Fraction]]  # world_size -> parts of the data
_Share = Callable[[int], Fraction]


class OperandOrder(IntEnum):
    """The order in which operands are reduced; a larger order keeps every smaller one."""

    ANY = 0
    """Any order: for operators that are commutative and associative."""
    RANK = 1
    """Operands stay in rank order, in any brackets: for operators that do not commute."""
    LEFT_TO_RIGHT = 2
    """``((x0 + x1) + x2) + ...``: for operators that are not associative, either."""
    AT_ONCE = 3
    """The same in a single reduction of all operands: no partial result is kept or sent."""

    def __str__(self) -> str:
        return (
            "any order",
            "rank order",
            "rank order, from left to right",
            "rank order, all operands at once",
        )[self]


def _part(each: int, more: int) -> _Share:
    """Each of k blocks ``each`` times, and ``more`` blocks, as a part of the whole data."""
    return lambda k: Fraction(each * k + more, k)


_NOTHING, _OWN, _ONCE = _part(0, 0), _part(0, 1), _part(1, 0)
_OTHERS, _OTHERS_TWICE = _part(1, -1), _part(2, -2)


def _least(sent: _Share, received: _Share, reduced: _Share = _NOTHING) -> _Amounts:
    """The amounts that the busiest rank has to send, receive and reduce; 0 on a single rank."""

    def amounts(world_size: int) -> tuple[Fraction, Fraction, Fraction]:
        if world_size == 1:
            return Fraction(0), Fraction(0), Fraction(0)
        return sent(world_size), received(world_size), reduced(world_size)

    return amounts


_UNKNOWN = _least(_NOTHING, _NOTHING)


@dataclass(frozen=True)
class Contract:
    """The promise of one collective, and all else that the library has to know of it.

    Parameters
    ----------
    collective
        Name of the collective.
    num_blocks
        Number of blocks, from the world size.
    inputs, outputs
        Blocks that a rank has in its input, and must have in its output; called
        with ``(rank, world_size, root)``.
    reduces
        Whether an output holds the contributions of all its ``contributors``, each
        exactly once, or the data of the block's one owner.
    rooted
        Whether one rank, the root, is special.
    in_place
        Whether a block that a rank has both as input and as output may lie in one
        place, in ``output = input`` or in a slice of it.
    common_lengths
        Whether every rank knows the length of every block.
    at_least_once
        A set contract: a contribution may arrive more than once (barrier).
    busbw_factor
        Bus bandwidth over algorithm bandwidth, from the world size.
    least
        Data that the busiest rank has to send, to receive and to reduce in any algorithm, as parts
        of the whole data, from the world size; by default no bound is known.
    contributors
        For a collective that reduces: how many ranks, from rank 0 on, contribute to the output of a
        rank; called with ``(rank, world_size)``. By default all do.
    phases
        For a collective that reduces: its parts, as (collective that only moves, whether
        backwards). Backwards, every message goes the other way, in the opposite order of steps.
    """

    collective: str
    num_blocks: Callable[[int], int]
    inputs: _Blocks
    outputs: _Blocks
    busbw_factor: Callable[[int], Fraction]
    reduces: bool = False
    rooted: bool = False
    in_place: bool = True
    common_lengths: bool = True
    at_least_once: bool = False
    least: _Amounts = _UNKNOWN
    contributors: Callable[[int, int], int] = lambda rank, world_size: world_size
    phases: tuple[tuple[str, bool], ...] = ()

    @property
    def is_prefix(self) -> bool:
        """Whether a rank gets the reduction of the ranks before it, with or without its own."""
        return self.contributors(0, 2) != 2

    @property
    def of_vector(self) -> bool:
        """Whether the data are one vector, of which ranks have no blocks of their own."""
        return self.num_blocks(2) == 1

    @property
    def made_of(self) -> tuple[tuple[str, bool], ...]:
        """The ``phases``; of a collective that only moves, itself. Nothing, if there are none."""
        return self.phases if self.reduces else ((self.collective, False),)

    def blocks_of_rank(self, world_size: int) -> int:
        """Blocks of the whole data: as many as rank 0, as the root, has in its input or output."""
        return max(len(blocks(0, world_size, 0)) for blocks in (self.inputs, self.outputs))

    @property
    def can_be_cut(self) -> bool:
        """Whether data can be cut into segments that all ranks know."""
        return self.common_lengths and not self.at_least_once

    def chunks_per_block(self, num_chunks: int, world_size: int) -> int:
        """Chunks that a schedule cuts each block into.

        Raises
        ------
        ScheduleError
            The chunks do not divide evenly among the blocks.
        """
        blocks = self.num_blocks(world_size)
        if num_chunks < 1 or num_chunks % blocks:
            raise ScheduleError(
                f"{self.collective} on {world_size} ranks has {blocks} blocks, "
                f"which {num_chunks} chunks do not divide evenly into"
            )
        return num_chunks // blocks

    def owner(self, block: int, world_size: int, root: int) -> int:
        """The rank whose input a block is, where nothing is reduced."""
        ranks = range(world_size)
        # Of the package's own collectives it is one of the first three.
        likely: Iterable[int] = (block, root, block // world_size, *ranks)
        return next(
            rank
            for rank in likely
            if rank in ranks and block in self.inputs(rank, world_size, root)
        )


def _vector(rank: int, world_size: int, root: int) -> Sequence[int]:
    return (0,)


def _mine(rank: int, world_size: int, root: int) -> Sequence[int]:
    return (rank,)


def _all(rank: int, world_size: int, root: int) -> Sequence[int]:
    return range(world_size)


def _at_root(blocks: _Blocks) -> _Blocks:
    return lambda rank, k, root: blocks(rank, k, root) if rank == root else ()


def _row(rank: int, world_size: int, root: int) -> Sequence[int]:
    return range(rank * world_size, (rank + 1) * world_size)


def _column(rank: int, world_size: int, root: int) -> Sequence[int]:
    return range(rank, world_size * world_size, world_size)


def _one_block(world_size: int) -> int:
    return 1


def _block_each(world_size: int) -> int:
    return world_size


_BACKWARDS, _FORWARDS = ("all_gather", True), ("all_gather", False)

CONTRACTS: dict[str, Contract] = {
    c.collective: c
    for c in (
        Contract(
            "all_reduce", _one_block, _vector, _vector, _OTHERS_TWICE, reduces=True,
            least=_least(_OTHERS_TWICE, _OTHERS_TWICE, _OTHERS), phases=(_BACKWARDS, _FORWARDS),
        ),
        Contract(
            "reduce_scatter", _block_each, _all, _mine, _OTHERS, reduces=True,
            least=_least(_OTHERS, _OTHERS, _OTHERS), phases=(_BACKWARDS,),
        ),
        Contract(
            "all_gather", _block_each, _mine, _all, _OTHERS,
            least=_least(_OTHERS, _OTHERS),
        ),
        Contract(
            "broadcast", _one_block, _at_root(_vector), _vector, _ONCE, rooted=True,
            least=_least(_ONCE, _ONCE),
        ),
        Contract(
            "reduce", _one_block, _vector, _at_root(_vector), _ONCE, reduces=True, rooted=True,
            least=_least(_ONCE, _ONCE, _OTHERS), phases=(("broadcast", True),),
        ),
        Contract(
            "gather", _block_each, _mine, _at_root(_all), _OTHERS, rooted=True,
            least=_least(_OWN, _OTHERS),
        ),
        Contract(
            "scatter", _block_each, _at_root(_all), _mine, _OTHERS, rooted=True,
            least=_least(_OTHERS, _OWN),
        ),
        Contract(
            "all_to_all", lambda world_size: world_size * world_size, _row, _column, _OTHERS,
            in_place=False, common_lengths=False, least=_least(_OTHERS, _OTHERS),
        ),
        Contract(
            "barrier", _one_block, _vector, _vector, _ONCE, reduces=True, at_least_once=True,
            least=_least(_ONCE, _ONCE, _OTHERS),
        ),
        Contract(
            "scan", _one_block, _vector, _vector, _ONCE, reduces=True,
            least=_least(_ONCE, _ONCE, _OTHERS), contributors=lambda rank, k: rank + 1,
        ),
        Contract(
            "exscan", _one_block, _vector, lambda rank, k, root: (0,) if rank else (), _ONCE,
            reduces=True, least=_least(_ONCE, _ONCE, _part(1, -2)),
            contributors=lambda rank, k: rank,
        ),
    )
}  # fmt: skip
"""One entry a collective. Sources of ``least``: see `ringcoll.schedules.cost.lower_bound`."""


def contract(collective: str) -> Contract:
    """Look up the contract of a collective.

    Raises
    ------
    ScheduleError
        There is no such collective; the message lists the known ones.
    """
    try:
        return CONTRACTS[collective]
    except KeyError:
        known = ", ".join(CONTRACTS)
        raise ScheduleError(f"unknown collective {collective!r}; known: {known}") from None


def balanced_share(numel: int, num_shares: int, index: int) -> tuple[int, int]:
    """Offset and length of one share of a balanced division; the first shares are longer.

    >>> [balanced_share(5, 3, index) for index in range(3)]
    [(0, 2), (2, 2), (4, 1)]
    """
    short, longer = divmod(numel, num_shares)
    return index * short + min(index, longer), short + (index < longer)
