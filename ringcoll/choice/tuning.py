"""The file that ``ringcoll tune`` writes: what was measured, for this machine.

One file holds a table for each transport, number of ranks and number of hosts; see
`ringcoll.choice.table.Table` for what is in one. It is replaced as a whole, by a rename, so that
a reader finds the old one or the new one.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ringcoll import __version__
from ringcoll.choice.table import Table
from ringcoll.errors import RingcollError, TuningFileError
from ringcoll.machine import cores, cpu

__all__ = ["Tuned", "find_table", "machine", "read", "update"]

_FORMAT = "ringcoll tuning"
_VERSION = 1
_log = logging.getLogger("ringcoll")


def machine() -> dict[str, Any]:
    """What measurements on this machine depend on, beside its load."""
    return {"cpu": cpu(), "cores": cores()}


@dataclass(frozen=True, eq=False)
class Tuned:
    """One table of a file, and how it came about.

    Parameters
    ----------
    table
        Costs and rules.
    facts
        Versions, date and machine; for people, and to tell machines apart.
    """

    table: Table
    facts: dict[str, Any]

    @classmethod
    def now(cls, table: Table, **facts: Any) -> Tuned:
        """A table that has just been measured here."""
        date = datetime.now(UTC).isoformat(timespec="seconds")
        return cls(table, {"date": date, "ringcoll": __version__, "machine": machine()} | facts)

    @property
    def key(self) -> tuple[str, int, int]:
        """What the table is for."""
        return self.table.transport, self.table.world_size, self.table.hosts


def read(path: Path) -> list[Tuned]:
    """Read a file.

    Raises
    ------
    TuningFileError
        It cannot be read, or is something else; the error names it.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TuningFileError(f"cannot be read: {error}", path=str(path)) from error
    if not isinstance(found, dict) or found.get("format") != _FORMAT:
        raise TuningFileError("not a file of `ringcoll tune`", path=str(path))
    if found.get("version") != _VERSION:
        raise TuningFileError(
            f"has version {found.get('version')!r}, and this library reads {_VERSION}",
            path=str(path),
        )
    entries = found.get("tables")
    if not isinstance(entries, list):
        raise TuningFileError("has no list of tables", path=str(path))
    return [_tuned(entry, path) for entry in entries]


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # in a directory that may not be looked into
        return False


def _tuned(entry: Any, path: Path) -> Tuned:
    try:
        table = Table.from_json(entry)
    except TuningFileError as error:
        raise TuningFileError(str(error), path=str(path)) from error
    facts = entry.get("facts", {})
    return Tuned(replace(table, source=str(path)), facts if isinstance(facts, dict) else {})


def update(path: Path, tuned: Tuned) -> None:
    """Put a table into a file, in place of the one for the same, and keep the others.

    Raises
    ------
    TuningFileError
        There is a file that is something else, or it cannot be written.
    """
    kept = [one for one in read(path) if one.key != tuned.key] if _exists(path) else []
    entries = [one.table.to_json() | {"facts": one.facts} for one in [*kept, tuned]]
    for entry in entries:
        del entry["source"], entry["forced"]
    document = {"format": _FORMAT, "version": _VERSION, "tables": entries}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, json.dumps(document, indent=2) + "\n")
    except OSError as error:
        raise TuningFileError(f"cannot be written: {error}", path=str(path)) from error


def _replace(path: Path, text: str) -> None:
    """Write a file beside another, and put it into its place at once."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        with suppress(OSError):
            Path(name).unlink()
        raise


def find_table(
    path: Path, transport: str, world_size: int, hosts: int, *, asked: bool
) -> Table | None:
    """Look for the table for so many ranks in a file.

    Parameters
    ----------
    path
        The file.
    transport, world_size, hosts
        What it has to be for.
    asked
        Whether the file was asked for. If not, one that is not there is none, one that is
        wrong is warned of, and what was measured on another machine is not used.

    Raises
    ------
    TuningFileError
        The file was asked for, and is wrong.
    """
    if not asked and not _exists(path):
        return None
    try:
        entries = read(path)
    except RingcollError as error:
        if asked:
            raise
        _log.warning("ignored: %s", error)
        return None
    for one in entries:
        if one.key == (transport, world_size, hosts):
            if asked or one.facts.get("machine") == machine():
                return one.table
            _log.info("%s: measured on another machine, and not used", path)
    return None
