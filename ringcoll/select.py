"""Which algorithm runs, and in how many segments.

Whatever is chosen here must be chosen alike on every rank, so it depends only on
values that the collective's contract makes equal everywhere.
"""

from __future__ import annotations

import contextlib
import os
from functools import lru_cache

from ringcoll.algorithms import Algorithm, algorithms, find, schedule_of
from ringcoll.errors import ArgumentError, ScheduleError, UnsupportedWorldSizeError
from ringcoll.reduction import Operator
from ringcoll.schedule import Schedule
from ringcoll.verify import verify

__all__ = [
    "COLLECTIVES",
    "checked_schedule",
    "choose",
    "required",
    "segment_count",
    "transport",
    "where_possible",
]

_TRANSPORTS = ("gloo", "ucx")
_TRANSPORT_VARIABLE = "RINGCOLL_TRANSPORT"

# For each collective: up to so many bytes the first algorithm, beyond them the second.
# Measured with `ringcoll compare` over gloo, 2 and 4 ranks on 2 cores: there the tree,
# in which few ranks are busy at once, was the fastest all-reduce up to 1 MiB, the ring
# from 16 MiB on; at 4 MiB runs disagreed.
_RULES: dict[str, tuple[int, str, str]] = {
    "all_reduce": (4 << 20, "binomial_tree", "ring"),
    "reduce_scatter": (32 << 10, "direct", "ring"),
    "all_gather": (1 << 20, "bruck", "ring"),
    "broadcast": (1 << 20, "binomial_tree", "scatter_all_gather"),
    "reduce": (1 << 20, "binomial_tree", "reduce_scatter_gather"),
    "gather": (32 << 10, "binomial_tree", "linear"),
    "scatter": (32 << 10, "binomial_tree", "linear"),
    "all_to_all": (0, "pairwise", "pairwise"),
    "barrier": (0, "dissemination", "dissemination"),
}

# The same for operators whose operands must stay in rank order.
_RULES_IN_ORDER: dict[str, tuple[int, str, str]] = {
    "all_reduce": (4 << 20, "binomial_tree", "rabenseifner"),
    "reduce_scatter": (0, "direct", "direct"),
    "reduce": (0, "direct", "direct"),
}

# Segments of pipelined algorithms. Over gloo a message costs some 60 us and a
# byte some 0.5 ns, so that a segment should be well above 100 KiB; 1 MiB was the best
# of 256 KiB, 512 KiB and 1 MiB at 4 to 64 MiB.
_PIPELINED_SEGMENT_BYTES = 1 << 20


COLLECTIVES = tuple(_RULES)
"""All collectives."""


def transport(asked: str | None) -> str:
    """Name the transport of CPU tensors.

    Parameters
    ----------
    asked
        What the program asks for; the environment's ``RINGCOLL_TRANSPORT`` overrides it,
        and ``"gloo"`` is the default.

    Raises
    ------
    ArgumentError
        There is none of that name.
    """
    forced = os.environ.get(_TRANSPORT_VARIABLE)
    name = forced or asked or "gloo"
    if name not in _TRANSPORTS:
        raise ArgumentError(
            "no such transport",
            argument=_TRANSPORT_VARIABLE if forced else "transport",
            expected=" or ".join(_TRANSPORTS),
            got=name,
        )
    return name


def required(collective: str, algorithm: str, world_size: int) -> str:
    """Check that a collective has an algorithm of that name, for so many ranks.

    Raises
    ------
    UnknownAlgorithmError, UnsupportedWorldSizeError
        It has not.
    """
    if algorithm != "auto" and (reason := find(collective, algorithm).restriction(world_size)):
        raise UnsupportedWorldSizeError(
            f"{algorithm} {collective} cannot run on {world_size} ranks: {reason}"
        )
    return algorithm


def where_possible(collective: str, algorithm: str, world_size: int) -> str:
    """Name an algorithm if the collective has it, otherwise ``"auto"``.

    Raises
    ------
    UnknownAlgorithmError
        No collective has it for so many ranks.
    """
    found = {}
    for one in COLLECTIVES:
        with contextlib.suppress(ScheduleError):
            found[one] = required(one, algorithm, world_size)
    if not found:
        required("all_reduce", algorithm, world_size)  # says why
    return found.get(collective, "auto")


def choose(collective: str, nbytes: int, operator: Operator | None = None) -> str:
    """Name the algorithm that ``"auto"`` stands for.

    Parameters
    ----------
    collective
        The collective.
    nbytes
        Size of the whole data: the vector, or all blocks of a rank.
    operator
        The reduction operator, if there is one.
    """
    if operator is not None and not operator.associative:
        return "direct"
    rules = _RULES if operator is None or operator.commutative else _RULES_IN_ORDER
    limit, short, long = rules[collective]
    return short if nbytes <= limit else long


def checked_schedule(
    collective: str,
    algorithm: str | Schedule,
    world_size: int,
    root: int,
    operator: Operator | None,
    rank: int,
    hosts: tuple[int, ...] | None = None,
) -> Schedule:
    """Fetch a schedule that may be run with an operator.

    An algorithm that does not come with the library, or a schedule that was given
    as such, is verified first.

    Parameters
    ----------
    collective, algorithm, world_size, root, operator, rank
        Of the call.
    hosts
        ``Transport.hosts`` of the group, for an algorithm that needs them.

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
        schedule = _schedule(entry, world_size, root, hosts)
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
                and _keeps_order(_schedule(entry, world_size, root, hosts))[0]
            ),
            got=schedule.algorithm,
        )
    return schedule


def _schedule(
    entry: Algorithm, world_size: int, root: int, hosts: tuple[int, ...] | None
) -> Schedule:
    """An algorithm's schedule: one for all layouts, where it does not need to know."""
    needed = hosts if entry.needs_hosts else None
    return schedule_of(entry.collective, entry.name, world_size, root, needed)


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
