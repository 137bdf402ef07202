"""``ringcoll tune``: what messages cost here, and which algorithm is the fastest when."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import click

import ringcoll.tools.bench as benchmarks
from ringcoll.runtime import launch, user_files
from ringcoll.runtime.machine import tuning_file
from ringcoll.runtime.transport import catalogue
from ringcoll.runtime.user_files import UserModule, is_schedule_file
from ringcoll.schedules import CONTRACTS, contract
from ringcoll.schedules.cost import MEASURED, Parameters, Table, in_text
from ringcoll.tools.bench import FEW_SAMPLES, as_size, time_in_words
from ringcoll.tools.cli import measuring, options
from ringcoll.tools.cli.app import command
from ringcoll.tools.cli.doctor import print_costs
from ringcoll.tools.cli.fit import fit_command
from ringcoll.tools.cli.output import echo, grouped, print_json, print_table, print_text, progress

_RANK_OPTIONS = {"device", "transport", "cuda_transport", "seconds", "algorithms"}
_SIZE_OPTIONS = {"minbytes", "maxbytes", "stepfactor"}
_START_S = 60.0  # for the ranks to connect and to measure the costs


@command(
    examples="""
        ringcoll tune -k 4
        ringcoll tune -k 2 --transport ucx --seconds 120
        ringcoll tune -k 4 --collectives all_reduce,all_gather -b 1K -e 16M
        ringcoll tune -k 8 --output tuning.json
        ringcoll tune -k 4 --device cuda --cuda-transport ucx
        ringcoll tune --graph cluster.txt --output cluster.fit
    """
)
@measuring.ranks_option(4)
@measuring.device_option
@measuring.transport
@measuring.cuda_transport
@click.option("--seconds", type=options.FiniteRange(min=0), default=60, show_default=True,
              help="Time to spend on the algorithms; each runs a few times in any "
              "case.")  # fmt: skip
@click.option("--collectives", "names", metavar="NAMES", help="Which; all of them.")
@click.option("--algorithms", metavar="NAMES", shell_complete=options.complete_algorithms,
              help="Which; names of `ringcoll list`, or algorithms of your own, such as "
              "star.py:star, which every rank of a group then has to import. Without it, "
              "all that come with ringcoll.")  # fmt: skip
@options.sizes_options("4", "64M", factor=16)
@click.option("--graph", type=click.Path(dir_okay=False, path_type=Path),
              help="A file with a network: algorithms are not measured here, but fitted to it, as "
              "by `ringcoll fit`, which names more options; -o names the file.")  # fmt: skip
@options.file_option("-o", "--output",
                     help="File to write; that of RINGCOLL_TUNING, or in the user's "
                     "cache.")  # fmt: skip
@options.json_option
@click.pass_context
def tune(
    ctx: click.Context,
    ranks: int | None,
    device: str,
    transport: str,
    cuda_transport: str,
    seconds: float,
    names: str | None,
    algorithms: str | None,
    minbytes: int,
    maxbytes: int,
    stepfactor: int,
    graph: Path | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Measure what messages cost here, and which algorithm is the fastest when.

    Ranks are processes on this machine. The results are written to a file, beside the
    results for other numbers of ranks, transports or devices. From then on, "auto" goes by
    the file in every group with as many ranks, this transport, and tensors on such a device,
    without measuring anew.

    The table shows, at each size, the fastest algorithm, the algorithm that the model
    would choose by the costs of messages alone, and how many times as long that took. If
    it took longer, a rule is written to the file.
    """
    sizes = options.sizes_between(minbytes, maxbytes, stepfactor)
    collectives = tuple(CONTRACTS)
    if names is not None:
        asked = options.names_in(names, "--collectives")
        collectives = tuple(options.collective_name.convert(name, None, None) for name in asked)
    if graph is not None:
        typed = options.typed(ctx)
        if output is None or typed & _RANK_OPTIONS:
            raise click.UsageError("with --graph, give --output, and no option for ranks that run")
        with_data = [name for name in collectives if not contract(name).at_least_once]
        asked_sizes = ",".join(map(str, sizes)) if typed & _SIZE_OPTIONS else None
        ctx.invoke(fit_command, collectives=with_data, sizes=asked_sizes, graph=graph, ranks=ranks,
                   file=output, as_json=as_json)  # fmt: skip
        return
    measuring.refuse_unused_transport(ctx, device)
    if device == "cuda":
        transport = catalogue.resolved("cuda", cuda_transport)
    path = output or tuning_file()[0]
    if path is None:
        raise click.UsageError("RINGCOLL_TUNING is off; name a file with --output")
    if path.exists():
        user_files.read_tables(path)  # raises if the file is something else
    world_size = ranks or 4
    measuring.check_memory(maxbytes, world_size, device)
    plan = benchmarks.tuner.TuningPlan(collectives, sizes, seconds, device=device)
    if algorithms is not None:
        chosen, modules = _chosen(algorithms, collectives, world_size)
        plan = replace(plan, algorithms=chosen, modules=modules)
    facts = benchmarks.environment(world_size) | {"transport": transport}
    if not as_json:
        print_text(f"{benchmarks.ran_on(facts)}; about {seconds:.0f} s", "")
    costs, results = _measure(plan, world_size, transport)
    table = Table(
        transport=transport, world_size=world_size, parameters=costs, source=MEASURED, device=device
    )
    findings = benchmarks.tuner.findings(results, table)
    table = replace(table, tuned=benchmarks.tuner.rules_from(findings, world_size, device=device))
    import torch  # here, as pages of help need no torch

    tuned = user_files.Tuned.now(table, torch=torch.__version__, seconds=seconds)
    user_files.update_tables(path, tuned)
    if as_json:
        print_json(
            {
                "environment": facts,
                "transport": table.transport,
                "world_size": table.world_size,
                "device": table.device,
                "parameters": asdict(table.parameters),
                "rules": in_text(table.tuned),
                "results": [asdict(finding) | {"ratio": finding.ratio} for finding in findings],
                "file": str(path.resolve()),
            }
        )
    else:
        _print_tuning(table, findings, path)


