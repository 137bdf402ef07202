"""Arguments and options that several commands take."""

from __future__ import annotations

import re
from collections.abc import Iterable

import click

__all__ = ["as_ranges", "collective_name", "json_option", "world_sizes"]

_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_LARGEST_WORLD = 1 << 16  # a typing error should not run for days

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def world_sizes(text: str) -> tuple[int, ...]:
    """Read numbers and ranges, such as ``1-8,13,64``; sorted, each once.

    Raises
    ------
    click.BadParameter
        The text is something else; the message names the part.

    Examples
    --------
    >>> world_sizes("8,1-3,2")
    (1, 2, 3, 8)
    """
    sizes: set[int] = set()
    for part in map(str.strip, text.split(",")):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise click.BadParameter(f"{part!r} is neither a number nor a range like 1-8")
        first = int(match[1])
        last = int(match[2] or first)
        if not 1 <= first <= last <= _LARGEST_WORLD:
            raise click.BadParameter(f"{part!r} is not within 1 to {_LARGEST_WORLD}, lowest first")
        sizes.update(range(first, last + 1))
    return tuple(sorted(sizes))


def as_ranges(numbers: Iterable[int]) -> str:
    """Write numbers in the way that `world_sizes` reads.

    >>> as_ranges([1, 2, 3, 5, 8, 9])
    '1-3,5,8-9'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def collective_name(text: str) -> str:
    """Read the name of a collective; ``all-reduce`` is understood as ``all_reduce``."""
    return text.replace("-", "_")
