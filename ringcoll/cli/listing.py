"""``ringcoll list``: which algorithms there are."""

from __future__ import annotations

import click

from ringcoll.algorithms import ALIASES, Algorithm, algorithms
from ringcoll.cli.output import print_json, print_table
from ringcoll.cli.parameters import collective_name, json_option
from ringcoll.contracts import CONTRACTS

__all__ = ["list_algorithms"]

_EXAMPLES = """\b
Examples:
  ringcoll list
  ringcoll list all_reduce
"""


def _names(entry: Algorithm) -> str:
    """The name, with the short names that also find it."""
    short = [alias for alias, name in ALIASES.items() if name == entry.name]
    return f"{entry.name} ({', '.join(short)})" if short else entry.name


@click.command("list", epilog=_EXAMPLES)
@click.argument("collective", type=collective_name, required=False)
@json_option
def list_algorithms(collective: str | None, as_json: bool) -> None:
    """List the algorithms of COLLECTIVE, or of all collectives.

    A short name that also finds an algorithm is given in parentheses.
    """
    names = CONTRACTS if collective is None else [collective]
    families = [list(algorithms(name)) for name in names]
    if as_json:
        print_json(
            [
                {
                    "collective": entry.collective,
                    "algorithm": entry.name,
                    "summary": entry.summary,
                    "pipelined": entry.pipelined,
                    "equal_blocks": entry.equal_blocks,
                }
                for family in families
                for entry in family
            ]
        )
        return
    print_table(
        ("collective", "algorithm", "how"),
        [
            (
                entry.collective if index == 0 else "",
                _names(entry),
                entry.summary,
            )
            for family in families
            for index, entry in enumerate(family)
        ],
        left=3,
        prose=True,
    )
