"""``ringcoll doctor``: what is used here, why, and what to expect.

Nothing is measured. torch is imported as late as it can be.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

import click

from ringcoll.errors import RingcollError
from ringcoll.runtime.machine import TRANSPORT_VARIABLES, cores, forced_transport
from ringcoll.runtime.transport import catalogue
from ringcoll.schedules.cost import BUILT_IN, Parameters, Table
from ringcoll.tools.bench import as_size, time_in_words
from ringcoll.tools.cli import options
from ringcoll.tools.cli.app import command
from ringcoll.tools.cli.output import print_json, print_table, print_text
from ringcoll.tools.cli.versions import print_report

_SIZES = (4, 64 << 10, 16 << 20)  # bytes: a message's cost counts, then both, then each byte's


@command(
    examples="""
        ringcoll doctor -k 4
        ringcoll doctor -k 8 --json
        ringcoll doctor --report
    """
)
@options.ranks_option("Number of ranks that are meant to run here.", 2)
@click.option("--report", is_flag=True,
              help="Print versions and machine instead, for a bug report.")  # fmt: skip
@options.json_option
@click.pass_context
def doctor(ctx: click.Context, ranks: int, report: bool, as_json: bool) -> None:
    """Say which transports will be used on this machine, why, and what to expect.

    The same transports are used by the commands, by the functions, and by the backend of
    torch.distributed, unless a program or an option asks for others. Nothing is measured:
    times are predicted, from the costs that `ringcoll tune` has measured, or a group in the last
    hours, which are shown; otherwise from built-in costs.

    Exit status: 1 if something stands in the way.
    """
    if report:
        print_report(as_json=as_json)
        return
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
    reasons = [f"the first that is installed of {', '.join(installed)}", *missing]
    if forced_transport(kind) not in (None, "auto"):
        reasons = [f"{TRANSPORT_VARIABLES[kind]} asks for it"]
    try:
        name = catalogue.resolved(kind)
    except RingcollError as error:
        return facts | {"why": "; ".join(reasons), "problem": str(error)}
    why = "; ".join(filter(None, [*reasons, catalogue.entry(name).remark]))
    return facts | {"transport": name, "why": why}


def _expected(transport: str, ranks: int) -> tuple[list[dict[str, Any]], Table]:
    """The choice of "auto" for all-reduce at some sizes, and the table of costs and rules."""
    from ringcoll.runtime.collectives import explain_without_ranks

    rows = []
    for nbytes in _SIZES:
        choice = explain_without_ranks("all_reduce", nbytes, ranks, transport).choice
        seconds = None if choice.predicted is None else choice.predicted.seconds
        rows.append({"nbytes": nbytes, "algorithm": choice.algorithm, "predicted_s": seconds})
    return rows, choice.table


def _print(facts: dict[str, Any], table: Table | None) -> None:
    from ringcoll.tools.bench import oversubscribed  # here, as its file imports torch

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


def print_costs(costs: Parameters) -> None:
    """Print what messages were measured to cost, and which way they go."""
    words = [
        f"a message takes {time_in_words(costs.alpha_s)}, and "
        f"{time_in_words(costs.crowded_alpha_s)} if all ranks send at once",
        f"1 MiB takes {time_in_words(costs.beta_s_per_byte * 2**20)} and "
        f"{time_in_words(costs.crowded_beta_s_per_byte * 2**20)} more, and to add it "
        f"{time_in_words(costs.gamma_s_per_byte * 2**20)}",
    ]
    if 0 < costs.direct_from < sys.maxsize:
        words.append(f"from {as_size(costs.direct_from)} on it is read in its sender's memory")
    if costs.slice_bytes:
        words.append(f"operations on long data run in slices of {as_size(costs.slice_bytes)}")
    print_text("", *words)
