"""What the scripts share: options, tables, files."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ringcoll.bench.environment import environment, oversubscribed


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the option that all scripts have."""
    result = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("--json", type=Path, metavar="FILE", help="write everything to FILE")
    return result


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table; the first column is left-justified."""
    cells = [list(columns), *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        first, *others = (
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        print("  ".join([first, *others]).rstrip())


def introduce(facts: dict[str, Any]) -> None:
    """Say on what machine the numbers are measured."""
    print(
        f"{facts['cpu']}, {facts['cores']} cores, load {facts['load_average'][0]}; "
        f"torch {facts['torch']}, python {facts['python']}"
    )
    if facts["world_size"] > 1 and (warning := oversubscribed(facts["world_size"])):
        print(warning)


def write(path: Path | None, facts: dict[str, Any], results: object) -> None:
    """Write results with their environment, if a file was asked for."""
    if path is not None:
        text = json.dumps({"environment": facts, "results": results}, indent=2)
        path.write_text(text + "\n", encoding="utf-8")
        print(f"\n{path.resolve()}")


__all__ = ["environment", "introduce", "parser", "table", "write"]
