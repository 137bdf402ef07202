"""How fast this machine is: ``ringcoll compare``, ``ringcoll tune`` and ``ringcoll probe``.

They measure ring, tree and native side by side; what ``"auto"`` then goes by; and the network.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

import ringcoll.bench as lab
from ringcoll import launch, machine
from ringcoll.algorithms import ALIASES
from ringcoll.bench import FEW_SAMPLES, NATIVE, OVER, as_size, spread_in_words, time_in_words
from ringcoll.cli import measuring, options
from ringcoll.cli.app import command
from ringcoll.cli.doctor import print_costs
from ringcoll.cli.output import (
    echo,
    grouped,
    print_csv,
    print_json,
    print_table,
    print_text,
    progress,
)
from ringcoll.cli.search import fit_command
from ringcoll.cost import MEASURED, Parameters, Table, in_number, in_text
from ringcoll.machine import (
    UserModule,
    forced_transport,
    is_schedule_file,
    replace_file,
    tuning_file,
)
from ringcoll.schedule import CONTRACTS, contract
from ringcoll.simulation import Measurements, links_of, topology_of, topology_text
from ringcoll.transport import catalogue

_FEATURED = ("ring", "tree", "double_tree")
_BESIDE = "gloo"  # the transport of torch's isend and irecv, for the first two
_REST = "best of the rest"
_OF_RANKS = {"device", "transport", "cuda_transport", "seconds", "algorithms"}  # without --graph
_SIZES = {"minbytes", "maxbytes", "stepfactor"}
_START_S = 60.0  # for the ranks to connect and to measure the costs
_SHOWN_LINKS = 60


def _picture(ctx: click.Context, param: click.Parameter, path: Path | None) -> Path | None:
    """Make sure that the picture can be drawn; ``None`` if nothing is to be drawn."""
    if path is None or ctx.params["no_picture"]:
        return None
    return options.new_picture(ctx, param, path)


@command(
    examples="""
        ringcoll compare
        ringcoll compare -k 8 --seconds 120 --picture eight.svg
        ringcoll compare all_gather -b 1K -e 64M -f 2
        ringcoll compare --algorithms ring,star.py:star,native --no-picture
    """
)
@options.usual_collective
@measuring.ranks_option(4)
@options.sizes_options("4", "16M", factor=4)
@click.option("--seconds", type=options.FiniteRange(min=0), default=50, show_default=True,
              help="Time to spend on measuring; more of it means more repetitions.")  # fmt: skip
@click.option("--algorithms", "names", metavar="NAMES", shell_complete=options.complete_algorithms,
              help="Which to compare: names from `ringcoll list`, auto, native for torch's "
              "own, an algorithm of yours such as star.py:star, a file such as best.txt; or all. "
              "ring@gloo: over gloo.")  # fmt: skip
@measuring.transport
@click.option("--no-picture", is_flag=True, is_eager=True,
              help="Draw nothing; matplotlib is not needed then.")  # fmt: skip
@options.file_option("--picture", default="ringcoll-compare.png", show_default=True,
                     callback=_picture, help="Where to draw the curves.")  # fmt: skip
@options.json_option
@options.csv_option
@click.pass_context
def compare(
    ctx: click.Context,
    collective: str,
    ranks: int | None,
    minbytes: int,
    maxbytes: int,
    stepfactor: int,
    seconds: float,
    names: str | None,
    transport: str,
    picture: Path | None,
    no_picture: bool,
    as_json: bool,
    as_csv: bool,
) -> None:
    """Run ring, tree, double tree, the best of the other algorithms, and native.

    COLLECTIVE is all_reduce unless said otherwise. Ranks are processes on this machine.
    The contenders take turns, in an order that changes; each size has as many
    rounds as the time allows. Native is torch.distributed's own collective, over
    gloo; ring and tree also run over gloo's point-to-point messages, if the others do not.
    Short runs choose the best of the rest for each size, which is then measured
    like the others.

    Times are medians, in place, of the slowest rank; the spread is the interquartile
    range over the median. #wrong counts elements that differ in any bit from the exact
    result, on all ranks, in place and out of place.

    Exit status: 1 if any element was wrong, or an algorithm was refused.
    """
    world_size = ranks or 4
    measuring.check_memory(maxbytes, world_size)
    sizes = options.sizes_between(minbytes, maxbytes, stepfactor)
    request = _request(collective, names, world_size, transport, sizes, seconds)
    facts = lab.environment(world_size) | {"transport": transport}
    if not (as_json or as_csv):
        _announce(request, facts)
    results = measuring.measured(request, world_size, _medians)
    results.sort(key=lambda result: (result.nbytes, result.contender == NATIVE))
    if picture is not None:
        _draw(results, picture, facts)
    if as_json:
        print_json(
            {
                "environment": facts,
                "collective": collective,
                "world_size": world_size,
                "results": list(lab.comparison_records(results)),
                "wrong": lab.wrong_in(results),
                "findings": list(lab.sentences(results)),
                "picture": None if picture is None else str(picture.resolve()),
            }
        )
    elif as_csv:
        print_csv(list(lab.comparison_records(results)))
    else:
        _print_comparison(results, facts, picture)
    if lab.failed(results):
        ctx.exit(1)


def _request(
    collective: str,
    names: str | None,
    world_size: int,
    transport: str,
    sizes: tuple[int, ...],
    seconds: float,
) -> lab.BenchRequest:
    scouts: list[str] = []
    modules: tuple[UserModule, ...] = ()
    if names is not None:
        chosen, modules = measuring.contenders(collective, names, world_size)
        contenders = list(chosen)
    else:
        everything, _ = measuring.contenders(collective, "all", world_size)
        contenders = [name for name in _FEATURED if ALIASES.get(name, name) in everything]
        full = {ALIASES.get(name, name) for name in contenders}
        scouts = [name for name in everything if name not in full and name != NATIVE]
        if not contenders:  # a collective with few algorithms: all of them
            contenders, scouts = scouts, []
        if transport != _BESIDE and forced_transport("cpu") is None:
            contenders += [f"{name}{OVER}{_BESIDE}" for name in contenders[:2]]
        contenders.append(NATIVE)
    sizes = tuple(n for n in sizes if lab.shape(lab.Workload(collective, n), world_size).count)
    if not sizes:
        raise click.UsageError("at no size is there an element to move; a barrier has none")
    return lab.BenchRequest(
        collective,
        tuple(contenders),
        sizes,
        timed_modes=(contract(collective).in_place,),
        scouts=tuple(scouts),
        warmup=2,
        least=5,
        most=200,  # with more the quartiles hardly move
        seconds=seconds,
        modules=modules,
    )


def _announce(request: lab.BenchRequest, facts: dict[str, Any]) -> None:
    names = [lab.label(name) for name in request.contenders]
    if request.scouts:
        names.insert(-1, f"the best of {len(request.scouts)} others")
    print_text(
        f"{request.collective} of float32 on {lab.ran_on(facts)}",
        f"{', '.join(names)}; about {request.seconds:.0f} s",
        "",
    )


def _medians(results: list[lab.Result]) -> str:
    """The last medians, for the progress bar."""
    medians = "  ".join(
        f"{lab.label(result.contender)} {time_in_words(result.timed.summary.p50_s)}"
        for result in results
        if result.timed is not None
    )
    return f"{as_size(results[0].nbytes)}: {medians}"


_COLUMNS = ("size", "algorithm", "median", "spread", "busbw", "speed", "#wrong", "rounds")
_UNITS = ("", "", "(us)", "", "(GB/s)", "/native", "", "")


def _print_comparison(results: list[lab.Result], facts: dict[str, Any], path: Path | None) -> None:
    headings = [f"{name}\n{unit}" for name, unit in zip(_COLUMNS, _UNITS, strict=True)]
    print_table(headings, grouped(_comparison_rows(results)), left=2)
    print_text("", "* lowest median of its size")
    if any(result.scouted for result in results):
        print_text("+ the best of the rest at its size")
    if any(result.timed is not None and result.timed.summary.few for result in results):
        print_text(f"~ median and spread are {FEW_SAMPLES}")
    print_text(*lab.oversubscribed(facts["world_size"]), "", *lab.sentences(results))
    if path is not None:
        echo(f"\n{path.resolve()}")


def _comparison_rows(results: list[lab.Result]) -> Iterator[tuple[str, ...]]:
    table = lab.by_size(results)
    for result in results:
        row, first = table.get(result.nbytes, {}), as_size(result.nbytes)
        name = lab.label(result.contender) + ("+" if result.scouted else "")
        if result.timed is None:
            yield (first, name, *"-" * (len(_COLUMNS) - 2))
            continue
        summary = result.timed.summary
        fastest = summary.p50_s == min(
            other.timed.summary.p50_s for other in row.values() if other.timed is not None
        )
        native = row.get(NATIVE)
        yield (
            first,
            name,
            f"{'*' if fastest else ''}{summary.p50_s * 1e6:.1f}",
            spread_in_words(summary),
            f"{result.busbw(summary.p50_s):.4f}",
            "-" if native is None else f"{lab.speed_against(result, native):.2f}",
            "-" if result.wrong is None else str(result.wrong),
            str(summary.samples),
        )


def _draw(results: list[lab.Result], path: Path, facts: dict[str, Any]) -> None:
    curves: dict[str, list[lab.Result]] = {}
    for result in results:
        curves.setdefault(_REST if result.scouted else result.contender, []).append(result)
    title = (
        f"{results[0].workload.collective} of float32, {facts['world_size']} processes "
        f"on {facts['cores']} cores, {facts['transport']}: medians, quartiles shaded"
    )
    lab.plot.save(lab.plot.draw(curves, title), path)


# --- tune -------------------------------------------------------------------------------


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
    collectives = _collectives(names)
    if graph is not None:
        typed = options.typed(ctx)
        if output is None or typed & _OF_RANKS:
            raise click.UsageError("with --graph, give --output, and no option for ranks that run")
        with_data = [name for name in collectives if not contract(name).at_least_once]
        asked_sizes = ",".join(map(str, sizes)) if typed & _SIZES else None
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
        machine.tuning.read(path)  # raises if the file is something else
    world_size = ranks or 4
    measuring.check_memory(maxbytes, world_size, device)
    chosen, modules = (
        (None, ()) if algorithms is None else _chosen(algorithms, collectives, world_size)
    )
    plan = lab.tuner.TuningPlan(
        collectives, sizes, seconds, algorithms=chosen, modules=modules, device=device
    )
    facts = lab.environment(world_size) | {"transport": transport}
    if not as_json:
        print_text(f"{lab.ran_on(facts)}; about {seconds:.0f} s", "")
    costs, results = _measure(plan, world_size, transport)
    table = Table(
        transport=transport, world_size=world_size, parameters=costs, source=MEASURED, device=device
    )
    findings = lab.tuner.findings(results, table)
    table = replace(table, tuned=lab.tuner.rules_from(findings, world_size, device=device))
    import torch  # here, as pages of help need no torch

    machine.tuning.update(path, machine.Tuned.now(table, torch=torch.__version__, seconds=seconds))
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


def _collectives(names: str | None) -> tuple[str, ...]:
    if names is None:
        return tuple(CONTRACTS)
    asked = filter(None, map(str.strip, names.split(",")))
    return tuple(options.collective_name.convert(name, None, None) for name in asked)


def _chosen(
    names: str, collectives: tuple[str, ...], world_size: int
) -> tuple[dict[str, tuple[str, ...]], tuple[UserModule, ...]]:
    """The algorithms to measure, by collective, and the modules that have them."""
    modules: list[UserModule] = []
    algorithms: dict[str, list[str]] = {}
    for name in filter(None, map(str.strip, names.split(","))):
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
    plan: lab.tuner.TuningPlan, world_size: int, transport: str
) -> tuple[Parameters, list[lab.Result]]:
    total = sum(map(len, lab.tuner.workloads(plan, world_size).values()))
    with (
        progress(total, "starting ranks") as advance,
        launch.Ranks(world_size, timeout_s=_START_S) as ranks,
    ):
        costs: Parameters = ranks.run(lab.tuner.costs_on_rank, transport, plan.device)[0]
        results: list[lab.Result] = ranks.run(
            lab.tuner.time_on_rank,
            replace(plan, costs=costs),
            on_report=lambda results: advance(
                f"{results[0].workload.collective} of {as_size(results[0].nbytes)}"
            ),
            timeout_s=measuring.RUN_S,
        )[0]
    return costs, results


def _print_tuning(table: Table, findings: list[lab.tuner.Finding], path: Path) -> None:
    columns = ("collective", "size", "fastest", "median", "model", "ratio")
    print_table(columns, grouped(map(_finding_row, findings)), left=3)
    if any(finding.few for finding in findings):
        print_text(f"~ medians are {FEW_SAMPLES}")
    print_costs(table.parameters)
    print_text(*lab.oversubscribed(table.world_size))
    echo("\nrules:" if table.tuned else "\nno rules: the model is as good")
    for rule in table.tuned:
        echo(f"  {rule}")
    echo(f"\n{path.resolve()}")


def _finding_row(finding: lab.tuner.Finding) -> tuple[str, ...]:
    return (
        finding.collective,
        as_size(finding.nbytes),
        finding.best,
        f"{'~' * finding.few}{time_in_words(finding.medians_s[finding.best])}",
        "the same" if finding.auto == finding.best else finding.auto,
        f"{finding.ratio:.2f}",
    )


# --- probe ------------------------------------------------------------------------------


@command(
    examples="""
        ringcoll probe -k 4
        torchrun --nnodes 2 --nproc-per-node 4 --rdzv-endpoint host0:29500 \
