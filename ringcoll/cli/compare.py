"""``ringcoll compare``: ring, tree and native side by side."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from ringcoll.algorithms import ALIASES
from ringcoll.bench import (
    FEW_SAMPLES,
    NATIVE,
    OVER,
    BenchRequest,
    Result,
    Workload,
    as_size,
    by_size,
    comparison_records,
    environment,
    failed,
    label,
    oversubscribed,
    plot,
    ran_on,
    sentences,
    shape,
    speed_against,
    spread_in_words,
    time_in_words,
    wrong_in,
)
from ringcoll.cli import measuring
from ringcoll.cli.command import command
from ringcoll.cli.output import grouped, print_csv, print_json, print_table, print_text
from ringcoll.cli.parameters import (
    FiniteRange,
    collective_name,
    complete_algorithms,
    csv_option,
    file_option,
    json_option,
    new_picture,
)
from ringcoll.machine import UserModule, forced_transport
from ringcoll.schedule import contract

_FEATURED = ("ring", "tree", "double_tree")
_BESIDE = "gloo"  # the transport of torch's isend and irecv, for the first two
_REST = "best of the rest"

_WARMUP = 2
_LEAST, _MOST = 5, 200  # rounds; with more the quartiles hardly move

_EXAMPLES = """
  ringcoll compare
  ringcoll compare -k 8 --seconds 120 --picture eight.svg
  ringcoll compare all_gather -b 1K -e 64M -f 2
  ringcoll compare --algorithms ring,star.py:star,native --no-picture
"""


def _picture(ctx: click.Context, param: click.Parameter, path: Path | None) -> Path | None:
    """Make sure that the picture can be drawn; ``None`` if nothing is to be drawn."""
    if path is None or ctx.params["no_picture"]:
        return None
    return new_picture(ctx, param, path)


@command(examples=_EXAMPLES)
@click.argument("collective", type=collective_name, default="all_reduce")
@measuring.ranks_option(4)
@measuring.sizes_options("4", "16M", factor=4)
@click.option("--seconds", type=FiniteRange(min=0), default=50, show_default=True,
              help="Time to spend on measuring; more of it means more repetitions.")  # fmt: skip
@click.option("--algorithms", "names", metavar="NAMES",
              shell_complete=complete_algorithms,
              help="Which to compare: names from `ringcoll list`, auto, native for torch's "
              "own, an algorithm of yours such as star.py:star, a file such as best.txt; or all. "
              "ring@gloo: over gloo.")  # fmt: skip
@measuring.transport
@click.option("--no-picture", is_flag=True, is_eager=True,
              help="Draw nothing; matplotlib is not needed then.")  # fmt: skip
@file_option("--picture", default="ringcoll-compare.png", show_default=True, callback=_picture,
             help="Where to draw the curves.")  # fmt: skip
@json_option
@csv_option
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
    request = _request(
        collective,
        names,
        world_size,
        transport,
        measuring.chosen(minbytes, maxbytes, stepfactor, 0),
        seconds,
    )
    facts = environment(world_size) | {"transport": transport}
    if not (as_json or as_csv):
        _announce(request, facts)
    results = measuring.measured(request, world_size, _medians)
    results.sort(key=lambda result: (result.nbytes, result.contender == NATIVE))
    path = None if picture is None else _draw(results, picture, facts)
    if as_json:
        print_json(_document(request, facts, results, path))
    elif as_csv:
        print_csv(list(comparison_records(results)))
    else:
        _print(results, facts, path)
    if failed(results):
        ctx.exit(1)


def _request(
    collective: str,
    names: str | None,
    world_size: int,
    transport: str,
    sizes: tuple[int, ...],
    seconds: float,
) -> BenchRequest:
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
    sizes = tuple(n for n in sizes if shape(Workload(collective, n), world_size).count)
    if not sizes:
        raise click.UsageError("at no size is there an element to move; a barrier has none")
    return BenchRequest(
        collective,
        tuple(contenders),
        sizes,
        timed_modes=(contract(collective).in_place,),
        scouts=tuple(scouts),
        warmup=_WARMUP,
        least=_LEAST,
        most=_MOST,
        seconds=seconds,
        modules=modules,
    )


def _announce(request: BenchRequest, facts: dict[str, Any]) -> None:
    names = [label(name) for name in request.contenders]
    if request.scouts:
        names.insert(-1, f"the best of {len(request.scouts)} others")
    print_text(
        f"{request.collective} of float32 on {ran_on(facts)}",
        f"{', '.join(names)}; about {request.seconds:.0f} s",
        "",
    )


def _medians(results: list[Result]) -> str:
    """The last medians, for the progress bar."""
    medians = "  ".join(
        f"{label(result.contender)} {time_in_words(result.timed.summary.p50_s)}"
        for result in results
        if result.timed is not None
    )
    return f"{as_size(results[0].nbytes)}: {medians}"


_COLUMNS = ("size", "algorithm", "median", "spread", "busbw", "speed", "#wrong", "rounds")
_UNITS = ("", "", "(us)", "", "(GB/s)", "/native", "", "")


def _print(results: list[Result], facts: dict[str, Any], path: Path | None) -> None:
    headings = [f"{name}\n{unit}" for name, unit in zip(_COLUMNS, _UNITS, strict=True)]
    print_table(headings, grouped(_rows(results)), left=2)
    print_text("", "* lowest median of its size")
    if any(result.scouted for result in results):
        print_text("+ the best of the rest at its size")
    if any(result.timed is not None and result.timed.summary.few for result in results):
        print_text(f"~ median and spread are {FEW_SAMPLES}")
    print_text(*oversubscribed(facts["world_size"]), "", *sentences(results))
    if path is not None:
        click.echo(f"\n{path.resolve()}")


def _rows(results: list[Result]) -> Iterator[tuple[str, ...]]:
    table = by_size(results)
    for result in results:
        row, first = table.get(result.nbytes, {}), as_size(result.nbytes)
        name = label(result.contender) + ("+" if result.scouted else "")
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
            "-" if native is None else f"{speed_against(result, native):.2f}",
            "-" if result.wrong is None else str(result.wrong),
            str(summary.samples),
        )


def _draw(results: list[Result], path: Path, facts: dict[str, Any]) -> Path:
    curves: dict[str, list[Result]] = {}
    for result in results:
        curves.setdefault(_REST if result.scouted else result.contender, []).append(result)
    title = (
        f"{results[0].workload.collective} of float32, {facts['world_size']} processes "
        f"on {facts['cores']} cores, {facts['transport']}: medians, quartiles shaded"
    )
    plot.save(plot.draw(curves, title), path)
    return path


def _document(
    request: BenchRequest, facts: dict[str, Any], results: list[Result], path: Path | None
) -> dict[str, Any]:
    return {
        "environment": facts,
        "collective": request.collective,
        "world_size": facts["world_size"],
        "results": list(comparison_records(results)),
        "wrong": wrong_in(results),
        "findings": list(sentences(results)),
        "picture": None if path is None else str(path.resolve()),
    }