def _chosen(
    names: str, collectives: tuple[str, ...], world_size: int
) -> tuple[dict[str, tuple[str, ...]], tuple[UserModule, ...]]:
    """The algorithms to measure, by collective, and the modules that have them."""
    modules: list[UserModule] = []
    algorithms: dict[str, list[str]] = {}
    for name in options.names_in(names, "--algorithms"):
        if is_schedule_file(name):
            raise click.BadParameter(
                f"{name}: a tuning file names no files; "
                f"RINGCOLL_ALGORITHM='all_reduce:1M-inf:{name}' may",
                param_hint="--algorithms",
            )
        entries, own = options.named_algorithms(name)
        modules += own
        for entry in entries:
            if entry.collective in collectives and not entry.restriction(world_size):
                algorithms.setdefault(entry.collective, []).append(entry.name)
    if not algorithms:
        raise click.BadParameter(
            f"none is for {', '.join(collectives)} on {world_size} ranks", param_hint="--algorithms"
        )
    unique = {name: tuple(dict.fromkeys(own)) for name, own in algorithms.items()}
    return unique, tuple(dict.fromkeys(modules))


def _measure(
    plan: benchmarks.tuner.TuningPlan, world_size: int, transport: str
) -> tuple[Parameters, list[benchmarks.Result]]:
    total = sum(map(len, benchmarks.tuner.workloads(plan, world_size).values()))
    with (
        progress(total, "starting ranks") as advance,
        launch.Ranks(world_size, timeout_s=_START_S) as ranks,
    ):
        costs: Parameters = ranks.run(benchmarks.tuner.costs_on_rank, transport, plan.device)[0]
        results: list[benchmarks.Result] = ranks.run(
            benchmarks.tuner.time_on_rank,
            replace(plan, costs=costs),
            on_report=lambda results: advance(
                f"{results[0].workload.collective} of {as_size(results[0].nbytes)}"
            ),
            timeout_s=measuring.RUN_S,
        )[0]
    return costs, results


def _print_tuning(table: Table, findings: list[benchmarks.tuner.Finding], path: Path) -> None:
    columns = ("collective", "size", "fastest", "median", "model", "ratio")
    print_table(columns, grouped(map(_finding_row, findings)), left=3)
    if any(finding.few for finding in findings):
        print_text(f"~ medians are {FEW_SAMPLES}")
    print_costs(table.parameters)
    print_text(*benchmarks.oversubscribed(table.world_size))
    echo("\nrules:" if table.tuned else "\nno rules: the model is as good")
    for rule in table.tuned:
        echo(f"  {rule}")
    echo(f"\n{path.resolve()}")


def _finding_row(finding: benchmarks.tuner.Finding) -> tuple[str, ...]:
    return (
        finding.collective,
        as_size(finding.nbytes),
        finding.best,
        f"{'~' * finding.few}{time_in_words(finding.medians_s[finding.best])}",
        "the same" if finding.auto == finding.best else finding.auto,
        f"{finding.ratio:.2f}",
    )
