"""Algorithms of a user: files that hold a schedule, modules that register algorithms, and rules.

A user may name them in place of a registered algorithm:

- ``FILE.xml``, ``FILE.json`` and ``FILE.txt`` hold a schedule: MSCCL's XML, MSCCL++'s JSON, or the
  library's own text. Each rank reads the file for itself; the ranks compare what they have read
  before they run it.
- ``FILE.py:NAME`` and ``MODULE:NAME`` are modules of a user that register algorithms. Such a module
  is imported as Python imports it, with the current folder, or that of the file, before all others.
  So every rank can import it in the same way, and it may import its neighbours.
- Rules (`ringcoll.schedules.cost.rules`) choose by collective and size; their algorithms may be
  files, too.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import re
import sys
import time
import traceback
import zlib
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from ringcoll.errors import RulesError, ScheduleError, UnknownAlgorithmError
from ringcoll.runtime.machine import read_file
from ringcoll.schedules import Schedule
from ringcoll.schedules.algorithms import (
    Algorithm,
    algorithms,
    entry_of_schedule,
    register_schedule,
)
from ringcoll.schedules.cost import FORCED, Rule, parse_rules
from ringcoll.schedules.ir import laboratory

_MOST_KEPT = 64
_TICK_NS = 2_000_000_000  # of the file systems with the coarsest times
_read: dict[tuple[int, ...], Schedule] = {}  # by device, inode, size and times
_SUFFIXES = (".xml", ".json", ".txt")
# A word is looked at from its beginning only, so that it takes time in its length and no square.
_WORD = r"(?<![^:;@\s])[^:;@\s]+"
_MODULE = re.compile(rf"{_WORD}\.py:[\w=+]+")
_FILE = re.compile(rf"{_WORD}({'|'.join(map(re.escape, _SUFFIXES))})", re.IGNORECASE)


class UserModule(NamedTuple):
    """A module that registers algorithms; a rank that loads it has the algorithms as well.

    ``name`` is the name of the module, with dots; Python looks for it in ``folder`` first.
    """

    name: str
    folder: str

    @property
    def file(self) -> Path:
        """The file at which Python looks first."""
        return Path(self.folder, *self.name.split(".")).with_suffix(".py")

    def load(self) -> ModuleType:
        """Import the module, and with it register its algorithms.

        Raises `UnknownAlgorithmError` if there is no such module, and `ScheduleError`, with the
        line, if the module raised an error.
        """
        if self.folder not in sys.path:
            sys.path.insert(0, self.folder)
        importlib.invalidate_caches()  # the file may be younger than the last import
        spec = None
        try:
            with contextlib.suppress(ImportError, ValueError):
                spec = find_spec(self.name)  # it runs the packages that the module is in
            if spec is not None:
                return importlib.import_module(self.name)
        except Exception as error:
            last = traceback.TracebackException.from_exception(error)
            place = f"{last.filename}:{last.lineno}" if isinstance(error, SyntaxError) else ""
            for frame in last.stack:
                if spec is not None and frame.filename == spec.origin:
                    place = f"{frame.filename}:{frame.lineno}"
            where = place or (self.name if spec is None else spec.origin)
            raise ScheduleError(f"{where}: {type(error).__name__}: {error}") from error
        raise UnknownAlgorithmError(
            f"there is no module {self.name!r}: neither {self.file} nor elsewhere on sys.path"
        )


@cache
def _registered_by(module: UserModule) -> tuple[ModuleType, frozenset[tuple[str, str]]]:
    before = {(entry.collective, entry.name) for entry in algorithms()}
    loaded = module.load()
    return loaded, frozenset({(entry.collective, entry.name) for entry in algorithms()} - before)


def is_reference(text: str) -> bool:
    """Whether a text is ``module:algorithm`` or ``path/file.py:algorithm``."""
    return ":" in text


def algorithms_named(reference: str) -> tuple[UserModule, list[Algorithm]]:
    """Import a module, and find the algorithm that a reference names, for each collective.

    The reference is ``module:algorithm`` or ``path/file.py:algorithm``, with the name under which
    the algorithm is registered, or the name of its function.

    Raises
    ------
    UnknownAlgorithmError
        There is no such file, module or algorithm, or the function is not registered. The message
        names the file, and the algorithms in it.
    ScheduleError
        The module raised an error.
    """
    text, _, name = reference.rpartition(":")
    try:
        path = Path(text).expanduser().absolute()
        is_file = path.is_file()
    except (RuntimeError, OSError) as error:  # a user who is not there, a name that is too long
        raise UnknownAlgorithmError(f"{reference!r}: {error}") from error
    if path.suffix == ".py":
        module = UserModule(path.stem, str(path.parent))
        if not is_file:
            raise UnknownAlgorithmError(f"{reference!r}: there is no file {path}")
    else:
        module = UserModule(text, os.getcwd())  # noqa: PTH109  # an entry of sys.path is a str
    loaded, registered = _registered_by(module)
    file = Path(getattr(loaded, "__file__", None) or module.file)
    if path.suffix == ".py" and not file.samefile(path):
        raise UnknownAlgorithmError(
            f"{reference!r}: Python takes {path.stem!r} for {file}; give {path} another name"
        )
    program = getattr(loaded, name, None)
    own = [
        entry
        for entry in algorithms()
        if (entry.collective, entry.name) in registered or entry.program.__module__ == module.name
    ]
    called = [entry for entry in own if entry.name == name.replace("-", "_")]
    entries = called or [e for e in algorithms() if inspect.unwrap(e.program) is program]
    if entries:
        return module, entries
    if inspect.isfunction(program):
        raise UnknownAlgorithmError(
            f"{file}: the function {name} is not registered; write "
            f'@register("all_reduce", "{name}"), or another collective, above it: '
            "from ringcoll.schedules import register"
        )
    names = ", ".join(dict.fromkeys(entry.name for entry in own))
    raise UnknownAlgorithmError(
        f"{file} has no algorithm {name!r}; it holds: {names or 'no algorithm'}"
    )


def is_schedule_file(text: str) -> bool:
    """Whether the name of an algorithm is that of a file.

    >>> [is_schedule_file(name) for name in ("ring", "ring.xml", "star.py:star")]
    [False, True, False]
    """
    return text.lower().endswith(_SUFFIXES)


def read_schedule(path: str) -> Schedule:
    """Read a file; what was read is kept as long as the file stays as it is.

    The times of a file have coarse ticks: a file that has just been written may be written again in
    the same tick, and is read at every call until the tick is over. A `ScheduleError` names a file
    that cannot be read, or holds no schedule.
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
    """The same schedule for the same text, with what was proved of it."""
    schedule: Schedule = laboratory.schedule_in(text)
    return schedule


