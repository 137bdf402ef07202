"""Names that come from anyone are written for print: to terminals, in pictures, in files."""

from __future__ import annotations

import json
import re
import xml.dom.minidom
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from ringcoll.errors import printable
from ringcoll.lab.formats import to_msccl, to_mscclpp
from ringcoll.lab.simulation import Link, Topology
from ringcoll.schedules import Schedule
from ringcoll.schedules.algorithms import schedule_of

Run = Callable[..., Result]

# It clears the screen, sets a title, colours, turns the direction of writing, and forges a line.
EVIL = "a\x1b[2J\x1b]0;title\x07\x9b31m\x7f\u202e\u2066\ufffe"
RAW = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")
RING = schedule_of("all_reduce", "ring", 2)


def in_text() -> str:
    return RING.to_text().replace(" ring ", f" {EVIL} ")


def in_xml() -> str:
    return to_msccl(RING).replace('name="ring"', 'name="a&#10;FORGED\x9b\u202e&#x7f;"')


def in_json() -> str:
    return json.dumps(json.loads(to_mscclpp(RING)) | {"name": f"a\n\ud800FORGED {EVIL}"})


FILES = {
    "evil.txt": in_text,
    "evil.xml": in_xml,
    "evil.json": in_json,
    "f\x1b[2J\u202e.txt": in_text,
    "wrong.txt": lambda: in_text().replace(" final", ""),
}
COMMANDS = (
    *("show FILE", "show FILE --json", "show FILE --text", "show FILE --primitives"),
    *("show FILE -o x.svg", "show FILE --grid -o x.svg", "show FILE -o x.html"),
    *(
        "verify FILE --order",
        "verify FILE --order --json",
        "verify FILE",
        "verify FILE --json",
        "simulate FILE",
    ),
    *("simulate FILE -o x.svg", "simulate FILE -o x.json", "simulate FILE -o x.html"),
    *("export FILE", "export FILE --format mscclpp"),
    "plot crossover --algorithms FILE,ring -o x.svg",
)


def check(result: Result, folder: Path) -> None:
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert not RAW.search(result.output)
    assert not re.search("^FORGED", result.output, re.MULTILINE)
    for path in folder.glob("x.*"):
        content = path.read_text(encoding="utf-8")
        assert not RAW.search(content)
        if path.suffix == ".svg":
            xml.dom.minidom.parseString(content)


@pytest.mark.parametrize("file", FILES, ids=ascii)
def test_the_name_of_a_schedule(run: Run, own_folder: Path, file: str) -> None:
    Path(file).write_text(FILES[file](), encoding="utf-8")
    for words in COMMANDS:
        result = run(
            *(file if word == "FILE" else word.replace("FILE", file) for word in words.split())
        )
        check(result, own_folder)


@pytest.mark.parametrize(
    "words", ["show GRAPH", "simulate ring --graph GRAPH -o x.svg", "show GRAPH -o x.svg",
              "plot pareto --graph GRAPH", "simulate ring --graph GRAPH --fail EVIL-0"],
)  # fmt: skip
@pytest.mark.parametrize("content", ["0 -- 1 1 1", f"0 -- 1 1 1\n{EVIL}"], ids=["right", "wrong"])
def test_the_name_of_a_network(run: Run, own_folder: Path, words: str, content: str) -> None:
    graph = "n\x1b[2J\u202e\n.txt"
    Path(graph).write_text(content, encoding="utf-8")
    check(
        run(*({"GRAPH": graph, "EVIL-0": f"{EVIL}-0"}.get(w, w) for w in words.split())), own_folder
    )


@pytest.mark.parametrize(
    "words", ["EVIL", "--EVIL", "show EVIL", "show ring EVIL", "show ring -k EVIL", "show --EVIL",
              "simulate ring --topology EVIL", "verify --schedule EVIL", "list EVIL", "dump EVIL",
              "verify EVIL.py:x --order", "show ring=EVIL", "show ring -o /nowhere/EVIL.svg"],
)  # fmt: skip
@pytest.mark.parametrize("evil", [EVIL, "\udcff"], ids=ascii)
def test_what_the_user_types(run: Run, own_folder: Path, words: str, evil: str) -> None:
    result = run(*(word.replace("EVIL", evil) for word in words.split()))
    assert result.exit_code == 2
    check(result, own_folder)


def test_where_names_come_in_they_are_made_printable() -> None:
    schedule = Schedule("all_reduce", EVIL, 2, 2, 0, RING.program)
    network = Topology(world_size=2, links=(Link(0, 1, 1), Link(1, 0, 1)), name=EVIL, source=EVIL)
    for name in (schedule.algorithm, network.name, network.source, Link(0, EVIL, 1).name):
        assert name.isprintable()
    assert Schedule.from_text(schedule.to_text()) == schedule
    assert printable("größer ≥ 環") == "größer ≥ 環"


ODD: tuple[object, ...] = (EVIL, float("nan"), [])


@pytest.mark.slow
def test_a_trace_that_is_none(run: Run, own_folder: Path) -> None:
    """Every value of a trace in turn is something else."""
    run("simulate", "ring", "-k", "2", "-o", "trace.json")
    trace = json.loads(Path("trace.json").read_text())
    last = [event for event in trace["traceEvents"] if event.get("cat") == "operation"][-1:]
    sends = [event for event in trace["traceEvents"] if event.get("ph") == "b"][:2]
    holders: list[dict[str, Any]] = [trace, trace["otherData"], *last, *sends]
    holders += [event["args"] for event in (*last, *sends)]
    for holder in holders:
        for name, value in [*holder.items()]:
            for odd in ODD:
                holder[name] = odd
                Path("odd.json").write_text(json.dumps(trace))
                result = run("show", "ring", "-k", "2", "--trace", "odd.json", "-o", "x.html")
                assert result.exit_code in (0, 2)
                check(result, own_folder)
            holder[name] = value
