"""``ringcoll verify --order``: in which order each element is summed."""

from __future__ import annotations

from collections.abc import Iterable

import click

from ringcoll.schedules import as_runs, check_reduces, chunk_elements, chunks_by_order, infix
from ringcoll.tools.cli import options
from ringcoll.tools.cli.output import echo, print_json
from ringcoll.tools.cli.prove import header, order_in_words


def print_order(
    algorithm: str,
    collective: str,
    world_size: int | None,
    *,
    root: int | None,
    num_hosts: int | None,
    chunk: int | None,
    numel: int | None,
    as_json: bool,
) -> None:
    """Print the sums of an algorithm, as `options.asked_schedule` takes it; one chunk, or all.

    ``numel`` is the number of elements of the input of a rank, if these are to be shown.
    """
    check_reduces(collective)
    entry, schedule, title = options.asked_schedule(
        algorithm, collective, world_size, root, num_hosts
    )
    if chunk is not None and chunk >= schedule.num_chunks:
        raise click.UsageError(
            f"--chunk: {title} has chunks 0 to {schedule.num_chunks - 1}, got {chunk}"
        )
    proof = options.proved(entry, schedule, num_hosts)
    elements = None if numel is None else chunk_elements(schedule, numel)
    sums = chunks_by_order(proof) if chunk is None else {proof.order(chunk): [chunk]}
    runs = {
        order: None if elements is None else _runs(elements[chunk] for chunk in chunks)
        for order, chunks in sums.items()
    }
    if as_json:
        facts = {"same_everywhere": proof.same_everywhere, "order": order_in_words(proof)}
        rows = [
            {"chunks": chunks, "elements": runs[order], "sum": infix(order), "postfix": order}
            for order, chunks in sums.items()
        ]
        print_json(header(schedule) | facts | {"sums": rows})
        return
    echo(title)
    if not proof.same_everywhere:
        echo("The order differs between ranks; this is the order on one of them.")
    for order, chunks in sums.items():
        place = f"chunk{'s' * (len(chunks) > 1)} {as_runs(chunks)}"
        echo(f"{place}{_elements_in_words(runs[order])}: {infix(order)}")


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


def _elements_in_words(runs: list[tuple[int, int]] | None) -> str:
    if runs is None:
        return ""
    if not runs:
        return ", no elements"
    words = ",".join(f"{first}-{last}" if first < last else f"{first}" for first, last in runs)
    return f", element{'s' * (words != str(runs[0][0]))} {words}"
