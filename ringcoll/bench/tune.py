"""Measure a group's costs and its algorithms, and make a table of them.

The costs are those of `ringcoll.choice.measured.measure`, taken several times: the median of
each. The algorithms run in rounds, as always (`ringcoll.bench.measure`), at sizes that grow
by a factor; the fastest at a size gets the range up to the middle to the next one. A size
at which the model's choice is as fast as the best, within the noise, is left to the
model, so that rules say only what it does not know.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields, replace
from itertools import pairwise
from math import isqrt
from statistics import median

import torch
import torch.distributed as dist

import ringcoll
from ringcoll import groups, select
from ringcoll.algorithms import algorithms, find
from ringcoll.bench.contenders import Workload, shape
from ringcoll.bench.measure import Request, Result
from ringcoll.bench.measure import measure as measure_all
from ringcoll.choice.measured import measure
from ringcoll.choice.predict import Parameters, comes_with_the_library, predictions
from ringcoll.choice.rules import AUTO, Range, Rule
from ringcoll.choice.table import Table
from ringcoll.contracts import contract
from ringcoll.errors import ArgumentError
from ringcoll.launch import report
from ringcoll.machine import cores

__all__ = [
    "Finding",
    "Plan",
    "candidates",
    "costs_on_rank",
    "findings",
    "rules_from",
    "time_on_rank",
]

_TIMES = 5  # that the costs are measured
_NOISE = 1.1  # times as slow is as fast
_HOPELESS = 4.0  # times as slow as the best one, by prediction: it is wrong by less
_LIMIT_S = 30.0


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Parameters
    ----------
    collectives
        Their names.
    sizes
        In bytes, rising.
    seconds
        Time for all of it.
    costs
        What was measured before; algorithms that by these are many times slower than the
        best one are left out.
    """

    collectives: tuple[str, ...]
    sizes: tuple[int, ...]
    seconds: float
    costs: Parameters | None = None


@dataclass(frozen=True)
class Finding:
    """What was found out about one collective at one size.

    Parameters
    ----------
    collective, nbytes
        The workload; the size is what ``"auto"`` sees.
    best
        The fastest algorithm.
    auto
        What the model would choose, by the measured costs.
    medians_s
        Time of each algorithm.
    """

    collective: str
    nbytes: int
    best: str
    auto: str
    medians_s: dict[str, float]

    @property
    def ratio(self) -> float:
        """How many times as long as the best the model's choice takes."""
        return self.medians_s[self.auto] / self.medians_s[self.best]


def costs_on_rank(transport: str, timeout_s: float = _LIMIT_S) -> Parameters:
    """Measure the costs on the default group; called on all ranks, before anything else.

    Parameters
    ----------
    transport
        The transport to use for the group from now on.
    timeout_s
        Time limit.

    Returns
    -------
    costs
        Only those of rank 0 mean anything.

    Raises
    ------
    ArgumentError
        The environment asks for another transport.
    """
    select.without_tuning()
    groups.use(transport=transport)
    ringcoll.barrier()  # connects the ranks
    used = groups.communicator(None, torch.device("cpu")).transport
    if used.name != transport:
        raise ArgumentError(
            "the environment asks for another transport", argument="transport",
            expected=used.name, got=transport,
        )  # fmt: skip
    found = [astuple(measure(used, timeout_s, cores=cores())) for _ in range(_TIMES)]
    names = [field.name for field in fields(Parameters)]
    return Parameters(**dict(zip(names, map(median, zip(*found, strict=True)), strict=True)))


def candidates(collective: str, world_size: int) -> tuple[str, ...]:
    """Algorithms that ``"auto"`` may choose."""
    unequal = not contract(collective).common_lengths
    return tuple(
        entry.name
        for entry in algorithms(collective)
        if comes_with_the_library(entry)
        and not entry.restriction(world_size)
        and not (unequal and entry.equal_blocks)
    )


def workloads(plan: Plan, world_size: int) -> dict[str, tuple[int, ...]]:
    """Sizes to measure of each collective that leaves a choice."""
    sizes = {
        name: tuple(n for n in plan.sizes if shape(Workload(name, n), world_size).count)
        for name in plan.collectives
        if len(candidates(name, world_size)) > 1
    }
    return {name: found for name, found in sizes.items() if found}


