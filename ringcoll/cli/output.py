"""How commands print: tables and text for people, JSON and CSV for programs, progress."""

from __future__ import annotations

import csv
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import click

from ringcoll.machine import json_text

_WIDE = 1000  # characters; wider than any table of this library


def print_json(value: Any) -> None:
    """Print a value as strict JSON, fractions as numbers."""
    click.echo(json_text(value, indent=2, default=_number))


def _number(value: object) -> float:
    if isinstance(value, Fraction):
        return float(value)
    raise TypeError(f"{value!r} has no form in JSON")


def print_csv(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a table as CSV, with a line of names; ``None`` is an empty cell."""
    names = dict.fromkeys(name for row in rows for name in row)
    writer = csv.DictWriter(sys.stdout, list(names), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


def amount(value: Fraction) -> str:
    """Write an amount of data, in n, as tables show it.

    >>> amount(Fraction(63, 32)), amount(Fraction(3))
    ('1.969', '3.000')
    """
    return f"{float(value):.3f}"


def times(value: Fraction | int, bound: Fraction | int) -> str:
    """Write a value as a multiple of its bound; nothing if the bound is 0.

    >>> times(6, 4), times(3, 0)
    ('1.50x', '')
    """
    return f"{float(value / bound):.2f}x" if bound else ""


def grouped(rows: Iterable[Sequence[str]], *, apart: bool = True) -> Iterator[tuple[str, ...]]:
    """Rows of which the first cell is written only where it changes, perhaps with a line before.

    >>> list(grouped([("a", "1"), ("a", "2"), ("b", "3")]))
    [('a', '1'), ('', '2'), ('', ''), ('b', '3')]
    """
    last = None
    for first, *others in rows:
        if apart and last not in (None, first):
            yield ("",) * (1 + len(others))
        yield ("" if first == last else first, *others)
        last = first


def on_terminal() -> bool:
    """Whether standard output is a terminal."""
    return sys.stdout.isatty()


def print_text(*sentences: str) -> None:
    """Print each sentence on lines of its own, wrapped if standard output is a terminal."""
    for sentence in sentences:
        if on_terminal():
            click.echo(textwrap.fill(sentence, shutil.get_terminal_size().columns))
        else:
            click.echo(sentence)


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: int, prose: int = 0
) -> None:
    """Print a table on standard output.

    Cells are never cut; a terminal that is too narrow breaks the lines.

    Parameters
    ----------
    columns, rows
        Headings, and rows with as many cells.
    left, prose
        Number of columns, from the first, that hold words and not numbers; and of columns, to the
        last, that hold text, which may be broken to fit a terminal.
    """
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for index, column in enumerate(columns):
        breaks = index >= len(columns) - prose
        words = breaks or index < left
        table.add_column(column, justify="left" if words else "right", no_wrap=not breaks)
    for row in rows:
        table.add_row(*row)
    console = Console(file=sys.stdout, highlight=False, markup=False)
    if not (prose and console.is_terminal):
        console.width = _WIDE
    with console.capture() as capture:
        console.print(table, crop=False)
    for line in capture.get().splitlines():
        click.echo(line.rstrip())  # rich fills lines up


@contextmanager
def progress(total: int, text: str = "", *, shown: bool = True) -> Iterator[Callable[..., None]]:
    """Show a progress bar of so many steps on standard error, if that is a terminal.

    Yields ``advance(text=None, steps=1)``, which goes on by some steps, with another text beside
    the bar; a narrow terminal cuts the text.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Column

    bar = Progress(
        TextColumn("{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True)),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(file=sys.stderr),
        expand=True,
        transient=True,
        disable=not (shown and sys.stderr.isatty()),
    )
    with bar:
        task = bar.add_task(text, total=total)

        def advance(text: str | None = None, steps: int = 1) -> None:
            bar.update(task, advance=steps, description=text)

        yield advance
