"""GOAL: sends, receives and computations with what they require, for LogGOPSim and ATLAHS.

A step of a rank begins when its step before has ended, as in the executor. The end of a step is a
``calc`` that requires all of it; its length is that of the reductions, one of one nanosecond at least
where there are any. The n-th message from one rank to another has the tag n at both ends.

Sources: ``txt2bin.re`` of spcl/LogGOPSim, for the grammar (a line must not begin with white space);
T. Hoefler, T. Schneider, A. Lumsdaine, "LogGOPSim", LSAP 2010, for the meaning.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ringcoll.errors import ScheduleError
from ringcoll.formats.traffic import chunk_nbytes, traffic
from ringcoll.schedule import Schedule, Send


def to_goal(schedule: Schedule, nbytes: int, *, gamma_ns_per_byte: float = 0.0) -> str:
    """Write a schedule as a GOAL text, all ranks in one.

    Parameters
    ----------
    schedule
        A schedule that keeps its contract.
    nbytes
        Bytes of the whole data: of the vector, or of all blocks of a rank.
    gamma_ns_per_byte
        Nanoseconds that it takes to reduce a byte.

    Raises
    ------
    ScheduleError
        The blocks of a rank would not have equal lengths, or ``gamma_ns_per_byte`` is below 0.

    Examples
    --------
    >>> from ringcoll.algorithms import schedule_of
    >>> print(to_goal(schedule_of("reduce", "binomial_tree", 2), 8, gamma_ns_per_byte=2), end="")
    num_ranks 2
    rank 0 {
    l1: recv 8b from 1 tag 0
    l2: calc 16
    l2 requires l1
    }
    rank 1 {
    l1: send 8b to 0 tag 0
    l2: calc 0
    l2 requires l1
    }
    """
    if not gamma_ns_per_byte >= 0:
        raise ScheduleError(f"gamma_ns_per_byte must be at least 0, got {gamma_ns_per_byte}")
    lines = [f"num_ranks {schedule.world_size}"]
    for rank in range(schedule.world_size):
        lines += [f"rank {rank} {{", *_program(schedule, rank, nbytes, gamma_ns_per_byte), "}"]
    return "\n".join(lines) + "\n"


def _program(schedule: Schedule, rank: int, nbytes: int, gamma: float) -> Iterator[str]:
    length = chunk_nbytes(schedule, nbytes)
    tags: Counter[tuple[str, int]] = Counter()
    label, ended = 0, ""
    for step in schedule.steps(rank):
        messages, reduced = traffic(step, length)
        labels = []
        for operation, size in messages:
            word = "send" if isinstance(operation, Send) else "recv"
            way = "to" if word == "send" else "from"
            label += 1
            yield f"l{label}: {word} {size}b {way} {operation.peer} tag {tags[word, operation.peer]}"
            tags[word, operation.peer] += 1
            labels.append(f"l{label}")
            if ended:
                yield f"l{label} requires {ended}"
        if not labels and not reduced:
            continue
        label += 1
        yield f"l{label}: calc {round(reduced * gamma)}"
        yield from (f"l{label} requires {each}" for each in labels or [ended] if each)
        ended = f"l{label}"
