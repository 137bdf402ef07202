"""Files of measurements of this machine: that of ``ringcoll tune``, and what groups have measured.

A file of ``ringcoll fit`` holds what was fitted to a network. A file of ``ringcoll tune`` holds a
table for each transport, number of ranks, number of hosts and type of device; see
`ringcoll.schedules.cost.Table`. The file is replaced as a whole, so that a reader sees the old file
or the new file. A group that measures, as it finds nothing in either file, keeps its costs in the
second file (`remember`), for the programs of the next hours.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from ringcoll._package import __version__
from ringcoll.errors import RingcollError, TuningFileError
from ringcoll.runtime.machine import (
    cores,
    cpu,
    json_text,
    read_file,
    read_json_file,
    replace_file,
    settings,
)
from ringcoll.schedules.cost import Fitted, Table

_FORMAT, _FIT_FORMAT = "ringcoll tuning", "ringcoll fit"
_VERSION = 1
_RECENT = timedelta(hours=12)  # what else the machine does changes from day to day
_log = logging.getLogger("ringcoll")


def machine(device: str = "cpu") -> dict[str, Any]:
    """Facts of this machine, beside its load, on which measurements depend; on CUDA its GPU."""
    facts: dict[str, Any] = {"cpu": cpu(), "cores": cores()}
    if device == "cuda":
        facts["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return facts


@dataclass(frozen=True, eq=False)
class Tuned:
    """A table of a file, and where the table comes from.

    ``facts`` are versions, date and machine; for people, and to tell machines apart.
    """

    table: Table
    facts: dict[str, Any]

    @classmethod
    def now(cls, table: Table, **facts: Any) -> Tuned:
        """Make an entry for a table that has just been measured on this machine."""
        date = datetime.now(UTC).isoformat(timespec="seconds")
        own = {"date": date, "ringcoll": __version__, "machine": machine(table.device)}
        return cls(table, own | facts)

    @property
    def key(self) -> tuple[str, int, int, str]:
        """Transport, number of ranks, number of hosts, and type of device of the table."""
        table = self.table
        return table.transport, table.world_size, table.hosts, table.device


def read_tables(path: Path) -> list[Tuned]:
    """Read a file of ``ringcoll tune``; a `TuningFileError` names the file if it is none."""
    status = path.stat() if _exists(path) else None
    # Every group asks: a file that was not replaced is read once.
    return list(_read(path, status and (status.st_ino, status.st_size, status.st_mtime_ns)))


@lru_cache(maxsize=4)
def _read(path: Path, version: object) -> list[Tuned]:
    try:
        entries = _document(path, _FORMAT, "tune").get("tables")
        if not isinstance(entries, list):
            raise TuningFileError("has no list of tables")
        return [_tuned(entry, path) for entry in entries]
    except TuningFileError as error:
        raise TuningFileError(str(error), path=str(path)) from error


def _document(path: Path, kind: str, command: str) -> dict[str, Any]:
    try:
        document = read_json_file(path)
    except (OSError, ValueError, RecursionError) as error:
        raise TuningFileError(f"cannot be read: {error}") from error
    if not isinstance(document, dict) or document.get("format") != kind:
        raise TuningFileError(f"not a file of `ringcoll {command}`")
    if (version := document.get("version")) != _VERSION:
        raise TuningFileError(f"has version {version!r}, and this library reads {_VERSION}")
    return document


def read_fit(path: Path) -> Fitted:
    """Read a file of ``ringcoll fit``; a `TuningFileError` names the file if it is none."""
    try:
        return Fitted.from_json(_document(path, _FIT_FORMAT, "fit"))
    except TuningFileError as error:
        raise TuningFileError(str(error), path=str(path)) from error


def write_fit(path: Path, fitted: Fitted) -> None:
    """Write a file that `read_fit` reads; `TuningFileError` if it cannot be written."""
    _write(path, {"format": _FIT_FORMAT, "version": _VERSION, **fitted.to_json()})


def fit_for(asked: str | None, hosts: tuple[int, ...]) -> Fitted | None:
    """The fit that a group uses: of the file that its options name, or ``RINGCOLL_TUNING`` does.

    The latter is for groups of as many ranks as the fit has, on hosts as it has them; others go on
    without it. A `TuningFileError` names a file that cannot be read, or whose fit is of another
    version of the library; or that the options name, and that is for other ranks or hosts.
    """
    path = Path(asked).expanduser() if asked else settings.tuning_file()[0]
    if path is None or not (asked or _is_fit(path)):
        return None
    fitted = read_fit(path)
    try:
        fitted.check(hosts)
    except TuningFileError as error:
        if asked or fitted.version != __version__:
            raise TuningFileError(str(error), path=str(path)) from None
        level = logging.INFO if fitted.world_size != len(hosts) else logging.WARNING
        _log.log(level, "%s is not used: %s", path, error)
        return None
    return fitted


def _is_fit(path: Path) -> bool:
    try:
        return f'"{_FIT_FORMAT}"' in read_file(path)[:200]
    except (OSError, ValueError):
        return False


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # the directory may not be searched
        return False


def _tuned(entry: Any, path: Path) -> Tuned:
    table = Table.from_json(entry)
    facts = entry.get("facts", {})
    return Tuned(replace(table, source=str(path)), facts if isinstance(facts, dict) else {})


def update_tables(path: Path, tuned: Tuned) -> None:
    """Put a table into a file, in place of the table with the same key.

    Raises `TuningFileError` if the file is none of ``ringcoll tune``, or cannot be written.
    """
    kept = [entry for entry in read_tables(path) if entry.key != tuned.key] if _exists(path) else []
    entries = [entry.table.to_json() | {"facts": entry.facts} for entry in [*kept, tuned]]
    for entry in entries:
        del entry["source"], entry["forced"], entry["fit"]
    _write(path, {"format": _FORMAT, "version": _VERSION, "tables": entries})


def _write(path: Path, document: dict[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json_text(document, indent=2) + "\n")
    except OSError as error:
        raise TuningFileError(f"cannot be written: {error.strerror}", path=str(path)) from error


def remember(path: Path | None, table: Table) -> None:
    """Keep what a group has measured, if there is a file for it that can be written."""
    if path is not None:
        try:
            update_tables(path, Tuned.now(table))
        except TuningFileError as error:
            _log.debug("not kept: %s", error)


def is_recent(tuned: Tuned) -> bool:
    """Whether a table was measured in the last hours, by this version of the library."""
    try:
        age = datetime.now(UTC) - datetime.fromisoformat(tuned.facts["date"])
    except (KeyError, TypeError, ValueError):  # a hand has written it
        return False
    return tuned.facts.get("ringcoll") == __version__ and timedelta(0) <= age < _RECENT


def known_table(
    transport: str, world_size: int, hosts: int, device: str, measured: Table | None = None
) -> Table | None:
    """The table of the tuning file; or ``measured`` by this process; or by another one lately.

    Raises as `find_table`, whose arguments these are.
    """
    path, asked = settings.tuning_file()
    path = None if path is not None and _is_fit(path) else path
    where = transport, world_size, hosts
    return (
        find_table(path, *where, asked=asked, device=device)
        or measured
        or find_table(settings.measured_file(), *where, asked=False, device=device, holds=is_recent)
    )


def find_table(
    path: Path | None,
    transport: str,
    world_size: int,
    hosts: int,
    *,
    asked: bool,
    device: str = "cpu",
    holds: Callable[[Tuned], bool] = lambda _: True,
) -> Table | None:
    """Look in a file for the table of a transport, a number of ranks and hosts, and a device.

    ``path`` is ``None`` for no file. If the user has ``asked`` for the file, a `TuningFileError`
    says what is wrong with it; if not, the file may be missing, a wrong file gives a warning only,
    and measurements of another machine are not used. Measurements with CPU tensors say nothing
    about CUDA tensors, and are not used for them. ``holds`` says whether a table may still be used.
    """
    if path is None or (not asked and not _exists(path)):
        return None
    try:
        entries = read_tables(path)
    except RingcollError as error:
        if asked:
            raise
        _log.warning("ignored: %s", error)
        return None
    for entry in entries:
        if entry.key == (transport, world_size, hosts, device) and holds(entry):
            if asked or entry.facts.get("machine") == machine(device):
                return entry.table
            _log.info("%s: measured on another machine, and not used", path)
    return None
