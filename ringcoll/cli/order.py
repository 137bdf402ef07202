"""``ringcoll order``: in which order an algorithm sums."""

from __future__ import annotations

from collections.abc import Iterable

import click

from ringcoll.cli.command import command
from ringcoll.cli.output import print_json
from ringcoll.cli.parameters import (
    algorithm_argument,
    asked_schedule,
    collective_name,
    hosts_option,
    json_option,
    proved,
    root_option,
    world_size_option,
)
from ringcoll.cli.report import header, order_in_words
from ringcoll.schedule import as_runs, check_reduces, chunk_elements, chunks_by_order, infix

_EXAMPLES = """
  ringcoll order ring -k 5 --size 1000
  ringcoll order tree -c reduce -k 8 --root 3
  ringcoll order ring -k 64 --chunk 63
  ringcoll order star.py:star --json
"""


@command("order", examples=_EXAMPLES)
@algorithm_argument
@click.option(
    "-c", "--collective", type=collective_name, default="all_reduce", show_default=True,
    metavar="NAME", help="A collective that reduces.",
)  # fmt: skip
@world_size_option
@hosts_option
@root_option
@click.option("--chunk", type=click.IntRange(min=0), help="Only this chunk.")
@click.option(
    "--size", "numel", type=click.IntRange(0, 10**18), metavar="ELEMENTS",
    help="Elements of the input of a rank, to see which of them each sum is for.",
)  # fmt: skip
@json_option
def order(
    algorithm: str,
    collective: str,
    world_size: int | None,
    num_hosts: int | None,
    root: int | None,
    chunk: int | None,
    numel: int | None,
    as_json: bool,
) -> None:
    """Print in which order ALGORITHM sums each element; xr is the element of rank r.

    ALGORITHM is a name of `ringcoll list`, or module:algorithm or path/file.py:algorithm, or a
    file of a schedule.

    A sum of floats depends on its order. The order is proved on the schedule, and the same
    in every call: it does not depend on the transport, on segments, or on the time at
    which messages arrive. Chunks with the same order share a line.
    """
    check_reduces(collective)
    entry, schedule, title = asked_schedule(algorithm, collective, world_size, root, num_hosts)
    if chunk is not None and chunk >= schedule.num_chunks:
        raise click.UsageError(
            f"--chunk: {title} has chunks 0 to {schedule.num_chunks - 1}, got {chunk}"
        )
    proof = proved(entry, schedule, num_hosts)
    elements = None if numel is None else chunk_elements(schedule, numel)
    sums = chunks_by_order(proof) if chunk is None else {proof.order(chunk): [chunk]}
    runs = {
        order: None if elements is None else _runs(elements[chunk] for chunk in chunks)
        for order, chunks in sums.items()
    }
    if as_json:
        print_json(
            header(schedule)
            | {"same_everywhere": proof.same_everywhere, "order": order_in_words(proof)}
            | {
                "sums": [
                    {"chunks": chunks, "elements": runs[order], "sum": infix(order)}
                    | {"postfix": order}
                    for order, chunks in sums.items()
                ]
            }
        )
        return
    click.echo(title)
    if not proof.same_everywhere:
        click.echo("The order differs between ranks; this is the order on one of them.")
    for order, chunks in sums.items():
        place = f"chunk{'s' * (len(chunks) > 1)} {as_runs(chunks)}"
        click.echo(f"{place}{_in_words(runs[order])}: {infix(order)}")


def _runs(ranges: Iterable[range]) -> list[tuple[int, int]]:
    """First and last element of each run of elements.

    >>> _runs([range(0, 2), range(2, 4), range(4, 4), range(6, 7)])
    [(0, 3), (6, 6)]
    """
    runs: list[tuple[int, int]] = []
    for elements in filter(None, ranges):
        first, last = elements[0], elements[-1]
        if runs and runs[-1][1] + 1 == first:
            first, _ = runs.pop()
        runs.append((first, last))
    return runs


def _in_words(runs: list[tuple[int, int]] | None) -> str:
    if runs is None:
        return ""
    if not runs:
        return ", no elements"
    words = ",".join(f"{first}-{last}" if first < last else f"{first}" for first, last in runs)
    return f", element{'s' * (words != str(runs[0][0]))} {words}"