def as_algorithm(algorithm: str | Schedule) -> str | Schedule:
    """The schedule in a file, or the name of what a module registers; anything else as it is.

    Raises as `read_schedule` and `algorithms_named`.
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

    Raises as `ringcoll.schedules.cost.parse_rules` and `as_algorithm`.
    """
    rules = text if is_rules(text) or not is_reference(text) else str(as_algorithm(text))
    rules = _MODULE.sub(lambda match: str(as_algorithm(match[0])), rules)
    return parse_rules(_FILE.sub(lambda match: _registered(match[0]), rules))


def forced_rules(text: str) -> tuple[Rule, ...]:
    """Read ``RINGCOLL_ALGORITHM``'s text, and the files that it names; errors name the variable."""
    try:
        return rules_in(text)
    except RulesError as error:
        raise RulesError(
            error.message, text=error.text, start=error.start, length=error.length, source=FORCED
        ) from error


def _registered(path: str) -> str:
    """Register the schedule in a file by a name made of the file's name and of what it holds."""
    schedule = read_schedule(path)
    name = re.sub(r"\W", "_", f"file_{Path(path).stem}_{_content(schedule):08x}")
    return register_schedule(schedule, name, path)


@lru_cache(maxsize=_MOST_KEPT)
def _content(schedule: Schedule) -> int:
    return zlib.crc32(schedule.to_text().encode())


def algorithm_in(path: str) -> Algorithm:
    """A file as an entry like those of the registry, for one number of ranks and one root.

    Raises as `read_schedule`.
    """
    return entry_of_schedule(read_schedule(path), path)
