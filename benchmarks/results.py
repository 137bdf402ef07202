"""Write RESULTS.md, the results that matter, and a page of each record of ``records/`` in ``measured/``.

``make results`` runs it, and a test holds that the pages are what the committed records say.
A record comes from a script's ``--json FILE``.
"""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # it need not be installed

from benchmarks.common import FORMATS, Table, introduction

FOLDER = Path(__file__).with_name("records")
PAGE = Path(__file__).with_name("RESULTS.md")
PAGES = Path(__file__).with_name("measured")

INTRODUCTION = """\
# Results

The results that matter. Behind each stands the page of its whole record, with the command that measures it anew;
all pages are listed below. `make results` writes them from [records/](records). Words are explained in
[README.md](README.md#words), which also says how times are taken.

Times are medians of the slowest rank; the pages have the spreads. Contenders of a table took turns in one run. Ratios
travel from machine to machine, times do not, and where more ranks run than there are cores the scheduler is measured
too. `auto` is the public function, `persistent` the prepared call, `shared_tensors` the prepared call on tensors in
shared memory, `native` gloo.
"""


class Highlight(NamedTuple):
    """Rows and columns of a record that are shown on the first page."""

    record: str
    title: str
    caption: str  # how the caption of the table begins
    columns: tuple[str, ...]
    rows: tuple[object, ...] = ()  # values in the first column; all if there are none
    picture: str | None = None


_SIZES = (4, 65536, 1 << 20, 16 << 20, 64 << 20)
_BESIDE = (4, 1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26)
_PEERS = ("size", "auto", "persistent", "shared_tensors", "native", "openmpi", "mpich")
HIGHLIGHTS = (
    Highlight(
        "peers-shared", "All-reduce on two ranks of one host", "all_reduce, 2 ranks: medians",
        _PEERS, _SIZES, "peers-shared-2.png",
    ),
    Highlight(
        "peers-shared", "All-reduce on four ranks that share two cores",
        "all_reduce, 4 ranks: medians", _PEERS, _SIZES, "peers-shared-4.png",
    ),
    Highlight(
        "peers-busy", "All-reduce on four ranks beside two busy loops",
        "all_reduce, 4 ranks, 2 busy loops beside them: medians", _PEERS,
    ),
    Highlight(
        "deepspeed", "Against DeepSpeed's all-reduce through shared memory", "All-reduce of float32",
        ("ranks", "size", "persistent", "shared_tensors", "deepspeed"), (2,),
    ),
    Highlight(
        "calls", 'Programs for torch.distributed on `init_process_group("ringcoll")`',
        "The backend ringcoll against gloo", ("what", "k", "busy loops", "ringcoll", "gloo", "/ gloo"),
    ),
    Highlight(
        "kills", "Ranks that are killed at random moments, and what the others say",
        "What became of the survivors", ("transport", "survivors", "right", "median", "slowest"),
    ),
    Highlight(
        "recovery", "Groups that go on without the dead", "From a rank's death",
        ("transport", "ranks", "survivors", "median", "slowest"),
    ),
    Highlight(
        "sharded", "A training step with sharded state", "Step",
        ("trainer", "median", "spread", "/ DDP"),
    ),
    Highlight(
        "out_of_step", "Training out of lock-step with a slow rank", "Loss 0.2",
        ("way", "slow rank", "to the target", "steps", "sent"),
        ("lock-step", "local SGD"),
    ),
    Highlight(
        "fit", "Schedules that were fitted to three hosts with unequal links",
        "All-reduce of float32 without and with a fit",
        ("ranks", "size", "auto", "fitted", "auto / fitted", "fitted / bound", "simulated / fitted"), ("in turn",),
    ),
)  # fmt: skip


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
    """The page of a record: title, command, question, machine, tables, pictures."""
    facts = record.environment
    variables = [
        f"{name}={shlex.quote(value)}"
        for name, value in facts["variables"].items()
        if name.startswith("RINGCOLL_")
    ]
    paragraphs = [
        f"# {record.title} ({record.name})",
        f"```\n{' '.join([*variables, shlex.join(facts['command'])])}\n```",
        record.question,
        _about(record),
    ]
    for table in record.tables:
        paragraphs += [table.caption, _markdown(table)]
    paragraphs += [f"![{record.title}](../records/{name})" for name in record.pictures]
    return "\n\n".join(filter(None, paragraphs)) + "\n"


