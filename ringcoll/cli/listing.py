"""``ringcoll list``: which algorithms there are."""

from __future__ import annotations

import click

from ringcoll.algorithms import ALIASES, Algorithm, algorithms
from ringcoll.cli.command import command
from ringcoll.cli.output import print_json, print_table
from ringcoll.cli.parameters import collective_name, json_option, named_algorithms
from ringcoll.schedule.contracts import CONTRACTS
from ringcoll.system.user_modules import is_reference

__all__ = ["list_algorithms"]

_EXAMPLES = """
ringcoll list
ringcoll list all_reduce
ringcoll list star.py:star
"""


def _names(entry: Algorithm) -> str:
    """The name, with the short names that also find the algorithm."""
    short = [alias for alias, name in ALIASES.items() if name == entry.name]
    return f"{entry.name} ({', '.join(short)})" if short else entry.name


@command("list", examples=_EXAMPLES)
@click.argument("collective", required=False)
@json_option
def list_algorithms(collective: str | None, as_json: bool) -> None:
    """List the algorithms of COLLECTIVE, or of all collectives.

    A short name that also finds an algorithm is given in parentheses. With
    module:algorithm or path/file.py:algorithm in place of COLLECTIVE, that algorithm of
    yours is listed.
    """
    if collective is None:
        families = [list(algorithms(name)) for name in CONTRACTS]
    elif is_reference(collective):
        families = [[entry] for entry in named_algorithms(collective)[0]]
    else:
        families = [list(algorithms(collective_name.convert(collective, None, None)))]
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
