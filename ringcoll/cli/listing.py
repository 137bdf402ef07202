"""``ringcoll list``: which algorithms there are."""

from __future__ import annotations

from typing import Any

import click

from ringcoll.algorithms import ALIASES, Algorithm, algorithms
from ringcoll.cli.command import command
from ringcoll.cli.output import amount, grouped, print_json, print_table, times
from ringcoll.cli.parameters import collective_name, json_option, named_algorithms
from ringcoll.cli.report import findings
from ringcoll.errors import ScheduleError
from ringcoll.machine import is_reference
from ringcoll.schedule import CONTRACTS, verify

_EXAMPLES = """
ringcoll list
ringcoll list all_reduce
ringcoll list star.py:star
"""


_COLUMNS = (
    *("collective", "algorithm", "restriction", "k", "rounds", "/bound", "traffic", "/bound"),
    *("how", "source"),
)


def _origin(entry: Algorithm) -> tuple[str, str]:
    return entry.summary, entry.source


def _names(entry: Algorithm) -> str:
    """The name, with the short names that also find the algorithm."""
    short = [alias for alias, name in ALIASES.items() if name == entry.name]
    return f"{entry.name} ({', '.join(short)})" if short else entry.name


def _proved(entry: Algorithm) -> dict[str, Any] | None:
    """The proof for 8 ranks, or for a few more; ``None`` if the algorithm is wrong."""
    fitting = (k for k in range(8, 65) if not entry.restriction(k))
    try:
        proof = verify(entry.schedule(next(fitting, 1)))
    except ScheduleError:
        return None
    return {"world_size": proof.schedule.world_size} | findings(proof)


def _costs(facts: dict[str, Any] | None) -> tuple[str, ...]:
    if facts is None:
        return ("", "", "", "", "wrong")
    return (
        str(facts["world_size"]),
        str(facts["rounds"]),
        times(facts["rounds"], facts["rounds_at_least"]),
        amount(facts["traffic"]),
        times(facts["traffic"], facts["traffic_at_least"]),
    )


@command("list", examples=_EXAMPLES)
@click.argument("collective", required=False)
@json_option
def list_algorithms(collective: str | None, as_json: bool) -> None:
    """List the algorithms of COLLECTIVE, or of all collectives.

    A short name that also finds an algorithm is given in parentheses. Rounds and
    traffic, in units of the whole data, are those of k ranks; a factor says how many
    times the lower bound each is. Traffic is what the busiest rank sends or receives,
    added up over the steps. With module:algorithm or path/file.py:algorithm in place
    of COLLECTIVE, that algorithm of yours is listed.

    A name with = chooses the parameter of an algorithm that has one, such as circulant=64 for
    64 blocks. Names with + are a hierarchy of all_reduce algorithms, such as ring+two_shot: the
    first runs inside each host, the second across; a third is for groups of hosts.
    """
    if collective is None:
        entries = [entry for name in CONTRACTS for entry in algorithms(name)]
    elif is_reference(collective):
        entries = named_algorithms(collective)[0]
    else:
        entries = list(algorithms(collective_name.convert(collective, None, None)))
    if as_json:
        print_json(
            [
                {
                    "collective": entry.collective,
                    "algorithm": entry.name,
                    "summary": entry.summary,
                    "pipelined": entry.pipelined,
                    "equal_blocks": entry.equal_blocks,
                    "restriction": entry.needs,
                    "parameter": entry.parameter and entry.parameter.name,
                    "source": entry.source,
                    "at": _proved(entry),
                }
                for entry in entries
            ]
        )
        return
    rows = (
        (entry.collective, _names(entry), entry.needs, *_costs(_proved(entry)), *_origin(entry))
        for entry in entries
    )
    print_table(_COLUMNS, grouped(rows, apart=False), left=3, prose=2)
