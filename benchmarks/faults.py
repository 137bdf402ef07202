"""What ranks meet when they disagree, die, stop or lack something, over every transport.

The conformance suite of faults. Some 150 kinds of disagreement, between one rank of three and the others: in
the collective, operator, root, dtype, length, order, algorithm, schedule, segment size, wire dtype, coalescing
or group; messages against collectives; a rank that skips a call, raises or leaves. And some 25 ways in which a
rank comes to an end: it is killed in each phase of its work, stopped, or has no files, descriptors or memory.

Each rank has to get one of ringcoll's errors that names a rank and the operation, within 5 seconds, or at the
time limit where only that can tell; or the right result, and the error in the next call. Wanted: no rank is
silent, gets a wrong value, crashes or hangs, and the median is below 1 s.

``--page`` writes the tables into docs/reliability.md. NCCL is a stand-in: threads, whose messages have
no tags.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for tests.programs

from common import Table, environment, introduce, parser, write

from ringcoll.runtime import RankError, Ranks
from tests.programs import deaths, disagreements
from tests.programs.deaths import ENDINGS, run_ending
from tests.programs.disagreements import (
    KINDS,
    WORLD_SIZE,
    kinds_over,
    run_kinds,
    run_on_threads,
)

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reliability.md"
BEGIN, END = "<!-- written by benchmarks/faults.py -->", "<!-- end -->"
TRANSPORTS = ("threads", "shared", "ucx", "gloo", "nccl")
OVER_PROCESSES = ("shared", "ucx", "gloo")
PROBLEMS = (
    "silent", "wrong value", "untyped", "unnamed", "late", "false alarm", "no mismatch",
    "hangs", "crashes",
)  # fmt: skip
_BATCH_S = 90.0  # for the kinds that are tried at once

Found = dict[str, list[Any]]
"""What each rank met, by the name of a kind or of an ending."""


def available() -> list[str]:
    """The transports that can be tried here."""
    lacking = "" if find_spec("ucxx") else "ucx"
    return [name for name in TRANSPORTS if name != lacking]


def disagree(transport: str, names: Sequence[str], at_once: int = 1) -> Found:
    """Try kinds of disagreement over a transport; ``None`` for a rank that hangs or crashes."""
    if transport in ("threads", "nccl"):
        with ThreadPoolExecutor(at_once) as executor:
            met = executor.map(lambda name: run_on_threads(name, transport), names)
            return dict(zip(names, met, strict=True))
    found: Found = {}
    ranks: Ranks | None = None
    try:
        for start in range(0, len(names), at_once):
            batch = names[start : start + at_once]
            if ranks is None:
                ranks = Ranks(WORLD_SIZE, backend="ringcoll", timeout_s=_BATCH_S, threads=1)
            try:
                met = ranks.run(run_kinds, batch, transport)
            except (RankError, TimeoutError) as error:
                print(f"{transport}: {', '.join(batch)}: {error}", flush=True)
                met, ranks = [[None] * len(batch)] * WORLD_SIZE, None
            found |= {name: [item[at] for item in met] for at, name in enumerate(batch)}
    finally:
        if ranks is not None:
            ranks.close()
    return found


def outcome(words: Iterable[str], errors: Iterable[str], seconds: Sequence[float]) -> str:
    """A cell of the page's tables: what is wrong, or the errors, and their median time."""
    wrong = Counter(word for word in words if word not in ("right", "next", "cannot be known"))
    if wrong:
        return ", ".join(f"{number} {word}" for word, number in wrong.items())
    classes = sorted({error for error in errors if error})
    names = ", ".join(f"`{name}`" for name in classes) or "right results"
    return f"{names} {median(seconds):.1f} s" if seconds and classes else names


