"""``ringcoll list``: the algorithms of each collective."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import click

from ringcoll.errors import ScheduleError
from ringcoll.runtime.user_files import is_reference
from ringcoll.schedules import CONTRACTS, verify
from ringcoll.schedules.algorithms import ALIASES, Algorithm, algorithms
from ringcoll.tools.cli import options
from ringcoll.tools.cli.app import command
from ringcoll.tools.cli.output import echo, grouped, print_json, print_table, print_text
from ringcoll.tools.cli.prove import cost_cells, findings_at


@command(
    "list",
    examples="""
        ringcoll list
        ringcoll list all_reduce
        ringcoll list --all
        ringcoll list star.py:star
    """,
)
@click.argument("collective", required=False, shell_complete=options.collective_name.shell_complete)
@click.option("--all", "every", is_flag=True,
              help="List every algorithm, with costs and source, in a wide table.")  # fmt: skip
@options.json_option
def list_algorithms(collective: str | None, every: bool, as_json: bool) -> None:
    """List the algorithms of COLLECTIVE, or of all collectives.

    Without --all, those are listed that run on any number of ranks and that are no second
    choices: where two algorithms are predicted to take the same time, "auto" prefers them. A
    short name that also finds an algorithm is given in parentheses.

    In the table of --all, rounds and traffic, in units of the whole data, are those of k ranks; a
    factor says how many times the lower bound each is. Traffic is what the busiest rank sends or
    receives, added up over the steps. With module:algorithm or path/file.py:algorithm in place of
    COLLECTIVE, that algorithm of yours is listed in this table. --json has every algorithm.

    A name with = chooses the parameter of an algorithm that has one, such as circulant=64 for
    64 blocks. Names with + are a hierarchy of all_reduce, reduce_scatter or all_gather, such as
    ring+bruck: the first runs inside each host, the second across; a third is for groups of hosts.
    """
    every = every or is_reference(collective or "")
    if collective is None:
        entries = [entry for name in CONTRACTS for entry in algorithms(name)]
    elif is_reference(collective):
        entries = options.named_algorithms(collective)[0]
    else:
        entries = list(algorithms(options.collective_name.convert(collective, None, None)))
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
    if not every:
        _print_usual(entries)
        return
    wrong = ("", "", "", "", "wrong")
    rows = (
        (entry.collective, _names(entry), entry.needs)
        + (cost_cells(facts) if (facts := _proved(entry)) else wrong)
        + (entry.summary, entry.source)
        for entry in entries
    )
    costs = ("k", "rounds", "/bound", "traffic", "/bound")
    columns = ("collective", "algorithm", "restriction", *costs, "how", "source")
    print_table(columns, grouped(rows, apart=False), left=3, prose=2)


def _print_usual(entries: Sequence[Algorithm]) -> None:
    """Print what is listed without ``--all``, a heading for each collective."""
    usual = [entry for entry in entries if not (entry.second_choice or entry.needs)]
    width = max((len(_names(entry)) for entry in usual), default=0)
    for collective, group in groupby(usual, lambda entry: entry.collective):
        echo(collective)
        for entry in group:
            name = f"  {_names(entry):{width}}  "
            text = textwrap.fill(
                _how(entry), 80, break_on_hyphens=False,
                initial_indent=name, subsequent_indent=" " * len(name),
            )  # fmt: skip
            echo(text or name.rstrip())
        echo()
    print_text(
        f"{len(usual)} of {len(entries)} algorithms; all of them, with costs: ringcoll list --all",
        "Steps and costs of one: ringcoll show ring all_reduce",
    )


def _short(entry: Algorithm) -> list[str]:
    """The short names that also find the algorithm."""
    return [alias for alias, name in ALIASES.items() if name == entry.name]


def _names(entry: Algorithm) -> str:
    short = _short(entry)
    return f"{entry.name} ({', '.join(short)})" if short else entry.name


def _how(entry: Algorithm) -> str:
    """The summary, without the names that stand beside it."""
    title, _, text = entry.summary.partition(": ")
    names = {f"{name}_{entry.collective}" for name in (entry.name, *_short(entry))}
    if text and title.lower().replace("-", "_").replace(" ", "_") in names:
        return text[0].upper() + text[1:]
    return entry.summary


def _proved(entry: Algorithm) -> dict[str, Any] | None:
    """The proof for 8 ranks, or for a few more; ``None`` if the algorithm is wrong."""
    fitting = (k for k in range(8, 65) if not entry.restriction(k))
    try:
        proof = verify(entry.schedule(next(fitting, 1)))
    except ScheduleError:
        return None
    return findings_at(proof)
