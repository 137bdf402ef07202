"""The choice of an algorithm: the one that ``algorithm="auto"`` stands for in one call.

All ranks must choose alike. So the choice depends only on values that the collective's contract
makes equal on all ranks, and on the group's table, which rank 0 has published
(`ringcoll.schedules.cost.table`). The rules of the table come first: forced ones, then measured
ones. If no rule matches, the choice is the algorithm with the least predicted time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ringcoll.errors import ArgumentError
from ringcoll.schedules.algorithms import algorithms, find, named, registry
from ringcoll.schedules.cost.predict import (
    MODEL_ERROR,
    Prediction,
    fastest,
    predict,
    predictions,
    preferred,
)
from ringcoll.schedules.cost.rules import AUTO, Rule
from ringcoll.schedules.cost.table import BUILT_IN, Table
from ringcoll.schedules.ir import OperandOrder, Schedule, contract

# Over gloo a message costs some 60 us and a byte some 0.5 ns, so that a segment should be well
# above 100 KiB; 1 MiB was the best of 256 KiB, 512 KiB and 1 MiB at 4 to 64 MiB.
PIPELINED_SEGMENT_BYTES = 1 << 20
"""Bytes of a segment of CPU tensors, for a pipelined algorithm that is asked for by name."""

# Not measured yet. A message and a launch cost some 17 us together, and a byte on its way between
# GPUs some 0.02 ns (the catalogue's costs of NCCL): 1 MiB would take as long as they do, 4 MiB four
# times as long.
CUDA_SEGMENT_BYTES = 4 << 20
"""The same for CUDA tensors."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The algorithm that ``"auto"`` stands for in one call.

    Parameters
    ----------
    collective, nbytes, world_size
        The call.
    algorithm, reason
        Name of the chosen algorithm, and the reason for the choice in words.
    segment_bytes
        Bytes of a segment; ``None`` if the algorithm is not pipelined.
    predictions
        Predictions for all algorithms that may run, the fastest first.
    table
        The table that the choice rests on.
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
        """The prediction for the chosen algorithm; ``None`` if there is no prediction for it."""
        return next((row for row in self.predictions if row.algorithm == self.algorithm), None)

    def __str__(self) -> str:
        has_segments = self.segment_bytes is not None
        segments = f" in segments of {self.segment_bytes} bytes" if has_segments else ""
        return (
            f"{self.collective} of {self.nbytes} bytes on {self.world_size} ranks over "
            f"{self.table.transport}: {self.algorithm}{segments}; {self.reason}"
        )


def pipelined_segment_bytes(device: str = "cpu") -> int:
    """Bytes of a segment if nothing better is known, by the type of the tensors' device."""
    return CUDA_SEGMENT_BYTES if device == "cuda" else PIPELINED_SEGMENT_BYTES


def segment_bytes_of(collective: str, algorithm: str | Schedule, device: str) -> int | None:
    """Bytes of a segment for an algorithm that is asked for by name, or as a schedule.

    ``None`` for ``"auto"``, which chooses them itself, and for an algorithm that is not pipelined.

    Examples
    --------
    >>> [segment_bytes_of("all_reduce", name, "cuda") for name in ("double_tree", "ring", "auto")]
    [4194304, None, None]
    >>> segment_bytes_of("all_reduce", "double_tree", "cpu")
    1048576
    """
    name = algorithm.algorithm if isinstance(algorithm, Schedule) else algorithm
    if name == AUTO or not any(entry.pipelined for entry in named(name, collective)):
        return None
    return pipelined_segment_bytes(device)


