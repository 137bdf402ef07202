"""Write RESULTS.md from the records of ``records/``: a section for each.

``make results`` runs it, and a test holds that the page is what the committed records say.
A record comes from a script's ``--json FILE``.
"""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # it need not be installed

from benchmarks.common import FORMATS, Table, introduction

FOLDER = Path(__file__).with_name("records")
PAGE = Path(__file__).with_name("RESULTS.md")

INTRODUCTION = """\
# Results

`make results` writes this page from the records in [records/](records); the command under each
title writes its record anew with `--json FILE`. Words are explained in
[README.md](README.md#words), which also says how times are taken.

Times are medians of the slowest rank. The spread is the interquartile range over the median. A
ratio compares contenders that took turns in one run. Ratios travel from machine to machine,
times do not, and where more ranks run than there are cores the scheduler is measured too.
"""


class RecordError(Exception):
    """A file is not a record; the message names the file, what was expected, and what is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One run of one script, as `benchmarks.common.write` has written it.

    Parameters
    ----------
    title, question
        What was measured, and what for.
    environment
        Machine, software, date and command.
    tables
        The numbers.
    pictures
        Names of files beside the record.
    name
        The name of its file, less the ending.
    """

    title: str
    question: str
    environment: dict[str, Any]
    tables: tuple[Table, ...]
    pictures: tuple[str, ...]
    name: str


_FIELDS = {"title": str, "question": str, "environment": dict, "tables": list, "pictures": list}
_FACTS = ("command", "cores", "cpu", "load_average", "python", "started", "torch", "variables")


def read(path: Path) -> Record:
    """Read a record.

    Raises
    ------
    RecordError
        The file is not a record.
    """

    def demand(holds: bool, expected: str, got: object) -> None:
        if not holds:
            raise RecordError(f"{path}: not a record; expected {expected}, got {got!r}")

    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RecordError(f"{path}: not a record; expected JSON, got: {error}") from error
    demand(isinstance(record, dict), "an object", record)
    for field, kind in _FIELDS.items():
        value = record.get(field)
        demand(isinstance(value, kind), f"{field!r}, a {kind.__name__}", value)
    facts = record["environment"]
    demand(facts.keys() >= set(_FACTS), f"an environment with {', '.join(_FACTS)}", list(facts))
    demand(bool(record["tables"]), "at least one table", [])
    for table in record["tables"]:
        demand(
            isinstance(table, dict) and table.keys() == {"columns", "rows", "caption"},
            "tables with columns, rows and a caption",
            table,
        )
        demand(
            set(table["columns"].values()) <= FORMATS.keys(),
            f"columns of the kinds {', '.join(FORMATS)}",
            table["columns"],
        )
        kinds = table["columns"].values()
        for row in table["rows"]:
            demand(len(row) == len(kinds), f"{len(kinds)} values a row", row)
            for kind, value in zip(kinds, row, strict=True):
                fits = kind == "text" or value is None or isinstance(value, int | float)
                demand(fits, f"a value of the kind {kind}", value)
    return Record(
        title=record["title"],
        question=record["question"],
        environment=facts,
        tables=tuple(Table(**table) for table in record["tables"]),
        pictures=tuple(record["pictures"]),
        name=path.stem,
    )


def section(record: Record) -> str:
    """The section of a record: title, command, question, machine, tables, pictures."""
    facts = record.environment
    variables = [
        f"{name}={shlex.quote(value)}"
        for name, value in facts["variables"].items()
        if name.startswith("RINGCOLL_")
    ]
    paragraphs = [
        f"## {record.title} ({record.name})",
        f"```\n{' '.join([*variables, shlex.join(facts['command'])])}\n```",
        record.question,
        f"{facts['started'][:10]}; {introduction(facts)}.",
    ]
    for table in record.tables:
        lines = [list(table.columns), ["---"] * len(table.columns), *table.cells()]
        paragraphs += [table.caption, "\n".join(f"| {' | '.join(line)} |" for line in lines)]
    paragraphs += [f"![{record.title}](records/{name})" for name in record.pictures]
    return "\n\n".join(filter(None, paragraphs)) + "\n"


def page(folder: Path | None = None) -> str:
    """The whole page: all records of a folder, by default `FOLDER`, in the order of their names."""
    records = [read(path) for path in sorted((folder or FOLDER).glob("*.json"))]
    return "\n".join([INTRODUCTION, *map(section, records)])


def main() -> int:
    """Write the page."""
    try:
        text = page()
    except RecordError as error:
        print(error, file=sys.stderr)
        return 1
    PAGE.write_text(text, encoding="utf-8")
    print(PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
