"""An all-reduce in two parts: until it has completed its chunks, and from there on.

Problem: a hierarchy reduces inside each group, then across the groups, and then tells the result
inside again. Between the two parts of an all-reduce each chunk is complete on some ranks: on one
after a ring, on the root of a tree, on all after recursive doubling. There the results of several
groups can be combined, by any other all-reduce, and the second part passes on what comes out::

    ring, rank 0 of 3   >1:2 +2:1 | >1:1 +2:0! | >1:0 <2:2 | >1:2 <2:1
                                               ^ here rank 0 has chunk 0

The parts are found by the reductions that are marked `final`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ringcoll.errors import ScheduleError
from ringcoll.schedule.counting import check_work
from ringcoll.schedule.ir import Buffer, RecvReduce, Reduce, Ref
from ringcoll.schedule.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Opening:
    """The place where an all-reduce falls into two parts.

    Parameters
    ----------
    first_steps
        Number of steps of the first part.
    completed
        Chunks that each rank has completed by then, in their order.
    """

    first_steps: int
    completed: tuple[tuple[int, ...], ...]


@lru_cache(maxsize=256)
def step_count(schedule: Schedule) -> int:
    """Number of steps of the rank that has most of them."""
    return max(sum(1 for _ in schedule.steps(rank)) for rank in range(schedule.world_size))


@lru_cache(maxsize=256)
def opening_of(schedule: Schedule) -> Opening:
    """Find the place where an all-reduce falls into two parts.

    Raises
    ------
    ScheduleError
        A rank passes on a chunk before all chunks are complete, or completes it outside of the
        output.
    TooLargeError
        The schedule is too large.

    Examples
    --------
    >>> from ringcoll.algorithms import schedule_of
    >>> opening_of(schedule_of("all_reduce", "ring", 3))
    Opening(first_steps=2, completed=((0,), (1,), (2,)))
    >>> opening_of(schedule_of("all_reduce", "binomial_tree", 3))
    Opening(first_steps=2, completed=((0,), (), ()))
    """
    if schedule.world_size == 1:
        return Opening(0, (tuple(range(schedule.num_chunks)),))
    check_work(schedule)
    programs = [tuple(schedule.steps(rank)) for rank in range(schedule.world_size)]
    completed: list[dict[Ref, int]] = [{} for _ in programs]  # in which step
    for known, steps in zip(completed, programs, strict=True):
        for number, step in enumerate(steps):
            for operation in step:
                if isinstance(operation, RecvReduce | Reduce) and operation.final:
                    known.update(dict.fromkeys(operation.writes, number))
    first_steps = 1 + max(number for known in completed for number in known.values())
    for rank, (known, steps) in enumerate(zip(completed, programs, strict=True)):
        for number, step in enumerate(steps[:first_steps]):
            for ref in (ref for operation in step for ref in operation.reads):
                if known.get(ref, number) < number:
                    raise _refusal(schedule, rank, ref, f"is passed on in step {number}, too early")
        for ref in known:
            if ref.buffer is not Buffer.OUTPUT:
                raise _refusal(schedule, rank, ref, "is not in the output")
    return Opening(first_steps, tuple(tuple(sorted(ref.chunk for ref in it)) for it in completed))


def _refusal(schedule: Schedule, rank: int, ref: Ref, reason: str) -> ScheduleError:
    return ScheduleError(
        f"{schedule.algorithm} all_reduce on {schedule.world_size} ranks does not fall into two "
        f"parts, so that a hierarchy can have it only as its outermost algorithm: on rank {rank} "
        f"the complete chunk {ref} {reason}"
    )