def choose(
    collective: str,
    nbytes: int,
    world_size: int,
    table: Table,
    order: OperandOrder = OperandOrder.ANY,
    *,
    explained: bool = True,
) -> Choice:
    """Choose the algorithm that ``"auto"`` stands for; all ranks choose alike.

    Parameters
    ----------
    collective, world_size
        Name of the collective, and number of ranks.
    nbytes
        Bytes of the whole data: the vector, or all blocks of one rank.
    table
        Costs and rules of the group.
    order
        The order of operands that the reduction operator needs.
    explained
        Whether the choice has the predictions of all algorithms, and not those of the fastest only.

    Raises
    ------
    ScheduleError, ArgumentError
        There is no such collective; or none of its algorithms keeps the order.
    """
    return _choose(collective, nbytes, world_size, table, order, registry.revision, explained)


@lru_cache(maxsize=512)  # of some 5 KiB each, with their predictions
def _choose(
    collective: str,
    nbytes: int,
    world_size: int,
    table: Table,
    order: OperandOrder,
    revision: int,
    explained: bool,
) -> Choice:
    about = collective, nbytes, world_size, table.parameters
    if explained:
        every = predictions(*about)
        candidates = tuple(row for row in every if find(collective, row.algorithm).order >= order)
    else:
        candidates = fastest(*about, order)
    if not candidates:
        raise ArgumentError(f"no algorithm for {collective} reduces in {order}", "op")
    picked = _pick(collective, nbytes, world_size, table, order, candidates)
    return Choice(collective, nbytes, world_size, *picked, candidates, table)


def _pick(
    collective: str,
    nbytes: int,
    world_size: int,
    table: Table,
    order: OperandOrder,
    candidates: tuple[Prediction, ...],
) -> tuple[str, int | None, str]:
    """Name of the algorithm, bytes of a segment, and the reason."""
    if not contract(collective).common_lengths:
        # Each rank knows other lengths, so the choice must not depend on them.
        able = algorithms(collective, world_size)
        first = next(entry for entry in able if not entry.equal_blocks)
        return first.name, None, "no rank knows all lengths, which other algorithms need"
    for rules, reason_of in table.layers():
        for rule in rules:
            if not rule.matches(collective, nbytes, world_size, table.hosts):
                continue
            if rule.algorithm == AUTO:
                break
            if find(collective, rule.algorithm).order < order:
                continue
            segment_bytes = _segment_bytes(rule, collective, nbytes, world_size, table)
            return rule.algorithm, segment_bytes, reason_of(rule)
    best = preferred(candidates, table.parameters)
    reason = "the least predicted time"
    if best is not candidates[0]:
        reason = f"few waits, within {MODEL_ERROR:.0%} of the least predicted time"
    if order is not OperandOrder.ANY:
        reason += f" of those that reduce in {order}"
    return best.algorithm, best.segment_bytes, f"{reason} (costs: {table.origin})"


def _segment_bytes(
    rule: Rule, collective: str, nbytes: int, world_size: int, table: Table
) -> int | None:
    """Bytes of a segment by a rule; by the prediction if the rule does not say it."""
    entry = find(collective, rule.algorithm)
    if rule.segment_bytes is not None or not entry.pipelined:
        return rule.segment_bytes
    if table.source == BUILT_IN or not entry.built_in:
        return pipelined_segment_bytes(table.device)
    return predict(entry, nbytes, world_size, table.parameters).segment_bytes


def segment_count(
    schedule: Schedule,
    longest_nbytes: int,
    segment_bytes: int | None,
    longest_numel: int,
    usual: int | None = None,
    slice_bytes: int = 0,
) -> int:
    """Number of segments, from the longest chunk and the wanted bytes of a segment.

    If nobody has said these, they are the ``usual`` ones, or those of the algorithm, and at most
    those of a slice.
    """
    if segment_bytes is None:
        segment_bytes = usual or segment_bytes_of(schedule.collective, schedule, "cpu")
        if slice_bytes:
            segment_bytes = min(segment_bytes or slice_bytes, slice_bytes)
        if segment_bytes is None:
            return 1
    wanted = -(-longest_nbytes // max(1, segment_bytes))
    return max(1, min(wanted, longest_numel))
