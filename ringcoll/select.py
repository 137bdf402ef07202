"""Which algorithm runs, and in how many segments.

Whatever is chosen here must be chosen alike on every rank, so it depends only on
values that the collective's contract makes equal everywhere.
"""

from __future__ import annotations

from functools import lru_cache

from ringcoll.algorithms import Algorithm, algorithms, find, schedule_of
from ringcoll.errors import ArgumentError
from ringcoll.reduction import Operator
from ringcoll.schedule import Schedule
from ringcoll.verify import verify

__all__ = ["checked_schedule", "choose", "segment_count"]

# Up to this many bytes one round counts more than traffic. Measured with
# `ringcoll compare` over gloo on 2 cores: see benchmarks/README.md.
_SHORT = 32 << 10
_MEDIUM = 256 << 10

# Segments of pipelined algorithms. Over gloo a message costs some 60 us and a
# byte some 0.5 ns, so that a segment should be well above 100 KiB.
_PIPELINED_SEGMENT_BYTES = 1 << 20


def choose(
    collective: str,
    nbytes: int,
    world_size: int,
    *,
    operator: Operator | None = None,
    equal_blocks: bool = True,
) -> str:
    """Name the algorithm that ``"auto"`` stands for.

    Parameters
    ----------
    collective
        The collective.
    nbytes
        Size of the whole data: the vector, or all blocks of a rank.
    world_size
        Number of ranks.
    operator
        The reduction operator, if there is one.
    equal_blocks
        Whether all blocks are known to have the same length.
    """
    ordered = operator is not None and not (operator.commutative and operator.associative)
    if ordered and operator is not None:
        return _choose_ordered(collective, nbytes, operator)
    match collective:
        case "all_reduce":
            if nbytes <= _SHORT:
                return "direct" if world_size == 2 else "recursive_doubling"
            return "ring" if nbytes > _MEDIUM else "rabenseifner"
        case "reduce_scatter":
            return "direct" if nbytes <= _SHORT else "ring"
        case "all_gather":
            return "bruck" if nbytes <= _MEDIUM else "ring"
        case "broadcast":
            return "binomial_tree" if nbytes <= _MEDIUM else "scatter_all_gather"
        case "reduce":
            return "binomial_tree" if nbytes <= _MEDIUM else "reduce_scatter_gather"
        case "gather" | "scatter":
            return "binomial_tree" if nbytes <= _SHORT else "linear"
        case _:
            return next(algorithms(collective)).name if collective == "barrier" else "pairwise"


def _choose_ordered(collective: str, nbytes: int, operator: Operator) -> str:
    if collective == "all_reduce" and operator.associative:
        return "recursive_doubling" if nbytes <= _SHORT else "rabenseifner"
    return "direct"


def checked_schedule(
    collective: str,
    algorithm: str | Schedule,
    world_size: int,
    root: int,
    operator: Operator | None,
    rank: int,
) -> Schedule:
    """Fetch a schedule that may be run with an operator.

    An algorithm that does not come with the library, or a schedule that was given
    as such, is verified first.

    Raises
    ------
    ScheduleError
        Unknown algorithm, unsupported world size, or a schedule that is wrong.
    ArgumentError
        The algorithm does not keep the order of operands that the operator needs,
        or the schedule is for another collective, world size or root.
    """
    if isinstance(algorithm, Schedule):
        schedule = algorithm
        fits = (collective, world_size, root)
        given = (schedule.collective, schedule.world_size, schedule.root)
        if given != fits:
            raise ArgumentError(
                "the schedule is for another call",
                rank=rank,
                argument="algorithm",
                expected="collective {}, world_size {}, root {}".format(*fits),
                got="collective {}, world_size {}, root {}".format(*given),
            )
        _keeps_order(schedule)
    else:
        entry = find(collective, algorithm)
        schedule = schedule_of(collective, algorithm, world_size, root)
        if not _ships_with_the_library(entry):
            _keeps_order(schedule)
    if operator is None or (operator.commutative and operator.associative):
        return schedule
    in_rank_order, from_left_to_right = _keeps_order(schedule)
    if not operator.associative and not from_left_to_right:
        raise ArgumentError(
            f"{operator} is not associative, and {schedule.algorithm} does not reduce "
            "from left to right in rank order",
            rank=rank,
            argument="algorithm",
            expected="direct, or auto",
            got=schedule.algorithm,
        )
    if not in_rank_order:
        raise ArgumentError(
            f"{operator} is not declared commutative, and {schedule.algorithm} does not "
            "keep operands in rank order",
            rank=rank,
            argument="algorithm",
            expected=", ".join(
                entry.name
                for entry in algorithms(collective)
                if not entry.restriction(world_size)
                and _keeps_order(schedule_of(collective, entry.name, world_size, root))[0]
            ),
            got=schedule.algorithm,
        )
    return schedule


def segment_count(
    schedule: Schedule, longest_nbytes: int, segment_bytes: int | None, longest_numel: int
) -> int:
    """Number of segments, from the longest chunk and the wanted size of a segment."""
    if segment_bytes is None:
        if not _is_pipelined(schedule):
            return 1
        segment_bytes = _PIPELINED_SEGMENT_BYTES
    wanted = -(-longest_nbytes // max(1, segment_bytes))
    return max(1, min(wanted, longest_numel))


def _is_pipelined(schedule: Schedule) -> bool:
    return any(
        entry.pipelined
        for entry in algorithms(schedule.collective)
        if entry.name == schedule.algorithm
    )


def _ships_with_the_library(entry: Algorithm) -> bool:
    return entry.program.__module__.startswith("ringcoll.algorithms.")


@lru_cache(maxsize=256)
def _keeps_order(schedule: Schedule) -> tuple[bool, bool]:
    """Verify; and say whether operands stay in rank order, and reduce from left to right."""
    proof = verify(schedule)
    return proof.rank_order, proof.left_fold
