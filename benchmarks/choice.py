"""The algorithm that ``"auto"`` stands for against the fastest one, and predicted times against measured ones.

Prepared operations with every algorithm, and twice with ``"auto"``, take turns, in one run for each collective and size.
*Chosen / fastest* is the median of ``"auto"`` over that of the fastest algorithm; *twice* is how much the two of
``"auto"`` differ, which is noise. *Predicted / measured* is of all algorithms, from 64 KiB on.

Wanted: chosen / fastest at most 1.08 on average, and 1.4 at any size; a median error of at most 20 % with as many cores
as ranks, and 30 % with fewer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from statistics import geometric_mean, median
from typing import Any

import torch
from common import Table, environment, introduce, parser, write
from torch import Tensor

import ringcoll
from ringcoll.runtime import Ranks
from ringcoll.schedules.algorithms import algorithms
from ringcoll.tools.bench import Meeting, alternate, parse_size, summarize

LONG = 64 << 10  # bytes; what is shorter takes as long as its messages
CALLS: dict[str, Callable[[Tensor, Tensor], tuple[Any, ...]]] = {
    "all_reduce": lambda whole, part: (ringcoll.all_reduce, whole),
    "reduce_scatter": lambda whole, part: (ringcoll.reduce_scatter_tensor, part, whole),
    "all_gather": lambda whole, part: (ringcoll.all_gather_into_tensor, whole, part),
    "broadcast": lambda whole, part: (ringcoll.broadcast, whole, 0),
    "reduce": lambda whole, part: (ringcoll.reduce, whole, 0),
}
"""The function and its tensors, from the whole data and a rank's block."""


def repeated(function: Callable[[], object], times: int) -> None:
    """Do so many operations, as `alternate` asks for them."""
    for _ in range(times):
        function()


def on_rank(
    collective: str, nbytes: int, seconds: float
) -> tuple[str, dict[str, float], dict[str, float]]:
    """What is chosen, the median seconds of each contender, and the seconds that are predicted."""
    meeting = Meeting()
    numel = max(meeting.world_size, nbytes // 4)
    whole, part = torch.zeros(numel), torch.zeros(numel // meeting.world_size)
    entries = algorithms(collective, meeting.world_size)
    names = [entry.name for entry in entries if not entry.needs_hosts]
    asked = ["auto", *names, "auto"]
    function, *given = CALLS[collective](whole, part)
    plans = [function.plan(*given, algorithm=name) for name in asked]
    functions = [partial(repeated, plan) for plan in plans]
    found = alternate(meeting, functions, warmup=2, least=7, most=400, seconds=seconds)
    meeting.close()
    medians = [summarize(times).p50_s for times in found.times_s]
    choice = ringcoll.explain(collective, nbytes).choice
    predicted = {row.algorithm: row.seconds for row in choice.predictions}
    return choice.algorithm, dict(zip([*asked[:-1], "again"], medians, strict=True)), predicted


def main() -> None:
    """Run, print, write."""
    arguments = parser(__doc__)
    arguments.add_argument("-k", "--ranks", default="2,4,8")
    arguments.add_argument("--collectives", default=",".join(CALLS))
    arguments.add_argument("--sizes", default="4,1K,16K,64K,256K,1M,4M,16M,64M")
    arguments.add_argument(
        "--seconds", type=float, default=2.0, help="for each collective and size"
    )
    options = arguments.parse_args()
    worlds = [int(number) for number in options.ranks.split(",")]
    facts = environment(max(worlds))
    introduce(facts)
    sizes = [parse_size(text) for text in options.sizes.split(",")]
    each: list[tuple[Any, ...]] = []
    together: list[tuple[Any, ...]] = []
    for world_size in worlds:
        regrets, noises, shares = [], [], []
        with Ranks(world_size, timeout_s=600.0) as ranks:
            for collective, nbytes in product(options.collectives.split(","), sizes):
                run = ranks.run(on_rank, collective, nbytes, options.seconds, timeout_s=3600.0)
                chosen, medians, predicted = run[0]
                first, again = medians.pop("auto"), medians.pop("again")
                fastest = min(medians, key=lambda name: medians[name])
                auto_s = geometric_mean([first, again])
                regrets.append(auto_s / min(first, again, medians[fastest]))
                noises.append(max(first, again) / min(first, again))
                each.append(
                    (
                        world_size,
                        collective,
                        nbytes,
                        chosen,
                        fastest,
                        auto_s,
                        regrets[-1],
                        noises[-1],
                    )
                )
                if nbytes >= LONG:
                    shares += [
                        predicted[name] / s for name, s in medians.items() if name in predicted
                    ]
        errors = [abs(share - 1) for share in shares]
        about = (geometric_mean(shares), median(errors)) if shares else (None, None)
        mean = geometric_mean(regrets)
        together.append((world_size, mean, max(regrets), geometric_mean(noises), *about))
    columns = {
        "ranks": "count", "chosen / fastest": "ratio", "largest": "ratio", "twice": "ratio",
        "predicted / measured": "ratio", "median error": "share",
    }  # fmt: skip
    single = {
        "ranks": "count", "collective": "text", "size": "bytes", "chosen": "text", "fastest": "text",
        "median": "seconds", "chosen / fastest": "ratio", "twice": "ratio",
    }  # fmt: skip
    tables = [
        Table(columns, together, "Geometric means over all collectives and sizes."),
        Table(single, each, "Each collective and size."),
    ]
    for table in tables:
        table.show()
    write(options.json, __doc__, facts, tables)


if __name__ == "__main__":
    main()
