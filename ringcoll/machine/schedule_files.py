"""Files, modules, and rules with them, which a user may name in place of a registered algorithm.

- ``FILE.xml``, ``FILE.json`` and ``FILE.txt`` hold a schedule: MSCCL's XML, MSCCL++'s JSON, or the library's own
  text. Each rank reads the file for itself; the ranks compare what they have read before they run it.
- ``FILE.py:NAME`` and ``MODULE:NAME`` are registered by what they name: see `ringcoll.machine.user_modules`.
- Rules (`ringcoll.cost.rules`) choose by collective and size; their algorithms may be files as well.
"""

from __future__ import annotations

import re
import time
import zlib
from functools import lru_cache
from pathlib import Path

from ringcoll.algorithms import Algorithm, entry_of_schedule, register_schedule
from ringcoll.cost import Rule, parse_rules
from ringcoll.errors import ScheduleError
from ringcoll.machine.files import read_file
from ringcoll.machine.user_modules import algorithms_named, is_reference
from ringcoll.schedule import Schedule

_MOST_KEPT = 64
_TICK_NS = 2_000_000_000  # of the file systems with the coarsest times
_read: dict[tuple[int, ...], Schedule] = {}  # by device, inode, size and times
_SUFFIXES = (".xml", ".json", ".txt")
_MODULE = re.compile(r"[^:;@\s]+\.py:[\w=+]+")
_FILE = re.compile(rf"[^:;@\s]+({'|'.join(map(re.escape, _SUFFIXES))})", re.IGNORECASE)


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
    from ringcoll.formats import schedule_in  # not before: every group comes by this module

    return schedule_in(text)


def as_algorithm(algorithm: str | Schedule) -> str | Schedule:
    """The schedule in a file, or the name of what a module registers; other names and rules as they are.

    Raises
    ------
    ScheduleError, UnknownAlgorithmError
        See `read_schedule` and `ringcoll.machine.user_modules.algorithms_named`.
    """
    if isinstance(algorithm, Schedule) or is_rules(algorithm):
        return algorithm
    if is_schedule_file(algorithm):
        return read_schedule(algorithm)
    return algorithms_named(algorithm)[1][0].name if is_reference(algorithm) else algorithm


def is_rules(text: str) -> bool:
    """Whether a text has rules, and does not name an algorithm, a file or a module.

    >>> [is_rules(text) for text in ("ring", "star.py:star", "*:0-4K:star.py:star", "tree;ring")]
    [False, False, True, True]
    """
    return ";" in text or _MODULE.sub("", text).count(":") > 1


def has_files(rules: str) -> bool:
    """Whether rules name files that hold a schedule."""
    return _FILE.search(rules) is not None


def rules_in(text: str) -> tuple[Rule, ...]:
    """Read rules, register what their files hold, and put the names in the files' places.

    Raises
    ------
    RulesError, ScheduleError, UnknownAlgorithmError
        See `ringcoll.cost.rules.parse_rules`, and `as_algorithm`.
    """
    known = text if is_rules(text) or not is_reference(text) else str(as_algorithm(text))
    known = _MODULE.sub(lambda found: str(as_algorithm(found[0])), known)
    return parse_rules(_FILE.sub(lambda found: _registered(found[0]), known))


def _registered(path: str) -> str:
    """The name under which the schedule in a file is registered, made of the file's name and what it holds."""
    schedule = read_schedule(path)
    name = re.sub(r"\W", "_", f"file_{Path(path).stem}_{_content(schedule):08x}")
    return register_schedule(schedule, name, path)


@lru_cache(maxsize=_MOST_KEPT)
def _content(schedule: Schedule) -> int:
    """A number for the text of a schedule."""
    return zlib.crc32(schedule.to_text().encode())


def algorithm_in(path: str) -> Algorithm:
    """A file as an entry like those of the registry, for one number of ranks and one root.

    Raises
    ------
    ScheduleError
        See `read_schedule`.
    """
    return entry_of_schedule(read_schedule(path), path)
