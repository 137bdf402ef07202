"""Measure collectives on real processes, against each other and torch's own.

================  =============================================================
`exact`           inputs whose exact result is known
`contenders`      the table of contenders: ringcoll, torch.distributed, limits
`rounds`          functions that take turns, without torch
`measure`         what is measured, and the measurement on every rank
`peers`           MPI libraries beside ours
`mpi_peer`        the script that measures under their ``mpiexec``
`summary`         statistics, bandwidths
`environment`     what a measurement has to be read with
`records`         measurements as JSON and CSV
`verdicts`        who wins where, in sentences; how near all come to the limits
`plot`            curves, and the Pareto front; needs matplotlib
`training`        trainers side by side, for ``ringcoll train``
`training_plot`   losses, time, schedules, memory of training; needs matplotlib
`traced`          a collective, or a trainer, under `ringcoll.trace`
`tune`            costs and fastest algorithms, for `ringcoll.machine.tuning`
`units`           how sizes and times are written and read
================  =============================================================

::

    from ringcoll.bench import BenchRequest, on_rank
    from ringcoll.launch.processes import Ranks

    request = BenchRequest("all_reduce", ("ring", "tree", "native"), (4, 65536, 1 << 20))
    with Ranks(4) as ranks:
        results = ranks.run(on_rank, request)[0]

May be imported from outside: ``__all__``; the functions `measure` and `environment` of the modules
of these names; and what `peers`, `plot`, `traced`, `training`, `training_plot` and `tune` name. A
module is imported when a name of it is used, so that commands without tensors need no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ringcoll.bench.contenders import (
        AUTO,
        DTYPES,
        LIMITS,
        NATIVE,
        OVER,
        PERSISTENT,
        SHARED,
        Workload,
        added_numel,
        caller,
        exchanged_nbytes,
        shape,
    )
    from ringcoll.bench.environment import (
        default_backend,
        device,
        device_of,
        oversubscribed,
        ran_on,
    )
    from ringcoll.bench.exact import (
        Oracle,
        count_wrong,
        spoil,
    )
    from ringcoll.bench.measure import (
        BenchRequest,
        Meeting,
        Result,
        Timing,
        on_rank,
    )
    from ringcoll.bench.records import (
        average_busbw,
        comparison_records,
        csv_records,
        document,
        failed,
        timings,
        wrong_in,
    )
    from ringcoll.bench.rounds import (
        OVER_RANKS,
        Samples,
        alternate,
        turn_seconds,
    )
    from ringcoll.bench.summary import (
        FEW_SAMPLES,
        Summary,
        algbw,
        busbw,
        spread_in_words,
        summarize,
    )
    from ringcoll.bench.units import (
        as_size,
        parse_size,
        time_in_words,
    )
    from ringcoll.bench.verdicts import (
        EVEN,
        BySize,
        Efficiency,
        by_size,
        duel,
        efficiencies,
        faster,
        label,
        sentences,
        speed_against,
    )

__all__ = [
    "AUTO", "DTYPES", "EVEN", "FEW_SAMPLES", "LIMITS", "NATIVE", "OVER", "OVER_RANKS", "PERSISTENT",
    "SHARED", "BenchRequest", "BySize", "Efficiency", "Meeting", "Oracle", "Result", "Samples",
    "Summary", "Timing", "Workload", "added_numel", "algbw", "alternate", "as_size",
    "average_busbw", "busbw", "by_size", "caller", "comparison_records", "count_wrong",
    "csv_records", "default_backend", "device", "device_of", "document", "duel", "efficiencies",
    "exchanged_nbytes", "failed", "faster", "label", "on_rank", "oversubscribed", "parse_size",
    "ran_on", "sentences", "shape", "speed_against", "spoil", "spread_in_words", "summarize",
    "time_in_words", "timings", "turn_seconds", "wrong_in",
]  # fmt: skip

# Those without torch stand first: a name is looked up in one after the other.
_MODULES = (
    *("units", "summary", "rounds"),
    *("contenders", "environment", "exact", "measure", "verdicts", "records"),
)


def __getattr__(name: str) -> Any:
    if name in __all__:
        for each in _MODULES:
            module = import_module(f"{__name__}.{each}")
            if name in module.__all__:
                globals()[name] = getattr(module, name)
                return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
