"""Which algorithm runs, and in how many segments.

Whatever is chosen here must be chosen alike on every rank, so it depends only on
values that the collective's contract makes equal everywhere, and on the group's table,
which rank 0 has published (`ringcoll.choice.table`).

Only this module reads the library's variables of the environment.
"""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ringcoll.algorithms import Algorithm, algorithms, find, generation, schedule_of
from ringcoll.choice.predict import Prediction, comes_with_the_library, predict, predictions
from ringcoll.choice.rules import AUTO, Rule, parse_rules
from ringcoll.choice.table import BUILT_IN, Table, built_in
from ringcoll.contracts import CONTRACTS, contract
from ringcoll.errors import ArgumentError, RulesError, ScheduleError, UnsupportedWorldSizeError
from ringcoll.reduction import Operator
from ringcoll.schedule import Schedule
from ringcoll.verify import verify

__all__ = [
    "ALGORITHM_VARIABLE",
    "COLLECTIVES",
    "CUDA_TRANSPORTS",
    "CUDA_TRANSPORT_VARIABLE",
    "PIPELINED_SEGMENT_BYTES",
    "TRANSPORTS",
    "TRANSPORT_VARIABLE",
    "Choice",
    "checked_schedule",
    "choose",
    "cuda_transport",
    "forced_rules",
    "forced_text",
    "log_as_asked",
    "ranks_may_share_gpus",
    "reduction",
    "required",
    "segment_count",
    "transport",
    "tuning_file",
    "where_possible",
    "without_tuning",
]

TRANSPORTS = ("gloo", "ucx", "mpi")
"""Transports of CPU tensors."""
CUDA_TRANSPORTS = ("nccl", "ucx", "gloo", "mpi")
"""Transports of CUDA tensors."""
TRANSPORT_VARIABLE = "RINGCOLL_TRANSPORT"
"""The variable that overrides what the program asks for."""
CUDA_TRANSPORT_VARIABLE = "RINGCOLL_CUDA_TRANSPORT"
"""The same for CUDA tensors."""
ALGORITHM_VARIABLE = "RINGCOLL_ALGORITHM"
"""The variable that forces algorithms."""
_TUNING_VARIABLE = "RINGCOLL_TUNING"
_REDUCTION_VARIABLE = "RINGCOLL_REDUCTION"
_DEBUG_VARIABLE = "RINGCOLL_DEBUG"

# Algorithms that keep operands in rank order, for every number of ranks and every root:
# `tests/inprocess/test_choice.py` proves it. What is run is proved again, by
# `checked_schedule`.
_IN_ORDER = {
    "all_reduce": ("binary_tree", "binomial_tree", "direct", "rabenseifner", "recursive_doubling"),
    "reduce_scatter": ("direct",),
    "reduce": ("direct",),
}

# Segments of pipelined algorithms that are asked for by name. Over gloo a message costs
# some 60 us and a byte some 0.5 ns, so that a segment should be well above 100 KiB; 1 MiB
# was the best of 256 KiB, 512 KiB and 1 MiB at 4 to 64 MiB.
PIPELINED_SEGMENT_BYTES = 1 << 20
"""Size of the segments of a pipelined algorithm, unless one is given."""


COLLECTIVES = tuple(CONTRACTS)
"""All collectives."""

_log = logging.getLogger("ringcoll")


def transport(asked: str | None, rank: int | None = None) -> str:
    """Name the transport of CPU tensors.

    Parameters
    ----------
    asked
        What the program asks for; the environment's ``RINGCOLL_TRANSPORT`` overrides it,
        and ``"gloo"`` is the default. ``"auto"`` is UCX where it is installed.
    rank
        For the error message.

    Raises
    ------
    ArgumentError
        There is none of that name.
    """
    asked = "gloo" if asked is None else asked
    return _named(asked, TRANSPORTS, "transport", TRANSPORT_VARIABLE, rank)


def cuda_transport(asked: str | None, rank: int | None = None) -> str:
    """Name the transport of CUDA tensors.

    Parameters
    ----------
    asked
        What the program asks for; the environment's ``RINGCOLL_CUDA_TRANSPORT`` overrides
        it, and ``"auto"`` is the default: NCCL where torch has it, otherwise UCX where it
        is installed, otherwise gloo.
    rank
        For the error message.

    Raises
    ------
    ArgumentError
        There is none of that name.
    """
    asked = "auto" if asked is None else asked
    return _named(asked, CUDA_TRANSPORTS, "cuda_transport", CUDA_TRANSPORT_VARIABLE, rank)


