"""Algorithms whose ranks stand in another order: ``ring~0.3.1.2`` is a ring through the ranks 0, 3, 1, 2.

Problem: an algorithm sends between neighbours in rank order, and ranks are numbered without regard to the
network. The ranks at the places stand after ``~``, in runs such as ``0-3.7-4``. The rank at place p then runs
the program of rank p, with all peers and blocks mapped, at the same cost. Operands are reduced in the order of
places, so an operator that does not commute cannot use such an algorithm, unless the verifier shows that the
order is kept.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

from ringcoll.algorithms.entry import Algorithm, mark_built_in
from ringcoll.errors import UnknownAlgorithmError
from ringcoll.schedule import LARGEST_WORLD, OperandOrder, Program, contract, renumber

SIGN = "~"
"""Sign between the name of an algorithm and the order of its ranks."""

_RUN = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?", re.ASCII)


def order_in_text(order: Sequence[int]) -> str:
    """Write an order as names have it.

    >>> order_in_text([0, 1, 2, 3, 7, 6, 5, 9])
    '0-3.7-5.9'
    >>> order_in_text([0, 2, 1])
    '0.2.1'
    """
    runs: list[list[int]] = []
    for before, rank in pairwise([-2, *order]):
        if abs(rank - before) != 1:
            runs.append([])
        runs[-1].append(rank)  # no run turns round, as an order has each rank once
    return ".".join(
        f"{run[0]}-{run[-1]}" if len(run) > 2 else ".".join(map(str, run)) for run in runs
    )


def _order_of(text: str) -> tuple[int, ...]:
    order: list[int] = []
    for run in text.split("."):
        match = _RUN.fullmatch(run)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, LARGEST_WORLD)
        if abs(last - first) + len(order) >= LARGEST_WORLD:
            raise UnknownAlgorithmError(
                f"{run!r} is no rank, and no run of ranks such as 0-3, in {text!r}"
            )
        order += range(first, last + 1) if last >= first else range(first, last - 1, -1)
    if sorted(order) != [*range(len(order))]:
        raise UnknownAlgorithmError(
            f"an order names each rank once, from 0 to {len(order) - 1}, got {text!r}"
        )
    return tuple(order)


@lru_cache(maxsize=256)
def placed(entry: Algorithm, text: str) -> Algorithm:
    """Let an algorithm run with its ranks in an order.

    Raises
    ------
    UnknownAlgorithmError
        The text is no order of ranks, or the collective is a prefix reduction.

    Examples
    --------
    >>> from ringcoll.algorithms import find
    >>> from ringcoll.schedule import grid
    >>> print(grid(find("all_gather", "ring~0.2.1").schedule(3)))
    step  rank 0        rank 1        rank 2
       0  =0 >2:0 <1:1  =1 >0:1 <2:2  =2 >1:2 <0:0
       1  >2:1 <1:2     >0:2 <2:0     >1:0 <0:1
    """
    if contract(entry.collective).is_prefix:
        raise UnknownAlgorithmError(f"{entry.collective} is about the order of ranks, got ~{text}")
    order = _order_of(text)
    world_size = len(order)
    place = {rank: number for number, rank in enumerate(order)}

    def of_places(world: Any) -> Any:
        """The hosts of the ranks at the places, if the algorithm needs them."""
        return tuple(world[rank] for rank in order) if entry.needs_hosts else world

    def program(rank: int, world: Any, *root: int) -> Program:
        world = of_places(world)
        steps = entry.program(place[rank], world, *map(place.__getitem__, root))
        yield from renumber(steps, peer=order.__getitem__, chunk=_chunks(entry, world, order))

    program.__doc__ = (
        f"{entry.summary.rstrip('.')}, through the ranks {', '.join(map(str, order))}."
    )

    def restriction(ranks: int) -> str | None:
        return entry.restriction(ranks) if ranks == world_size else f"its order has {world_size}"

    result = replace(
        entry,
        name=f"{entry.name}{SIGN}{order_in_text(order)}",
        program=program,
        chunks=lambda world: entry.chunks(of_places(world)),
        slots=lambda world: entry.slots(of_places(world)),
        cost=None,
        restriction=restriction,
        order=OperandOrder.ANY,
        across_hosts_from=None,
        parameter=None,
    )
    return mark_built_in(result) if entry.built_in else result


def _chunks(entry: Algorithm, world: Any, order: Sequence[int]) -> Callable[[int], int]:
    """The chunk of the ranks that stand in the places of another chunk's ranks."""
    k = len(order)
    blocks = contract(entry.collective).num_blocks(k)
    each = entry.chunks(world) // blocks

    def of_ranks(block: int, blocks: int) -> int:
        """The number of a block has a digit for each rank that the block is of: none, one, or two."""
        return of_ranks(block // k, blocks // k) * k + order[block % k] if blocks > 1 else 0

    return lambda chunk: of_ranks(chunk // each, blocks) * each + chunk % each
