"""Measure a group's costs and its algorithms, and make a table of them.

The costs are those of `ringcoll.runtime.group.message_costs.measure`, taken several times: the
median of each. The algorithms run in rounds, as always (`ringcoll.tools.bench.measure`), at sizes
that grow by a factor; the fastest algorithm at a size gets the range up to the middle to the next
size. A size at which the model's choice is as fast as the best, within the noise, is left to the
model, so that rules say only what the model does not know.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from itertools import groupby, pairwise
from math import isqrt
from statistics import median

import torch
import torch.distributed as dist

import ringcoll
from ringcoll.runtime.collectives import groups
from ringcoll.runtime.group import measure
from ringcoll.runtime.launch import report
from ringcoll.runtime.machine import cores, without_tuning
from ringcoll.runtime.user_files import UserModule
from ringcoll.schedules import contract
from ringcoll.schedules.algorithms import algorithms, find
from ringcoll.schedules.cost import (
    AUTO,
    Parameters,
    Range,
    Rule,
    Table,
    choose,
    pipelined_segment_bytes,
    predictions,
)
from ringcoll.tools.bench.contenders import Workload, check_transport, shape
from ringcoll.tools.bench.measure import BenchRequest, Result, device_of
from ringcoll.tools.bench.measure import measure as measure_all
from ringcoll.tools.bench.units import Summary

_TIMES = 5  # that the costs are measured
_NOISE_RATIO = 1.1  # times as slow is as fast
_MOST_TIMES_SLOWER = 4.0  # times as slow as the best, by prediction, which is wrong by less
_LIMIT_S = 30.0


@dataclass(frozen=True)
class TuningPlan:
    """The collectives, sizes in bytes, rising, and seconds of a tuning run on a type of device.

    By ``costs`` that were measured before, algorithms many times slower than the best are left out.
    ``algorithms`` has names by collective; ``None`` for those of the library.
    """

    collectives: tuple[str, ...]
    sizes: tuple[int, ...]
    seconds: float
    costs: Parameters | None = None
    algorithms: Mapping[str, tuple[str, ...]] | None = None
    modules: tuple[UserModule, ...] = ()
    device: str = "cpu"

    def contenders(self, collective: str, nbytes: int, world_size: int) -> tuple[str, ...]:
        """Algorithms to measure at a size; the algorithm that the model chooses is one of them."""
        own = promising(collective, nbytes, world_size, self.costs)
        if self.algorithms is None:
            return own
        return tuple(dict.fromkeys((*self.algorithms[collective], own[0])))


@dataclass(frozen=True)
class Finding:
    """The fastest algorithm of a collective at a size that ``"auto"`` sees, and the model's choice.

    ``few`` says that a median is that of few samples.
    """

    collective: str
    nbytes: int
    best: str
    auto: str
    medians_s: dict[str, float]
    few: bool = False

    @property
    def ratio(self) -> float:
        """How many times as long as the best the model's choice takes."""
        return self.medians_s[self.auto] / self.medians_s[self.best]


def costs_on_rank(transport: str, kind: str = "cpu", timeout_s: float = _LIMIT_S) -> Parameters:
    """Measure the costs on the default group; called on all ranks, before anything else.

    The group uses the transport, for tensors on such devices, from then on; `ArgumentError` if the
    environment asks for another one. Only the costs of rank 0 mean anything.
    """
    without_tuning()
    device = device_of(kind, dist.get_rank())
    if kind == "cuda":
        torch.cuda.set_device(device)
        groups.use(cuda_transport=transport)
    else:
        groups.use(transport=transport)
    ringcoll.all_reduce(torch.zeros(1, device=device), algorithm="ring")  # connects the ranks
    used = groups.communicator(None, device).transport
    check_transport(used.name, transport, "transport")
    costs = [astuple(measure(used, timeout_s, cores=cores(), device=device)) for _ in range(_TIMES)]
    names = [field.name for field in fields(Parameters)]
    return Parameters(**dict(zip(names, map(median, zip(*costs, strict=True)), strict=True)))


def workloads(plan: TuningPlan, world_size: int) -> dict[str, tuple[int, ...]]:
    """Sizes to measure of each collective that leaves a choice between algorithms."""
    names: Iterable[str] = plan.algorithms or ()
    if plan.algorithms is None:
        names = [name for name in plan.collectives if len(promising(name, 0, world_size, None)) > 1]
    sizes = {
        name: tuple(n for n in plan.sizes if shape(Workload(name, n), world_size).count)
        for name in plan.collectives
        if name in names
    }
    return {name: own for name, own in sizes.items() if own}