def promising(
    collective: str, nbytes: int, world_size: int, costs: Parameters | None
) -> tuple[str, ...]:
    """Algorithms that are worth measuring at a size."""
    if costs is None:
        return candidates(collective, world_size)
    found = predictions(collective, nbytes, world_size, costs)
    limit_s = _HOPELESS * found[0].seconds
    return tuple(one.algorithm for one in found if one.seconds <= limit_s)


def time_on_rank(plan: Plan) -> list[Result]:
    """Time the algorithms of all collectives; called on all ranks.

    Results are reported to the parent as they come.
    """
    start, found = time.perf_counter(), []
    world_size = dist.get_world_size()
    todo = [(name, n) for name, sizes in workloads(plan, world_size).items() for n in sizes]
    for index, (collective, nbytes) in enumerate(todo):
        left = max(0.0, plan.seconds - (time.perf_counter() - start)) / (len(todo) - index)
        in_place = contract(collective).in_place
        request = Request(
            collective,
            promising(collective, nbytes, world_size, plan.costs),
            (nbytes,),
            modes=(in_place,),
            timed_modes=(in_place,),
            warmup=1,
            least=3,
            most=30,
            seconds=left,
            check=False,
        )
        found += measure_all(request, report)
    return found


def findings(results: Iterable[Result], table: Table) -> list[Finding]:
    """Compare, at each size, the fastest algorithm with what the model would choose."""
    rows: dict[tuple[str, int], dict[str, float]] = {}
    for result in results:
        if result.timed is not None:
            key = result.workload.collective, result.nbytes
            rows.setdefault(key, {})[result.contender] = result.timed.summary.p50_s
    found = []
    for (collective, nbytes), medians_s in rows.items():
        best = min(medians_s, key=lambda name: (medians_s[name], name))
        choice = select.choose(collective, nbytes, table.world_size, None, table)
        found.append(Finding(collective, nbytes, best, choice.algorithm, medians_s))
    return found


def rules_from(found: Sequence[Finding], world_size: int, hosts: int = 1) -> tuple[Rule, ...]:
    """Rules that say what is fastest, where the model would choose something slower.

    A pipelined algorithm gets the segments with which it was measured.

    From one size to the next, the border is their geometric mean. Before the smallest
    and beyond the largest size, it is as at that size.

    Examples
    --------
    >>> found = [
    ...     Finding("all_reduce", nbytes, best, "tree", {best: 1.0, "tree": 2.0})
    ...     for nbytes, best in ((1 << 10, "direct"), (1 << 14, "direct"), (1 << 18, "ring"))
    ... ]
    >>> for rule in rules_from(found, 4):
    ...     print(rule)
    all_reduce:0-64K:direct:k=4:hosts=1
    all_reduce:64K-inf:ring:k=4:hosts=1
    """
    rules: list[Rule] = []
    for collective in dict.fromkeys(one.collective for one in found):
        own = sorted(
            (one for one in found if one.collective == collective), key=lambda one: one.nbytes
        )
        borders: list[int | None] = [0]
        borders += [isqrt(a.nbytes * b.nbytes) for a, b in pairwise(own)]
        borders.append(None)
        for index, one in enumerate(own):
            first, end = borders[index] or 0, borders[index + 1]
            algorithm = AUTO if one.ratio <= _NOISE else one.best
            last = rules[-1] if rules else None
            if last and last.collective == collective and last.algorithm == algorithm:
                rules[-1] = replace(last, nbytes=Range(last.nbytes.first, end))
            else:
                rule = Rule(
                    collective=collective,
                    nbytes=Range(first, end),
                    algorithm=algorithm,
                    segment_bytes=_segment_bytes(collective, algorithm),
                    world_size=Range(world_size, world_size + 1),
                    hosts=Range(hosts, hosts + 1),
                )
                rules.append(rule)
    return tuple(rule for rule in rules if rule.algorithm != AUTO)


def _segment_bytes(collective: str, algorithm: str) -> int | None:
    pipelined = algorithm != AUTO and find(collective, algorithm).pipelined
    return select.PIPELINED_SEGMENT_BYTES if pipelined else None
