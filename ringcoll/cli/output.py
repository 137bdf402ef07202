"""How commands print: tables for people, JSON for programs, progress for the patient."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

__all__ = ["amount", "print_json", "print_table", "progress"]

_WIDE = 200  # characters; wider than any table of this library


def print_json(value: Any) -> None:
    """Print a value as JSON, fractions as numbers."""
    click.echo(json.dumps(value, indent=2, default=_number))


def _number(value: object) -> float:
    if isinstance(value, Fraction):
        return float(value)
    raise TypeError(f"{value!r} has no form in JSON")


def amount(value: Fraction) -> str:
    """Write an amount of data, in n, as tables show it.

    >>> amount(Fraction(63, 32)), amount(Fraction(3))
    ('1.969', '3.000')
    """
    return f"{float(value):.3f}"


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: int, prose: bool = False
) -> None:
    """Print a table on standard output.

    Cells are never cut; where a terminal is too narrow it breaks the lines.

    Parameters
    ----------
    columns
        Headings.
    rows
        As many cells in each.
    left
        Number of columns, from the first, that hold words and not numbers.
    prose
        Whether the last column is text that may be broken to fit a terminal.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for index, column in enumerate(columns):
        breaks = prose and index == len(columns) - 1
        table.add_column(column, justify="left" if index < left else "right", no_wrap=not breaks)
    for row in rows:
        table.add_row(*row)
    console = Console(file=sys.stdout, highlight=False, markup=False)
    if not (prose and console.is_terminal):
        console.width = _WIDE
    with console.capture() as capture:
        console.print(table, crop=False)
    for line in capture.get().splitlines():
        click.echo(line.rstrip())  # rich fills lines up


def progress() -> Progress:
    """A progress bar on standard error; nothing is drawn if that is no terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(file=sys.stderr),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