def promising(
    collective: str, nbytes: int, world_size: int, costs: Parameters | None
) -> tuple[str, ...]:
    """Algorithms of the library that are worth measuring at a size; all without costs."""
    if costs is not None:
        predicted = predictions(collective, nbytes, world_size, costs)
        limit_s = _MOST_TIMES_SLOWER * predicted[0].seconds
        return tuple(each.algorithm for each in predicted if each.seconds <= limit_s)
    unequal = not contract(collective).common_lengths
    return tuple(
        entry.name
        for entry in algorithms(collective, world_size, variants=True)
        if entry.built_in and not (unequal and entry.equal_blocks)
    )


def time_on_rank(plan: TuningPlan) -> list[Result]:
    """Time the algorithms of all collectives on all ranks; results are reported as they come."""
    for module in plan.modules:
        module.load()
    start, results = time.perf_counter(), []
    world_size = dist.get_world_size()
    todo = [(name, n) for name, sizes in workloads(plan, world_size).items() for n in sizes]
    for index, (collective, nbytes) in enumerate(todo):
        left = max(0.0, plan.seconds - (time.perf_counter() - start)) / (len(todo) - index)
        in_place = contract(collective).in_place
        request = BenchRequest(
            collective,
            plan.contenders(collective, nbytes, world_size),
            (nbytes,),
            modes=(in_place,),
            timed_modes=(in_place,),
            warmup=1,
            least=3,
            most=30,
            seconds=left,
            check=False,
            device=plan.device,
        )
        results += measure_all(request, report)
    return results


def findings(results: Iterable[Result], table: Table) -> list[Finding]:
    """Compare, at each size, the fastest algorithm with what the model would choose."""
    rows: dict[tuple[str, int], dict[str, Summary]] = {}
    for result in results:
        if result.timed is not None:
            key = result.workload.collective, result.nbytes
            rows.setdefault(key, {})[result.contender] = result.summary
    comparisons = []
    for workload, summaries in rows.items():
        medians_s = {name: summary.p50_s for name, summary in summaries.items()}
        best = min(medians_s, key=lambda name: (medians_s[name], name))
        auto = choose(*workload, table.world_size, table).algorithm
        few = any(summary.few for summary in summaries.values())
        comparisons.append(Finding(*workload, best, auto, medians_s, few))
    return comparisons


def rules_from(
    results: Sequence[Finding], world_size: int, hosts: int = 1, device: str = "cpu"
) -> tuple[Rule, ...]:
    """Make rules for the sizes at which the model would choose a slower algorithm.

    A pipelined algorithm gets the segments with which it was measured.

    Between two sizes, the border is their geometric mean. Below the smallest size and
    above the largest, the rule is the same as at that size.

    >>> results = [
    ...     Finding("all_reduce", nbytes, best, "tree", {best: 1.0, "tree": 2.0})
    ...     for nbytes, best in ((1 << 10, "direct"), (1 << 14, "direct"), (1 << 18, "ring"))
    ... ]
    >>> for rule in rules_from(results, 4):
    ...     print(rule)
    all_reduce:0-64K:direct:k=4:hosts=1
    all_reduce:64K-inf:ring:k=4:hosts=1
    """
    rules: list[Rule] = []
    for collective in dict.fromkeys(finding.collective for finding in results):
        own = [finding for finding in results if finding.collective == collective]
        own.sort(key=lambda finding: finding.nbytes)
        middles = [isqrt(a.nbytes * b.nbytes) for a, b in pairwise(own)]
        ranges = zip(own, [0, *middles], [*middles, None], strict=True)
        for algorithm, alike in groupby(
            ranges, lambda row: AUTO if row[0].ratio <= _NOISE_RATIO else row[0].best
        ):
            if algorithm == AUTO:
                continue
            (_, first, end), *others = alike
            is_pipelined = find(collective, algorithm).pipelined
            rules.append(
                Rule(
                    collective=collective,
                    nbytes=Range(first, others[-1][2] if others else end),
                    algorithm=algorithm,
                    segment_bytes=pipelined_segment_bytes(device) if is_pipelined else None,
                    world_size=Range(world_size, world_size + 1),
                    hosts=Range(hosts, hosts + 1),
                )
            )
    return tuple(rules)
