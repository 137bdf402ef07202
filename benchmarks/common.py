"""What the scripts share: options, tables, records.

A *record* is a JSON file: what was asked, where it was measured and with which command, and
tables of numbers. ``--json FILE`` writes one; ``make results`` puts those of ``records/``
into RESULTS.md.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import torch.distributed as dist

from ringcoll.runtime import serve_store
from ringcoll.runtime.transport import catalogue
from ringcoll.tools.bench import as_size, oversubscribed, time_in_words
from ringcoll.tools.bench import environment as facts_of
from ringcoll.tools.cli import print_table

__all__ = [
    "FORMATS",
    "LOOPBACK",
    "Processes",
    "Table",
    "busy_loops",
    "environment",
    "introduce",
    "introduction",
    "meeting_place",
    "parser",
    "shared_memory",
    "write",
]

LOOPBACK = "127.0.0.1"

# It ends with the script, however that ends.
_BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(100_000))"

FORMATS: dict[str, Callable[[Any], str]] = {
    "text": str,
    "count": str,
    "bytes": as_size,
    "seconds": time_in_words,
    "ratio": "{:.2f}".format,
    "share": "{:.0%}".format,
    "number": "{:.4g}".format,
}
"""How a value is written, by the kind of its column."""


def shared_memory() -> set[str]:
    """Names of shared memory that no process need have: files, and System V segments that none has attached."""
    table = [line.split() for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]]
    segments = {number for _, number, _, _, _, _, attached, *_ in table if attached == "0"}
    return segments | {path.name for path in Path("/dev/shm").iterdir()}


@contextmanager
def busy_loops(number: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run so many processes that never sleep, and end them."""
    loops = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in range(number)]
    try:
        yield loops
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


class Processes:
    """Processes of which some may die: forked from one that has imported torch, ended with the block.

    ``preload`` is the module of their function.
    """

    def __init__(self, preload: str) -> None:
        self._context: Any = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch", "ringcoll.training.resilient", preload])
        self.all: list[Any] = []

    def start(self, function: Callable[..., object], *arguments: object) -> tuple[Any, Connection]:
        """Start ``function(*arguments, connection)``; return the process, and the connection's end."""
        own, theirs = self._context.Pipe()
        process = self._context.Process(target=function, args=(*arguments, theirs))
        process.start()
        theirs.close()
        self.all.append(process)
        return process, own

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.all:
            process.kill()
            process.join()


def meeting_place(
    rank: int, address: str, port: int, limit: timedelta, *, at_rank_0: str = ""
) -> dist.Store:
    """The store at an address; or one that rank 0 serves at its address, and that dies with it."""
    outer = dist.TCPStore(address, port, None, False, timeout=limit)
    if not at_rank_0:
        return outer
    if rank == 0:
        store = serve_store(at_rank_0)
        outer.set("port", str(store.port))
        return store
    return dist.TCPStore(at_rank_0, int(outer.get("port")), None, False, timeout=limit)


@dataclass(frozen=True, slots=True)
class Table:
    """Numbers that belong together.

    Parameters
    ----------
    columns
        The kind of each column, one of `FORMATS`, by its name.
    rows
        Values, in the order of the columns; ``None`` for a value that does not exist.
    caption
        What the table shows, in one sentence; may be empty.
    """

    columns: dict[str, str]
    rows: Sequence[Sequence[Any]]
    caption: str = ""

    def cells(self) -> list[list[str]]:
        """The values as they are written, one list a row."""
        formats = [FORMATS[kind] for kind in self.columns.values()]
        return [
            [
                "-" if value is None else write(value)
                for write, value in zip(formats, row, strict=True)
            ]
            for row in self.rows
        ]

    def show(self) -> None:
        """Print the table; the first column is left-justified."""
        print(f"\n{self.caption}" if self.caption else "")
        print_table(list(self.columns), self.cells(), left=1)


def parser(description: str | None) -> argparse.ArgumentParser:
    """Make a parser with the option that all scripts have."""
    result = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("--json", type=Path, metavar="FILE", help="write a record to FILE")
    return result


def environment(world_size: int, transport: str | None = None) -> dict[str, Any]:
    """Describe software, machine and load before anything is started.

    Parameters
    ----------
    world_size
        Number of ranks; 1 if there are no messages.
    transport
        Name of the transport; by default the one that ``"auto"`` stands for.
    """
    facts = facts_of(world_size)
    if world_size > 1:
        facts["transport"] = catalogue.resolved("cpu") if transport is None else transport
    return facts


def introduction(facts: dict[str, Any]) -> str:
    """Name the machine and the software; facts that are ``None`` were not recorded."""
    load = facts["load_average"]
    words = {
        "{}": facts["cpu"],
        "{} cores": facts["cores"],
        "load {}": load and load[0],
        "torch {}": facts["torch"],
        "Python {}": facts["python"],
        "over {}": facts.get("transport"),
    }
    return ", ".join(word.format(value) for word, value in words.items() if value is not None)


def introduce(facts: dict[str, Any]) -> None:
    """Print where the numbers are measured."""
    print(introduction(facts))
    if facts["world_size"] > 1 and (warning := oversubscribed(facts["world_size"])):
        print(*warning, sep="\n")


def write(
    path: Path | None,
    about: str | None,
    facts: dict[str, Any],
    tables: Sequence[Table],
    *,
    title: str = "",
    pictures: Sequence[str] = (),
) -> None:
    """Write a record, if a file was asked for.

    Parameters
    ----------
    path
        The file; ``None`` to write nothing.
    about
        The script's docstring: a title, and what is asked.
    facts
        What `environment` returned.
    tables
        The numbers.
    title
        In place of the docstring's first line, if a script measures several things.
    pictures
        Names of files beside the record.
    """
    if path is None:
        return
    first, _, question = (about or "").strip().partition("\n")
    script, *words = facts["command"]
    if "--json" in words:  # where the record lies is no part of the measurement
        place = words.index("--json")
        words[place : place + 2] = []
    command = ["python", f"benchmarks/{Path(script).name}", *words]
    document = {
        "title": title or first.rstrip("."),
        "question": question.strip(),
        "environment": facts | {"command": command},
        "tables": [asdict(table) for table in tables],
        "pictures": list(pictures),
    }
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"\n{path.resolve()}")
