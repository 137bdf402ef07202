"""Draw schedules: the step-by-rank grid.

In the grid a cell lists what one rank does in one step::

    >1:0-2    send chunks 0, 1 and 2, as one message, to rank 1
    <3:1      receive chunk 1 from rank 3
    +3:1      receive chunk 1 from rank 3 and reduce it with the chunk 1 here
    =2        copy chunk 2 from the input to the output, on this rank
    S2        reduce several shares of chunk 2, on this rank
    !         behind a reduction: it completes the chunk
    .         nothing
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from itertools import islice, zip_longest

from ringcoll.schedules.ir.steps import (
    Copy,
    Program,
    Recv,
    RecvReduce,
    Reduce,
    Ref,
    Send,
    Step,
    Written,
)

_WINDOW = 16  # ranks and steps on either side of a mark; a wider grid is unreadable


def as_runs(numbers: Iterable[int]) -> str:
    """Write increasing numbers, those that follow each other as ``first-last``.

    >>> as_runs([0, 1, 2, 5])
    '0-2,5'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def _chunks(refs: Iterable[Ref]) -> str:
    return as_runs(ref.chunk for ref in refs)


def _cell(operation: object) -> str:
    try:
        match operation:
            case Send():
                return f">{operation.peer}:{_chunks(operation.refs)}"
            case Recv():
                return f"<{operation.peer}:{_chunks(operation.refs)}"
            case RecvReduce():
                mark = "!" if operation.final else ""
                return f"+{operation.peer}:{_chunks(operation.into)}{mark}"
            case Copy():
                return f"={operation.into.chunk}"
            case Reduce():
                return f"S{operation.into.chunk}{'!' if operation.final else ''}"
    except (AttributeError, TypeError):  # no reference where one belongs
        pass
    return repr(operation)  # perhaps not an operation


def _steps(
    source: Written | Callable[..., Program], world_size: int | None, root: int
) -> tuple[int, Callable[[int], Iterable[Step]]]:
    if isinstance(source, Written):
        return source.world_size, source.steps
    if world_size is None:
        raise TypeError("a program needs a world_size to be drawn")
    roots = (root,) if "root" in inspect.signature(source).parameters else ()
    return world_size, lambda rank: source(rank, world_size, *roots)


def grid(
    source: Written | Callable[..., Program],
    world_size: int | None = None,
    *,
    root: int = 0,
    mark: tuple[int, int] | None = None,
    ranks: Sequence[int] | None = None,
) -> str:
    """Draw the step-by-rank grid.

    Parameters
    ----------
    source
        A schedule, or an algorithm's program.
    world_size, root
        For a program: the number of ranks, and the root of a rooted collective.
    mark
        The rank and step of a cell to be shown as ``**cell**``. A large grid is then cut
        to the neighbourhood of the cell.
    ranks
        Ranks whose columns are drawn; ``None`` for all of them. Unused with ``mark``.

    Returns
    -------
    str
        A line for each step, a column for each rank; the docstring of the module explains
        the cells.
    """
    world_size, steps_of = _steps(source, world_size, root)
    ranks, first, last = range(world_size) if ranks is None else ranks, 0, None
    if mark is not None:
        ranks = range(world_size)[max(0, mark[0] - _WINDOW // 2) : mark[0] + _WINDOW // 2 + 1]
        first, last = max(0, mark[1] - _WINDOW), mark[1] + _WINDOW
    rows = [["step", *(f"rank {rank}" for rank in ranks)]]
    columns = (islice(steps_of(rank), first, last) for rank in ranks)
    table = list(zip_longest(*columns, fillvalue=Step()))
    if mark is not None:  # the drawn ranks may have ended before the marked step
        table += [(Step(),) * len(ranks)] * (mark[1] + 1 - first - len(table))
    for number, steps in enumerate(table, start=first):
        row = [f"{number:4}"]
        for rank, step in zip(ranks, steps, strict=True):
            cell = " ".join(map(_cell, step)) or "."
            row.append(f"**{cell}**" if mark == (rank, number) else cell)
        rows.append(row)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "\n".join(lines)
