"""Why an algorithm is chosen on a group, in words."""

from __future__ import annotations

from dataclasses import dataclass, replace
from html import escape
from typing import Any, Literal, Unpack

import torch
from torch import Tensor

from ringcoll.errors import ArgumentError
from ringcoll.runtime.collectives.arguments import ReduceOptions
from ringcoll.runtime.collectives.groups import as_group, communicator, members_of
from ringcoll.runtime.machine import cores, settings
from ringcoll.runtime.reduction import as_operator, reproduced, resolve
from ringcoll.runtime.transport import costs_of, names
from ringcoll.runtime.user_files import as_algorithm, forced_rules, is_rules, rules_in, tuning
from ringcoll.schedules import OperandOrder, Schedule, contract
from ringcoll.schedules.algorithms import find, required
from ringcoll.schedules.cost import (
    Choice,
    Prediction,
    Table,
    built_in,
    choose,
    segment_bytes_of,
    under_rules,
)

_RECENT = 1024  # operations among which the last one of a collective is looked for


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

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"

    def __str__(self) -> str:
        choice, table = self.choice, self.choice.table
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


def _columns(choice: Choice) -> list[str]:
    titles = ("", "algorithm", "segments", "waits", "predicted us", "path us", "together us")
    rows = [titles, *(_row(choice, prediction) for prediction in choice.predictions)]
    if choice.predicted is None:
        rows.append(("*", choice.algorithm, "", "", "-", "-", "-"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = zip("<<>>>>>", widths, strict=True)
    line = "  ".join(f"{{:{side}{width}}}" for side, width in cells)
    return [line.format(*row).rstrip() for row in rows]


def _row(choice: Choice, prediction: Prediction) -> tuple[str, ...]:
    mark = "*" if prediction.algorithm == choice.algorithm else ""
    counts = str(prediction.num_segments), str(prediction.num_waits)
    times = prediction.seconds, prediction.path_s, prediction.crowded_s
    return mark, prediction.algorithm, *counts, *(f"{seconds * 1e6:.1f}" for seconds in times)


def explain(
    collective: str,
    data: int | Tensor | Literal["last"],
    group: Any = None,
    *,
    op: object = None,
    **options: Unpack[ReduceOptions],
) -> Explanation:
    """Name the algorithm that runs on a group, and the reason.

    Nothing is sent, and no other rank is needed. Costs are measured when the first
    operation runs; before that, the answer rests on built-in costs, and says so.

    Parameters
    ----------
    collective
        Name of the collective, such as ``"all_reduce"``.
    data
        Size of the whole data in bytes: the vector, or all blocks of a rank; or a tensor
        of that size, whose dtype counts, too. ``"last"`` explains the last such call of the group.
    group
        As for the collectives. The `Options` of a group of the backend count, as for the calls of
        ``torch.distributed``.
    op
        Reduction operator; by default a sum.
    **options
        ``algorithm``, ``segment_bytes``, ``wire_dtype``, ``reproducible`` as for the collectives;
        they come before those of the group. Tensors are of float32 if ``data`` is a number.

    Raises
    ------
    ScheduleError
        There is no such collective, or no such algorithm of it.
    ArgumentError
        ``data``, ``group``, ``op`` or an option is not what it should be, or nothing has run yet.

    Examples
    --------
    >>> import torch, ringcoll
    >>> def rank_main(group):
    ...     return ringcoll.explain("all_reduce", torch.zeros(2), group).algorithm
    >>> ringcoll.run_threads(rank_main, 2)
    ['direct', 'direct']
    """
    rules = contract(collective)  # raises if there is no such collective
    if isinstance(data, str) and data == "last":
        return _last(collective, group)
    nbytes, own = _nbytes(data), as_group(group)
    device = data.device if isinstance(data, Tensor) else torch.device("cpu")
    dtype = data.dtype if isinstance(data, Tensor) else torch.float32
    member = communicator(own, device)
    defaults = getattr(own, "defaults", None)  # of a group of the backend
    asked = {**(defaults(collective, dtype) if defaults else {}), **options}
    order, world_size = OperandOrder.ANY, member.world_size
    if rules.reduces and not rules.at_least_once:
        wire_dtype, reproducible = asked.get("wire_dtype"), asked.get("reproducible", False)
        if isinstance(data, Tensor) or wire_dtype is not None or reproducible:
            op = "sum" if op is None else op
            reduction = resolve(op, dtype, wire_dtype=wire_dtype, rank=member.rank)
            reduction = reproduced(reduction, reproducible, world_size=world_size, device=device)
            order = reduction.order
            nbytes = nbytes // dtype.itemsize * reduction.wire_dtype.itemsize
        elif op is not None:
            order = as_operator(op).order
    table = member.table
    notes: tuple[str, ...] = ()
    if table is None:
        table, notes = _expected_table(member.transport.name, world_size, 1, device.type)
    algorithm = as_algorithm(asked.get("algorithm", "auto"))
    if isinstance(algorithm, str) and is_rules(algorithm):
        table, algorithm = under_rules(table, rules_in(algorithm)), "auto"
    choice = choose(collective, nbytes, world_size, table, order)
    algorithm = required(collective, algorithm, world_size)
    segment_bytes = asked.get("segment_bytes")
    if algorithm != "auto":
        whose = "" if "algorithm" in options else " by the options of the group"
        segment_bytes = segment_bytes or segment_bytes_of(collective, algorithm, device.type)
        choice = _asked_for(choice, algorithm, segment_bytes, f"it is asked for{whose}")
    elif segment_bytes is not None:
        choice = replace(choice, segment_bytes=segment_bytes)
    return Explanation(choice, notes)


def _asked_for(
    choice: Choice, algorithm: str | Schedule, segment_bytes: int | None, reason: str
) -> Choice:
    """The choice of an algorithm that was named, beside those for which "auto" stands."""
    named = algorithm if isinstance(algorithm, Schedule) else find(choice.collective, algorithm)
    name = named.algorithm if isinstance(named, Schedule) else named.name
    return replace(choice, algorithm=name, segment_bytes=segment_bytes, reason=reason)


def _last(collective: str, group: Any) -> Explanation:
    """Explain the last call of a collective that has run in a group."""
    own = as_group(group)
    for member in members_of(own):
        for number, words in reversed(member.monitor.progress.recent(_RECENT)):
            request = words.request
            if words.name != collective or request is None or member.table is None:
                continue
            table = under_rules(member.table, request.rules)
            choice = choose(collective, request.nbytes, member.world_size, table, request.order)
            if request.algorithm != "auto":
                asked = request.algorithm, request.segment_bytes
                choice = _asked_for(choice, *asked, "it was asked for")
            note = f"Call {number + 1} of the group was {words.description}."
            return Explanation(choice, (note,))
    got = f"'last', and no {collective} has run in the group"
    raise ArgumentError("nothing to explain", "data", "bytes, or a tensor", got, own.rank())


def _nbytes(data: object) -> int:
    nbytes: Any = data.numel() * data.element_size() if isinstance(data, Tensor) else data
    if not isinstance(nbytes, int) or isinstance(nbytes, bool) or nbytes < 0:
        raise ArgumentError("not a size", "data", 'bytes, a tensor, or "last"', repr(data))
    return nbytes


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
    contract(collective)  # raises if there is no such collective
    return Explanation(choose(collective, _nbytes(nbytes), world_size, table), notes)


def _expected_table(
    transport: str, world_size: int, hosts: int, device: str
) -> tuple[Table, tuple[str, ...]]:
    """The table that such a group will use, as far as it is known before; and notes on it."""
    forced = forced_rules(settings.forced_text())
    table = tuning.known_table(transport, world_size, hosts, device)
    notes: tuple[str, ...] = ()
    if table is None:
        costs = costs_of(transport)
        table = built_in(transport, costs, world_size, hosts=hosts, cores=cores(), device=device)
        if transport in names("cpu"):
            notes = ("The costs are built in; a group measures its own when it is first used.",)
    return replace(table, forced=forced), notes