def _section(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def rows_of_kinds() -> dict[str, list[str]]:
    """The rows of the page's first table: what differs, and the kinds."""
    rows: dict[str, list[str]] = {}
    for name, kind in KINDS.items():
        rows.setdefault(kind.differs, []).append(name)
    return rows


def section(met: dict[str, Found], ended: dict[str, Found]) -> str:
    """The page's tables, from what ranks met, by transport."""
    rows = []
    for differs, names in rows_of_kinds().items():
        row = [differs, str(len(names))]
        for found in met.values():
            here = [name for name in names if name in found]
            items = [item for name in here for item in found[name] if item and item.error]
            own = ("OddError", "ArgumentError")  # of the rank that raises
            told = [item for item in items if item.error not in own]
            words = [disagreements.judge(KINDS[name], found[name]) for name in here]
            cell = outcome(words, [x.error for x in told], [x.seconds for x in told])
            row.append(cell if here else "-")
        rows.append(row)
    first = _section(["what differs", "kinds", *met], rows)
    rows = []
    for name, ending in ENDINGS.items():
        row = [name]
        for found in ended.values():
            if name not in found:
                row.append("-")
                continue
            told = found[name]
            seconds = deaths.seconds_of(ending, told)
            others = [rank for rank in seconds if rank not in ending.victims]
            errors = [told[rank].kind for rank in others]
            words = [deaths.judge(ending, told)]
            row.append(outcome(words, errors, [seconds[rank] for rank in others]))
        rows.append(row)
    second = _section(["one rank is or has", *ended], rows)
    return f"{first}\n\n{second}"


def put(page: str, text: str) -> str:
    """A page with new text between its markers."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def summary(met: dict[str, Found], ended: dict[str, Found]) -> list[Table]:
    """What became of all kinds and endings, by transport."""
    tables = []
    for what, every, judge_all in (
        ("kinds of disagreement", met, lambda n, f: disagreements.judge(KINDS[n], f[n])),
        ("endings", ended, lambda n, f: deaths.judge(ENDINGS[n], f[n])),
    ):
        rows = []
        words_of_all: set[str] = set()
        judged = {over: [judge_all(name, found) for name in found] for over, found in every.items()}
        for words in judged.values():
            words_of_all |= {*words}
        wrong = sorted(words_of_all - {"right", "next", "cannot be known"})
        for over, found in every.items():
            if every is met:
                times = [
                    item.seconds
                    for name in found
                    for item in found[name]
                    if item and item.error and KINDS[name].ends != "limit"
                ]
            else:
                times = [
                    seconds
                    for name in found
                    if ENDINGS[name].ends != "limit"
                    for rank, seconds in deaths.seconds_of(ENDINGS[name], found[name]).items()
                    if rank not in ENDINGS[name].victims
                ]
            words = judged[over]
            counts = [words.count(word) for word in ("right", "next", "cannot be known", *wrong)]
            if times:  # `--kinds` may leave out all
                rows.append((over, len(words), *counts, median(times), max(times)))
        columns = {"transport": "text", what: "count", "right": "count", "next call": "count"}
        columns |= {"cannot be known": "count", **dict.fromkeys(wrong, "count")}
        columns |= {"median": "seconds", "slowest": "seconds"}
        caption = f"What became of {what}; times without those that only a time limit ends."
        tables.append(Table(columns, rows, caption))
    return tables


def report_wrong(met: dict[str, Found], ended: dict[str, Found]) -> None:
    """Print each kind and ending with which something is wrong."""
    fine = ("right", "next", "cannot be known")
    for over, found in met.items():
        for name, items in found.items():
            if (word := disagreements.judge(KINDS[name], items)) not in fine:
                print(f"{over}: {name}: {word}: {items}", flush=True)
    for over, found in ended.items():
        for name, items in found.items():
            if (word := deaths.judge(ENDINGS[name], items)) not in fine:
                print(f"{over}: {name}: {word}: {items}", flush=True)


def main() -> None:
    """Run, print, write."""
    arguments = parser(__doc__)
    arguments.add_argument("--transports", default=",".join(available()))
    arguments.add_argument(
        "--kinds", default="", help="only kinds and endings of which this is a part"
    )
    arguments.add_argument("--at-once", type=int, default=1, help="kinds that are tried at once")
    arguments.add_argument("--page", action="store_true", help="write docs/reliability.md")
    options = arguments.parse_args()
    os.environ["RINGCOLL_TUNING"] = "off"
    facts = environment(WORLD_SIZE, options.transports)
    introduce(facts)
    met: dict[str, Found] = {}
    ended: dict[str, Found] = {}
    for transport in options.transports.split(","):
        names = [name for name in kinds_over(transport) if options.kinds in name]
        met[transport] = disagree(transport, names, options.at_once)
        if transport in OVER_PROCESSES:
            ended[transport] = {
                name: run_ending(name, transport)
                for name, ending in ENDINGS.items()
                if options.kinds in name and transport not in ending.but
            }
    report_wrong(met, ended)
    tables = summary(met, ended)
    for table in tables:
        table.show()
    write(options.json, __doc__, facts, tables)
    if options.page:
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(put(page, section(met, ended)), encoding="utf-8")


if __name__ == "__main__":
    main()