-m ringcoll probe -o cluster.txt
        mpiexec -n 8 ringcoll probe
        ringcoll probe -k 2 --transport gloo --seconds 5 --json
    """
)
@measuring.ranks_option(4)
@measuring.transport
@click.option("--seconds", type=options.FiniteRange(min=0, min_open=True), default=20,
              show_default=True,
              help="Time to spend.")  # fmt: skip
@options.file_option("-o", "--output", "file",
                     help="Write the network, as --graph of other commands reads it.")  # fmt: skip
@options.json_option
def probe(
    ranks: int | None, transport: str, seconds: float, file: Path | None, as_json: bool
) -> None:
    """Measure all pairs of ranks, and find hosts, their cards, and the links between them.

    Ranks are processes on this machine; under torchrun, mpiexec and srun every rank runs the
    command, and rank 0 writes. The table has each link with its spread: the interquartile range
    over the median. Nothing else should run on these hosts meanwhile.
    """
    measured: Measurements = measuring.on_ranks(
        lab.measurements,
        None,
        seconds,
        world_size=measuring.ranks_to_use(ranks, 4),
        backend="gloo",
    )
    if not measuring.is_first_rank():
        return
    links = links_of(measured)
    if file is not None:
        spreads = {link: f"spread {spread:.0%}" for link, spread in links.items()}
        replace_file(file, topology_text(topology_of(measured), spreads))
    if as_json:
        echo(measured.to_json())
        return
    rows = [
        (
            link.name,
            f"{float(link.bandwidth) / 1e6:.5g}",
            time_in_words(float(link.latency_s)),
            f"{spread:.0%}",
        )
        for link, spread in links.items()
    ]
    sizes = in_number(len(measured.hosts), "rank"), in_number(max(measured.hosts) + 1, "host")
    print_text(f"{' on '.join(sizes)} over {transport}", "")
    print_table(("link", "MB/s", "latency", "spread"), rows[-_SHOWN_LINKS:], left=1)
    if file is not None:
        print_text("", f"Wrote {file}.")
