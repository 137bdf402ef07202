"""Files that hold a schedule: MSCCL's XML, MSCCL++'s JSON, or the library's own text.

A name that ends in ``.xml``, ``.json`` or ``.txt`` is such a file wherever an algorithm is named. Each
rank reads the file for itself; the ranks compare what they have read before they run it.
"""

from __future__ import annotations

import time
from functools import lru_cache
from pathlib import Path

from ringcoll.algorithms import Algorithm
from ringcoll.errors import ScheduleError
from ringcoll.formats import schedule_in
from ringcoll.schedule.ir import Program, Schedule
from ringcoll.system.files import read_file

__all__ = ["algorithm_in", "as_algorithm", "is_schedule_file", "read_schedule"]

_MOST_KEPT = 64
_TICK_NS = 2_000_000_000  # of the file systems with the coarsest times
_read: dict[tuple[int, ...], Schedule] = {}  # by device, inode, size and times
_SUFFIXES = (".xml", ".json", ".txt")


def is_schedule_file(text: str) -> bool:
    """Whether the name of an algorithm is that of a file.

    >>> [is_schedule_file(name) for name in ("ring", "ring.xml", "star.py:star")]
    [False, True, False]
    """
    return text.lower().endswith(_SUFFIXES)


def read_schedule(path: str) -> Schedule:
    """Read a file; what was read is kept as long as the file stays as it is.

    The times of a file have coarse ticks: a file that has just been written may be written again in the same
    tick, and is read at every call until the tick is over.

    Raises
    ------
    ScheduleError
        The file cannot be read, or holds no schedule; the message names it.
    """
    try:
        file = Path(path).expanduser()
        facts = file.stat()
        version = (*facts[:3], facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)
        schedule = _read.get(version)
        if schedule is None:
            is_settled = time.time_ns() - facts.st_ctime_ns > _TICK_NS
            schedule = _schedule_in(read_file(file))
            if is_settled:
                if len(_read) >= _MOST_KEPT:
                    _read.clear()
                _read[version] = schedule
    except (OSError, RuntimeError) as error:  # no such user is a RuntimeError
        reason = getattr(error, "strerror", None) or error
        raise ScheduleError(f"{path}: cannot be read: {reason}") from error
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}") from error
    return schedule


@lru_cache(maxsize=_MOST_KEPT)
def _schedule_in(text: str) -> Schedule:
    """The same schedule for the same text: what was proved of it is remembered with it."""
    return schedule_in(text)


def as_algorithm(algorithm: str | Schedule) -> str | Schedule:
    """The schedule in a file, if the name of an algorithm is that of a file.

    Raises
    ------
    ScheduleError
        See `read_schedule`.
    """
    if isinstance(algorithm, str) and is_schedule_file(algorithm):
        return read_schedule(algorithm)
    return algorithm


def algorithm_in(path: str) -> Algorithm:
    """A file as an entry like those of the registry, for one number of ranks and one root.

    Raises
    ------
    ScheduleError
        See `read_schedule`.
    """
    schedule = read_schedule(path)

    def program(rank: int, world_size: int, root: int = 0) -> Program:
        if root != schedule.root:
            raise ScheduleError(f"{path} is for root {schedule.root}, not for root {root}")
        return iter(schedule.program(rank))

    program.__doc__ = f"Read from {path}."

    def restriction(world_size: int) -> str | None:
        right = schedule.world_size
        return None if world_size == right else f"{path} holds a schedule for {right} ranks"

    return Algorithm(
        schedule.collective,
        schedule.algorithm,
        program,
        cost=None,
        chunks=lambda world_size: schedule.num_chunks,
        slots=lambda world_size: schedule.num_slots,
        restriction=restriction,
    )
