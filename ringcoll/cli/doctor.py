"""``ringcoll doctor``: what will be used here, why, and what to expect."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from ringcoll.bench import as_size, oversubscribed, time_in_words
from ringcoll.cli.command import command
from ringcoll.cli.measuring import print_costs
from ringcoll.cli.output import print_json, print_table, print_text
from ringcoll.cli.parameters import json_option, ranks_option
from ringcoll.collectives import explain_without_ranks
from ringcoll.cost import BUILT_IN, Table
from ringcoll.errors import RingcollError
from ringcoll.machine import TRANSPORT_VARIABLES, cores, forced_transport
from ringcoll.transport import catalogue

_EXAMPLES = """
ringcoll doctor -k 4
ringcoll doctor -k 8 --json
"""

_SIZES = (4, 64 << 10, 16 << 20)  # bytes: a message's cost counts, then both, then each byte's


@command(examples=_EXAMPLES)
@ranks_option("Number of ranks that are meant to run here.", 2)
@json_option
@click.pass_context
def doctor(ctx: click.Context, ranks: int, as_json: bool) -> None:
    """Say which transports will be used on this machine, why, and what to expect.

    The same transports are used by the commands, by the functions, and by the backend of
    torch.distributed, unless a program or an option asks for others. Nothing is measured:
    times are predicted, from the costs that `ringcoll tune` has measured, or a group in the last
    hours, which are shown; otherwise from built-in costs.

    Exit status: 1 if something stands in the way.
    """
    transports = {kind: _transport(kind) for kind in ("cpu", "cuda")}
    problems = [facts["problem"] for facts in transports.values() if facts["problem"]]
    expected: list[dict[str, Any]] = []
    table: Table | None = None
    if not problems:
        try:
            expected, table = _expected(transports["cpu"]["transport"], ranks)
        except RingcollError as error:
            problems.append(str(error))
    facts = {
        "transports": transports,
        "ranks": ranks,
        "cores": cores(),
        "expected": expected,
        "costs": "" if table is None else table.source,
        "measured": None if table is None or table.source == BUILT_IN else asdict(table.parameters),
        "problems": problems,
    }
    if as_json:
        print_json(facts)
    else:
        _print(facts, table)
    if problems:
        ctx.exit(1)


def _transport(kind: str) -> dict[str, Any]:
    """The transport for tensors on a type of device, and the reason for it."""
    facts: dict[str, Any] = {"transport": None, "why": "", "problem": None}
    if kind == "cuda":
        import torch

        if not torch.cuda.is_available():
            return facts | {"why": "torch finds no GPU"}
    installed, missing = [], []
    for entry in catalogue.entries():
        if entry.automatic and entry.carries(kind):
            try:
                entry.check_automatic()
                installed.append(entry.name)
            except RingcollError as error:
                missing.append(f"{entry.name} is not installed: {error}")
    forced = forced_transport(kind)
    if forced not in (None, "auto"):
        facts["why"] = f"{TRANSPORT_VARIABLES[kind]} asks for it"
    else:
        facts["why"] = "; ".join(
            [f"the first that is installed of {', '.join(installed)}", *missing]
        )
    try:
        name = catalogue.resolved(kind)
    except RingcollError as error:
        return facts | {"problem": str(error)}
    facts["why"] = "; ".join(filter(None, (facts["why"], catalogue.entry(name).remark)))
    return facts | {"transport": name}


def _expected(transport: str, ranks: int) -> tuple[list[dict[str, Any]], Table]:
    """The choice of "auto" for all-reduce at some sizes, and the table of costs and rules."""
    rows = []
    for nbytes in _SIZES:
        choice = explain_without_ranks("all_reduce", nbytes, ranks, transport).choice
        seconds = None if choice.predicted is None else choice.predicted.seconds
        rows.append({"nbytes": nbytes, "algorithm": choice.algorithm, "predicted_s": seconds})
    return rows, choice.table


def _print(facts: dict[str, Any], table: Table | None) -> None:
    for kind, transport in facts["transports"].items():
        name = transport["transport"] or "none"
        print_text(f"{kind.upper()} tensors: {name} ({transport['problem'] or transport['why']})")
    ranks, available = facts["ranks"], facts["cores"]
    if ranks > available:
        print_text(*oversubscribed(ranks))
    else:
        print_text(f"{ranks} ranks, {available} cores: each rank has a core of its own")
    if facts["expected"]:
        print_text("", f'all_reduce with algorithm="auto"; costs: {facts["costs"]}')
        rows = [
            (
                as_size(row["nbytes"]),
                row["algorithm"],
                "-" if row["predicted_s"] is None else time_in_words(row["predicted_s"]),
            )
            for row in facts["expected"]
        ]
        print_table(("size", "algorithm", "predicted"), rows, left=2)
    if table is not None and table.source != BUILT_IN:
        print_costs(table.parameters)
    elif table is not None:
        print_text("", f"`ringcoll tune -k {ranks}` measures the costs of this machine.")
    for problem in facts["problems"]:
        print_text("", f"PROBLEM: {problem}")
