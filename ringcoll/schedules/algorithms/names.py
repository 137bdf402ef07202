"""Algorithms by their names, those with signs as well, and schedules that may be run.

``ring+two_shot`` is a hierarchy, the innermost first. ``ring~0.3.1.2`` is a ring through the ranks
0, 3, 1, 2. Such algorithms have no entry in `ringcoll.schedules.algorithms.registry`.

After ``~`` stand the ranks at the places, in runs such as ``0-3.7-4``, because an algorithm sends
between neighbours in rank order, and ranks are numbered without regard to the network. The rank at
place p runs the program of rank p, with all peers and blocks mapped, at the same cost. Operands are
reduced in the order of places, so an operator that does not commute cannot use such an algorithm,
unless the verifier shows that the order is kept.

Tests prove the algorithms of the library. An algorithm of a user, and a schedule that a user
passes, are verified here before they run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

from ringcoll.errors import ArgumentError, UnknownAlgorithmError, UnsupportedWorldSizeError
from ringcoll.schedules.algorithms import registry
from ringcoll.schedules.algorithms.hierarchical import (
    Hosts,
    chunks_of,
    run_blocks_on,
    run_on,
    slots_of,
    slots_of_blocks,
)
from ringcoll.schedules.algorithms.registry import Algorithm, algorithms, mark_built_in
from ringcoll.schedules.ir import (
    CONTRACTS,
    LARGEST_WORLD,
    OperandOrder,
    Program,
    Recv,
    RecvReduce,
    Schedule,
    contract,
    renumber,
    verify,
)

_HIERARCHIES = {
    "all_reduce": (run_on, slots_of),
    "reduce_scatter": (run_blocks_on, slots_of_blocks),
    "all_gather": (run_blocks_on, slots_of_blocks),
}
_RUN = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?", re.ASCII)


def find(collective: str, name: str) -> Algorithm:
    """Look up an algorithm by its name or alias.

    Parameters
    ----------
    collective
        The collective.
    name
        The name of an entry; or ``name=value``, to choose the value of its `Parameter`; or
        names joined by ``+``, for a hierarchy; any of these with ``~`` and an order of the ranks
        after it.

    Raises
    ------
    UnknownAlgorithmError
        The collective has no such algorithm, and the message lists its algorithms; or the order is
        no order of ranks.
    """
    name, sign, order = name.partition("~")
    entry = (_hierarchy if "+" in name else registry.entry_of)(collective, name)
    return _placed(entry, order) if sign else entry


def named(name: str, collective: str | None = None) -> list[Algorithm]:
    """Look up a name in one collective, or in all; as many algorithms as there are.

    Examples
    --------
    >>> [entry.collective for entry in named("pairwise")], named("pairwise", "broadcast")
    (['reduce_scatter', 'all_to_all'], [])
    """
    entries = []
    for each in CONTRACTS if collective is None else (collective,):
        with suppress(UnknownAlgorithmError):
            entries.append(find(each, name))
    return entries


def required(collective: str, name: str | Schedule, world_size: int) -> str | Schedule:
    """Check that a collective has an algorithm for a number of ranks; return its name.

    Raises
    ------
    UnknownAlgorithmError, UnsupportedWorldSizeError
        The collective does not have the algorithm, or the schedule is for something else.
    """
    if isinstance(name, Schedule):
        if name.collective != collective:
            raise UnknownAlgorithmError(
                f"{name.algorithm} is a schedule for {name.collective}, not for {collective}"
            )
        if name.world_size != world_size:
            raise UnsupportedWorldSizeError(
                f"{name.algorithm} {collective} cannot run on {world_size} ranks: it is a schedule "
                f"for {name.world_size}"
            )
    elif name != "auto" and (reason := find(collective, name).restriction(world_size)):
        raise UnsupportedWorldSizeError(
            f"{name} {collective} cannot run on {world_size} ranks: {reason}"
        )
    return name


def where_possible(collective: str, name: str | Schedule, world_size: int) -> str | Schedule:
    """Name an algorithm, or return a schedule, if it is for the collective; otherwise ``"auto"``.

    Raises
    ------
    UnknownAlgorithmError, UnsupportedWorldSizeError
        No collective has the algorithm for so many ranks.
    """
    if isinstance(name, Schedule):
        required(name.collective, name, world_size)
        return name if name.collective == collective else "auto"
    if name == "auto":
        return name
    can_run = {entry.collective for entry in named(name) if not entry.restriction(world_size)}
    if not can_run:
        required("all_reduce", name, world_size)  # says why
    return name if collective in can_run else "auto"


def schedule_of(
    collective: str, name: str, world_size: int, root: int = 0, hosts: tuple[int, ...] | None = None
) -> Schedule:
    """Build, or take from a cache, the schedule of an algorithm; see `Algorithm.schedule`."""
    return _schedule(collective, name, world_size, root, hosts, registry.revision)


@lru_cache(maxsize=256)
def _schedule(
    collective: str,
    name: str,
    world_size: int,
    root: int,
    hosts: tuple[int, ...] | None,
    revision: int,
) -> Schedule:
    return find(collective, name).schedule(world_size, root, hosts)


# ---- Names with + --------------------------------------------------------------------------


def _hierarchy(collective: str, name: str) -> Algorithm:
    """The first of the names runs inside each host, the next across.

    Of three names the last two are a hierarchy of the hosts, in groups as of `rows_of`.
    """
    entries = [registry.entry_of(collective, level) for level in name.split("+")]
    if collective not in _HIERARCHIES:
        raise UnknownAlgorithmError(f"{collective} has no hierarchies, got {name!r}")
    return _hierarchy_of(*entries)


@lru_cache(maxsize=256)
def _hierarchy_of(inside: Algorithm, *further: Algorithm) -> Algorithm:
    across = _hierarchy_of(*further) if len(further) > 1 else further[0]
    run, slots = _HIERARCHIES[inside.collective]

    def program(rank: int, hosts: Hosts) -> Program:
        return run(rank, hosts, inside, across)

    program.__doc__ = f"Hierarchy: {inside.name} inside each host, {across.name} across."
    hierarchy = Algorithm(
        inside.collective,
        f"{inside.name}+{across.name}",
        program,
        cost=None,
        chunks=lambda hosts: chunks_of(hosts, inside, across),
        slots=lambda hosts: slots(hosts, inside, across),
        pipelined=inside.pipelined or across.pipelined,
        needs_hosts=True,
    )
    # A hierarchy with an algorithm of a user is not the library's own.
    return mark_built_in(hierarchy) if inside.built_in and across.built_in else hierarchy


# ---- Names with ~ --------------------------------------------------------------------------


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


def _order_in(text: str) -> tuple[int, ...]:
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
def _placed(entry: Algorithm, text: str) -> Algorithm:
    """Let an algorithm run with its ranks in an order.

    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(find("all_gather", "ring~0.2.1").schedule(3)))
    step  rank 0        rank 1        rank 2
       0  =0 >2:0 <1:1  =1 >0:1 <2:2  =2 >1:2 <0:0
       1  >2:1 <1:2     >0:2 <2:0     >1:0 <0:1
    """
    if contract(entry.collective).is_prefix:
        raise UnknownAlgorithmError(f"{entry.collective} is about the order of ranks, got ~{text}")
    order = _order_in(text)
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

    in_order = replace(
        entry,
        name=f"{entry.name}~{order_in_text(order)}",
        program=program,
        chunks=lambda world: entry.chunks(of_places(world)),
        slots=lambda world: entry.slots(of_places(world)),
        cost=None,
        restriction=restriction,
        order=OperandOrder.ANY,
        across_hosts_from=None,
        parameter=None,
    )
    return mark_built_in(in_order) if entry.built_in else in_order


def _chunks(entry: Algorithm, world: Any, order: Sequence[int]) -> Callable[[int], int]:
    """The chunk of the ranks that stand in the places of another chunk's ranks."""
    k = len(order)
    blocks = contract(entry.collective).num_blocks(k)
    each = entry.chunks(world) // blocks

    def of_ranks(block: int, blocks: int) -> int:
        """A block's number has a digit for each rank that the block is of: none, one, or two."""
        return of_ranks(block // k, blocks // k) * k + order[block % k] if blocks > 1 else 0

    return lambda chunk: of_ranks(chunk // each, blocks) * each + chunk % each


# ---- Schedules that may be run -------------------------------------------------------------

_REASONS = {
    OperandOrder.RANK: (
        "is not declared commutative",
        "does not keep operands in rank order "
        "(`received_left` of a recv_reduce says which operand is left)",
    ),
    OperandOrder.LEFT_TO_RIGHT: (
        "is not associative",
        "does not reduce from left to right in rank order",
    ),
    OperandOrder.AT_ONCE: (
        "takes the operands of all ranks at once",
        "reduces some of them first, or not in rank order",
    ),
}
"""Why an operator needs an order of operands, and what an algorithm lacks; in words."""


def proved_schedule(
    collective: str,
    algorithm: Algorithm | Schedule,
    world_size: int,
    root: int,
    hosts: tuple[int, ...] | None,
    *,
    order: OperandOrder,
    operator: str,
    rank: int,
) -> Schedule:
    """Fetch a schedule that may be run with an operator.

    Parameters
    ----------
    collective, algorithm, world_size, root
        The call.
    hosts
        ``Transport.hosts`` of the group, for an algorithm that needs them.
    order
        The order of operands that the operator needs.
    operator, rank
        Name of the operator and rank of the caller, for error messages.

    Raises
    ------
    ScheduleError
        The algorithm does not run on so many ranks, or its schedule is wrong.
    ArgumentError
        The algorithm does not keep the order of operands, or the schedule is for another
        collective, world size or root.
    """
    if isinstance(algorithm, Schedule):
        schedule = algorithm
        call = (collective, world_size, root)
        own = (schedule.collective, schedule.world_size, schedule.root)
        if own != call:
            words = "collective {}, world_size {}, root {}"
            message = "the schedule is for another call"
            raise ArgumentError(message, "algorithm", words.format(*call), words.format(*own), rank)
        order_of(schedule)
    else:
        schedule = _schedule_for(algorithm, world_size, root, hosts)
        if not algorithm.built_in:
            order_of(schedule)
    if order is OperandOrder.ANY or order_of(schedule) >= order:
        return schedule
    enough = [
        entry.name
        for entry in algorithms(collective, world_size)
        if order_of(_schedule_for(entry, world_size, root, hosts)) >= order
    ]
    is_so, does_not = _REASONS[order]
    message = f"{operator} {is_so}, and {schedule.algorithm} {does_not}"
    expected = ", ".join([*enough, "auto"])
    raise ArgumentError(message, "algorithm", expected, schedule.algorithm, rank)


def _schedule_for(
    entry: Algorithm, world_size: int, root: int, hosts: tuple[int, ...] | None
) -> Schedule:
    """The schedule of an algorithm; the hosts count only if the algorithm needs them."""
    needed = hosts if entry.needs_hosts else None
    return schedule_of(entry.collective, entry.name, world_size, root, needed)


@lru_cache(maxsize=256)
def order_of(schedule: Schedule) -> OperandOrder:
    """Verify a schedule; return the order of operands that it keeps.

    Raises
    ------
    VerificationError
        The schedule is wrong.
    """
    proof = verify(schedule)
    if proof.left_fold:
        return OperandOrder.AT_ONCE if proof.at_once else OperandOrder.LEFT_TO_RIGHT
    return OperandOrder.RANK if proof.rank_order else OperandOrder.ANY


@lru_cache(maxsize=256)
def passes_on_blocks(schedule: Schedule) -> bool:
    """Whether a rank receives blocks that are neither in its input nor in its output.

    >>> [passes_on_blocks(schedule_of("all_to_all", name, 4)) for name in ("pairwise", "bruck")]
    [False, True]
    """
    rules, world_size, root = contract(schedule.collective), schedule.world_size, schedule.root
    per_block = rules.chunks_per_block(schedule.num_chunks, world_size)
    for rank in range(world_size):
        own = {*rules.inputs(rank, world_size, root), *rules.outputs(rank, world_size, root)}
        for step in schedule.program(rank):
            for operation in step:
                if isinstance(operation, Recv | RecvReduce):
                    blocks = (ref.chunk // per_block for ref in operation.writes)
                    if not own.issuperset(blocks):
                        return True
    return False
