"""``ringcoll tune``: measure, and write down what ``"auto"`` then goes by."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
import torch

from ringcoll import select
from ringcoll.bench import tune as bench
from ringcoll.bench.environment import environment, oversubscribed
from ringcoll.bench.measure import Result
from ringcoll.bench.units import as_size, time_in_words
from ringcoll.choice import tuning
from ringcoll.choice.predict import Parameters
from ringcoll.choice.rules import in_text
from ringcoll.choice.table import Table
from ringcoll.choice.tuning import Tuned
from ringcoll.cli import measuring
from ringcoll.cli.output import print_json, print_table, progress
from ringcoll.cli.parameters import json_option
from ringcoll.contracts import CONTRACTS, contract
from ringcoll.launch import Ranks

__all__ = ["tune"]

_START_S = 60.0  # for the ranks to connect and to measure the costs
_RUN_S = 7 * 86400.0  # as long as the user is willing to wait

_EXAMPLES = """\b
Examples:
  ringcoll tune -k 4
  ringcoll tune -k 2 --transport ucx --seconds 120
  ringcoll tune -k 4 --collectives all_reduce,all_gather -b 1K -e 16M
  ringcoll tune -k 8 --output tuning.json
"""


@click.command(epilog=_EXAMPLES)
@measuring.ranks_option
@click.option("--transport", "name", type=click.Choice(select.TRANSPORTS), help="gloo.")
@click.option("--seconds", type=click.FloatRange(min=0), default=60, show_default=True,
              help="Time to spend on the algorithms; each runs a few times in any case.")  # fmt: skip
@click.option("--collectives", "names", metavar="NAMES", help="Which; all of them.")
@click.option("-b", "--minbytes", type=measuring.size, default="4", show_default=True,
              help="Smallest size.")  # fmt: skip
@click.option("-e", "--maxbytes", type=measuring.size, default="64M", show_default=True,
              help="Largest size.")  # fmt: skip
@click.option("-f", "--stepfactor", type=click.IntRange(min=2), default=16, show_default=True,
              help="From one size to the next.")  # fmt: skip
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path),
              help="File to write; that of RINGCOLL_TUNING, or in the user's cache.")  # fmt: skip
@json_option
def tune(
    ranks: int | None,
    name: str | None,
    seconds: float,
    names: str | None,
    minbytes: int,
    maxbytes: int,
    stepfactor: int,
    output: Path | None,
    as_json: bool,
) -> None:
    """Measure what messages cost here, and which algorithm is the fastest when.

    Ranks are processes on this machine. What was found is written to a file, beside
    what it holds for other numbers of ranks or transports. From then on, "auto" goes by
    it in every group with as many ranks and this transport, without measuring anew.

    The table shows, at each size, the fastest algorithm, what the model would choose by
    the costs of messages alone, and how many times as long that took. Where it took
    longer, a rule is written down.
    """
    path = output or select.tuning_file()[0]
    if path is None:
        raise click.UsageError("RINGCOLL_TUNING is off; name a file with --output")
    if path.exists():
        tuning.read(path)  # is it one of ours?
    world_size = ranks or 4
    transport = name or select.transport(None)
    plan = bench.Plan(
        _collectives(names), measuring.chosen(minbytes, maxbytes, stepfactor, 0), seconds
    )
    facts = environment(world_size)
    if not as_json:
        click.echo(
            f"{world_size} processes over {transport}, {facts['cores']} cores ({facts['cpu']}), "
            f"load {facts['load_average'][0]}; about {seconds:.0f} s\n"
        )
    with measuring.interruptible():
        costs, results = _measure(plan, world_size, transport)
    table = Table(transport=transport, world_size=world_size, parameters=costs, source="measured")
    found = bench.findings(results, table)
    table = replace(table, tuned=bench.rules_from(found, world_size))
    tuning.update(path, Tuned.now(table, torch=torch.__version__, seconds=seconds))
    if as_json:
        print_json(_document(facts, table, found, path))
    else:
        _print(table, found, path)


def _collectives(names: str | None) -> tuple[str, ...]:
    if names is None:
        return tuple(CONTRACTS)
    asked = [name.strip().replace("-", "_") for name in names.split(",") if name.strip()]
    return tuple(contract(name).collective for name in asked)


def _measure(plan: bench.Plan, world_size: int, transport: str) -> tuple[Parameters, list[Result]]:
    total = sum(map(len, bench.workloads(plan, world_size).values()))
    with _bar(total) as advance, Ranks(world_size, timeout_s=_START_S) as ranks:
        costs: Parameters = ranks.run(bench.costs_on_rank, transport)[0]
        results: list[Result] = ranks.run(
            bench.time_on_rank, replace(plan, costs=costs), on_report=advance, timeout_s=_RUN_S
        )[0]
    return costs, results


@contextmanager
def _bar(total: int) -> Iterator[Callable[[list[Result]], None]]:
    with progress() as bar:
        task = bar.add_task("starting ranks", total=total)

        def advance(results: list[Result]) -> None:
            one = results[0]
            told = f"{one.workload.collective} of {as_size(one.nbytes)}"
            bar.update(task, description=told, advance=1)

        yield advance


def _print(table: Table, found: list[bench.Finding], path: Path) -> None:
    columns = ("collective", "size", "fastest", "median", "model", "ratio")
    print_table(columns, _rows(found), left=3)
    costs = table.parameters
    click.echo(
        f"\na message takes {time_in_words(costs.alpha_s)}, and "
        f"{time_in_words(costs.crowded_alpha_s)} if all ranks send at once; "
        f"1 MiB {time_in_words(costs.beta_s_per_byte * 2**20)} and "
        f"{time_in_words(costs.crowded_beta_s_per_byte * 2**20)} more"
    )
    if (warning := oversubscribed(table.world_size)) is not None:
        click.echo(warning)
    click.echo("\nrules:" if table.tuned else "\nno rules: the model is as good")
    for rule in table.tuned:
        click.echo(f"  {rule}")
    click.echo(f"\n{path.resolve()}")


def _rows(found: list[bench.Finding]) -> Iterator[tuple[str, ...]]:
    last = None
    for one in found:
        if last is not None and one.collective != last:
            yield ("",) * 6
        yield (
            one.collective if one.collective != last else "",
            as_size(one.nbytes),
            one.best,
            time_in_words(one.medians_s[one.best]),
            "the same" if one.auto == one.best else one.auto,
            f"{one.ratio:.2f}",
        )
        last = one.collective


def _document(
    facts: dict[str, Any], table: Table, found: list[bench.Finding], path: Path
) -> dict[str, Any]:
    return {
        "environment": facts,
        "transport": table.transport,
        "world_size": table.world_size,
        "parameters": asdict(table.parameters),
        "rules": in_text(table.tuned),
        "results": [asdict(one) | {"ratio": one.ratio} for one in found],
        "file": str(path.resolve()),
    }