def _named(
    asked: str, known: tuple[str, ...], argument: str, variable: str, rank: int | None
) -> str:
    """What the environment says, or else the program; both have to be names."""
    forced = os.environ.get(variable) or asked
    for what, name in ((argument, asked), (variable, forced)):
        if name not in ("auto", *known):
            raise ArgumentError(
                "no such transport",
                rank=rank,
                argument=what,
                expected=f"one of {', '.join(('auto', *known))}",
                got=name,
            )
    return forced


def ranks_may_share_gpus(nccl_version: tuple[int, ...]) -> bool:
    """Whether NCCL connects ranks that share a GPU: since 2.30, if a variable of its own says so."""
    return nccl_version >= (2, 30) and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"


def reduction() -> str:
    """What is to reduce CUDA tensors: ``"cupy"``, ``"torch"``, or ``"auto"``.

    Raises
    ------
    ArgumentError
        The environment's ``RINGCOLL_REDUCTION`` is none of these.
    """
    name = os.environ.get(_REDUCTION_VARIABLE, "") or "auto"
    if name not in ("auto", "cupy", "torch"):
        raise ArgumentError(
            "no such way to reduce",
            argument=_REDUCTION_VARIABLE,
            expected="one of auto, cupy, torch",
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


def forced_text() -> str:
    """What this process's ``RINGCOLL_ALGORITHM`` says, or nothing."""
    return os.environ.get(ALGORITHM_VARIABLE, "").strip()


def forced_rules(text: str) -> tuple[Rule, ...]:
    """Read what ``RINGCOLL_ALGORITHM`` says.

    Raises
    ------
    RulesError
        These are no rules.
    """
    try:
        return parse_rules(text)
    except RulesError as error:
        raise RulesError(
            error.message,
            text=error.text,
            start=error.start,
            length=error.length,
            source=ALGORITHM_VARIABLE,
        ) from error


def tuning_file() -> tuple[Path | None, bool]:
    """Where the measurements of ``ringcoll tune`` are, and whether that was asked for.

    ``RINGCOLL_TUNING`` names the file, and ``off`` is none. By default it is in the
    user's cache.
    """
    asked = os.environ.get(_TUNING_VARIABLE, "")
    if asked:
        return (None if asked == "off" else Path(asked).expanduser()), True
    cache = os.environ.get("XDG_CACHE_HOME", "")  # to be ignored unless absolute
    if not cache.startswith("/"):
        try:
            cache = str(Path.home() / ".cache")
        except RuntimeError:  # a user without a home
            return None, False
    return Path(cache) / "ringcoll" / "tuning.json", False


def without_tuning() -> None:
    """From now on, go by no file and no forced rules in this process: it makes them."""
    os.environ[_TUNING_VARIABLE] = "off"
    os.environ.pop(ALGORITHM_VARIABLE, None)


def log_as_asked() -> None:
    """Set up the log ``ringcoll`` as ``RINGCOLL_DEBUG`` says: ``info`` or ``debug``."""
    asked = os.environ.get(_DEBUG_VARIABLE, "").lower()
    if not asked:
        return
    if asked not in ("info", "debug"):  # no reason to stop
        _log.warning("%s is %r, and not info or debug", _DEBUG_VARIABLE, asked)
        return
    _log.setLevel(asked.upper())
    if not _log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("ringcoll[%(process)d] %(message)s"))
        _log.addHandler(handler)


@dataclass(frozen=True, slots=True)
class Choice:
    """What ``algorithm="auto"`` stands for in one call.

    Parameters
    ----------
    collective, nbytes, world_size
        The call.
    algorithm
        The algorithm that runs.
    segment_bytes
        Size of its segments; ``None`` where it has none.
    reason
        Why, in words.
    predictions
        What each algorithm that may run is predicted to take, the fastest first.
    table
        What the choice rests on.
    """

    collective: str
    nbytes: int
    world_size: int
    algorithm: str
    segment_bytes: int | None
    reason: str
    predictions: tuple[Prediction, ...]
    table: Table

    @property
    def predicted(self) -> Prediction | None:
        """The prediction for what was chosen, if there is one."""
        return next((one for one in self.predictions if one.algorithm == self.algorithm), None)


