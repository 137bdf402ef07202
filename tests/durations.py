"""Where the tests' time goes: ``python -m tests.durations [JUNIT.xml] [--kills FILE]``.

With the report of a run of all tests, in which none has failed (``pytest --junitxml=JUNIT.xml``), the
command writes the seconds of each test function, all its cases together, to ``tests/durations.json``.
What has changed since then decides which long tests ``make test`` runs (`tests.halves`), so the file is
committed alone. The command prints the tests that take longest; with the file that
``make mutants MUTANTS_FLAGS="--kills FILE"`` writes, by seconds for each mutant that a test has killed.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

from tests.halves import LONG

DURATIONS = Path(__file__).with_name("durations.json")
_LEAST_S = 0.5  # what takes less is left out of the file, which would be a list of all tests


def seconds_by_test(report: str) -> dict[str, float]:
    """The seconds of each test function in a JUnit report: set-up, cases and teardown.

    >>> seconds_by_test('<t><testcase classname="tests.a.T" name="test_b[1]" time="2"/></t>')
    {'tests.a.T.test_b': 2.0}
    """
    seconds: dict[str, float] = {}
    for case in ET.fromstring(report).iter("testcase"):
        name = f"{case.get('classname')}.{case.get('name', '').partition('[')[0]}"
        seconds[name] = seconds.get(name, 0.0) + float(case.get("time", 0))
    return seconds


def lacks(report: str) -> list[str]:
    """What a report lacks to be that of a run of all tests in which none has failed.

    >>> lacks('<t><testcase classname="tests.a" name="test_b"><failure/></testcase></t>')[:2]
    ['tests.a.test_b has failed', 'nothing of tests/backend/test_announcement.py']
    """
    cases = [*ET.fromstring(report).iter("testcase")]
    failed = [case for case in cases if {child.tag for child in case} & {"failure", "error"}]
    modules = {f"{case.get('classname')}." for case in cases}
    missing = [
        part
        for part in LONG
        if not any(
            name.startswith(part.removesuffix(".py").rstrip("/").replace("/", ".") + ".")
            for name in modules
        )
    ]
    return [
        *(f"{case.get('classname')}.{case.get('name')} has failed" for case in failed),
        *(f"nothing of {part}" for part in missing),
    ]


def ranked(seconds: dict[str, float], kills: dict[str, int]) -> list[tuple[str, float, int]]:
    """Tests with their seconds and kills, the most seconds for a kill first.

    >>> ranked({"a": 4.0, "b": 3.0, "c": 1.0}, {"a": 4})
    [('b', 3.0, 0), ('c', 1.0, 0), ('a', 4.0, 4)]
    """
    rows = [(name, spent, kills.get(name, 0)) for name, spent in seconds.items()]
    return sorted(rows, key=lambda row: (row[2] > 0, -row[1] / max(row[2], 1)))


def main() -> None:
    """Write the file from a report, if one is given, and print the tests that take longest."""
    parser = argparse.ArgumentParser(prog="python -m tests.durations", description=__doc__)
    parser.add_argument("report", nargs="?", type=Path)
    parser.add_argument("--kills", type=Path, help="mutants that each test has killed, as JSON")
    parser.add_argument("--most", type=int, default=40, help="tests to print")
    arguments = parser.parse_args()
    if arguments.report is not None:
        report = arguments.report.read_text(encoding="utf-8")
        if lacking := lacks(report):
            sys.exit("\n".join(["not all tests have passed:", *lacking]))
        found = seconds_by_test(report)
        kept = {name: round(spent, 1) for name, spent in found.items() if spent >= _LEAST_S}
        ordered = dict(sorted(kept.items(), key=lambda row: -row[1]))
        DURATIONS.write_text(json.dumps(ordered, indent=0) + "\n", encoding="utf-8")
    seconds = json.loads(DURATIONS.read_text(encoding="utf-8"))
    killed_by = json.loads(arguments.kills.read_text(encoding="utf-8")) if arguments.kills else {}
    kills = {name.replace(".py", "").replace("::", ".").replace("/", "."): number
             for name, number in killed_by.items()}  # fmt: skip
    print(f"{'seconds':>8}  {'kills':>5}  test; {sum(seconds.values()):.0f} s in all")
    for name, spent, killed in ranked(seconds, kills)[: arguments.most]:
        print(f"{spent:8.1f}  {killed:5d}  {name}")


if __name__ == "__main__":
    main()
