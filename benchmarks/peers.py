"""All-reduce of this library against gloo, Open MPI and MPICH, and against what is possible.

Our algorithms, torch's own over gloo (``native``) and the limits (an exchange with the neighbours
of what has to be sent, over the same transport; the additions) take turns in one run. The MPI
libraries, in processes of their own ``mpiexec``, run before and after it: ``--cycles`` times
ours, then theirs. The samples of all cycles count together, so that a machine that slows down
slows all of them.

Writes ``peers.json``, ``peers.md`` and ``peers-K.png`` to ``--output``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from common import environment, introduce, parser

from ringcoll.bench import NATIVE, Request, Result, Timing, peers
from ringcoll.bench import on_rank as measure_on_rank
from ringcoll.bench.efficiency import Efficiency, efficiencies
from ringcoll.bench.limits import LIMITS
from ringcoll.bench.plot import check_matplotlib, draw, save
from ringcoll.bench.units import as_size, parse_size, time_in_words
from ringcoll.launch import Ranks

SIZES = "4,16,64,256,1K,4K,16K,64K,256K,1M,4M,16M,64M"
_DRAWN = ("auto", "persistent", NATIVE, *peers.MPI_PEERS, "exchange")


def pooled(cycles: Iterable[Sequence[Result]]) -> list[Result]:
    """Join the samples of results that were measured several times."""
    found: dict[tuple[Any, str], Result] = {}
    for results in cycles:
        for one in results:
            key = one.workload, one.contender
            before = found.get(key)
            if before is None or before.timed is None or one.timed is None:
                found[key] = one
                continue
            samples = (*before.timed.samples_s, *one.timed.samples_s)
            wrong = None if one.wrong is None else (before.wrong or 0) + one.wrong
            found[key] = replace(one, in_place=Timing(samples, one.timed.turn, wrong))
    return list(found.values())


def measure(world_size: int, options: Any) -> list[Result]:
    """All sizes on one number of ranks, in place."""
    sizes = tuple(parse_size(text) for text in options.sizes.split(","))
    request = Request(
        "all_reduce",
        (*options.algorithms.split(","), *peers.contenders(options.peers), *LIMITS),
        sizes,
        modes=(True,),
        timed_modes=(True,),
        warmup=2,
        least=5,
        most=10_000,
        seconds=options.seconds,
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


def markdown(world_size: int, results: Sequence[Result]) -> list[str]:
    """A table: a line for each size, a column for each contender; and the efficiencies."""
    table = {(one.nbytes, one.contender): one for one in results}
    sizes = sorted({one.nbytes for one in results})
    names = list(dict.fromkeys(one.contender for one in results))
    lines = [
        f"## {world_size} ranks",
        "",
        "Medians, in brackets the interquartile range over the median.",
        "",
        f"| size | {' | '.join(names)} |",
        f"| --- |{' --- |' * len(names)}",
    ]
    for nbytes in sizes:
        cells = []
        for name in names:
            timed = table[nbytes, name].timed
            if timed is None:
                cells.append("-")
                continue
            summary = timed.summary
            cells.append(f"{time_in_words(summary.p50_s)} ({100 * summary.spread:.0f} %)")
        lines.append(f"| {as_size(nbytes)} | {' | '.join(cells)} |")
    return [*lines, "", *_nearness(efficiencies(results)), ""]


def _nearness(found: Sequence[Efficiency]) -> list[str]:
    names = list(dict.fromkeys(name for one in found for name in one.of))
    lines = [
        "Efficiency: (exchange + add) over the time.",
        "",
        f"| size | {' | '.join(names)} |",
        f"| --- |{' --- |' * len(names)}",
    ]
    for one in found:
        cells = (f"{one.of[name]:.2f}" if name in one.of else "-" for name in names)
        lines.append(f"| {as_size(one.nbytes)} | {' | '.join(cells)} |")
    return lines


def record(one: Result) -> dict[str, Any]:
    """A result, for JSON."""
    timed = one.timed
    return {
        "world_size": one.world_size,
        "nbytes": one.nbytes,
        "contender": one.contender,
        "wrong": one.wrong,
        "refused": one.refused,
        "operations_a_sample": None if timed is None else timed.turn,
        "samples": 0 if timed is None else len(timed.samples_s),
        "summary": None if timed is None else asdict(timed.summary),
    }


def main() -> None:
    """Run, print, write."""
    arguments = parser(__doc__)
    arguments.add_argument("-k", "--ranks", default="2,4")
    arguments.add_argument("--sizes", default=SIZES)
    arguments.add_argument(
        "--algorithms", default="auto,persistent,ring,tree,recursive_doubling,rabenseifner"
    )
    arguments.add_argument("--transport", default="ucx", choices=("gloo", "ucx"))
    arguments.add_argument("--peers", type=peers.read, default=peers.PEERS)
    arguments.add_argument("--peer-dir", type=Path, default=peers.FOLDER)
    arguments.add_argument(
        "--seconds", type=float, default=40.0, help="of each cycle, for ours and for each library"
    )
    arguments.add_argument("--cycles", type=int, default=2)
    arguments.add_argument("--output", type=Path, default=Path(__file__).parent)
    options = arguments.parse_args()
    check_matplotlib()
    for name in options.peers:
        if name in peers.MPI_PEERS:
            peers.find(name, options.peer_dir)
    os.environ["RINGCOLL_TRANSPORT"] = options.transport
    worlds = [int(number) for number in options.ranks.split(",")]
    facts = environment(max(worlds)) | {"transport": options.transport}
    introduce(facts)
    options.output.mkdir(parents=True, exist_ok=True)
    document: dict[str, Any] = {"environment": facts, "results": [], "limits": []}
    text = [
        "# All-reduce of float32 against gloo, Open MPI, MPICH, and what is possible",
        "",
        f"{facts['cpu']}, {facts['cores']} cores, load {facts['load_average'][0]} at the start; "
        f"torch {facts['torch']}; ours over {options.transport}; in place; slowest rank; "
        f"{options.cycles} cycles of {options.seconds:g} s.",
        "",
    ]
    for world_size in worlds:
        results = measure(world_size, options)
        text += markdown(world_size, results)
        document["results"] += [record(one) for one in results]
        document["limits"] += [
            asdict(one) | {"world_size": world_size} for one in efficiencies(results)
        ]
        curves: dict[str, list[Result]] = {}
        for one in results:
            if one.timed is not None and one.contender in _DRAWN:
                curves.setdefault(one.contender, []).append(one)
        title = (
            f"all_reduce of float32, {world_size} processes on {facts['cores']} cores, "
            f"ours over {options.transport}: medians, quartiles shaded"
        )
        save(draw(curves, title), options.output / f"peers-{world_size}.png")
    print("\n".join(text))
    (options.output / "peers.md").write_text("\n".join(text).rstrip() + "\n", encoding="utf-8")
    file = options.json or options.output / "peers.json"
    file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
