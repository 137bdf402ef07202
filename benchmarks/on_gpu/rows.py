"""The rows of tables that stages emit; each is written at once."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

__all__ = ["NOT_RUN", "Row", "Settings", "load", "markdown", "missing", "store"]


NOT_RUN = "not run"
"""The column of reasons."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a stage.

    Parameters
    ----------
    device
        Type of the device: ``"cuda"``, or ``"cpu"`` for a rehearsal, with tiny sizes.
    quick
        Fewer sizes, and less time for each.
    tune
        Whether shapes of launches are tried out.
    commit
        Name of the commit, if the source tree does not say it.
    """

    device: str = "cuda"
    quick: bool = False
    tune: bool = False
    commit: str = ""

    @property
    def rehearsal(self) -> bool:
        """Whether nothing is really measured."""
        return self.device == "cpu"

    @property
    def place(self) -> torch.device:
        """The device of a stage that uses one."""
        return torch.device(self.device, 0) if self.device == "cuda" else torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a table.

    Parameters
    ----------
    table
        The title of the table.
    cells
        By the names of their columns; ``None`` where there is nothing to say.
    """

    table: str
    cells: dict[str, Any] = field(default_factory=dict)


def missing(table: str, what: str, reason: object) -> Row:
    """A row that says what could not run, and why."""
    told = " ".join(str(reason).split()) or type(reason).__name__
    return Row(table, {"what": what, NOT_RUN: told})


def store(path: Path, row: Row) -> None:
    """Append a row to a file."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"table": row.table, "cells": row.cells}) + "\n")


def load(path: Path) -> list[Row]:
    """Read what `store` has written; a last line that is cut off is left out."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [Row(**json.loads(line)) for line in lines if line.endswith("\n")]


def markdown(rows: Iterable[Row]) -> Iterator[str]:
    """The tables, in the order in which they were begun."""
    tables: dict[str, list[Row]] = {}
    for row in rows:
        tables.setdefault(row.table, []).append(row)
    for title, own in tables.items():
        ordered = sorted(own, key=lambda row: NOT_RUN in row.cells)  # their columns come last
        columns = list(dict.fromkeys(name for row in ordered for name in row.cells))
        yield from ("", f"### {title}", "")
        yield f"| {' | '.join(columns)} |"
        yield "|" + " --- |" * len(columns)
        for row in own:
            yield f"| {' | '.join(_shown(row.cells.get(name)) for name in columns)} |"


def _shown(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value).replace("|", "\\|")
