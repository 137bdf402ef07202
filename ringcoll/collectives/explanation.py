"""The algorithm for which ``"auto"`` stands, the alternatives, and the reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ringcoll.collectives.groups import communicator
from ringcoll.cost.choice import Choice, choose
from ringcoll.cost.predict import Prediction
from ringcoll.cost.table import Table, built_in
from ringcoll.errors import ArgumentError
from ringcoll.reduction import Reproducible, as_operator, reproduced, resolve
from ringcoll.schedule.contracts import OperandOrder, contract
from ringcoll.system import settings, tuning
from ringcoll.system.machine import cores
from ringcoll.transport.catalogue import costs_of, names

__all__ = ["Explanation", "explain", "explain_without_ranks"]


@dataclass(frozen=True)
class Explanation:
    """A choice and its alternatives; its ``str`` is a table.

    Parameters
    ----------
    choice
        The choice, with all predictions, the reason and the costs.
    notes
        Further facts, in sentences.
    """

    choice: Choice
    notes: tuple[str, ...] = ()

    @property
    def algorithm(self) -> str:
        """Name of the chosen algorithm."""
        return self.choice.algorithm

    def __str__(self) -> str:
        choice = self.choice
        table = choice.table
        hosts = f"{table.hosts} host{'s' if table.hosts > 1 else ''}"
        lines = [
            f"{choice.collective} of {choice.nbytes} bytes on {choice.world_size} ranks, "
            f"{hosts}, {table.transport}: {choice.algorithm}",
            f"why: {choice.reason}",
            "",
            *_columns(choice),
            "",
            "waits: synchronisations, one after the other, of a rank with another one;",
            "path: the longest chain of messages; together: what all ranks do, on the cores",
            "and links that they share. Predicted: the larger one and a fifth of the other.",
            *self.notes,
        ]
        return "\n".join(lines)


def _columns(choice: Choice) -> Iterator[str]:
    rows: list[tuple[str, ...]]
    rows = [("", "algorithm", "segments", "waits", "predicted us", "path us", "together us")]
    rows += [_row(choice, prediction) for prediction in choice.predictions]
    if choice.predicted is None:
        rows.append(("*", choice.algorithm, "", "", "-", "-", "-"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row[:2], widths[:2], strict=True)]
        cells += [cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True)]
        yield "  ".join(cells).rstrip()


def _row(choice: Choice, prediction: Prediction) -> tuple[str, ...]:
    times = (prediction.seconds, prediction.path_s, prediction.crowded_s)
    mark = "*" if prediction.algorithm == choice.algorithm else ""
    numbers = (f"{seconds * 1e6:.1f}" for seconds in times)
    counts = str(prediction.num_segments), str(prediction.num_waits)
    return (mark, prediction.algorithm, *counts, *numbers)


def explain(
    collective: str,
    data: int | Tensor,
    group: Any = None,
    *,
    op: object = None,
    reproducible: Reproducible = False,
) -> Explanation:
    """Name the algorithm for which ``algorithm="auto"`` stands on a group, and the reason.

    Nothing is sent, and no other rank is needed. Costs are measured when the first
    operation runs; before that, the answer rests on built-in costs, and says so.

    Parameters
    ----------
    collective
        Name of the collective, such as ``"all_reduce"``.
    data
        Size of the whole data in bytes: the vector, or all blocks of a rank; or a tensor
        of that size.
    group
        As for the collectives.
    op
        Reduction operator; by default an operator whose operands may change places.
    reproducible
        As for the collectives that reduce; it is a sum if ``op`` is ``None``, and of float32 if
        ``data`` is a number.

    Raises
    ------
    ScheduleError
        There is no such collective.
    ArgumentError
        ``data``, ``group``, ``op`` or ``reproducible`` is not what it should be.

    Examples
    --------
    >>> import torch, ringcoll
    >>> def rank_main(group):
    ...     return ringcoll.explain("all_reduce", torch.zeros(2), group).algorithm
    >>> ringcoll.run_threads(rank_main, 2)
    ['direct', 'direct']
    """
    device = data.device if isinstance(data, Tensor) else torch.device("cpu")
    member = communicator(group, device)
    table = member.table
    notes: tuple[str, ...] = ()
    if table is None:
        table, notes = _expected_table(member.transport.name, member.world_size, 1, device.type)
    order = OperandOrder.ANY if op is None else as_operator(op).order
    if reproducible:
        dtype = data.dtype if isinstance(data, Tensor) else torch.float32
        reduction = resolve("sum" if op is None else op, dtype, rank=member.rank)
        world_size = member.world_size
        order = reproduced(reduction, reproducible, world_size=world_size, device=device).order
    return _explanation(collective, _nbytes(data), member.world_size, order, table, notes)


def _nbytes(data: int | Tensor) -> int:
    nbytes: Any = data.numel() * data.element_size() if isinstance(data, Tensor) else data
    if not isinstance(nbytes, int) or isinstance(nbytes, bool) or nbytes < 0:
        raise ArgumentError(
            "not a size", argument="data", expected="bytes, or a tensor", got=repr(data)
        )
    return nbytes


def _explanation(
    collective: str,
    nbytes: int,
    world_size: int,
    order: OperandOrder,
    table: Table,
    notes: tuple[str, ...],
) -> Explanation:
    contract(collective)  # raises if there is no such collective
    return Explanation(choose(collective, nbytes, world_size, table, order), notes)


def explain_without_ranks(
    collective: str,
    nbytes: int,
    world_size: int,
    transport: str,
    hosts: int = 1,
    device: str = "cpu",
) -> Explanation:
    """Explain the choice for a group that need not exist.

    The costs are those of ``ringcoll tune``, if it has run for such a group on this
    machine with tensors on that type of device, otherwise the built-in costs of the transport.
    ``RINGCOLL_ALGORITHM`` counts.

    Raises
    ------
    ScheduleError
        There is no such collective.
    RulesError, TuningFileError
        A variable of the environment says what cannot be used.
    """
    table, notes = _expected_table(transport, world_size, hosts, device)
    return _explanation(collective, _nbytes(nbytes), world_size, OperandOrder.ANY, table, notes)


def _expected_table(
    transport: str, world_size: int, hosts: int, device: str
) -> tuple[Table, tuple[str, ...]]:
    """The table that such a group will use, as far as it is known before; and notes on it."""
    forced = settings.forced_rules(settings.forced_text())
    path, asked = settings.tuning_file()
    table = tuning.find_table(path, transport, world_size, hosts, asked=asked, device=device)
    notes: tuple[str, ...] = ()
    if table is None:
        costs = costs_of(transport)
        table = built_in(transport, costs, world_size, hosts=hosts, cores=cores(), device=device)
        if transport in names("cpu"):
            notes = ("The costs are built in; a group measures its own when it is first used.",)
    return replace(table, forced=forced), notes
