"""``ringcoll compare``: ring, tree and native side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from ringcoll.algorithms import ALIASES
from ringcoll.bench import NATIVE, Request, Result, plot
from ringcoll.bench.contenders import Workload, shape
from ringcoll.bench.environment import environment, oversubscribed
from ringcoll.bench.findings import by_size, label, sentences, speed_against
from ringcoll.bench.table import wrong_in
from ringcoll.bench.units import as_size, time_in_words
from ringcoll.cli import measuring
from ringcoll.cli.output import print_json, print_table, progress
from ringcoll.cli.parameters import collective_name, json_option
from ringcoll.contracts import contract

__all__ = ["compare"]

_FEATURED = ("ring", "tree", "double_tree")
_REST = "best of the rest"

_WARMUP = 2
_LEAST, _MOST = 5, 200  # rounds; with more the quartiles hardly move

_EXAMPLES = """\b
Examples:
  ringcoll compare
  ringcoll compare -k 8 --seconds 120 --picture eight.svg
  ringcoll compare all_gather -b 1K -e 64M -f 2
  ringcoll compare --algorithms ring,bidirectional_ring,native --no-picture
"""


@click.command(epilog=_EXAMPLES)
@click.argument("collective", type=collective_name, default="all_reduce")
@measuring.ranks_option
@click.option("-b", "--minbytes", type=measuring.size, default="4", show_default=True,
              help="Smallest size.")  # fmt: skip
@click.option("-e", "--maxbytes", type=measuring.size, default="16M", show_default=True,
              help="Largest size.")  # fmt: skip
@click.option("-f", "--stepfactor", type=click.IntRange(min=2), default=4, show_default=True,
              help="From one size to the next.")  # fmt: skip
@click.option("--seconds", type=click.FloatRange(min=0), default=50, show_default=True,
              help="Time to spend on measuring; more of it means more repetitions.")  # fmt: skip
@click.option("--algorithms", "names", metavar="NAMES",
              help="Which to compare: names from `ringcoll list`, auto, native for torch's "
              "own; or all.")  # fmt: skip
@measuring.transport
@measuring.imports
@click.option("--picture", type=click.Path(dir_okay=False, path_type=Path),
              default="ringcoll-compare.png", show_default=True,
              help="Where to draw the curves.")  # fmt: skip
@click.option("--no-picture", is_flag=True, help="Draw nothing; matplotlib is not needed then.")
@json_option
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
    modules: tuple[str, ...],
    picture: Path,
    no_picture: bool,
    as_json: bool,
) -> None:
    """Run ring, tree, double tree, the best of the other algorithms, and native.

    COLLECTIVE is all_reduce unless said otherwise. Ranks are processes on this machine.
    The contenders take turns, in an order that changes; each size has as many
    rounds as the time allows. Native is torch.distributed's own collective, over
    gloo. The best of the rest is found out beforehand for each size, and then
    measured like the others.

    Times are medians, in place, of the slowest rank; the spread is the interquartile
    range over the median. #wrong counts elements that differ in any bit from the exact
    result, on all ranks, in place and out of place.

    Exit status: 1 if any element was wrong.
    """
    world_size = ranks or 4
    if not no_picture:
        plot.check_matplotlib()
    request = _request(
        collective,
        names,
        modules,
        world_size,
        measuring.chosen(minbytes, maxbytes, stepfactor, 0),
        seconds,
    )
    facts = environment(world_size) | {"transport": transport}
    if not as_json:
        _announce(request, facts)
    with measuring.interruptible():
        results = _measure(request, world_size)
    path = None if no_picture else _draw(results, picture, facts)
    if as_json:
        print_json(_document(request, facts, results, path))
    else:
        _print(results, facts, path)
    if wrong_in(results):
        ctx.exit(1)


def _request(
    collective: str,
    names: str | None,
    modules: tuple[str, ...],
    world_size: int,
    sizes: tuple[int, ...],
    seconds: float,
) -> Request:
    everything = measuring.known(collective, "all", modules, world_size)
    scouts: list[str] = []
    if names is not None:
        contenders = measuring.known(collective, names, modules, world_size)
    else:
        contenders = [name for name in _FEATURED if ALIASES.get(name, name) in everything]
        full = {ALIASES.get(name, name) for name in contenders}
        scouts = [name for name in everything if name not in full and name != NATIVE]
        if not contenders:  # a collective with few algorithms: all of them
            contenders, scouts = scouts, []
        contenders.append(NATIVE)
    sizes = tuple(n for n in sizes if shape(Workload(collective, n), world_size).count)
    if not sizes:
        raise click.UsageError("at no size is there an element to move; a barrier has none")
    return Request(
        collective,
        tuple(contenders),
        sizes,
        timed_modes=(contract(collective).in_place,),
        scouts=tuple(scouts),
        warmup=_WARMUP,
        least=_LEAST,
        most=_MOST,
        seconds=seconds,
        imports=modules,
    )


def _announce(request: Request, facts: dict[str, Any]) -> None:
    names = [label(name) for name in request.contenders]
    if request.scouts:
        names.insert(-1, f"the best of {len(request.scouts)} others")
    click.echo(
        f"{request.collective} of float32 on {facts['world_size']} processes over {facts['transport']}, "
        f"{facts['cores']} cores ({facts['cpu']}), load {facts['load_average'][0]}"
    )
    click.echo(f"{', '.join(names)}; about {request.seconds:.0f} s\n")


def _measure(request: Request, world_size: int) -> list[Result]:
    with _bar(request) as advance:
        results = measuring.run_here(request, world_size, lambda devices: None, advance)
    return sorted(results, key=lambda one: (one.nbytes, one.contender == NATIVE))  # it comes last


@contextmanager
def _bar(request: Request) -> Iterator[Callable[[list[Result]], None]]:
    """A progress bar that shows the last medians."""
    sizes = request.nbytes
    with progress() as bar:
        task = bar.add_task(f"starting ranks, then {as_size(sizes[0])}", total=len(sizes))
        done = 0

        def advance(results: list[Result]) -> None:
            nonlocal done
            done += 1
            medians = "  ".join(
                f"{label(one.contender)} {time_in_words(one.timed.summary.p50_s)}"
                for one in results
                if one.timed is not None
            )
            bar.update(task, completed=done, description=f"{as_size(results[0].nbytes)}: {medians}")

        yield advance


_COLUMNS = ("size", "algorithm", "median", "spread", "busbw", "speed", "#wrong", "rounds")
_UNITS = ("", "", "(us)", "", "(GB/s)", "/native", "", "")


def _print(results: list[Result], facts: dict[str, Any], path: Path | None) -> None:
    headings = [f"{name}\n{unit}" for name, unit in zip(_COLUMNS, _UNITS, strict=True)]
    print_table(headings, _rows(results), left=2)
    click.echo("\n* lowest median of its size")
    if any(result.scouted for result in results):
        click.echo("+ the best of the rest at its size")
    if (warning := oversubscribed(facts["world_size"])) is not None:
        click.echo(warning)
    click.echo()
    for sentence in sentences(results):
        click.echo(sentence)
    if path is not None:
        click.echo(f"\n{path.resolve()}")


def _rows(results: list[Result]) -> Iterator[tuple[str, ...]]:
    table = by_size(results)
    last = None
    for result in results:
        row = table.get(result.nbytes, {})
        first = "" if result.nbytes == last else as_size(result.nbytes)
        if last is not None and first:
            yield ("",) * len(_COLUMNS)
        last = result.nbytes
        name = label(result.contender) + ("+" if result.scouted else "")
        if result.timed is None:
            yield (first, name, "-", "-", "-", "-", "-", "-")
            continue
        summary = result.timed.summary
        fastest = summary.p50_s == min(
            one.timed.summary.p50_s for one in row.values() if one.timed is not None
        )
        native = row.get(NATIVE)
        yield (
            first,
            name,
            f"{'*' if fastest else ''}{summary.p50_s * 1e6:.1f}",
            f"{100 * summary.spread:.0f}%",
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
    request: Request, facts: dict[str, Any], results: list[Result], path: Path | None
) -> dict[str, Any]:
    return {
        "environment": facts,
        "collective": request.collective,
        "world_size": facts["world_size"],
        "results": list(_records(results)),
        "wrong": wrong_in(results),
        "findings": list(sentences(results)),
        "picture": None if path is None else str(path.resolve()),
    }


def _records(results: list[Result]) -> Iterator[dict[str, Any]]:
    table = by_size(results)
    for result in results:
        native = table.get(result.nbytes, {}).get(NATIVE)
        timed = result.timed
        record: dict[str, Any] = {
            "nbytes": result.nbytes,
            "numel": result.count,
            "dtype": "float32",
            "algorithm": result.contender,
            "best_of_the_rest": result.scouted,
            "wrong": result.wrong,
            "refused": result.refused,
        }
        if timed is not None:
            median = timed.summary.p50_s
            record |= asdict(timed.summary) | {
                "spread": timed.summary.spread,
                "algbw": result.algbw(median),
                "busbw": result.busbw(median),
                "speed_against_native": speed_against(result, native) if native else None,
            }
        yield record
