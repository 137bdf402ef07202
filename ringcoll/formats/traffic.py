"""The bytes that ranks of a schedule send and reduce, for formats that know messages and no data."""

from __future__ import annotations

from collections.abc import Callable

from ringcoll.errors import ScheduleError
from ringcoll.schedule import (
    Recv,
    RecvReduce,
    Reduce,
    Schedule,
    Send,
    Step,
    balanced_share,
    chunks_of_data,
    contract,
)


def traffic(
    step: Step, length: Callable[[int], int]
) -> tuple[list[tuple[Send | Recv | RecvReduce, int]], int]:
    """The messages of a rank's step, each with its bytes, and the bytes that the rank reduces.

    ``length`` says how long a chunk is: `chunk_nbytes`.
    """
    messages: list[tuple[Send | Recv | RecvReduce, int]] = []
    reduced = 0
    for operation in step:
        if isinstance(operation, Reduce):
            reduced += length(operation.into.chunk) * (len(operation.sources) - 1)
        elif isinstance(operation, Send | Recv | RecvReduce):
            nbytes = sum(length(ref.chunk) for ref in operation.writes or operation.reads)
            reduced += nbytes if isinstance(operation, RecvReduce) else 0
            messages.append((operation, nbytes))
    return messages, reduced


def chunk_nbytes(schedule: Schedule, nbytes: int) -> Callable[[int], int]:
    """Make the function that says how long a chunk is, in bytes.

    Examples
    --------
    >>> from ringcoll.algorithms import schedule_of
    >>> [*map(chunk_nbytes(schedule_of("all_reduce", "ring", 3), 10), range(3))]
    [4, 3, 3]
    """
    rules = contract(schedule.collective)
    per_block = rules.chunks_per_block(schedule.num_chunks, schedule.world_size)
    blocks = chunks_of_data(schedule) // per_block
    if nbytes < 0 or nbytes % blocks:
        raise ScheduleError(
            f"{schedule.collective} on {schedule.world_size} ranks cannot divide {nbytes} bytes "
            f"into blocks of equal length: expected a multiple of {blocks}, at least 0"
        )
    return lambda chunk: balanced_share(nbytes // blocks, per_block, chunk % per_block)[1]