def choose(
    collective: str,
    nbytes: int,
    world_size: int,
    operator: Operator | None = None,
    table: Table | None = None,
) -> Choice:
    """Choose the algorithm that ``"auto"`` stands for; the same on every rank.

    Rules come first: those that were forced, then those that were measured, or are built
    in. Where none matches, it is the algorithm with the least predicted time.

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
    table
        What the group goes by; without one, what is built in.

    Raises
    ------
    ScheduleError
        There is no such collective.
    """
    order = _ANY
    if operator is not None and contract(collective).reduces:
        order = _ANY if operator.commutative else _RANKS
        order = order if operator.associative else _LEFT
    if table is None:
        table = _default_table(world_size)
    return _choose(collective, nbytes, world_size, order, table, generation())


_ANY, _RANKS, _LEFT = "any", "rank order", "left to right"  # in which operands are reduced


@lru_cache(maxsize=64)
def _default_table(world_size: int) -> Table:
    return built_in(TRANSPORTS[0], world_size)


@lru_cache(maxsize=4096)
def _choose(
    collective: str, nbytes: int, world_size: int, order: str, table: Table, generation: int
) -> Choice:
    found = predictions(collective, nbytes, world_size, table.parameters)
    found = tuple(one for one in found if _keeps(collective, one.algorithm, order))
    algorithm, segment_bytes, reason = _pick(collective, nbytes, world_size, order, table, found)
    choice = Choice(collective, nbytes, world_size, algorithm, segment_bytes, reason, found, table)
    _log.log(
        logging.INFO if table.announces else logging.DEBUG,
        "%s of %d bytes on %d ranks over %s: %s; %s",
        collective,
        nbytes,
        world_size,
        table.transport,
        algorithm if segment_bytes is None else f"{algorithm} in segments of {segment_bytes} bytes",
        reason,
    )
    return choice


def _keeps(collective: str, algorithm: str, order: str) -> bool:
    """Whether an algorithm reduces in the order that an operator needs, as far as is known."""
    if order == _LEFT:
        return algorithm == "direct"
    if order == _RANKS:
        return algorithm in _IN_ORDER.get(collective, ())
    return True


def _pick(
    collective: str,
    nbytes: int,
    world_size: int,
    order: str,
    table: Table,
    found: tuple[Prediction, ...],
) -> tuple[str, int | None, str]:
    """The algorithm, its segments and the reason."""
    if not contract(collective).common_lengths:
        return "pairwise", None, "no rank knows all lengths, which others need"
    for rules, whose in ((table.forced, ALGORITHM_VARIABLE), (table.tuned, table.source)):
        for rule in rules:
            if not rule.matches(collective, nbytes, world_size, table.hosts):
                continue
            if rule.algorithm == AUTO:
                break
            if not _keeps(collective, rule.algorithm, order):
                continue
            segment_bytes = _segment_bytes(rule, collective, nbytes, world_size, table)
            return rule.algorithm, segment_bytes, f"by the rule {rule} ({whose})"
    best = found[0]
    reason = "the least predicted time"
    if order != _ANY:
        reason += f" of those that reduce in {order}"
    return best.algorithm, best.segment_bytes, f"{reason} (costs: {table.source})"


def _segment_bytes(
    rule: Rule, collective: str, nbytes: int, world_size: int, table: Table
) -> int | None:
    """The segments of a rule; if it says nothing of them, and they are of use, the model's."""
    entry = find(collective, rule.algorithm)
    if rule.segment_bytes is not None or not entry.pipelined:
        return rule.segment_bytes
    if table.source == BUILT_IN or not comes_with_the_library(entry):
        return PIPELINED_SEGMENT_BYTES
    return predict(entry, nbytes, world_size, table.parameters).segment_bytes


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
        if not comes_with_the_library(entry):
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
        segment_bytes = PIPELINED_SEGMENT_BYTES
    wanted = -(-longest_nbytes // max(1, segment_bytes))
    return max(1, min(wanted, longest_numel))


def _is_pipelined(schedule: Schedule) -> bool:
    return any(
        entry.pipelined
        for entry in algorithms(schedule.collective)
        if entry.name == schedule.algorithm
    )


@lru_cache(maxsize=256)
def _keeps_order(schedule: Schedule) -> tuple[bool, bool]:
    """Verify; and say whether operands stay in rank order, and reduce from left to right."""
    proof = verify(schedule)
    return proof.rank_order, proof.left_fold
