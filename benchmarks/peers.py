"""Collectives against native gloo, Open MPI, MPICH, and the limits of transport and memory.

Our algorithms (``auto``, ``persistent``: an operation that is prepared once, ``shared_tensors``: the
same on tensors in shared memory), native gloo and the limits take turns in one run, on an idle machine
or beside busy loops. The limits are an *exchange* with both neighbours of the bytes
that a rank has to send, over the same transport, the *additions* of a rank, and a *copy*. The
MPI libraries run in processes of their own ``mpiexec``, between the cycles of the others.
Samples of all cycles count together, so that a machine that slows down slows all contenders.
Efficiency is the time of exchange and additions over the time of the collective.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from common import Table, busy_loops, environment, introduce, parser, write

from ringcoll.bench import (
    LIMITS,
    NATIVE,
    BenchRequest,
    Result,
    Timing,
    check_matplotlib,
    draw,
    efficiencies,
    parse_size,
    peers,
    save,
    speed_against,
)
from ringcoll.bench import on_rank as measure_on_rank
from ringcoll.launch import Ranks
from ringcoll.machine import TRANSPORT_VARIABLES
from ringcoll.schedule import contract

SIZES = "4,16,64,256,1K,4K,16K,64K,256K,1M,4M,16M,64M"
_DRAWN = ("auto", "persistent", "shared_tensors", NATIVE, *peers.MPI_PEERS, "exchange")


def pooled(cycles: Iterable[Sequence[Result]]) -> list[Result]:
    """Join the samples of results that were measured several times."""
    joined: dict[tuple[Any, str], Result] = {}
    for results in cycles:
        for result in results:
            key = result.workload, result.contender
            before = joined.get(key)
            if before is None or before.timed is None or result.timed is None:
                joined[key] = result
                continue
            samples = (*before.timed.samples_s, *result.timed.samples_s)
            wrong = None if result.wrong is None else (before.wrong or 0) + result.wrong
            timing = Timing(samples, result.timed.turn, wrong)
            way = "out_of_place" if result.in_place is None else "in_place"
            joined[key] = replace(result, **{way: timing})
    return list(joined.values())


def measure(collective: str, world_size: int, options: Any) -> list[Result]:
    """Measure all sizes on so many ranks, in place if the collective can be."""
    sizes = tuple(parse_size(text) for text in options.sizes.split(","))
    in_place = contract(collective).in_place
    request = BenchRequest(
        collective,
        (*options.algorithms.split(","), *peers.contenders(options.peers), *LIMITS),
        sizes,
        modes=(in_place,),
        timed_modes=(in_place,),
        warmup=2,
        least=5,
        most=10_000,
        seconds=options.seconds,
        writes=options.written,
    )
    cycles: list[list[Result]] = []
    for _ in range(options.cycles):
        with Ranks(world_size, timeout_s=600.0) as ranks:
            cycles.append(ranks.run(measure_on_rank, request, timeout_s=86400.0)[0])
        cycles += [
            peers.measure_peer(name, request, world_size, options.peer_dir)
            for name in options.peers
            if name in peers.MPI_PEERS
        ]
    return pooled(cycles)


def tables(results: Sequence[Result], where: str) -> list[Table]:
    """Tables with a row for each size: medians, spreads, speeds, wrong elements, efficiencies."""
    by_size: dict[int, dict[str, Result]] = {}
    for result in results:
        by_size.setdefault(result.nbytes, {})[result.contender] = result
    every = list(dict.fromkeys(result.contender for result in results))
    collectives = [name for name in every if name not in LIMITS]

    def make(caption: str, kind: str, names: Sequence[str], value: Any) -> Table:
        rows = [
            (nbytes, *(value(row, row[name]) for name in names))
            for nbytes, row in sorted(by_size.items())
        ]
        columns = {"size": "bytes", **dict.fromkeys(names, kind)}
        return Table(columns, rows, f"{where}: {caption}")

    def median(row: dict[str, Result], result: Result) -> float | None:
        return None if result.timed is None else result.timed.summary.p50_s

    def spread(row: dict[str, Result], result: Result) -> float | None:
        return None if result.timed is None else result.timed.summary.spread

    def speed(row: dict[str, Result], result: Result) -> float | None:
        timed = result.timed is not None and row[NATIVE].timed is not None
        return speed_against(result, row[NATIVE]) if timed else None

    near = {limit.nbytes: limit.of for limit in efficiencies(results)}

    def efficiency(row: dict[str, Result], result: Result) -> float | None:
        return near.get(result.nbytes, {}).get(result.contender)

    speeds = [make("times native's speed.", "ratio", collectives, speed)] * (NATIVE in every)
    return [
        make("medians.", "seconds", every, median),
        make("spreads.", "share", every, spread),
        *speeds,
        make("efficiency, (exchange + add) over the time.", "ratio", collectives, efficiency),
        make("wrong elements.", "count", collectives, lambda row, result: result.wrong),
    ]


def main() -> None:
    """Run, print, write."""
    arguments = parser(__doc__)
    arguments.add_argument("--collectives", default="all_reduce")
    arguments.add_argument("-k", "--ranks", default="2,4")
    arguments.add_argument("--sizes", default=SIZES)
    arguments.add_argument(
        "--algorithms",
        default="auto,persistent,shared_tensors,ring,tree,recursive_doubling,rabenseifner",
    )
    arguments.add_argument("--transport", default="shared", choices=("shared", "gloo", "ucx"))
    arguments.add_argument("--peers", type=peers.read, default=peers.PEERS)
    arguments.add_argument("--peer-dir", type=Path, default=peers.FOLDER)
    arguments.add_argument(
        "--seconds", type=float, default=40.0, help="of each cycle, for ours and for each library"
    )
    arguments.add_argument("--cycles", type=int, default=2)
    arguments.add_argument("--busy", type=int, default=0, help="busy loops beside the ranks")
    arguments.add_argument(
        "--written", action="store_true", help="write inputs before each operation"
    )
    options = arguments.parse_args()
    if options.json:
        check_matplotlib()
    for name in options.peers:
        if name in peers.MPI_PEERS:
            peers.find(name, options.peer_dir)
    os.environ[TRANSPORT_VARIABLES["cpu"]] = options.transport
    worlds = [int(number) for number in options.ranks.split(",")]
    facts = environment(max(worlds), options.transport)
    introduce(facts)
    beside = f", {options.busy} busy loops beside them" if options.busy else ""
    beside += ", inputs written before each operation" * options.written
    shown: list[Table] = []
    pictures: list[str] = []
    collectives = options.collectives.split(",")
    for collective, world_size in product(collectives, worlds):
        with busy_loops(options.busy):
            results = measure(collective, world_size, options)
        shown += tables(results, f"{collective}, {world_size} ranks{beside}")
        if options.json and len(collectives) == 1:
            curves: dict[str, list[Result]] = {}
            for result in results:
                if result.timed is not None and result.contender in _DRAWN:
                    curves.setdefault(result.contender, []).append(result)
            title = (
                f"{collective} of float32, {world_size} processes on {facts['cores']} cores, "
                f"ours over {options.transport}{beside}: medians, quartiles shaded"
            )
            pictures.append(f"{options.json.stem}-{world_size}.png")
            save(draw(curves, title), options.json.with_name(pictures[-1]))
    for table in shown:
        table.show()
    write(options.json, __doc__, facts, shown, pictures=pictures)


if __name__ == "__main__":
    main()
