"""Schedules that may be run: proved, and in the order of operands that an operator needs.

Tests prove the algorithms of the library. An algorithm of a user, and a schedule that a user
passes, are verified here before they run.
"""

from __future__ import annotations

from functools import lru_cache

from ringcoll.algorithms.entry import Algorithm
from ringcoll.algorithms.names import schedule_of
from ringcoll.algorithms.registry import algorithms
from ringcoll.errors import ArgumentError
from ringcoll.schedule import OperandOrder, Recv, RecvReduce, Schedule, contract, verify

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
            raise ArgumentError(
                "the schedule is for another call",
                rank=rank,
                argument="algorithm",
                expected=words.format(*call),
                got=words.format(*own),
            )
        order_of(schedule)
    else:
        schedule = _schedule(algorithm, world_size, root, hosts)
        if not algorithm.built_in:
            order_of(schedule)
    if order is OperandOrder.ANY or order_of(schedule) >= order:
        return schedule
    enough = [
        entry.name
        for entry in algorithms(collective, world_size)
        if order_of(_schedule(entry, world_size, root, hosts)) >= order
    ]
    is_so, does_not = _REASONS[order]
    raise ArgumentError(
        f"{operator} {is_so}, and {schedule.algorithm} {does_not}",
        rank=rank,
        argument="algorithm",
        expected=", ".join([*enough, "auto"]),
        got=schedule.algorithm,
    )


def _schedule(
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
                arrives = isinstance(operation, Recv | RecvReduce)
                if arrives and not own.issuperset(
                    ref.chunk // per_block for ref in operation.writes
                ):
                    return True
    return False