def _about(record: Record) -> str:
    return f"{record.environment['started'][:10]}; {introduction(record.environment)}."


def _markdown(table: Table) -> str:
    lines = [list(table.columns), ["---"] * len(table.columns), *table.cells()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _highlight(shown: Highlight, record: Record) -> str:
    (table,) = (one for one in record.tables if one.caption.startswith(shown.caption))
    places = [list(table.columns).index(column) for column in shown.columns]
    rows = [
        [row[place] for place in places]
        for row in table.rows
        if not shown.rows or row[0] in shown.rows
    ]
    part = Table({column: table.columns[column] for column in shown.columns}, rows)
    picture = f"![{shown.title}](records/{shown.picture})" if shown.picture else ""
    about = f"[{shown.record}](measured/{shown.record}.md): {_about(record)}"
    return "\n\n".join(filter(None, [f"## {shown.title}", about, _markdown(part), picture])) + "\n"


def _processors(records: dict[str, Record]) -> str:
    """The records of one benchmark on several processors: times over that of the better MPI library."""
    on = {name: one for name, one in records.items() if name.startswith("peers-shared")}
    if len(on) < 2:
        return ""
    ratios: dict[tuple[str, int], dict[str, float]] = {}
    for name, record in on.items():
        for table in record.tables:
            if not table.caption.endswith(": medians."):
                continue
            for row in table.rows:
                of = dict(zip(table.columns, row, strict=True))
                ratio = of["persistent"] / min(of["openmpi"], of["mpich"])
                ratios.setdefault((table.caption.removesuffix(": medians."), of["size"]), {})[
                    name
                ] = ratio
    heads = {
        name: f"{one.environment['cpu']}, {one.environment['started'][:10]}"
        for name, one in on.items()
    }
    columns = {"what": "text", "size": "bytes"} | dict.fromkeys(heads.values(), "ratio")
    rows = [(*key, *map(found.get, on)) for key, found in ratios.items() if key[1] in _BESIDE]
    links = ", ".join(f"[{name}](measured/{name}.md)" for name in on)
    about = f"`persistent` over the quicker one of Open MPI and MPICH; below 1 it is ahead. {links}"
    return (
        "\n\n".join(["## The same on other machines", about, _markdown(Table(columns, rows))])
        + "\n"
    )


def pages(folder: Path | None = None) -> dict[Path, str]:
    """All pages by their files: of each record of a folder, by default `FOLDER`, and the first one."""
    records = {path.stem: read(path) for path in sorted((folder or FOLDER).glob("*.json"))}
    shown = [_highlight(one, records[one.record]) for one in HIGHLIGHTS if one.record in records]
    listed = [f"- [{name}](measured/{name}.md): {one.title}" for name, one in records.items()]
    every = ["## All pages\n\n" + "\n".join(listed) + "\n"] if listed else []
    first = {PAGE: "\n".join(filter(None, [INTRODUCTION, *shown, _processors(records), *every]))}
    return first | {PAGES / f"{name}.md": section(record) for name, record in records.items()}


def main() -> int:
    """Write the pages, and remove those whose records are gone."""
    try:
        texts = pages()
    except RecordError as error:
        print(error, file=sys.stderr)
        return 1
    PAGES.mkdir(exist_ok=True)
    for path in {*PAGES.glob("*.md")} - texts.keys():
        path.unlink()
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    print(PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
