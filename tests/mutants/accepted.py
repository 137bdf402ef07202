"""The survivors that are accepted, each with the reason."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["ACCEPTED", "ROOT", "Change", "accepted", "normal"]

ROOT = Path(__file__).parents[2]
ACCEPTED = Path(__file__).with_name("accepted.toml")


class Change(NamedTuple):
    """A mutant, in words that stay the same if other lines of the file change.

    Parameters
    ----------
    file
        Path from the root of the repository.
    within
        Function that was changed, as ``Class.method``; empty at the level of the module.
    was, now
        Lines before and after, in one line.
    """

    file: str
    within: str
    was: str
    now: str


def normal(lines: str) -> str:
    """Lines in one line, with one space where there are several."""
    return " ".join(lines.split())


def accepted(text: str) -> dict[Change, str]:
    """The accepted survivors in the text of ``accepted.toml``, and the reasons.

    Raises
    ------
    ValueError
        An entry has no reason, occurs twice, or has a key that nothing reads.
    """
    reasons: dict[Change, str] = {}
    for change, reason in _entries(tomllib.loads(text)):
        if not reason.strip():
            raise ValueError(f"no reason is given for {change}")
        if change in reasons:
            raise ValueError(f"listed twice: {change}")
        reasons[change] = reason
    return reasons


def _entries(document: dict[str, list[dict[str, str | list[str]]]]) -> Iterator[tuple[Change, str]]:
    for file, entries in document.items():
        for entry in entries:
            if entry.keys() != {"in", "was", "now", "why"}:
                raise ValueError(f"{file}: an entry needs in, was, now and why: {entry}")
            mutants = entry["now"] if isinstance(entry["now"], list) else [entry["now"]]
            for now in mutants:
                yield (
                    Change(file, str(entry["in"]), normal(str(entry["was"])), normal(now)),
                    str(entry["why"]),
                )
