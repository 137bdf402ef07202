"""`make mutants`: change the library in one place at a time, and see whether a test fails."""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.mutants.accepted import ACCEPTED, ROOT, Change, accepted
from tests.mutants.changes import Mutant, mutants, operators, places, sampled
from tests.mutants.trial import End, preload, trial

_CONFIG = Path(__file__).with_name("mutants.toml")
_FACTOR, _EXTRA_S = 3.0, 10.0  # a run has that many times the time of the unchanged file, and some


@dataclass
class _Row:
    """What became of the mutants of a file."""

    file: str
    all: int
    tried: int = 0
    killed: int = 0
    same: int = 0  # accepted, as they have the same effect: no test can kill them
    accepted: int = 0  # for other reasons
    survivors: list[Mutant] = field(default_factory=list)

    def cells(self) -> list[str]:
        numbers = self.all, self.tried, self.killed, self.same, self.accepted, len(self.survivors)
        return [self.file, *map(str, numbers), f"{self.percent:.0f} %"]

    @property
    def percent(self) -> float:
        """Killed, of those that have another effect."""
        others = self.tried - self.same
        return 100 * self.killed / others if others else 100.0


def _try_all(
    file: str,
    settings: dict[str, Any],
    tried: Sequence[Mutant],
    reasons: dict[Change, str],
    row: _Row,
    kills: Counter[str],
) -> None:
    path = ROOT / file
    tests = [name.format(file=file) for name in settings["tests"]]
    unchanged = trial(path, None, tests, 600.0)
    if unchanged.end is not End.PASSED:
        sys.exit(f"{file}: its tests fail without a change\n{unchanged.printed}")
    limit_s = _FACTOR * unchanged.took_s + _EXTRA_S
    print(f"{file}: {len(tried)} mutants; all tests take {unchanged.took_s:.1f} s", flush=True)
    failed: list[str] = []  # tests, the last that killed a mutant first
    for mutant in tried:
        outcome = trial(path, mutant.source, tests, limit_s, failed)
        row.tried += 1
        if outcome.end is not End.PASSED:
            row.killed += 1
            if outcome.by:
                kills[outcome.by.partition("[")[0]] += 1
                failed = [outcome.by, *(name for name in failed if name != outcome.by)]
        elif mutant.change in reasons:
            if reasons[mutant.change].startswith("same"):
                row.same += 1
            else:
                row.accepted += 1
        else:
            row.survivors.append(mutant)
            print(_entry(mutant), flush=True)


def _entry(mutant: Mutant) -> str:
    """A survivor as it would be accepted."""
    change = mutant.change

    def quoted(text: str) -> str:
        return f"'{text}'" if "'" not in text else f"'''{text}'''"

    return (
        f"\n# {change.file}:{mutant.line}\n[[{quoted(change.file)}]]\nin = {quoted(change.within)}\n"
        f"was = {quoted(change.was)}\nnow = {quoted(change.now)}\nwhy = ''"
    )


def _print_table(rows: Sequence[_Row]) -> _Row:
    """Print a line for each file, and return the last one, which is of all."""
    total = _Row("all", sum(row.all for row in rows))
    for row in rows:
        total.tried += row.tried
        total.killed += row.killed
        total.same += row.same
        total.accepted += row.accepted
        total.survivors += row.survivors
    lines = [["file", "mutants", "tried", "killed", "same", "accepted", "survived", "killed"]]
    lines += [row.cells() for row in [*rows, total]]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print()
    for name, *numbers in lines:
        cells = [text.rjust(width) for text, width in zip(numbers, widths[1:], strict=True)]
        print("  ".join([name.ljust(widths[0]), *cells]))
    return total


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("--mutants", default="", help="how many of each file, or `all`")
    parser.add_argument("--files", nargs="*", help="parts of the paths of files; all by default")
    parser.add_argument("--lines", help="all mutants of these lines, as 10-20, instead")
    parser.add_argument("--kills", type=Path, help="write how many each test has killed, as JSON")
    parser.add_argument("--list", action="store_true", help="list the mutants, and run nothing")
    return parser.parse_args()


def main() -> None:
    """Try the mutants; the exit status says whether all survivors are accepted."""
    arguments = _arguments()
    config = tomllib.loads(_CONFIG.read_text(encoding="utf-8"))
    number = config["sample"] if arguments.mutants == "" else arguments.mutants
    chosen = operators(config["operators"])
    reasons = accepted(ACCEPTED.read_text(encoding="utf-8"))
    preload()
    rows: list[_Row] = []
    kills: Counter[str] = Counter()
    for file, settings in config["files"].items():
        if arguments.files and not any(part in file for part in arguments.files):
            continue
        source = (ROOT / file).read_text(encoding="utf-8")
        functions = settings.get("functions", ())
        every = places(source, chosen, functions, config["skip"], config["keywords"])
        some = every if number == "all" else sampled(source, every, int(number), config["seed"])
        if arguments.lines:
            first, _, last = arguments.lines.partition("-")
            some = [place for place in every if int(first) <= place.line <= int(last or first)]
        tried = list(mutants(file, source, some))
        if arguments.list:
            print(*map(_entry, tried), sep="\n")
            continue
        rows.append(_Row(file, len(every)))
        _try_all(file, settings, tried, reasons, rows[-1], kills)
        if arguments.kills:
            arguments.kills.write_text(json.dumps(kills), encoding="utf-8")
    if arguments.list:
        return
    total = _print_table(rows)
    wrong = []
    if total.survivors:
        wrong.append(
            "mutants have survived that tests/mutants/accepted.toml does not list: see above"
        )
    if total.percent < config["wanted"]:
        wrong.append(f"fewer than {config['wanted']} % of the mutants were killed")
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
