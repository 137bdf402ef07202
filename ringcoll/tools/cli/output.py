"""The output of commands: tables, text, JSON, CSV, progress, pictures.

The ending of a file says whether a picture is written as SVG, page, PNG, PDF or GIF.
"""

from __future__ import annotations

import csv
import io
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import click

from ringcoll.errors import MissingExtraError, printable
from ringcoll.runtime.machine import json_text, replace_file

PICTURES = (".svg", ".html", ".png", ".pdf")
"""The endings of files that `write_picture` writes."""

_WIDE = 1000  # characters; wider than any table of this library
_GIF_SECONDS = 1.6  # that a step is shown, as in a moving SVG


def echo(text: object = "", *, nl: bool = True, err: bool = False) -> None:
    """Print a text of one or more lines; commands print everything but tables with it.

    Names in the text may come from anyone, see `printable`.
    """
    click.echo("\n".join(map(printable, str(text).split("\n"))), nl=nl, err=err)


def print_json(value: Any) -> None:
    """Print a value as strict JSON, fractions as numbers."""
    echo(json_text(value, indent=2, default=_number))


def _number(value: object) -> float:
    if isinstance(value, Fraction):
        return float(value)
    raise TypeError(f"{value!r} has no form in JSON")


def print_csv(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a table as CSV, with a line of names; ``None`` is an empty cell."""
    names = dict.fromkeys(name for row in rows for name in row)
    writer = csv.DictWriter(sys.stdout, list(names), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: printable(cell) if isinstance(cell, str) else cell
                         for name, cell in row.items()})  # fmt: skip


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
        columns = shutil.get_terminal_size().columns
        echo(textwrap.fill(sentence, columns) if on_terminal() else sentence)


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
        table.add_row(*map(printable, row))
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
            bar.update(task, advance=steps, description=text and printable(text))

        yield advance


def write_picture(path: Path, picture: str) -> None:
    """Write an SVG document: as it is, as a page, as PNG or PDF."""
    ending = path.suffix.lower()
    content: str | bytes = picture
    if ending == ".html":
        content = f'<!doctype html>\n<meta charset="utf-8">\n<body style="margin: 0">\n{picture}'
    elif ending != ".svg":
        content = _typeset(picture, "pdf" if ending == ".pdf" else "png")
    replace_file(path, content)


def write_gif(path: Path, pictures: Sequence[str]) -> None:
    """Write a GIF of SVG documents, one after the other, for ever; the last one twice as long."""
    try:
        from PIL import Image
    except ImportError as error:
        raise _missing(path.suffix) from error
    frames = [Image.open(io.BytesIO(_typeset(picture, "png"))) for picture in pictures]
    size = max(frame.width for frame in frames), max(frame.height for frame in frames)
    pages = []
    for frame in frames:
        page = Image.new("RGB", size, "white")
        page.paste(frame, ((size[0] - frame.width) // 2, (size[1] - frame.height) // 2))
        pages.append(page)
    durations = [int(1000 * _GIF_SECONDS)] * len(pages)
    durations[-1] *= 2
    file = io.BytesIO()
    pages[0].save(file, "GIF", save_all=True, append_images=pages[1:], duration=durations, loop=0)
    replace_file(path, file.getvalue())


def _typeset(picture: str, form: Literal["png", "pdf"]) -> bytes:
    """Make a page of the size of an SVG document, a point a pixel."""
    try:
        import typst
    except ImportError as error:
        raise _missing(f".{form}") from error
    size = re.search(r'viewBox="0 0 (\d+) (\d+)"', picture)
    assert size is not None
    width, height = size.groups()
    source = (
        f"#set page(width: {width}pt, height: {height}pt, margin: 0pt)\n"
        '#image(bytes(sys.inputs.picture), format: "svg", width: 100%)'
    )
    page = typst.compile(source.encode(), format=form, ppi=72.0, sys_inputs={"picture": picture})
    assert isinstance(page, bytes)
    return page


def _missing(ending: str) -> MissingExtraError:
    return MissingExtraError(
        f"a file {ending} needs typst and Pillow: pip install 'ringcoll[pictures]'; "
        ".svg and .html need nothing"
    )
