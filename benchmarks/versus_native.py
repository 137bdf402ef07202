"""The best ringcoll algorithm against torch's own all-reduce over gloo.

All algorithms run a few times at each size; the fastest, what ``"auto"`` chooses, and
native are then timed side by side, in place, the results checked.

Wanted: on 2 ranks 1.5 times as fast from 4 KiB to 64 KiB, and 0.95 times from 4 MiB to
64 MiB; on 4 ranks 0.9 times at every size.
"""

from __future__ import annotations

from typing import Any

from common import environment, introduce, parser, table, write

from ringcoll.algorithms import algorithms
from ringcoll.bench import Request, Result
from ringcoll.bench import on_rank as measure_on_rank
from ringcoll.bench.findings import speed_against
from ringcoll.bench.units import as_size
from ringcoll.launch import Ranks

SIZES = tuple(4**power for power in range(1, 14))  # 4 B to 64 MiB
KIB, MIB = 1 << 10, 1 << 20


def wanted(world_size: int, nbytes: int) -> float | None:
    """How many times as fast as native the best should be; ``None`` where nothing is said."""
    if world_size == 4:
        return 0.9
    if world_size == 2 and 4 * KIB <= nbytes <= 64 * KIB:
        return 1.5
    return 0.95 if world_size == 2 and 4 * MIB <= nbytes <= 64 * MIB else None


def row(auto: Result, native: Result, best: Result) -> dict[str, Any]:
    """One size: who is how fast."""
    assert auto.timed is not None
    assert native.timed is not None
    assert best.timed is not None
    return {
        "world_size": native.world_size,
        "nbytes": native.nbytes,
        "native_s": native.timed.summary.p50_s,
        "native_spread": native.timed.summary.spread,
        "best": best.contender,
        "best_s": best.timed.summary.p50_s,
        "best_spread": best.timed.summary.spread,
        "best_against_native": speed_against(best, native),
        "auto_against_native": speed_against(auto, native),
        "wanted": wanted(native.world_size, native.nbytes),
        "wrong": sum(one.wrong or 0 for one in (auto, native, best)),
        "rounds": native.timed.summary.samples,
    }


def measure(world_size: int, seconds: float) -> list[dict[str, Any]]:
    """All sizes on one number of ranks."""
    names = [entry.name for entry in algorithms("all_reduce") if not entry.restriction(world_size)]
    request = Request(
        "all_reduce",
        ("auto", "native"),
        SIZES,
        scouts=tuple(names),
        timed_modes=(True,),
        warmup=2,
        least=7,
        most=300,
        seconds=seconds * len(SIZES),
    )
    with Ranks(world_size, timeout_s=600.0) as ranks:
        results = ranks.run(measure_on_rank, request, timeout_s=86400.0)[0]
    triples = zip(results[::3], results[1::3], results[2::3], strict=True)
    return [row(*triple) for triple in triples]


def main() -> None:
    """Run, print, write."""
    arguments = parser(__doc__)
    arguments.add_argument("-k", "--ranks", default="2,4")
    arguments.add_argument("--seconds", type=float, default=10.0, help="for each size")
    options = arguments.parse_args()
    worlds = [int(number) for number in options.ranks.split(",")]
    facts = environment(max(worlds))
    introduce(facts)
    found = [one for world_size in worlds for one in measure(world_size, options.seconds)]
    columns = ("k", "size", "native (us)", "spread", "best", "best (us)", "spread", "speed",
               "auto", "wanted", "#wrong", "rounds")  # fmt: skip
    table(
        columns,
        [
            (
                one["world_size"],
                as_size(one["nbytes"]),
                f"{one['native_s'] * 1e6:.1f}",
                f"{100 * one['native_spread']:.0f}%",
                one["best"],
                f"{one['best_s'] * 1e6:.1f}",
                f"{100 * one['best_spread']:.0f}%",
                f"{one['best_against_native']:.2f}",
                f"{one['auto_against_native']:.2f}",
                "-" if one["wanted"] is None else one["wanted"],
                one["wrong"],
                one["rounds"],
            )
            for one in found
        ],
    )
    short = [
        one
        for one in found
        if one["wanted"] is not None
        and max(one["best_against_native"], one["auto_against_native"]) < one["wanted"]
    ]
    for one in short:
        print(
            f"short of {one['wanted']}: k={one['world_size']}, {as_size(one['nbytes'])}, "
            f"{one['best_against_native']:.2f}"
        )
    write(options.json, facts, found)


if __name__ == "__main__":
    main()
